//! The terminal is raw while the guest runs, and as before on every way out.

mod tiny;

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
    process::{Child, ExitStatus},
    time::{Duration, Instant},
};

use rustix::{
    fs::{Mode, OFlags},
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, tcgetattr},
};
use tempfile::NamedTempFile;

/// ring3 with a terminal as its standard input and output.
struct Session {
    keyboard: File,
    terminal: OwnedFd,
    child: Child,
    _kernel: NamedTempFile,
}

impl Session {
    fn start(code: &[u8]) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let controller = openpt(flags).expect("a terminal");
        grantpt(&controller).expect("granted");
        unlockpt(&controller).expect("unlocked");
        let name = ptsname(&controller, Vec::new()).expect("named");
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        let terminal = rustix::fs::open(name, flags, Mode::empty()).expect("opened");
        let kernel = tiny::kernel(code);
        let mut command = tiny::ring3(&kernel, tiny::LONG);
        let stream = || terminal.try_clone().expect("another descriptor");
        command.stdin(stream()).stdout(stream());
        let session = Self {
            keyboard: controller.into(),
            child: command.spawn().expect("ring3 starts"),
            terminal,
            _kernel: kernel,
        };
        session.wait_until(false);
        session
    }

    /// Whether the terminal assembles lines, as it does outside raw mode.
    fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.terminal).expect("a terminal").local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    fn wait_until(&self, cooked: bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.is_cooked() != cooked {
            assert!(Instant::now() < deadline, "cooked never became {cooked}");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn types(&mut self, keys: &[u8]) {
        self.keyboard.write_all(keys).expect("typed");
    }

    fn ends(mut self) -> ExitStatus {
        let status = self.child.wait().expect("it ended");
        assert!(self.is_cooked(), "the terminal was left raw");
        status
    }
}

#[test]
fn ctrl_a_x_leaves() {
    let mut session = Session::start(tiny::HALT);
    session.types(b"\x01x");
    assert_eq!(session.ends().code(), Some(0));
}

#[test]
fn keys_reach_the_guest() {
    let mut session = Session::start(tiny::ECHO);
    // Ctrl-C is the guest's, Ctrl-A Ctrl-A is one Ctrl-A.
    session.types(b"a\x03\x01\x01q");
    let mut echoed = [0; 4];
    session.keyboard.read_exact(&mut echoed).expect("echoed by the guest");
    assert_eq!(echoed, *b"a\x03\x01q");
    assert_eq!(session.ends().code(), Some(0));
}

#[test]
fn a_signal_restores_the_terminal() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::HUP, 129)] {
        let session = Session::start(tiny::SPIN);
        let id = i32::try_from(session.child.id()).expect("a process id");
        let process = Pid::from_raw(id).expect("a process id");
        kill_process(process, signal).expect("sent");
        assert_eq!(session.ends().code(), Some(code));
    }
}

/// The process is not the terminal's session leader, so no signal tells it. Some terminals go away right after they became
/// raw, before anybody reads from them.
#[test]
fn a_terminal_that_hangs_up_ends_the_machine() {
    for pause in [0, 0, 0, 0, 100, 500, 2_000, 20_000] {
        let Session { keyboard, mut child, .. } = Session::start(tiny::HALT);
        std::thread::sleep(Duration::from_micros(pause));
        drop(keyboard);
        assert_eq!(child.wait().expect("it ended").code(), Some(129), "after {pause} µs");
    }
}

#[test]
fn the_end_of_the_guest_restores_the_terminal() {
    // A key first, so that the machine is seen raw before it ends.
    let mut session = Session::start(tiny::ECHO);
    session.types(b"q");
    assert_eq!(session.ends().code(), Some(0));
}
