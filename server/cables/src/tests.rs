//! Two cables on one path, and others at the other end.

use super::*;
use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{Arc, Barrier, mpsc::channel},
    time::Duration,
};

const PATIENCE: Duration = Duration::from_secs(20);

/// Waits for a frame.
fn receive(wire: &mut Wire) -> Vec<u8> {
    let (sender, rung) = channel();
    // The test may be over when the last one rings.
    wire.ringer()(Arc::new(move || {
        let _ = sender.send(());
    }));
    let mut frame = Vec::new();
    while !wire.receive(&mut frame) {
        rung.recv_timeout(PATIENCE).expect("a frame");
    }
    frame
}

/// Sends until something arrives: the first frames may come before the other end.
fn reaches(from: &mut Wire, to: &mut Wire, frame: &[u8]) {
    let mut received = Vec::new();
    for _ in 0..2000 {
        from.send(frame);
        // Some sent more often before may still be under way.
        while to.receive(&mut received) {
            if received == frame {
                return;
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("nothing arrived");
}

/// A cable with its thread.
fn cable(path: &Path) -> Result<Wire, CableError> {
    socket(path)?.start()
}

fn refusal(result: Result<Ready, CableError>) -> String {
    result.err().expect("it is refused").to_string()
}

#[test]
fn two_machines_on_one_path() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cable");
    let mut first = cable(&path).expect("it listens");
    let mut second = cable(&path).expect("it connects");
    reaches(&mut second, &mut first, &[7; 60]);
    reaches(&mut first, &mut second, &[8; 1514]);
    drop(second);
    let mut third = cable(&path).expect("it connects");
    reaches(&mut third, &mut first, &[9; 60]);
    drop(first);
    assert!(!path.exists(), "it is removed by who made it");
}

/// Whoever is first listens, however close the other is behind.
#[test]
fn two_machines_that_start_at_once_have_one_cable() {
    let folder = tempfile::tempdir().expect("a folder");
    for round in 0..200 {
        let path = folder.path().join(format!("cable{round}"));
        if round % 2 == 1 {
            leave_behind(&path);
        }
        let both = Barrier::new(2);
        let start = || {
            both.wait();
            cable(&path).expect("it listens or connects")
        };
        let (mut one, mut other) = std::thread::scope(|scope| {
            let one = scope.spawn(start);
            (start(), one.join().expect("a cable"))
        });
        reaches(&mut one, &mut other, &[7; 60]);
    }
}

/// A socket at which nobody listens. Another test's program that has just been forked may hold on to it until it is executed.
fn leave_behind(path: &Path) {
    drop(UnixListener::bind(path).expect("bound"));
    while UnixStream::connect(path).is_ok() {
        std::thread::yield_now();
    }
}

#[test]
fn a_socket_left_behind_is_replaced_and_other_files_are_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cable");
    leave_behind(&path);
    drop(cable(&path).expect("it listens"));
    std::fs::write(&path, "precious").expect("written");
    assert!(refusal(socket(&path)).contains("cable"));
    assert_eq!(std::fs::read(&path).expect("still there"), b"precious");
    assert!(refusal(socket(Path::new("/nonexistent/cable"))).contains("No such file"));
}

#[test]
fn who_only_listens_replaces_no_file_and_nobody() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("server");
    leave_behind(&path);
    let listening = listen(&path).expect("it listens");
    listen(&path).expect_err("somebody listens");
    drop(listening);
    let precious = folder.path().join("precious");
    std::fs::write(&precious, "precious").expect("written");
    listen(&precious).expect_err("no socket");
    assert_eq!(std::fs::read(&precious).expect("still there"), b"precious");
}

#[test]
fn frames_have_their_lengths_before_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cable");
    let listener = UnixListener::bind(&path).expect("bound");
    let mut wire = cable(&path).expect("it connects");
    let (mut other, _) = listener.accept().expect("it is there");
    wire.send(&[1, 2, 3]);
    let mut bytes = [0; 7];
    other.read_exact(&mut bytes).expect("read");
    assert_eq!(bytes, [0, 0, 0, 3, 1, 2, 3]);
    for piece in [&[0, 0][..], &[0, 2, 5], &[6]] {
        other.write_all(piece).expect("written");
    }
    assert_eq!(receive(&mut wire), [5, 6]);
}

#[test]
fn what_is_no_frame_ends_the_connection() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cable");
    let mut wire = cable(&path).expect("it listens");
    let mut hostile = UnixStream::connect(&path).expect("connected");
    hostile.set_read_timeout(Some(PATIENCE)).expect("set");
    hostile.write_all(&[0xff; 4]).expect("written");
    assert_eq!(hostile.read(&mut [0; 1]).expect("hung up"), 0);
    // The next one is served.
    let mut other = UnixStream::connect(&path).expect("connected");
    other.write_all(&[0, 0, 0, 1, 42]).expect("written");
    assert_eq!(receive(&mut wire), [42]);
}

#[test]
fn tap_devices_are_named_when_they_cannot_be_used() {
    assert!(refusal(tap("a-name-of-17-bytes")).contains("1 to 15"));
    assert!(refusal(tap("")).contains("1 to 15"));
}
