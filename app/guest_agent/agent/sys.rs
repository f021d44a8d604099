//! The system calls std has no name for.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_long, c_ulong, c_void},
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd},
    time::Duration,
};

use crate::protocol::Limit;

pub const MS_RDONLY: c_ulong = 1;
const MS_REMOUNT: c_ulong = 32;
const MS_BIND: c_ulong = 4096;
pub const MS_MOVE: c_ulong = 8192;
pub const SIGKILL: c_int = 9;
const SIG_IGN: usize = 1;
const CLOCK_REALTIME: c_int = 0;
const ADJ_OFFSET_SINGLESHOT: u32 = 0x8001;
const AT_FDCWD: c_int = -100;
const SECOND: i64 = 1_000_000_000;
const AF_VSOCK: c_int = 40;
const SOCK_STREAM_CLOEXEC: c_int = 1 | 0o2000000;
const HOST: u32 = 2;
const RB_POWER_OFF: c_int = 0x4321_fedc;
const SYS_INIT_MODULE: c_long = 175;
const SYS_FINIT_MODULE: c_long = 313;
const SYS_OPEN_BY_HANDLE_AT: c_long = 304;
const SYS_STATX: c_long = 332;
const SYS_OPEN_TREE: c_long = 428;
const MODULE_INIT_COMPRESSED_FILE: c_int = 4;
const TIOCSCTTY: c_ulong = 0x540e;
const TIOCSWINSZ: c_ulong = 0x5414;
const TIOCGPTPEER: c_ulong = 0x5441;
const TIOCSPTLCK: c_ulong = 0x4004_5431;
/// Opening a terminal does not make it the session's.
pub const O_NOCTTY: i32 = 0o400;
const O_RDWR_NOCTTY_CLOEXEC: c_ulong = 2 | O_NOCTTY as c_ulong | 0o2000000;

unsafe extern "C" {
    fn mount(
        source: *const c_char,
        target: *const c_char,
        kind: *const c_char,
        flags: c_ulong,
        data: *const c_void,
    ) -> c_int;
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn connect(fd: c_int, address: *const c_void, len: u32) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
    fn setsid() -> c_int;
    fn setpgid(process: c_int, group: c_int) -> c_int;
    fn setgroups(count: usize, groups: *const u32) -> c_int;
    fn setgid(group: u32) -> c_int;
    fn setuid(user: u32) -> c_int;
    fn kill(process: c_int, signal: c_int) -> c_int;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn reboot(command: c_int) -> c_int;
    fn sethostname(name: *const c_char, len: usize) -> c_int;
    fn sync();
    fn umask(mask: u32) -> u32;
    fn setrlimit(resource: c_int, limit: *const [u64; 2]) -> c_int;
    fn close(fd: c_int) -> c_int;
    fn signal(number: c_int, handler: usize) -> usize;
    fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int;
    fn clock_settime(clock: c_int, time: *const Timespec) -> c_int;
    fn adjtimex(change: *mut Timex) -> c_int;
    fn mknod(path: *const c_char, mode: u32, device: u64) -> c_int;
    fn linkat(from: c_int, old: *const c_char, to: c_int, new: *const c_char, flags: c_int) -> c_int;
    fn poll(fds: *mut Poll, count: c_ulong, timeout: c_int) -> c_int;
}

/// `struct timespec`.
#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

/// `struct timex`, of which only the beginning is used.
#[repr(C)]
struct Timex {
    modes: u32,
    pad: u32,
    offset: i64,
    rest: [u64; 24],
}

/// `struct pollfd`.
#[repr(C)]
struct Poll {
    fd: c_int,
    events: i16,
    happened: i16,
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// What a call has just opened, which nobody else has.
fn new_file(result: c_int) -> io::Result<File> {
    // SAFETY: callers in this program pass what a call that opens something has returned.
    check(result).map(|fd| unsafe { File::from_raw_fd(fd) })
}

fn c_string(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(io::Error::other)
}

/// Mounts a file system.
pub fn mount_at(
    source: &[u8],
    target: &[u8],
    kind: &str,
    flags: c_ulong,
    data: &str,
) -> io::Result<()> {
    let (source, target) = (c_string(source)?, c_string(target)?);
    let (kind, data) = (c_string(kind.as_bytes())?, c_string(data.as_bytes())?);
    // SAFETY: four C strings that outlive the call.
    check(unsafe {
        mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast())
    })
    .map(drop)
}

/// Loads a module.
pub fn load_module(image: &[u8]) -> io::Result<()> {
    // SAFETY: the image and an empty C string, both outliving the call.
    let result = unsafe { syscall(SYS_INIT_MODULE, image.as_ptr(), image.len(), c"".as_ptr()) };
    check(result as c_int).map(drop)
}

/// Loads a module from its file, which the kernel unpacks if it must.
pub fn load_module_file(file: &File, is_packed: bool) -> io::Result<()> {
    let flags = if is_packed { MODULE_INIT_COMPRESSED_FILE } else { 0 };
    // SAFETY: an open descriptor and an empty C string, both outliving the call.
    let result =
        unsafe { syscall(SYS_FINIT_MODULE, file.as_raw_fd(), c"".as_ptr(), flags) };
    check(result as c_int).map(drop)
}

/// Shows a folder at another place, too, where nothing can be changed.
pub fn bind_read_only(folder: &[u8], target: &[u8]) -> io::Result<()> {
    mount_at(folder, target, "", MS_BIND, "")?;
    mount_at(b"none", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY, "")
}

/// A private mount of the file system at a place. It has no path, and no other file system is mounted in it.
pub fn mount_of(place: &[u8]) -> io::Result<File> {
    const CLONE_CLOEXEC: c_int = 1 | 0o2000000;
    let place = c_string(place)?;
    // SAFETY: a C string that outlives the call.
    let fd = unsafe { syscall(SYS_OPEN_TREE, AT_FDCWD, place.as_ptr(), CLONE_CLOEXEC) };
    new_file(fd as c_int)
}

/// A file in a mount of a shared folder, by its number there, if the kernel knows the file.
pub fn known_file(mount: &File, number: u64) -> io::Result<File> {
    /// `struct file_handle`, with what Linux's driver has in it: the number's halves, and a generation, which ours do not have.
    #[repr(C)]
    struct Handle {
        len: u32,
        kind: i32,
        words: [u32; 3],
    }
    const O_PATH_CLOEXEC: c_int = 0o10000000 | 0o2000000;
    let words = [(number >> 32) as u32, number as u32, 0];
    let handle = Handle { len: 12, kind: 0x81, words };
    // The mount's own descriptor is only for finding it; the call wants the folder open.
    let folder = File::open(format!("/proc/self/fd/{}", mount.as_raw_fd()))?;
    // SAFETY: a handle as long as it says, which outlives the call.
    let fd = unsafe {
        syscall(SYS_OPEN_BY_HANDLE_AT, folder.as_raw_fd(), &raw const handle, O_PATH_CLOEXEC)
    };
    new_file(fd as c_int)
}

/// Has the kernel ask for the attributes of a file or folder.
pub fn look_at(file: &File) {
    const EMPTY_PATH: c_int = 0x1000;
    const FORCE_SYNC: c_int = 0x2000;
    const BASIC: c_int = 0x7ff;
    let mut answer = [0_u64; 32];
    let (file, flags) = (file.as_raw_fd(), EMPTY_PATH | FORCE_SYNC);
    // SAFETY: an empty C string, and room for `struct statx`. A file that is gone needs no look.
    unsafe { syscall(SYS_STATX, file, c"".as_ptr(), flags, BASIC, answer.as_mut_ptr()) };
}

/// Has the kernel ask what a path stands for in a folder. The kernel always asks for a name that somebody wants to make, so we try to make
/// a link there. That fails, because the link's file is in another file system.
pub fn look_up(folder: &File, path: &CStr) {
    // SAFETY: C strings that outlive the call.
    unsafe { linkat(AT_FDCWD, c"/".as_ptr(), folder.as_raw_fd(), path.as_ptr(), 0) };
}

/// Makes a device node; `kind` is part of its mode.
pub fn make_node(path: &str, mode: u32, major: u64, minor: u64) -> io::Result<()> {
    let path = c_string(path.as_bytes())?;
    let device = minor & 0xff | (major & 0xfff) << 8 | (minor & !0xff) << 12;
    // SAFETY: a C string that outlives the call, and plain numbers.
    check(unsafe { mknod(path.as_ptr(), mode, device) }).map(drop)
}

#[repr(C)]
struct VsockAddress {
    family: u16,
    reserved: u16,
    port: u32,
    cid: u32,
    flags: u8,
    zero: [u8; 3],
}

/// Connects to a port of the host.
pub fn connect_to_host(port: u32) -> io::Result<File> {
    // SAFETY: plain numbers.
    let file = new_file(unsafe { socket(AF_VSOCK, SOCK_STREAM_CLOEXEC, 0) })?;
    let family = AF_VSOCK as u16;
    let address = VsockAddress { family, reserved: 0, port, cid: HOST, flags: 0, zero: [0; 3] };
    let len = size_of::<VsockAddress>() as u32;
    // SAFETY: an address of the length given.
    check(unsafe { connect(file.as_raw_fd(), (&raw const address).cast(), len) })?;
    Ok(file)
}

/// An ioctl that reads or writes `argument`, whose type must be the request's.
pub fn control<T>(fd: &impl AsRawFd, request: c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: callers in this program pair each request with its argument's type.
    check(unsafe { ioctl(fd.as_raw_fd(), request, &raw mut *argument) }).map(drop)
}

/// A datagram socket to configure interfaces with.
pub fn inet_socket() -> io::Result<File> {
    const AF_INET: c_int = 2;
    const SOCK_DGRAM: c_int = 2;
    // SAFETY: plain numbers.
    new_file(unsafe { socket(AF_INET, SOCK_DGRAM, 0) })
}

/// A new terminal: its master's and its slave's side.
pub fn terminal() -> io::Result<(File, File)> {
    let master = File::options().read(true).write(true).open("/dev/ptmx")?;
    control(&master, TIOCSPTLCK, &mut (0 as c_int))?;
    // SAFETY: the argument is flags, by value.
    let slave = new_file(unsafe { ioctl(master.as_raw_fd(), TIOCGPTPEER, O_RDWR_NOCTTY_CLOEXEC) })?;
    Ok((master, slave))
}

/// Sets a terminal's size.
pub fn set_window(terminal: &File, rows: u16, columns: u16) -> io::Result<()> {
    control(terminal, TIOCSWINSZ, &mut [rows, columns, 0, 0])
}

/// Begins a session. Commands without a terminal are in it, and none of them leads it: a session's leader gets the first
/// terminal that it opens, and SIGHUP when that one's other side is closed. Programs that a shell starts are no leaders.
pub fn lead_session() {
    // SAFETY: plain numbers. Whoever leads a session already goes on to do so.
    unsafe { setsid() };
}

/// In the command's process, before it becomes the command: a process group of its own, or with standard input as
/// its terminal a session; then the user and groups.
pub fn become_user(user: u32, groups: &[u32], terminal: bool) -> io::Result<()> {
    // SAFETY: plain numbers, and a list of the length given. Nothing here allocates or locks, as
    // must be between fork and exec.
    unsafe {
        if terminal {
            check(setsid())?;
            check(ioctl(0, TIOCSCTTY, 0 as c_ulong))?;
        } else {
            check(setpgid(0, 0))?;
        }
        check(setgroups(groups.len(), groups.as_ptr()))?;
        check(setgid(groups.first().copied().unwrap_or(user)))?;
        check(setuid(user))?;
    }
    Ok(())
}

/// Gives a process resource limits, before [`become_user`]: only root may raise them. A limit that the kernel refuses stays as it was.
pub fn limit(limits: &[Limit]) {
    for Limit { resource, current, maximum } in limits {
        let limit = [*current, *maximum];
        // SAFETY: a `struct rlimit` that outlives the call.
        unsafe { setrlimit(*resource as c_int, &raw const limit) };
    }
}

/// There, too: what a program has from whoever starts it. Streams `closed` are closed.
pub fn inherit(mask: u32, ignored: u64, closed: &[c_int]) {
    // SAFETY: plain numbers; the streams are this process's own, which is about to become another program.
    unsafe {
        umask(mask);
        for number in (1..=64).filter(|number| ignored >> (number - 1) & 1 != 0) {
            signal(number, SIG_IGN);
        }
        for &number in closed {
            close(number);
        }
    }
}

/// Sends a signal to the processes of a group (negative), to one, or to all (-1).
pub fn send_signal(process: c_int, signal: c_int) {
    // SAFETY: plain numbers. What is gone needs no signal.
    unsafe { kill(process, signal) };
}

/// What time it is, in nanoseconds since 1970.
pub fn time() -> io::Result<i64> {
    let mut time = Timespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: room for the answer.
    check(unsafe { clock_gettime(CLOCK_REALTIME, &raw mut time) })?;
    Ok(time.seconds * SECOND + time.nanoseconds)
}

/// Sets the clock.
pub fn set_time(ns: i64) -> io::Result<()> {
    let time = Timespec { seconds: ns.div_euclid(SECOND), nanoseconds: ns.rem_euclid(SECOND) };
    // SAFETY: a structure that outlives the call.
    check(unsafe { clock_settime(CLOCK_REALTIME, &raw const time) }).map(drop)
}

/// Has the clock make up for so many nanoseconds without a jump.
pub fn slew_time(ns: i64) -> io::Result<()> {
    let mut change = Timex { modes: ADJ_OFFSET_SINGLESHOT, pad: 0, offset: ns / 1000, rest: [0; 24] };
    // SAFETY: a whole structure of the kernel's size that outlives the call.
    check(unsafe { adjtimex(&raw mut change) }).map(drop)
}

/// Waits until `from` can be read, or has ended; false once the other end of the connection `to` has hung up.
pub fn wait_while_read(from: &File, to: &File) -> bool {
    const POLLIN: i16 = 1;
    const POLLRDHUP: i16 = 0x2000;
    let one = |file: &File, events| Poll { fd: file.as_raw_fd(), events, happened: 0 };
    let mut both = [one(from, POLLIN), one(to, POLLRDHUP)];
    // SAFETY: a list of the length given.
    while unsafe { poll(both.as_mut_ptr(), 2, -1) } < 0 {
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return true;
        }
    }
    both[1].happened == 0
}

/// Waits for any child: which one, and its wait status. `None` when there are none.
pub fn wait_any() -> Option<(c_int, c_int)> {
    let mut status = 0;
    loop {
        // SAFETY: a place for the status.
        let process = unsafe { waitpid(-1, &raw mut status, 0) };
        if process > 0 {
            return Some((process, status));
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// Sets the host name.
pub fn set_host_name(name: &str) {
    // SAFETY: a string of the length given. A guest without a name works as well.
    unsafe { sethostname(name.as_ptr().cast(), name.len()) };
}

/// Has everything written to where it is kept.
pub fn sync_all() {
    // SAFETY: always.
    unsafe { sync() };
}

/// Switches the machine off.
pub fn power_off() -> ! {
    sync_all();
    // SAFETY: this is what we want.
    unsafe { reboot(RB_POWER_OFF) };
    loop {
        std::thread::park();
    }
}

/// Leaves the host time to switch the machine off itself.
pub fn sleep_then_power_off() -> ! {
    std::thread::sleep(Duration::from_secs(60));
    power_off()
}
