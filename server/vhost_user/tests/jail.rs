//! What is left of a process, here a thread, that has entered the jail.

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    net::UdpSocket,
    os::{fd::BorrowedFd, unix::fs::FileExt},
    process::Command,
    thread,
};

use vhost_user::jail;

#[test]
fn open_files_can_be_used_and_nothing_else_can_be_had() {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(1 << 20).expect("long enough");
    let memory = ram::Ram::new(1 << 20).expect("memory");
    let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("another");
    let theirs = [memory.fd(), memory.marks_fd(), memory.notes_fd()].map(own);
    let (mut pipe, mut other) = std::io::pipe().expect("a pipe");
    let prisoner = thread::spawn(move || {
        jail::enter().expect("filters");
        let denied = |outcome: std::io::Result<()>| {
            outcome.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
        };
        let mut data = [0; 6];
        file.write_all_at(b"stored", 4096).expect("written");
        file.read_exact_at(&mut data, 4096).expect("read");
        file.sync_data().expect("flushed");
        assert_eq!(&data, b"stored");
        assert_eq!(vec![1_u8; 64 << 20].len(), 64 << 20, "memory can be had");
        other.write_all(b"x").expect("written");
        let [memory, marks, notes] = theirs;
        let memory = ram::Ram::of_another(memory, marks, notes).expect("guest memory");
        memory.write_gpa(0x1000, b"stored").expect("written");
        [
            denied(File::open("/etc/passwd").map(drop)),
            denied(UdpSocket::bind("127.0.0.1:0").map(drop)),
            denied(Command::new("/bin/true").status().map(drop)),
            denied(std::fs::remove_file("/nonexistent")),
        ]
    });
    pipe.read_exact(&mut [0]).expect("it still speaks");
    assert_eq!(prisoner.join().expect("it lived"), [true; 4]);
}
