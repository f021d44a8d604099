//! How machines end, seen from outside.

mod tiny;

use std::{
    io::{Read, Write},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use tiny::{LONG, kernel, messages, ring3, run};

#[test]
fn exit_codes() {
    let cases: [(&str, &[u8], i32); 5] = [
        ("power-off", tiny::POWER_OFF, 0),
        ("debug-exit", tiny::DEBUG_EXIT, 0x15 << 1 | 1),
        ("reset", tiny::RESET, 4),
        ("reset", tiny::INIT, 4),
        ("triple-fault", tiny::TRIPLE_FAULT, 6),
    ];
    for (name, code, expected) in cases {
        let output = run(code, LONG, &["--json"]);
        let messages = messages(&output);
        assert_eq!(output.status.code(), Some(expected), "{name}: {messages}");
        let json: serde_json::Value =
            serde_json::from_str(messages.lines().last().expect("a line")).expect("JSON");
        assert_eq!(json["outcome"], name);
        assert_eq!(json["exit_code"], expected);
    }
}

#[test]
fn a_triple_fault_shows_the_cpu() {
    let messages = messages(&run(tiny::TRIPLE_FAULT, LONG, &[]));
    for part in ["triple fault", "RIP 0000000000100027", "int3", "IDT 0000000000000000+0000"] {
        assert!(messages.contains(part), "no `{part}` in:\n{messages}");
    }
}

/// `ring3 fault run` with a scenario is `ring3 run --fault`: the machine would spin, and is reset.
#[test]
fn a_scenario_runs_with_the_machine_it_is_given() {
    let kernel = kernel(tiny::SPIN);
    let mut scenario = tempfile::NamedTempFile::new().expect("a file");
    let text = "[[fault]]\non = 'machine'\ndo = 'reset'\nafter = '100ms'\n";
    scenario.write_all(text.as_bytes()).expect("written");
    let run = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ring3"));
        command.args(["fault", "run"]).arg(scenario.path()).args(options);
        command.stdin(Stdio::null()).output().expect("ring3 starts")
    };
    let path = kernel.path().to_str().expect("a name");
    let machine = ["--", "--memory", "16M", "--kernel", path, "--timeout"];
    let reset = run(&[&machine[..], &[LONG]].concat());
    assert_eq!(reset.status.code(), Some(4), "{}", messages(&reset));
    assert!(messages(&reset).contains(r#""effect":"reset""#), "{}", messages(&reset));
    for (options, part) in [
        (vec![], "has no [machine]"),
        ([&machine[..], &["0.1"]].concat(), "after 0.1 s, but the timeout is 0.1 s"),
        (vec!["--", "--colour"], "unexpected argument '--colour'"),
        (vec!["--seed", "1", "--", "--kernel", path], "has its own seed"),
    ] {
        let refused = run(&options);
        let said = messages(&refused);
        assert!(refused.status.code() == Some(2) && said.contains(part), "{part}: {said}");
    }
}

/// Beyond memory there is nothing: reads give ones, writes are lost, and ones are no instruction.
#[test]
fn nothing_is_where_no_memory_is() {
    for engine in ["interp", "auto"] {
        let lost = run(tiny::JUMP_NOWHERE, LONG, &["--engine", engine]);
        let said = messages(&lost);
        assert_eq!(lost.status.code(), Some(6), "{engine}: {said}");
        assert!(said.contains("RIP 0000000040000000"), "{engine}: {said}");
        let ones = run(tiny::WRITE_NOWHERE, LONG, &["--engine", engine]);
        assert_eq!(ones.status.code(), Some(0xff), "{engine}: {}", messages(&ones));
    }
}

#[test]
fn timeout() {
    for code in [tiny::SPIN, tiny::HALT] {
        let started = Instant::now();
        let output = run(code, "0.3", &[]);
        assert_eq!(output.status.code(), Some(124), "{}", messages(&output));
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn an_idle_guest_uses_no_cpu() {
    let messages = messages(&run(tiny::HALT, "1", &["--stats", "--json"]));
    let json: serde_json::Value =
        serde_json::from_str(messages.lines().last().expect("a line")).expect("JSON");
    let halted = json["statistics"]["halted_ns"].as_u64().expect("a number");
    let running = json["statistics"]["running_ns"].as_u64().expect("a number");
    assert!(halted > 700_000_000, "halted {halted} ns");
    assert!(running < 300_000_000, "running {running} ns");
}

#[test]
fn the_console_is_standard_input_and_output() {
    let kernel = kernel(tiny::ECHO);
    let mut command = ring3(&kernel, LONG);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("ring3 starts");
    let typed: Vec<u8> = (0..200_000).map(|i| b'0' + (i % 10) as u8).chain(*b"q").collect();
    let mut stdin = child.stdin.take().expect("piped");
    let sent = typed.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let mut echoed = Vec::new();
    child.stdout.take().expect("piped").read_to_end(&mut echoed).expect("readable");
    assert!(writer.join().expect("no panic").is_ok());
    assert!(child.wait().expect("it ended").success());
    assert!(echoed == typed, "{} of {} bytes came back", echoed.len(), typed.len());
}

#[test]
fn a_reader_that_went_away_is_no_problem() {
    let kernel = kernel(tiny::CHATTER);
    let mut command = ring3(&kernel, "0.5");
    command.stdout(Stdio::piped());
    let mut child = command.spawn().expect("ring3 starts");
    drop(child.stdout.take());
    assert_eq!(child.wait().expect("it ended").code(), Some(124));
}

/// What the guest printed is lost, and that is told.
#[test]
fn a_full_disk_is_a_problem() {
    let kernel = kernel(tiny::CHATTER);
    let full = std::fs::File::options().write(true).open("/dev/full").expect("the host has it");
    let output = ring3(&kernel, "0.5").stdout(full).output().expect("ring3 starts");
    let said = messages(&output);
    assert_eq!(output.status.code(), Some(124), "{said}");
    assert!(said.contains("standard output: No space left"), "{said}");
}

#[test]
fn a_reader_that_never_reads_cannot_hold_us() {
    let kernel = kernel(tiny::CHATTER);
    let mut command = ring3(&kernel, "0.5");
    command.stdout(Stdio::piped());
    let mut child = command.spawn().expect("ring3 starts");
    let unread = child.stdout.take();
    let started = Instant::now();
    assert_eq!(child.wait().expect("it ended").code(), Some(124));
    assert!(started.elapsed() < Duration::from_secs(10));
    drop(unread);
}

#[test]
fn signals_end_the_machine() {
    for (signal, code) in [("TERM", 143), ("INT", 130), ("HUP", 129)] {
        let kernel = kernel(tiny::HALT);
        let mut child = ring3(&kernel, LONG).spawn().expect("ring3 starts");
        std::thread::sleep(Duration::from_millis(300));
        let kill = format!("kill -{signal} {}", child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("sh").success());
        assert_eq!(child.wait().expect("it ended").code(), Some(code), "SIG{signal}");
    }
}

/// Runs a machine that switches itself off, with a disk.
fn with_disk(disk: &str) -> Output {
    run(tiny::POWER_OFF, LONG, &["--disk", disk])
}

/// One writer or several readers, told in one line; whoever is killed leaves no lock behind.
#[test]
fn an_image_in_use_is_refused_to_other_machines() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["disk.img", "disk.qcow2"] {
        let disk = folder.path().join(name).display().to_string();
        let mut create = Command::new(env!("CARGO_BIN_EXE_ring3"));
        create.args(["image", "create", &disk, "--size", "1M"]);
        assert!(create.status().expect("ring3 starts").success());
        let kernel = kernel(tiny::HALT);
        let mut owner = ring3(&kernel, LONG).args(["--disk", &disk]).spawn().expect("it starts");
        let deadline = Instant::now() + Duration::from_secs(10);
        while with_disk(&disk).status.success() {
            assert!(Instant::now() < deadline, "{name} was never refused");
        }
        for option in ["", ",readonly"] {
            let refused = with_disk(&format!("{disk}{option}"));
            let said = messages(&refused);
            assert_eq!(refused.status.code(), Some(2), "{said}");
            assert!(said.contains(name) && said.contains("in use"), "{said}");
        }
        owner.kill().expect("it was still there");
        owner.wait().expect("it ended");
        assert!(with_disk(&disk).status.success(), "{name} is free again");
        let reader = format!("{disk},readonly");
        let mut first = ring3(&kernel, LONG).args(["--disk", &reader]).spawn().expect("it starts");
        assert!(with_disk(&reader).status.success(), "two readers of {name}");
        first.kill().expect("it was still there");
        first.wait().expect("it ended");
    }
}
