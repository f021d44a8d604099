//! A server whose monitor has gone ends, whatever it is doing: a file that the monitor gave it may never answer.
//!
//! What ends is a whole process, so the server is this program anew, running the test that is ignored.

#![allow(missing_docs)]

use std::{
    env,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use vhost_user::leave_after;

host::choose!(host_linux::Linux);

/// How long the server waits once its monitor has gone.
const PATIENCE: Duration = Duration::from_millis(300);
/// It says this when it stands still.
const STANDS: &[u8] = b"stands";

#[test]
fn a_server_that_stands_still_is_gone_when_its_monitor_has_been_for_so_long() {
    let (mut ours, theirs) = UnixStream::pair().expect("a pair");
    let mut server = Command::new(env::current_exe().expect("this program"));
    server.args(["--exact", "stands_still", "--ignored", "--nocapture", "--test-threads=1"]);
    let server = server.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = server.spawn().expect("started");
    let mut said = [0; STANDS.len()];
    ours.read_exact(&mut said).expect("it says so");
    thread::sleep(2 * PATIENCE);
    assert_eq!((said.as_slice(), server.try_wait().expect("known")), (STANDS, None), "it serves");
    let since = Instant::now();
    drop(ours);
    let ended = server.wait().expect("an end");
    assert_eq!(ended.code(), Some(1));
    assert!(since.elapsed() >= PATIENCE, "after {:?}", since.elapsed());
}

#[test]
#[ignore = "run by a_server_that_stands_still_is_gone_when_its_monitor_has_been_for_so_long"]
fn stands_still() {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().expect("the monitor's");
    let mut socket = UnixStream::from(socket);
    leave_after(&socket, PATIENCE).expect("a thread");
    socket.write_all(STANDS).expect("said");
    loop {
        thread::park();
    }
}
