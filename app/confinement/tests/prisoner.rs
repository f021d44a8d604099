//! A monitor that was taken over: what it tries fails, and what it needs works.
//!
//! The box is for a whole process and for good, so the prisoner is this program anew, running the test that is ignored. What fails
//! there succeeds outside: the first test tries that.

// UNSAFETY: calls that only a prisoner would make, and memory of its own.
#![allow(unsafe_code)]

use std::{
    env,
    fs::{self, File, Permissions},
    io,
    net::{TcpListener, TcpStream, UdpSocket},
    os::{
        fd::AsRawFd,
        unix::{
            fs::{PermissionsExt, symlink},
            net::UnixStream,
            process::CommandExt,
        },
    },
    process::Command,
    ptr, thread,
    time::Duration,
};

fn call(number: i64, arguments: [usize; 4]) -> io::Result<()> {
    let [a, b, c, d] = arguments;
    // SAFETY: none of the calls below touches memory but their own.
    match unsafe { libc::syscall(number, a, b, c, d) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn executable_memory() -> io::Result<()> {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping.
    let at = unsafe { libc::mmap(ptr::null_mut(), 4096, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A copy of this process, which ends at once.
fn a_copy() -> io::Result<()> {
    // SAFETY: the child makes one call.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: ends the copy.
        0 => unsafe { libc::_exit(0) },
        _ => Ok(()),
    }
}

/// What is tried; outside each succeeds.
fn attempts(folder: &str) -> Vec<(&'static str, io::Result<()>)> {
    let keeper = std::os::unix::process::parent_id() as usize;
    let own = |name: &str| format!("{folder}/{name}-{}", std::process::id());
    let socket = format!("{folder}/socket");
    vec![
        ("read a file", File::open("/etc/passwd").map(drop)),
        ("make a file", File::create(own("file")).map(drop)),
        ("look into a folder", fs::read_dir("/proc").map(drop)),
        ("make a folder", fs::create_dir(own("folder"))),
        ("make a link", symlink("/", own("link"))),
        ("change a file's mode", fs::set_permissions(&socket, Permissions::from_mode(0o600))),
        ("start a program", Command::new("/bin/true").status().map(drop)),
        ("copy itself", a_copy()),
        ("listen", TcpListener::bind("127.0.0.1:0").map(drop)),
        ("make a socket", UdpSocket::bind("127.0.0.1:0").map(drop)),
        ("connect to a socket", UnixStream::connect(&socket).map(drop)),
        ("signal another process", call(libc::SYS_kill, [keeper, 0, 0, 0])),
        ("have a descriptor of another process", call(libc::SYS_pidfd_open, [keeper, 0, 0, 0])),
        ("have executable memory", executable_memory()),
        ("have its own name spaces", call(libc::SYS_unshare, [libc::CLONE_FS as usize, 0, 0, 0])),
        ("be told by a signal", call(libc::SYS_fcntl, [0, libc::F_SETOWN as usize, keeper, 0])),
        ("limit itself", call(libc::SYS_umask, [0o77, 0, 0, 0])),
    ]
}

/// Sockets in a folder of the test's, with somebody to connect to.
fn folder() -> (tempfile::TempDir, std::os::unix::net::UnixListener) {
    let folder = tempfile::tempdir().expect("a folder");
    let listener = std::os::unix::net::UnixListener::bind(folder.path().join("socket"));
    (folder, listener.expect("bound"))
}

#[test]
fn outside_each_attempt_succeeds() {
    let (folder, _listener) = folder();
    for (what, result) in attempts(&folder.path().to_string_lossy()) {
        result.unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}

/// Has a prisoner try; what it said.
fn imprison(name: &str) -> String {
    let (folder, _listener) = folder();
    let mut prisoner = Command::new(env::current_exe().expect("this program"));
    prisoner.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]);
    let output = prisoner.env("RING3_TEST_FOLDER", folder.path()).output().expect("started");
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    said.into_owned()
}

#[test]
fn inside_none_does() {
    imprison("prisoner");
}

#[test]
fn without_the_filter_names_lead_nowhere() {
    if imprison("prisoner_without_a_filter").contains(NO_LANDLOCK) {
        eprintln!("SKIPPED: {NO_LANDLOCK}");
    }
}

const NO_LANDLOCK: &str = "this host has no Landlock";

#[test]
#[ignore = "run by without_the_filter_names_lead_nowhere: it is for good"]
fn prisoner_without_a_filter() {
    let folder = env::var("RING3_TEST_FOLDER").expect("a folder");
    if !confinement::forget_names().expect("Landlock") {
        println!("{NO_LANDLOCK}");
        return;
    }
    const NAMES: [&str; 6] = [
        "read a file",
        "make a file",
        "look into a folder",
        "make a folder",
        "make a link",
        "start a program",
    ];
    let tried = |folder: &str| {
        let of_names = attempts(folder).into_iter().filter(|(what, _)| NAMES.contains(what));
        let of_names = of_names.map(|(what, result)| (what, result.is_err())).collect::<Vec<_>>();
        assert_eq!(of_names, NAMES.map(|what| (what, true)));
    };
    tried(&folder);
    // Threads that are made later are held to it, too.
    thread::scope(|scope| scope.spawn(|| tried(&folder)).join()).expect("a thread");
}

#[test]
#[ignore = "run by inside_none_does: it is for the whole process and for good"]
fn prisoner() {
    let folder = env::var("RING3_TEST_FOLDER").expect("a folder");
    // Made before: what is there is kept.
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let early = thread::spawn(move || {
        // A thread that is there already is held to the same.
        thread::sleep(Duration::from_millis(200));
        (File::open("/etc/passwd").is_err(), theirs)
    });
    confinement::give_up_capabilities().expect("given up");
    confinement::enter().expect("shut in");
    for (what, result) in attempts(&folder) {
        assert!(result.is_err(), "{what}");
    }
    assert!(
        TcpStream::connect("127.0.0.1:9").is_err_and(|e| e.raw_os_error() == Some(libc::EPERM))
    );
    let error = Command::new("/bin/true").exec();
    assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    // TIOCSTI would type into the terminal.
    let typed = call(libc::SYS_ioctl, [0, libc::TIOCSTI as usize, c"x".as_ptr() as usize, 0]);
    assert_eq!(typed.expect_err("refused").raw_os_error(), Some(libc::EPERM));
    // What a monitor does all the time.
    thread::spawn(|| thread::sleep(Duration::from_millis(1))).join().expect("a thread");
    assert!(early.join().expect("a thread").0, "threads that were there");
    assert!(ours.set_read_timeout(Some(Duration::from_millis(1))).is_ok());
    let descriptor = ours.as_raw_fd() as usize;
    call(libc::SYS_fcntl, [descriptor, libc::F_GETFL as usize, 0, 0]).expect("its flags");
    println!("it is all as it should be");
}
