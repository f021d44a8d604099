//! Debuggers and dumps of machines that are no Linux.

mod tiny;

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// `nop; nop`, and the machine is switched off.
fn two_steps_and_off() -> Vec<u8> {
    [b"\x90\x90", tiny::POWER_OFF].concat()
}

/// Where the code of a tiny kernel begins.
const ENTRY: u64 = 0x10_0020;

#[test]
fn a_machine_that_has_not_begun_waits_for_gdb_and_ends_under_it() {
    let (kernel, folder) = (tiny::kernel(&two_steps_and_off()), TempDir::new().expect("a folder"));
    let socket = folder.path().join("gdb");
    let mut command = tiny::ring3(&kernel, tiny::LONG);
    command.args(["--console", "none", "--paused", "--gdb", &format!("unix:{}", socket.display())]);
    let mut machine = command.spawn().expect("it starts");
    let started = Instant::now();
    while !socket.exists() {
        assert!(started.elapsed() < Duration::from_secs(20), "it does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    let connect = format!("target remote {}", socket.display());
    let last = format!("hbreak *{:#x}", ENTRY + 2);
    let commands = [
        &connect,
        "printf \"begins %#x\\n\", $rip",
        "stepi",
        "printf \"then %#x\\n\", $rip",
        "x/2xb 0x100020",
        "monitor mappings",
        "monitor kaslr",
        &last,
        "continue",
        "printf \"at last %#x\\n\", $rip",
        "continue",
    ];
    let mut gdb = Command::new("gdb");
    gdb.args(["-nx", "-batch", "-l", "60"]).stdin(Stdio::null());
    for command in commands {
        gdb.args(["-ex", command]);
    }
    let output = gdb.output().expect("GDB is needed: apt-get install gdb");
    let said = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
    let expected = [
        "begins 0x100020",
        "then 0x100021",
        "0x90\t0x90",
        "the vCPU is not in long mode",
        "there is no VMCOREINFO in memory",
        "at last 0x100022",
        "exited normally",
    ];
    expected.iter().for_each(|part| assert!(said.contains(part), "no `{part}` in: {said}"));
    assert!(machine.wait().expect("it ended").success());
    assert!(!socket.exists(), "and its socket is gone");
}

#[test]
fn a_dump_of_no_linux_says_so_and_the_machine_goes_on() {
    let (kernel, folder) = (tiny::kernel(tiny::SPIN), TempDir::new().expect("a folder"));
    let mut command = tiny::ring3(&kernel, tiny::LONG);
    command.env("XDG_RUNTIME_DIR", folder.path()).args(["--console", "none", "--name", "spins"]);
    let mut machine = command.spawn().expect("it starts");
    let ring3 = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ring3"));
        command.args(arguments).env("XDG_RUNTIME_DIR", folder.path()).output().expect("it starts")
    };
    let started = Instant::now();
    while ring3(&["ps", "--json"]).stdout.is_empty() {
        assert!(started.elapsed() < Duration::from_secs(20), "it does not listen");
    }
    let path = folder.path().join("core");
    let dumped = ring3(&["dump", "spins", &path.display().to_string()]);
    assert!(dumped.status.success(), "{}", tiny::messages(&dumped));
    assert!(tiny::messages(&dumped).contains("no VMCOREINFO"), "{}", tiny::messages(&dumped));
    let core = fs::read(&path).expect("written");
    assert_eq!(core.len(), 4096 + (16 << 20));
    assert!(core[4096 + ENTRY as usize..].starts_with(tiny::SPIN), "RAM is where it says");
    assert!(ring3(&["stop", "spins"]).status.success(), "it went on");
    assert!(machine.wait().expect("it ended").success());
    assert_eq!(ring3(&["dump", "spins", "core"]).status.code(), Some(2), "there is none any more");
}

#[test]
fn impossible_addresses_of_debuggers_are_refused() {
    let refused = tiny::run(tiny::HALT, "5", &["--gdb", "tcp:here"]);
    assert_eq!(refused.status.code(), Some(2));
    let refused = tiny::run(tiny::HALT, "5", &["--paused"]);
    assert!(tiny::messages(&refused).contains("--gdb"), "{}", tiny::messages(&refused));
    let refused = tiny::run(tiny::HALT, "5", &["--gdb", "unix:/nowhere/at/all"]);
    assert!(tiny::messages(&refused).contains("--gdb unix:/nowhere/at/all"));
    assert_eq!(refused.status.code(), Some(2));
}
