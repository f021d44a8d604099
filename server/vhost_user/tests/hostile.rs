//! Monitors that say anything to a server, and hang up: none of its threads stays, nor a descriptor.

mod monitor;

use std::{
    fs,
    io::IoSlice,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::mpsc::channel,
    thread,
    time::{Duration, Instant},
};

use monitor::{Echo, connection};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    io::{pread, pwrite, write},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use vhost_user::serve;

host::choose!(host_linux::Linux);

const CONNECTIONS: u64 = 1000;

fn count(folder: &str) -> usize {
    fs::read_dir(folder).expect("listed").count()
}

#[test]
fn a_thousand_hostile_monitors_leave_nothing_behind() {
    connection(0, &[]);
    let before = (count("/proc/self/fd"), count("/proc/self/task"));
    (1..=CONNECTIONS).for_each(|seed| connection(seed, &[]));
    // A thread that has sent its last word may still be there for a moment.
    for _ in 0..100 {
        if count("/proc/self/task") <= before.1 {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let after = (count("/proc/self/fd"), count("/proc/self/task"));
    assert!(after.0 <= before.0 && after.1 <= before.1, "{before:?} became {after:?}");
}

/// A message to a server, perhaps with a descriptor.
fn say(socket: &UnixStream, request: u32, words: &[u64], file: Option<&OwnedFd>) {
    let head = [request, 1, 8 * words.len() as u32].map(u32::to_ne_bytes).concat();
    let body: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    let bytes = [head, body].concat();
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL).expect("sent");
}

/// Guest memory with a request in a ring: one byte to be written at 0x4000.
fn memory_with_a_request() -> OwnedFd {
    let memory = memfd_create("patient", MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&memory, 1 << 20).expect("as long as that");
    fcntl_add_seals(&memory, SealFlags::SHRINK).expect("sealed");
    let descriptor = [0x4000_u64.to_le_bytes(), (1_u64 | 2 << 32).to_le_bytes()].concat();
    pwrite(&memory, &descriptor, 0x1000).expect("written");
    pwrite(&memory, &[0, 0, 1, 0, 0, 0], 0x2000).expect("written");
    memory
}

/// The guest is told by an event that another has filled, and that would wait to be emptied.
#[test]
fn an_event_that_is_full_holds_up_no_server() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let (done, ended) = channel();
    thread::spawn(move || done.send(serve(Box::new(Echo), None, theirs)));
    let event = || eventfd(0, EventfdFlags::empty()).expect("an event");
    let (memory, kick, full) = (memory_with_a_request(), event(), event());
    write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("filled");
    say(&ours, 3, &[], None); // SET_OWNER
    say(&ours, 1, &[], None); // GET_FEATURES
    say(&ours, 2, &[1 << 32 | 1 << 30], None); // SET_FEATURES: those of rings to be enabled among them
    say(&ours, 5, &[1, 0, 1 << 20, 0, 0], Some(&memory)); // SET_MEM_TABLE
    say(&ours, 8, &[128 << 32], None); // SET_VRING_NUM
    say(&ours, 9, &[0, 0x1000, 0x3000, 0x2000, 0], None); // SET_VRING_ADDR
    say(&ours, 10, &[0], None); // SET_VRING_BASE
    say(&ours, 13, &[0], Some(&full)); // SET_VRING_CALL
    say(&ours, 12, &[0], Some(&kick)); // SET_VRING_KICK
    say(&ours, 18, &[1 << 32], None); // SET_VRING_ENABLE
    write(&kick, &1_u64.to_ne_bytes()).expect("rung");
    let (start, mut used) = (Instant::now(), [0; 2]);
    while used != [1, 0] {
        assert!(start.elapsed() < Duration::from_secs(20), "the request is not answered");
        thread::sleep(Duration::from_millis(5));
        pread(&memory, &mut used, 0x3002).expect("read");
    }
    drop(ours);
    // That the monitor has gone is no failure of the server's.
    let outcome = ended.recv_timeout(Duration::from_secs(20));
    assert!(outcome.is_ok(), "the server hangs");
}
