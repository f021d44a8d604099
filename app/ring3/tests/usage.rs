//! Command lines that cannot work: exit code 2 and a line that names the thing.

use std::process::{Command, Output};

fn ring3(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ring3")).args(arguments).output().expect("ring3 starts")
}

/// Exit code 2 with `part` in the first line of standard error.
fn refuses(arguments: &[&str], part: &str) {
    refuses_with(2, arguments, part);
}

fn refuses_with(code: i32, arguments: &[&str], part: &str) {
    let output = ring3(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    let first = said.lines().next().unwrap_or_default();
    assert!(first.contains(part), "{arguments:?}: no `{part}` in `{first}`");
}

#[test]
fn every_command_has_its_manual_page() {
    for path in [&["run"][..], &["image", "create", "debian"], &["kernel", "list"]] {
        let output = ring3(&[&["man"], path].concat());
        let page = String::from_utf8_lossy(&output.stdout).replace("\\-", "-");
        assert!(output.status.success() && page.contains(&path.join("-")), "{path:?}: {page}");
    }
    refuses(&["man", "nothing"], "`nothing`");
}

#[test]
fn what_cannot_be_printed_is_a_failure() {
    for output in [">/dev/full", ">&-"] {
        let script = format!("\"$0\" doctor {output}");
        let mut shell = Command::new("sh");
        let output = shell.args(["-c", &script, env!("CARGO_BIN_EXE_ring3")]).output();
        let output = output.expect("a shell");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("ring3: standard output: "), "{said}");
    }
}

#[test]
fn kernels_are_listed_as_json_too() {
    let output = ring3(&["kernel", "list", "--json"]);
    let kernels: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(kernels.iter().any(|kernel| kernel["name"] == "debian-12"), "{kernels:?}");
}

#[test]
fn files() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str, content: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).expect("written");
        path.display().to_string()
    };
    let empty = file("empty", b"");
    let text = file("text", b"#!/bin/sh\necho this is not a kernel, whatever its name says\n");
    let small = file("small.img", &[0; 100]);
    refuses(&["run", "--kernel", "/nowhere/vmlinuz"], "no such file");
    refuses(&["run", "--kernel", "/"], "directory");
    refuses(&["run", "--kernel", &empty], "empty");
    refuses(&["run", "--kernel", &text], "not a kernel");
    // Whatever is wrong with the kernel, its file is named.
    let cut = file("cut", &bzimage_without_its_end());
    for kernel in [&text, &cut] {
        refuses(&["run", "--kernel", kernel], &format!("--kernel {kernel}: "));
    }
    refuses(&["run", "--kernel", &text, "--initrd", "/nowhere/initrd"], "/nowhere/initrd");
    refuses(&["run", "--kernel", &text, "--module", "/nowhere/module a b"], "/nowhere/module");
    let (_path, kernel) = tiny_kernel();
    refuses(&["run", "--kernel", &kernel, "--disk", "/nowhere/disk"], "/nowhere/disk");
    refuses(&["run", "--kernel", &kernel, "--disk", &small], "512");
    refuses(&["run", "--kernel", &kernel, "--disk", &format!("{small},fast")], "disk");
}

#[test]
fn sizes_and_numbers() {
    let (_path, kernel) = tiny_kernel();
    let run =
        |options: &[&str], part| refuses(&[&["run", "--kernel", &kernel], options].concat(), part);
    run(&["--memory", "1M"], "16M");
    run(&["--memory", "9999T"], "more than this host has");
    run(&["--memory", "99999999999999T"], "too much");
    run(&["--memory", "lots"], "lots");
    run(&["--cpus", "17"], "--cpus");
    run(&["--cpus", "0"], "--cpus");
    run(&["--timeout", "0"], "--timeout");
    run(&["--engine", "kvm"], "kvm");
    run(&["--boot-protocol", "bios"], "bios");
    run(&["--frobnicate"], "--frobnicate");
}

#[test]
fn images_and_configurations() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).display().to_string();
    let debian = |options: &[&str], part| {
        refuses(&[&["image", "create", "debian"], options].concat(), part);
    };
    debian(&[&path("d.img"), "--size", "100M"], "1024M");
    debian(&[&path("d.qcow2")], "--backing");
    debian(&[&path("d.img"), "--suite", "slink"], "slink");
    std::fs::write(path("d.vmlinuz"), "precious").expect("written");
    debian(&[&path("d.img")], "d.vmlinuz exists already");
    assert!(!directory.path().join("d.img").exists());
    refuses(&["image", "create", &path("new.img")], "size");
    refuses(&["run", "--config", &path("missing.toml")], "missing.toml");
    std::fs::write(path("vm.toml"), "kernel = [").expect("written");
    refuses(&["run", "--config", &path("vm.toml")], "vm.toml");
}

#[test]
fn networks() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("no-socket");
    std::fs::write(&file, "precious").expect("written");
    let (_path, kernel) = tiny_kernel();
    let net = |net: &str, part| refuses(&["run", "--kernel", &kernel, "--net", net], part);
    net("carrier-pigeon", "carrier-pigeon");
    net(&format!("socket,path={}", file.display()), "no-socket");
    net("socket,path=/nowhere/cable", "/nowhere/cable");
    net("tap,ifname=much-too-long-a-name", "1 to 15");
    refuses_with(125, &["exec", "--net", "tap,ifname=t", "--", "true"], "only user");
}

#[test]
fn options_that_contradict_each_other() {
    let (_path, kernel) = tiny_kernel();
    refuses(&["run", "--kernel", &kernel, "--initrd", "a", "--module", "b"], "--module");
    refuses(&["run", "--kernel", &kernel, "--memory", "1G", "--memory", "2G"], "--memory");
    let disk = tempfile::NamedTempFile::new().expect("a file");
    disk.as_file().set_len(1 << 20).expect("long enough");
    let path = disk.path().display().to_string();
    refuses(&["run", "--kernel", &kernel, "--disk", &path, "--disk", &path], &path);
}

#[test]
fn what_does_not_fit() {
    let (_path, kernel) = tiny_kernel();
    // One is larger than memory; the other is not, but memory has more to hold.
    for (size, part) in [(64 << 20, "larger than the guest's memory"), (16 << 20, "does not fit")] {
        let large = tempfile::NamedTempFile::new().expect("a file");
        large.as_file().set_len(size).expect("long enough");
        let module = large.path().display().to_string();
        refuses(&["run", "--memory", "16M", "--kernel", &kernel, "--module", &module], part);
    }
}

#[test]
fn users() {
    refuses_with(125, &["exec", "--user", "no-such-user", "--", "true"], "there is no such user");
    refuses(&["exec", "--user", "daemon", "--as-root", "--", "true"], "cannot be used with");
}

#[test]
fn help_teaches() {
    let help = ring3(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8_lossy(&help.stdout);
    assert!(text.contains("Examples:") && text.contains("--append console=ttyS0"), "{text}");
    let run = ring3(&["run", "--help"]);
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(text.contains("Exit codes:") && text.contains("Ctrl-A X"), "{text}");
    let version = ring3(&["--version"]);
    let text = String::from_utf8_lossy(&version.stdout);
    assert_eq!(text.trim(), format!("ring3 {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn doctor_answers_for_people_and_programs() {
    let text = ring3(&["doctor"]);
    assert!(text.status.success());
    assert!(String::from_utf8_lossy(&text.stdout).contains("protection keys"));
    let json = ring3(&["doctor", "--json"]);
    let parsed: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert!(parsed["findings"].as_array().is_some_and(|findings| findings.len() > 10));
}

mod tiny;

/// A kernel that would run, and its path.
fn tiny_kernel() -> (tempfile::TempPath, String) {
    let path = tiny::kernel(tiny::POWER_OFF).into_temp_path();
    let name = path.display().to_string();
    (path, name)
}

/// A boot sector and setup header that announce a kernel which is not there.
fn bzimage_without_its_end() -> Vec<u8> {
    let mut image = vec![0; 1024];
    image[0x1f1] = 4;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image
}
