//! Machines in the background, and the commands that speak to them.

mod tiny;

use std::{
    io::{Read, Write},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use tempfile::{NamedTempFile, TempDir};

/// A machine without a console of its own, in a runtime folder of its own.
struct Machine {
    process: Child,
    folder: TempDir,
    _kernel: NamedTempFile,
}

impl Machine {
    /// Starts one called `web` that executes `code`; it listens when this returns.
    fn start(code: &[u8]) -> Self {
        let (kernel, folder) = (tiny::kernel(code), TempDir::new().expect("a folder"));
        let mut command = tiny::ring3(&kernel, tiny::LONG);
        command.env("XDG_RUNTIME_DIR", folder.path()).args(["--console", "none", "--name", "web"]);
        let machine =
            Self { process: command.spawn().expect("it starts"), folder, _kernel: kernel };
        let started = Instant::now();
        while machine.ring3(&["ps", "--json"]).stdout.is_empty() {
            assert!(started.elapsed() < Duration::from_secs(20), "it does not listen");
        }
        machine
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ring3"));
        command.args(arguments).env("XDG_RUNTIME_DIR", self.folder.path());
        command
    }

    fn ring3(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("ring3 starts")
    }

    /// What `ring3 ps` says it does.
    fn state(&self) -> String {
        let output = self.ring3(&["ps", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(status["name"], "web");
        status["state"].as_str().expect("a word").to_owned()
    }

    /// Types into its console and reads as many bytes as should come back.
    fn converse(&self, typed: &[u8], expected: &[u8]) {
        let mut console = self.command(&["console", "web"]);
        let mut console =
            console.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it attaches");
        console.stdin.as_mut().expect("piped").write_all(typed).expect("typed");
        let mut bytes = vec![0; expected.len()];
        console.stdout.as_mut().expect("piped").read_exact(&mut bytes).expect("answered");
        assert_eq!(bytes, expected);
        console.kill().expect("it was still there");
        console.wait().expect("it ended");
    }
}

#[test]
fn a_console_shows_what_was_and_types_what_is_typed() {
    let mut machine = Machine::start(tiny::ECHO);
    machine.converse(b"hello", b"hello");
    machine.converse(b" again", b"hello again");
    let mut last = machine.command(&["console", "web"]);
    let mut last = last.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it attaches");
    last.stdin.as_mut().expect("piped").write_all(b"q").expect("typed");
    assert!(last.wait().expect("it ended").success(), "the machine ended, and so does its console");
    assert!(machine.process.wait().expect("it ended").success());
    let left = std::fs::read_dir(machine.folder.path().join("ring3")).expect("read").flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["host-cpus"], "by which machines take turns");
}

#[test]
fn pause_resume_stop() {
    let mut machine = Machine::start(tiny::SPIN);
    assert_eq!(machine.state(), "running");
    assert!(machine.ring3(&["pause", "web"]).status.success());
    assert_eq!(machine.state(), "paused");
    assert!(machine.ring3(&["resume", "web"]).status.success());
    assert_eq!(machine.state(), "running");
    assert!(machine.ring3(&["stop", "web"]).status.success());
    assert!(machine.process.wait().expect("it ended").success());
}

#[test]
fn stats_are_what_the_machine_takes_of_the_host() {
    let machine = Machine::start(tiny::SPIN);
    let stats = || -> serde_json::Value {
        let output = machine.ring3(&["stats", "web", "--json"]);
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let (first, deadline) = (stats(), Instant::now() + Duration::from_secs(20));
    assert_eq!((&first["name"], &first["state"]), (&"web".into(), &"running".into()));
    let number = |stats: &serde_json::Value, key: &str| stats["stats"][key].as_f64().expect(key);
    assert!(number(&first, "memory_used") > 1e6 && number(&first, "processes") >= 1.0, "{first}");
    while number(&stats(), "cpu_seconds") <= number(&first, "cpu_seconds") {
        assert!(Instant::now() < deadline, "a machine that spins takes no time");
    }
    let said = machine.ring3(&["stats", "web"]).stdout;
    assert!(String::from_utf8_lossy(&said).contains("of CPU time"));
    let listed = machine.ring3(&["ps", "--json"]).stdout;
    assert!(!String::from_utf8_lossy(&listed).contains("stats"), "nobody asked for them");
}

#[test]
fn machines_that_are_not_there() {
    let folder = TempDir::new().expect("a folder");
    for command in ["console", "stats", "stop", "pause", "resume"] {
        let mut ring3 = Command::new(env!("CARGO_BIN_EXE_ring3"));
        ring3.args([command, "nobody"]).env("XDG_RUNTIME_DIR", folder.path());
        let output = ring3.output().expect("ring3 starts");
        assert_eq!(output.status.code(), Some(2));
        assert!(tiny::messages(&output).contains("no machine is called nobody"), "{command}");
    }
}
