//! `ring3 serve` as a user meets it.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::net::UnixStream,
    process::{Command, Stdio},
};

/// It says where it waits and for what, and ends with its machine.
#[test]
fn a_server_says_what_it_waits_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let (disk, socket) = (folder.path().join("disk.img"), folder.path().join("socket"));
    fs::write(&disk, [0; 512]).expect("written");
    let (disk, path) = (disk.display().to_string(), socket.display().to_string());
    let share = format!("{}:work", folder.path().display());
    for (kind, what, option) in [
        ("disk", &*disk, format!("--disk vhost-user:{path} ")),
        ("share", &*share, format!("--share vhost-user:{path}:TAG ")),
        ("net", "user", format!("--net vhost-user:{path} ")),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ring3"));
        command.args(["serve", kind, what, "--socket", &path]).stderr(Stdio::piped());
        let mut server = command.spawn().expect("ring3 starts");
        let mut said = String::new();
        let mut words = BufReader::new(server.stderr.take().expect("piped"));
        words.read_line(&mut said).expect("said");
        assert!(said.contains(&format!("waiting at {path}")) && said.contains(&option), "{said}");
        drop(UnixStream::connect(&socket).expect("it listens"));
        let status = server.wait().expect("it ends");
        assert!(status.success(), "{kind}: {status}");
        assert!(!socket.exists());
    }
}
