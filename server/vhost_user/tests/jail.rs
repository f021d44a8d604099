//! What is left of a server that was taken over: prisoners in jails, who try.
//!
//! A jail is for a whole process and for good, so each prisoner is this program anew, running one of the tests that are ignored.

// UNSAFETY: fcntl with commands that rustix has no safe wrapper for.
#![allow(unsafe_code)]

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{self, Error, ErrorKind, Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    os::{
        fd::{AsRawFd, BorrowedFd},
        linux::net::SocketAddrExt,
        unix::{
            fs::{FileExt, PermissionsExt, symlink},
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use rustix::{
    fs::{
        AtFlags, CWD, FileType, Mode, RenameFlags, chmodat, linkat, mkdirat, mknodat,
        renameat_with, unlinkat,
    },
    net::{AddressFamily, SocketType, socket},
    process::{Pid, Signal, geteuid, getppid, kill_process},
    thread::{CapabilitySet, Gid, Uid, capabilities, set_thread_gid, set_thread_uid},
};
use vhost_user::{Served, jail, sandbox};

host::choose!(host_linux::Linux);

/// The folder a prisoner is given.
const FOLDER: &str = "RING3_TEST_FOLDER";
/// ... and a port of its keeper's.
const PORT: &str = "RING3_TEST_PORT";
/// How a prisoner says that it could not be locked up.
const SKIPPED: &str = "SKIPPED: ";

/// Has a prisoner try; it fails where the prisoner did not find what it should.
fn imprison(name: &str, folder: &Path, port: u16) {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]);
    command.env(FOLDER, folder).env(PORT, port.to_string());
    let output = command.output().expect("started");
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let skipped = said.split_once(SKIPPED).and_then(|(_, reason)| reason.lines().next());
    let passed = said.contains("1 passed");
    assert!(output.status.success() && (passed || skipped.is_some()), "{name}: {said}");
    if let Some(reason) = skipped {
        eprintln!("SKIPPED IN PART: {name}: {reason}");
    }
}

/// What a prisoner knows of those outside.
struct Given {
    folder: PathBuf,
    port: u16,
    keeper: Pid,
}

fn given() -> Given {
    let port = env::var(PORT).expect("a port").parse().expect("a number");
    let folder = env::var_os(FOLDER).expect("a folder").into();
    Given { folder, port, keeper: getppid().expect("a keeper") }
}

/// What none of them can have. Each attempt fails, and not because it was made badly: the tests of the others succeed with them.
fn attempts_of_all(keeper: Pid) -> Vec<(&'static str, io::Result<()>)> {
    let memory = format!("/proc/{}/mem", keeper.as_raw_nonzero());
    vec![
        ("a file outside", File::open("/etc/passwd").map(drop)),
        ("the monitor's memory", File::open(memory).map(drop)),
        ("a program", Command::new("/bin/true").status().map(drop)),
        ("a signal", kill_process(keeper, Signal::CONT).map_err(Error::from)),
        ("a listener", TcpListener::bind("127.0.0.1:0").map(drop)),
        ("a local socket", UnixStream::connect("/tmp/nobody").map(drop)),
        (
            "a raw socket",
            socket(AddressFamily::INET, SocketType::RAW, None).map(drop).map_err(Error::from),
        ),
        ("a link", fs::hard_link("/etc/hostname", "/tmp/ring3-linked")),
        ("a removal", remove(Path::new("/etc/ring3-nonexistent"))),
    ]
}

/// By way of descriptors: who is sent signals when something comes or changes.
fn attempts_by_fcntl(keeper: Pid) -> Vec<(&'static str, io::Result<()>)> {
    const F_SETSIG: i32 = 10;
    const F_SETOWN_EX: i32 = 15;
    const F_NOTIFY: i32 = 1026;
    let owner = [1, keeper.as_raw_nonzero().get()]; // F_OWNER_PID
    let owner = owner.as_ptr() as libc::c_long;
    let keeper = keeper.as_raw_nonzero().get().into();
    let tried = |name, command: i32, argument: libc::c_long| {
        // SAFETY: each command takes a number, or reads two words that are there.
        let done = unsafe { libc::fcntl(1, command, argument) };
        (name, if done < 0 { Err(Error::last_os_error()) } else { Ok(()) })
    };
    let asynchronous = (libc::O_ASYNC | libc::O_NONBLOCK).into();
    vec![
        tried("an owner", libc::F_SETOWN, keeper),
        tried("an owner of another kind", F_SETOWN_EX, owner),
        tried("a signal's number", F_SETSIG, libc::SIGUSR1.into()),
        tried("a signal when something comes", libc::F_SETFL, asynchronous),
        tried("a signal when a file is opened", libc::F_SETLEASE, libc::F_RDLCK.into()),
        tried("a signal when a folder changes", F_NOTIFY, 1),
        tried("a larger pipe", libc::F_SETPIPE_SZ, 1 << 20),
    ]
}

/// Without the filter, which refuses the calls: what holds a server that finds other calls for the same.
fn attempts_past_the_filter(keeper: Pid, abstract_socket: &SocketAddr) {
    let (end, mut other) = UnixStream::pair().expect("a pair");
    // SAFETY: commands that take numbers.
    let owned = unsafe {
        libc::fcntl(end.as_raw_fd(), libc::F_SETOWN, keeper.as_raw_nonzero().get());
        libc::fcntl(end.as_raw_fd(), libc::F_SETFL, libc::O_ASYNC)
    };
    assert_eq!(owned, 0, "nothing but Landlock is in its way");
    // Its keeper ends by SIGIO if it gets one.
    other.write_all(b"x").expect("written");
    denied(vec![
        ("a signal", kill_process(keeper, Signal::CONT).map_err(Error::from)),
        ("a socket without a name", UnixStream::connect_addr(abstract_socket).map(drop)),
        ("a file", File::open("/etc/passwd").map(drop)),
    ]);
}

/// A name of a socket that is no file's.
fn abstract_name(port: u16) -> SocketAddr {
    SocketAddr::from_abstract_name(format!("ring3-jail-{port}")).expect("a name")
}

/// Whether this host's Landlock knows signals and abstract sockets (Linux 6.12).
fn has_scopes() -> bool {
    // SAFETY: asks for the version.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) >= 6 }
}

#[test]
#[ignore = "run by a keeper: a prisoner"]
fn prisoner_without_a_filter() {
    let Given { folder, port, keeper } = given();
    sandbox::enter_empty(false).expect("rights given up");
    sandbox::allow_nothing().expect("Landlock");
    let sets = capabilities(None).expect("told");
    assert!((sets.effective | sets.permitted | sets.inheritable).is_empty(), "{sets:?}");
    if !has_scopes() {
        println!("{SKIPPED}this host's Landlock has no scopes");
        return;
    }
    attempts_past_the_filter(keeper, &abstract_name(port));
    File::open(folder.join("inside")).expect_err("no names at all");
    TcpListener::bind("127.0.0.1:0").expect_err("no ports");
}

#[test]
#[ignore = "run by a keeper: a prisoner"]
fn prisoner_in_a_folder_without_a_filter() {
    let Given { folder, port, keeper } = given();
    let place = sandbox::enter_folder(&folder.join("folder"), false, false).expect("a sandbox");
    sandbox::allow_only(&place).expect("Landlock");
    let sets = capabilities(None).expect("told");
    let dear = CapabilitySet::MKNOD
        | CapabilitySet::SETFCAP
        | CapabilitySet::FSETID
        | CapabilitySet::KILL
        | CapabilitySet::SYS_ADMIN;
    assert!((sets.effective & dear).is_empty(), "{sets:?}");
    if has_scopes() {
        attempts_past_the_filter(keeper, &abstract_name(port));
    } else {
        println!("{SKIPPED}this host's Landlock has no scopes");
    }
}

/// Fails if an attempt succeeded, or failed because there was nothing to have where there is.
fn denied(attempts: Vec<(&'static str, io::Result<()>)>) {
    for (what, outcome) in attempts {
        let error = outcome.expect_err(what);
        let expected =
            [ErrorKind::PermissionDenied, ErrorKind::NotFound, ErrorKind::CrossesDevices];
        assert!(expected.contains(&error.kind()), "{what}: {error}");
    }
}

#[test]
#[ignore = "run by a keeper: a prisoner"]
fn prisoner_with_a_disk() {
    let Given { folder, port, keeper } = given();
    let file = OpenOptions::new().read(true).write(true).open(folder.join("inside")).expect("it");
    let memory = ram::Ram::new(1 << 20).expect("memory");
    let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("another");
    let theirs = memory.descriptors().expect("descriptors").map(own);
    let (mut pipe, mut other) = io::pipe().expect("a pipe");
    leave(true);
    jail::enter(Served::Disk).expect("filters");
    file.write_all_at(b"stored", 4096).expect("written");
    let mut data = [0; 6];
    file.read_exact_at(&mut data, 4096).expect("read");
    file.sync_data().expect("flushed");
    assert_eq!(&data, b"stored");
    assert_eq!(vec![1_u8; 64 << 20].len(), 64 << 20, "memory can be had");
    other.write_all(b"x").expect("written");
    pipe.read_exact(&mut [0]).expect("it still speaks");
    let [memory, marks, notes] = theirs;
    let memory = ram::Ram::of_another(memory, marks, notes).expect("guest memory");
    memory.write_gpa(0x1000, b"stored").expect("written");
    denied(attempts_of_all(keeper));
    denied(attempts_by_fcntl(keeper));
    denied(vec![
        ("its own name", File::open(folder.join("inside")).map(drop)),
        ("a connection", TcpStream::connect(("127.0.0.1", port)).map(drop)),
        ("datagrams", UdpSocket::bind("127.0.0.1:0").map(drop)),
    ]);
}

#[test]
#[ignore = "run by a keeper: a prisoner"]
fn prisoner_with_a_network() {
    let Given { folder, port, keeper } = given();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    leave(false);
    // The filter is for threads there were before, too.
    let (go, gone) = std::sync::mpsc::channel();
    let thread = thread::spawn(move || {
        gone.recv().expect("now");
        File::open("/etc/passwd").map(drop)
    });
    jail::enter(Served::Network).expect("filters");
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the guest's connections");
    stream.set_nodelay(true).expect("an option");
    stream.write_all(b"hello").expect("written");
    let own = listener.local_addr().expect("its address");
    let _caller = TcpStream::connect(own).expect("connected");
    listener.accept().expect("what comes to a port that is forwarded");
    go.send(()).expect("it waits");
    denied(vec![("a file, by another thread", thread.join().expect("it lived"))]);
    denied(attempts_of_all(keeper));
    denied(attempts_by_fcntl(keeper));
    denied(vec![
        ("another port", UdpSocket::bind("127.0.0.1:0").map(drop)),
        ("the folder", File::open(folder.join("inside")).map(drop)),
    ]);
}

#[test]
#[ignore = "run by a keeper: a prisoner"]
fn prisoner_with_a_cable() {
    let Given { folder, port, keeper } = given();
    let listener = UnixListener::bind(folder.join("cable")).expect("a socket");
    let mut caller = UnixStream::connect(folder.join("cable")).expect("connected");
    leave(true);
    jail::enter(Served::Cable).expect("filters");
    let (mut stream, _) = listener.accept().expect("the other machine");
    stream.set_write_timeout(Some(Duration::from_secs(5))).expect("an option");
    stream.write_all(b"frame").expect("written");
    let mut data = [0; 5];
    caller.read_exact(&mut data).expect("read");
    denied(attempts_of_all(keeper));
    denied(attempts_by_fcntl(keeper));
    denied(vec![
        ("a connection", TcpStream::connect(("127.0.0.1", port)).map(drop)),
        ("datagrams", UdpSocket::bind("127.0.0.1:0").map(drop)),
        ("the folder", File::open(folder.join("inside")).map(drop)),
    ]);
}

/// Leaves all names behind, as servers of no folder do.
fn leave(network: bool) {
    sandbox::enter_empty(network).expect("rights given up");
    sandbox::allow_nothing().expect("Landlock, if there is any");
}

/// Enters as a folder's server does; says where the folder is then, and whether by a namespace.
fn enter(folder: &Path, readonly: bool) -> (PathBuf, bool) {
    let place = sandbox::enter_folder(folder, readonly, false).expect("a sandbox");
    let has_namespace = place != folder;
    let has_landlock = sandbox::allow_only(&place).expect("Landlock, if there is any");
    if !has_namespace && !has_landlock {
        eprintln!("{SKIPPED}this host has neither namespaces for us nor Landlock");
        std::process::exit(0);
    }
    jail::enter(Served::Folder { readonly, privileged: false }).expect("filters");
    (place, has_namespace)
}

// By the calls that a folder's server has; the standard library makes others.

fn remove(path: &Path) -> io::Result<()> {
    Ok(unlinkat(CWD, path, AtFlags::empty())?)
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    Ok(renameat_with(CWD, from, CWD, to, RenameFlags::empty())?)
}

fn open_to_all(path: &Path) -> io::Result<()> {
    Ok(chmodat(CWD, path, Mode::from_raw_mode(0o777), AtFlags::empty())?)
}

/// Ways out of a folder by names.
fn ways_out(place: &Path, outside: &Path, keeper: Pid) -> Vec<(&'static str, io::Result<()>)> {
    let secret = outside.join("secret");
    let up = place.join("../".repeat(20)).join(secret.strip_prefix("/").expect("from the root"));
    vec![
        ("a name", File::open(&secret).map(drop)),
        ("a way up", File::open(up).map(drop)),
        ("a link", File::open(place.join("link")).map(drop)),
        ("from where descriptors are", File::open("/proc/self/fd/../../../etc/passwd").map(drop)),
        ("a folder", fs::read_dir(outside).map(drop)),
        (
            "the monitor's descriptors",
            fs::read_dir(format!("/proc/{}/fd", keeper.as_raw_nonzero())).map(drop),
        ),
    ]
}

fn changes_outside(place: &Path, outside: &Path) -> Vec<(&'static str, io::Result<()>)> {
    let secret = outside.join("secret");
    vec![
        ("writing", OpenOptions::new().write(true).open(&secret).map(drop)),
        ("making", File::create(outside.join("new")).map(drop)),
        ("removing", remove(&secret)),
        ("taking", rename(&secret, &place.join("taken"))),
        ("putting", rename(&place.join("inside"), &outside.join("put"))),
        (
            "linking",
            linkat(CWD, &secret, CWD, place.join("linked"), AtFlags::empty()).map_err(Error::from),
        ),
    ]
}

#[test]
#[ignore = "run by a keeper: a prisoner"]
fn prisoner_with_a_folder() {
    let Given { folder: outside, keeper, .. } = given();
    let (place, has_namespace) = enter(&outside.join("folder"), false);
    let mut text = String::new();
    File::open(place.join("inside")).expect("opened").read_to_string(&mut text).expect("read");
    assert_eq!(text, "inside");
    fs::write(place.join("new"), "new").expect("written");
    rename(&place.join("new"), &place.join("newer")).expect("renamed");
    open_to_all(&place.join("newer")).expect("changed");
    denied(attempts_of_all(keeper));
    denied(attempts_by_fcntl(keeper));
    denied(ways_out(&place, &outside, keeper));
    denied(changes_outside(&place, &outside));
    denied(vec![("a program with rights of its own", own_program(&place.join("newer")))]);
    if has_namespace {
        denied(vec![
            ("attributes", fs::metadata(outside.join("secret")).map(drop)),
            ("modes", open_to_all(&outside.join("secret"))),
            ("a device of the host", device(&place)),
        ]);
    }
}

/// Makes a program that would run with the rights of its owner.
fn own_program(path: &Path) -> io::Result<()> {
    Ok(chmodat(CWD, path, Mode::from_raw_mode(0o4777), AtFlags::empty())?)
}

/// Makes the host's null device anew and opens it.
fn device(place: &Path) -> io::Result<()> {
    let path = place.join("null");
    mknodat(CWD, &path, FileType::CharacterDevice, Mode::RWXU, rustix::fs::makedev(1, 3))?;
    File::open(path).map(drop)
}

#[test]
#[ignore = "run by a keeper: a prisoner"]
fn prisoner_with_a_folder_of_an_ordinary_user() {
    if geteuid().is_root() {
        set_thread_gid(Gid::from_raw(65534)).expect("nobody");
        set_thread_uid(Uid::from_raw(65534)).expect("nobody");
    }
    prisoner_with_a_folder();
}

#[test]
#[ignore = "run by a keeper: a prisoner"]
fn prisoner_with_a_folder_to_read() {
    let Given { folder: outside, keeper, .. } = given();
    let (place, _) = enter(&outside.join("folder"), true);
    assert_eq!(fs::read(place.join("inside")).expect("read"), b"inside");
    denied(attempts_of_all(keeper));
    denied(attempts_by_fcntl(keeper));
    denied(ways_out(&place, &outside, keeper));
    denied(changes_outside(&place, &outside));
    denied(vec![
        ("writing", OpenOptions::new().append(true).open(place.join("inside")).map(drop)),
        ("making", File::create(place.join("another")).map(drop)),
        ("a folder", mkdirat(CWD, place.join("folder"), Mode::RWXU).map_err(Error::from)),
        ("modes", open_to_all(&place.join("inside"))),
        ("modes outside", open_to_all(&outside.join("secret"))),
    ]);
}

#[test]
fn a_server_reaches_what_it_serves_and_nothing_else() {
    for prisoner in [
        "prisoner_with_a_disk",
        "prisoner_with_a_network",
        "prisoner_with_a_cable",
        "prisoner_with_a_folder",
        "prisoner_with_a_folder_of_an_ordinary_user",
        "prisoner_with_a_folder_to_read",
        "prisoner_without_a_filter",
        "prisoner_in_a_folder_without_a_filter",
    ] {
        let outside = tempfile::tempdir().expect("a folder");
        let folder = outside.path().join("folder");
        fs::create_dir(&folder).expect("made");
        fs::write(outside.path().join("secret"), "secret").expect("written");
        fs::write(outside.path().join("inside"), "inside").expect("written");
        fs::write(folder.join("inside"), "inside").expect("written");
        symlink(outside.path().join("secret"), folder.join("link")).expect("linked");
        for path in
            [outside.path(), &folder, &outside.path().join("secret"), &folder.join("inside")]
        {
            fs::set_permissions(path, PermissionsExt::from_mode(0o777)).expect("open to all");
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("it").port();
        let _abstract = UnixListener::bind_addr(&abstract_name(port)).expect("a socket");
        imprison(prisoner, outside.path(), port);
        assert_eq!(fs::read(outside.path().join("secret")).expect("untouched"), b"secret");
    }
}
