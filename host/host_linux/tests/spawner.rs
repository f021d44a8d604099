//! A process that starts others in this one's stead. One test: it is to be made where there is one thread, or nearly so.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use host_linux::{
    LinuxChild,
    spawner::{Service, Spawner},
};

const PATIENCE: Duration = Duration::from_secs(20);

/// Says in capitals what it is asked, and starts processes that write their request and end.
struct Echo {
    begun: bool,
    last: File,
}

impl Service for Echo {
    fn begin(&mut self) {
        self.begun = true;
    }

    fn answer(&mut self, request: &[u8]) -> Vec<u8> {
        match request {
            b"wait" => std::thread::sleep(Duration::from_millis(300)),
            b"wait long" => std::thread::sleep(Duration::from_secs(3)),
            _ => {}
        }
        if self.begun { request.to_ascii_uppercase() } else { Vec::new() }
    }

    fn check(&self, request: &[u8]) -> io::Result<()> {
        if request.is_empty() { Err(io::ErrorKind::InvalidInput.into()) } else { Ok(()) }
    }

    fn become_child(&self, request: &[u8], descriptors: Vec<OwnedFd>) -> io::Error {
        let pipe = descriptors.into_iter().next().map(File::from);
        let written = pipe.map(|mut pipe| pipe.write_all(request));
        written.and_then(Result::err).unwrap_or_else(|| io::Error::other("it ends, as it should"))
    }

    fn finish(&mut self) {
        let _ = self.last.write_all(b"finished");
    }
}

fn status(child: &LinuxChild) -> i32 {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return status;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("it does not end");
}

#[test]
fn it_answers_starts_children_of_ours_and_ends_with_us() {
    let (mut last, says) = io::pipe().expect("a pipe");
    let echo = Echo { begun: false, last: File::from(OwnedFd::from(says)) };
    let spawner = Spawner::start(echo).expect("a process");
    assert_eq!(spawner.ask(b"hello", PATIENCE).expect("an answer"), b"HELLO");

    let (mut said, says) = io::pipe().expect("a pipe");
    let child = spawner.spawn(b"a wish", &[says.as_fd()]).expect("a process");
    drop(says);
    let mut text = String::new();
    said.read_to_string(&mut text).expect("its end of the pipe closes");
    assert_eq!((text.as_str(), status(&child)), ("a wish", 127 << 8));
    assert!(child.try_wait().is_err(), "it was waited for");

    let refused = spawner.spawn(b"", &[]).expect_err("not checked");
    assert_eq!(refused.raw_os_error(), Some(libc::EPERM), "{refused}");
    assert_eq!(spawner.ask(b"still there", PATIENCE).expect("an answer"), b"STILL THERE");

    let late = spawner.ask(b"wait", Duration::from_millis(10)).expect_err("too late");
    assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    assert_eq!(spawner.ask(b"next", PATIENCE).expect("its own answer"), b"NEXT");

    std::thread::scope(|scope| {
        let waits = scope.spawn(|| spawner.ask(b"wait long", PATIENCE));
        std::thread::sleep(Duration::from_millis(500));
        let asked = Instant::now();
        let behind = spawner.ask(b"behind", Duration::from_millis(10)).expect_err("too late");
        assert_eq!(behind.kind(), io::ErrorKind::TimedOut);
        assert!(asked.elapsed() < Duration::from_secs(1), "another's patience is not ours");
        assert_eq!(waits.join().expect("no panic").expect("an answer"), b"WAIT LONG");
    });
    assert_eq!(spawner.ask(b"next", PATIENCE).expect("its own answer"), b"NEXT");

    drop(spawner);
    let mut end = String::new();
    last.read_to_string(&mut end).expect("the spawner has ended");
    assert_eq!(end, "finished");
}
