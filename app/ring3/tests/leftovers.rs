//! Interrupted in the middle, ring3 leaves nothing half-made behind.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// In mmdebstrap's place: writes half of what it should, then takes long, and says whether it was asked to end.
const SLOW: &str = "#!/bin/sh
trap 'echo ended > \"$NOTES/ended\"; exit 1' TERM
for archive; do :; done
sleep 60 &
echo half > \"$archive\" && echo began > \"$NOTES/began\"
wait
";

/// `ring3 image create debian` in the folder `images`, once its work has begun.
fn begun(notes: &Path, images: &Path) -> Child {
    let program = notes.join("mmdebstrap");
    fs::write(&program, SLOW).expect("written");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("executable");
    let path = format!("{}:/usr/bin:/bin", notes.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_ring3"));
    command.args(["image", "create", "debian"]).env("PATH", path).env("NOTES", notes);
    command.current_dir(images).stderr(Stdio::piped());
    let child = command.spawn().expect("ring3 starts");
    wait_for(&notes.join("began"));
    child
}

fn wait_for(file: &Path) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !file.exists() {
        assert!(Instant::now() < deadline, "no {}", file.display());
        thread::sleep(Duration::from_millis(5));
    }
}

fn tell(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("it is there");
}

#[test]
fn an_interrupted_image_is_none() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let (notes, images) =
            (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
        let child = begun(notes.path(), images.path());
        tell(&child, signal);
        let output = child.wait_with_output().expect("it ended");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains("interrupted"), "{said}");
        assert!(notes.path().join("ended").exists(), "what worked for it went on");
        assert_eq!(fs::read_dir(images.path()).expect("readable").count(), 0, "{signal:?}");
    }
}

/// What cannot be cleared away by who is killed is by who comes next.
#[test]
fn what_a_killed_one_left_goes_when_the_next_comes() {
    let (notes, images) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    let mut killed = begun(notes.path(), images.path());
    killed.kill().expect("it was there");
    killed.wait().expect("it ended");
    assert_eq!(fs::read_dir(images.path()).expect("readable").count(), 1);
    fs::remove_file(notes.path().join("began")).expect("there");
    let next = begun(notes.path(), images.path());
    assert_eq!(fs::read_dir(images.path()).expect("readable").count(), 1, "its own");
    tell(&next, Signal::INT);
    next.wait_with_output().expect("it ended");
    assert_eq!(fs::read_dir(images.path()).expect("readable").count(), 0);
}
