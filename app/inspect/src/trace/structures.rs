//! What system calls' arguments point to, and what their bits mean, as strace prints it.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::{
    calls::{self, ArgumentMemory, Reader},
    linux_names,
};

/// Parts of a list that are shown.
const SHOWN: u64 = 16;

/// What an argument of a system call is, if it is known here.
pub fn of(call: &str, parameter: &str) -> Option<&'static str> {
    Some(match (call, parameter) {
        ("mmap" | "mprotect" | "pkey_mprotect", "prot") => "protection",
        ("mmap", "flags") => "mapping",
        ("mmap", "off") => "offset",
        ("clone", "clone_flags") => "clone",
        ("access" | "faccessat" | "faccessat2", "mode") => "access",
        ("newfstatat" | "unlinkat" | "fchownat", "flag") => "at",
        ("faccessat2" | "linkat" | "utimensat" | "execveat", "flags") => "at",
        ("wait4" | "waitid", "options") => "wait",
        ("wait4", "stat_addr") => "status",
        ("lseek", "whence") => "whence",
        ("fcntl", "cmd") => "fcntl",
        ("rt_sigprocmask", "how") => "how",
        ("rt_sigprocmask", "nset") => "signals",
        ("rt_sigprocmask", "oset") => "signals, then",
        ("rt_sigaction" | "kill" | "tkill" | "tgkill", "sig") => "signal",
        ("rt_sigaction", "act") => "action",
        ("rt_sigaction", "oact") => "action, then",
        ("socket" | "socketpair", "family") => "family",
        ("socket" | "socketpair", "type") => "type",
        ("connect", "uservaddr") | ("bind", "umyaddr") | ("sendto", "addr") => "address",
        ("stat" | "lstat" | "fstat" | "newfstatat", "statbuf") => "stat, then",
        ("nanosleep" | "clock_nanosleep", "rqtp") | ("clock_settime", "tp") => "time",
        ("clock_gettime" | "clock_getres", "tp") => "time, then",
        ("gettimeofday", "tv") => "timeval, then",
        ("writev" | "pwritev", "vec") => "buffers",
        ("readv" | "preadv", "vec") => "buffers, then",
        ("pipe" | "pipe2", "fildes") | ("socketpair", "usockvec") => "pair, then",
        ("pipe2" | "dup3" | "epoll_create1", "flags") => "close on exec",
        ("poll" | "ppoll", "ufds") => "polled",
        ("execve" | "execveat", "argv") => "words",
        ("execve" | "execveat", "envp") => "variables",
        _ => return None,
    })
}

/// What of memory it is made of, at the call's beginning or at its end.
pub fn piece(name: &str, at_end: bool) -> Option<ArgumentMemory> {
    let (name, then) = name.strip_suffix(", then").map_or((name, false), |name| (name, true));
    let piece = match name {
        "status" if at_end => return Some(ArgumentMemory::Bytes(4)),
        "polled" => return Some(ArgumentMemory::Times(8, 8 * SHOWN)),
        "signals" | "pair" => ArgumentMemory::Bytes(8),
        "action" => ArgumentMemory::Bytes(32),
        "address" => ArgumentMemory::Times(1, 128),
        "stat" => ArgumentMemory::Bytes(56),
        "time" | "timeval" => ArgumentMemory::Bytes(16),
        "buffers" => ArgumentMemory::Vectors,
        "words" => ArgumentMemory::Texts,
        "variables" => ArgumentMemory::UpToZero,
        _ => return None,
    };
    (then == at_end).then_some(piece)
}

/// An argument, and the one behind it, which may be its length. What the kernel fills is known once it has succeeded.
pub fn show(
    name: &str,
    [value, next]: [u64; 2],
    result: Option<i64>,
    read: Reader<'_>,
) -> Option<String> {
    let (name, then) = name.strip_suffix(", then").map_or((name, false), |name| (name, true));
    let done = result.filter(|result| *result >= 0);
    if then {
        done?;
    }
    match name {
        "protection" => Some(bits(value, PROTECTION, "PROT_NONE")),
        "mapping" => Some(bits(value, MAPPING, "0")),
        "offset" => Some(if value == 0 { "0".to_owned() } else { format!("{value:#x}") }),
        "clone" => Some(clone_flags(value)),
        "access" => Some(bits(value, ACCESS, "F_OK")),
        "at" => Some(bits(value & 0xffff_ffff, AT, "0")),
        "wait" => Some(bits(value & 0xffff_ffff, WAIT, "0")),
        "status" => done.filter(|pid| *pid > 0).and_then(|_| status(value, read)),
        "whence" => Some(whence(value)),
        "fcntl" => Some(fcntl(value)),
        "how" => Some(how(value)),
        "signals" => signals(value, read),
        "signal" => Some(linux_names::signal(value & 0xffff_ffff)),
        "action" => sigaction(value, read),
        "family" => Some(family(value)),
        "type" => Some(socket_type(value)),
        "address" => sockaddr(value, next & 0xffff_ffff, read),
        "stat" => stat(value, read),
        "time" => timespec(value, read),
        "timeval" => timeval(value, read),
        "buffers" => {
            let most = if then { done? as u64 } else { u64::MAX };
            iovec(value, next, most, read, &|at, len| calls::bytes(at, len, read))
        }
        "pair" => pair(value, read),
        "close on exec" => Some(bits(value & 0xffff_ffff, &ring3_trace::OPEN, "0")),
        "polled" => pollfds(value, next & 0xffff_ffff, done.is_some(), read),
        "words" => words(value, read),
        "variables" => variables(value, read),
        _ => None,
    }
}

/// Texts up to a null pointer.
fn words(at: u64, read: Reader<'_>) -> Option<String> {
    let mut parts = Vec::new();
    for n in 0..=SHOWN {
        let word = u64::from_le_bytes(load(at.wrapping_add(8 * n), read)?);
        match word {
            0 => break,
            _ if n == SHOWN => parts.push("...".to_owned()),
            word => parts.push(calls::text(word, read)?),
        }
    }
    Some(format!("[{}]", parts.join(", ")))
}

/// How many variables a program gets.
fn variables(at: u64, read: Reader<'_>) -> Option<String> {
    const MOST: u64 = 4096;
    let ends = |n: &u64| {
        load(at.wrapping_add(8 * n), read).is_none_or(|word| u64::from_le_bytes(word) == 0)
    };
    let count = (0..MOST).find(ends)?;
    let plural = if count == 1 { "" } else { "s" };
    (at != 0).then(|| format!("{at:#x} /* {count} var{plural} */"))
}

/// Bits with names.
type Bits = &'static [(u64, &'static str)];

/// Protection of memory.
const PROTECTION: Bits = &[(1, "PROT_READ"), (2, "PROT_WRITE"), (4, "PROT_EXEC")];
/// How memory is mapped; the first two bits are a number of their own.
const MAPPING: Bits = &[
    (3, "MAP_SHARED_VALIDATE"),
    (1, "MAP_SHARED"),
    (2, "MAP_PRIVATE"),
    (0x10, "MAP_FIXED"),
    (0x20, "MAP_ANONYMOUS"),
    (0x40, "MAP_32BIT"),
    (0x100, "MAP_GROWSDOWN"),
    (0x800, "MAP_DENYWRITE"),
    (0x1000, "MAP_EXECUTABLE"),
    (0x2000, "MAP_LOCKED"),
    (0x4000, "MAP_NORESERVE"),
    (0x8000, "MAP_POPULATE"),
    (0x1_0000, "MAP_NONBLOCK"),
    (0x2_0000, "MAP_STACK"),
    (0x4_0000, "MAP_HUGETLB"),
    (0x10_0000, "MAP_FIXED_NOREPLACE"),
];
/// What a new thread has in common with its parent; the lowest byte is a signal.
const CLONE: Bits = &[
    (0x100, "CLONE_VM"),
    (0x200, "CLONE_FS"),
    (0x400, "CLONE_FILES"),
    (0x800, "CLONE_SIGHAND"),
    (0x1000, "CLONE_PIDFD"),
    (0x2000, "CLONE_PTRACE"),
    (0x4000, "CLONE_VFORK"),
    (0x8000, "CLONE_PARENT"),
    (0x1_0000, "CLONE_THREAD"),
    (0x2_0000, "CLONE_NEWNS"),
    (0x4_0000, "CLONE_SYSVSEM"),
    (0x8_0000, "CLONE_SETTLS"),
    (0x10_0000, "CLONE_PARENT_SETTID"),
    (0x20_0000, "CLONE_CHILD_CLEARTID"),
    (0x100_0000, "CLONE_CHILD_SETTID"),
];
/// What access asks for.
const ACCESS: Bits = &[(4, "R_OK"), (2, "W_OK"), (1, "X_OK")];
/// How a path is looked up.
const AT: Bits = &[
    (0x100, "AT_SYMLINK_NOFOLLOW"),
    (0x200, "AT_REMOVEDIR"),
    (0x400, "AT_SYMLINK_FOLLOW"),
    (0x800, "AT_NO_AUTOMOUNT"),
    (0x1000, "AT_EMPTY_PATH"),
];
/// How a process's end is waited for.
const WAIT: Bits =
    &[(1, "WNOHANG"), (2, "WSTOPPED"), (4, "WEXITED"), (8, "WCONTINUED"), (0x100_0000, "WNOWAIT")];

/// Bits by their names; what has none as a number.
fn bits(value: u64, names: Bits, none: &str) -> String {
    let (mut rest, mut parts) = (value, Vec::new());
    for (bits, name) in names {
        if rest & bits == *bits {
            parts.push((*name).to_owned());
            rest &= !bits;
        }
    }
    if rest != 0 {
        parts.push(format!("{rest:#x}"));
    }
    if parts.is_empty() { none.to_owned() } else { parts.join("|") }
}

/// Flags of clone, with the signal in their lowest byte.
fn clone_flags(value: u64) -> String {
    let signal = value & 0xff;
    let flags = bits(value & !0xff, CLONE, "");
    match (flags.is_empty(), signal) {
        (_, 0) => bits(value, CLONE, "0"),
        (true, signal) => linux_names::signal(signal),
        (false, signal) => format!("{flags}|{}", linux_names::signal(signal)),
    }
}

/// From where lseek counts.
fn whence(value: u64) -> String {
    named(value, &["SEEK_SET", "SEEK_CUR", "SEEK_END", "SEEK_DATA", "SEEK_HOLE"])
}

/// What rt_sigprocmask does.
fn how(value: u64) -> String {
    named(value, &["SIG_BLOCK", "SIG_UNBLOCK", "SIG_SETMASK"])
}

/// What fcntl does.
fn fcntl(value: u64) -> String {
    const FIRST: [&str; 10] = [
        "F_DUPFD", "F_GETFD", "F_SETFD", "F_GETFL", "F_SETFL", "F_GETLK", "F_SETLK", "F_SETLKW",
        "F_SETOWN", "F_GETOWN",
    ];
    match value as u32 {
        1030 => "F_DUPFD_CLOEXEC".to_owned(),
        1031 => "F_SETPIPE_SZ".to_owned(),
        1032 => "F_GETPIPE_SZ".to_owned(),
        _ => named(value, &FIRST),
    }
}

/// A family of sockets' addresses.
fn family(value: u64) -> String {
    match value as u32 {
        10 => "AF_INET6".to_owned(),
        16 => "AF_NETLINK".to_owned(),
        17 => "AF_PACKET".to_owned(),
        40 => "AF_VSOCK".to_owned(),
        _ => named(value, &["AF_UNSPEC", "AF_UNIX", "AF_INET"]),
    }
}

/// A socket's type, with its flags.
fn socket_type(value: u64) -> String {
    const FLAGS: Bits = &[(0o4000, "SOCK_NONBLOCK"), (0o2000000, "SOCK_CLOEXEC")];
    let kind = named(
        value & 0xf,
        &["0", "SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW", "SOCK_RDM", "SOCK_SEQPACKET"],
    );
    let flags = bits(value & !0xf & 0xffff_ffff, FLAGS, "");
    if flags.is_empty() { kind } else { format!("{kind}|{flags}") }
}

fn named(value: u64, names: &[&str]) -> String {
    let known = usize::try_from(value as u32).ok().and_then(|n| names.get(n));
    known.map_or_else(|| (value as u32).to_string(), |name| (*name).to_owned())
}

fn load<const N: usize>(at: u64, read: Reader<'_>) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    (read(at, &mut bytes) == N).then_some(bytes)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let part = bytes.get(at..).and_then(|rest| rest.first_chunk());
    part.map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    word(&[&bytes[at..at + 4], &[0; 4]].concat(), 0) as u32
}

/// `struct stat`: the kind and rights of the file, and its size or device.
fn stat(at: u64, read: Reader<'_>) -> Option<String> {
    const KINDS: [(u32, &str); 7] = [
        (0o14, "S_IFSOCK"),
        (0o12, "S_IFLNK"),
        (0o10, "S_IFREG"),
        (0o6, "S_IFBLK"),
        (0o4, "S_IFDIR"),
        (0o2, "S_IFCHR"),
        (0o1, "S_IFIFO"),
    ];
    let bytes = load::<56>(at, read)?;
    let mode = half(&bytes, 24);
    let kind = KINDS.iter().find(|(kind, _)| *kind == mode >> 12).map_or("0", |(_, name)| name);
    let mode = format!("st_mode={kind}|{:#o}", mode & 0o7777).replacen("0o", "0", 1);
    Some(match kind {
        "S_IFCHR" | "S_IFBLK" => {
            let device = word(&bytes, 40);
            let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00);
            format!("{{{mode}, st_rdev=makedev({major:#x}, {minor:#x}), ...}}")
        }
        _ => format!("{{{mode}, st_size={}, ...}}", word(&bytes, 48)),
    })
}

/// `struct timespec`.
fn timespec(at: u64, read: Reader<'_>) -> Option<String> {
    let bytes = load::<16>(at, read)?;
    Some(format!("{{tv_sec={}, tv_nsec={}}}", word(&bytes, 0) as i64, word(&bytes, 8) as i64))
}

/// `struct timeval`.
fn timeval(at: u64, read: Reader<'_>) -> Option<String> {
    let bytes = load::<16>(at, read)?;
    Some(format!("{{tv_sec={}, tv_usec={}}}", word(&bytes, 0) as i64, word(&bytes, 8) as i64))
}

/// A set of signals.
fn signals(at: u64, read: Reader<'_>) -> Option<String> {
    load::<8>(at, read).map(|bytes| signal_set(word(&bytes, 0)))
}

fn signal_set(set: u64) -> String {
    let short = |number: u64| linux_names::signal(number).trim_start_matches("SIG").to_owned();
    let list = |set: u64| {
        (1..=64).filter(|n| set >> (n - 1) & 1 == 1).map(short).collect::<Vec<_>>().join(" ")
    };
    // strace, too, shows what is not in a set of which most is.
    if set.count_ones() > 32 { format!("~[{}]", list(!set)) } else { format!("[{}]", list(set)) }
}

/// The kernel's `struct sigaction`.
fn sigaction(at: u64, read: Reader<'_>) -> Option<String> {
    const FLAGS: Bits = &[
        (1, "SA_NOCLDSTOP"),
        (2, "SA_NOCLDWAIT"),
        (4, "SA_SIGINFO"),
        (0x400_0000, "SA_RESTORER"),
        (0x800_0000, "SA_ONSTACK"),
        (0x1000_0000, "SA_RESTART"),
        (0x4000_0000, "SA_NODEFER"),
        (0x8000_0000, "SA_RESETHAND"),
    ];
    let bytes = load::<32>(at, read)?;
    let handler = match word(&bytes, 0) {
        0 => "SIG_DFL".to_owned(),
        1 => "SIG_IGN".to_owned(),
        handler => format!("{handler:#x}"),
    };
    let (flags, mask) = (bits(word(&bytes, 8), FLAGS, "0"), signal_set(word(&bytes, 24)));
    let restorer = match word(&bytes, 16) {
        0 => String::new(),
        restorer => format!(", sa_restorer={restorer:#x}"),
    };
    Some(format!("{{sa_handler={handler}, sa_mask={mask}, sa_flags={flags}{restorer}}}"))
}

/// A socket's address of so many bytes.
fn sockaddr(at: u64, len: u64, read: Reader<'_>) -> Option<String> {
    let len = len.min(128) as usize;
    let mut bytes = [0; 128];
    (len >= 2 && read(at, &mut bytes[..len]) == len).then_some(())?;
    let family = u16::from_le_bytes([bytes[0], bytes[1]]);
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    Some(match (family, len) {
        (1, _) => {
            let path = &bytes[2..len];
            let (abstract_, path) = match path.split_first() {
                Some((0, rest)) if !rest.is_empty() => ("@", rest),
                _ => ("", path.split(|byte| *byte == 0).next().unwrap_or_default()),
            };
            let path = String::from_utf8_lossy(path);
            format!("{{sa_family=AF_UNIX, sun_path={abstract_}{path:?}}}")
        }
        (2, 8..) => {
            let address = Ipv4Addr::new(bytes[4], bytes[5], bytes[6], bytes[7]);
            format!(
                "{{sa_family=AF_INET, sin_port=htons({port}), sin_addr=inet_addr(\"{address}\")}}"
            )
        }
        (10, 24..) => {
            let address: [u8; 16] = bytes[8..24].try_into().ok()?;
            let address = Ipv6Addr::from(address);
            format!(
                "{{sa_family=AF_INET6, sin6_port=htons({port}), inet_pton(AF_INET6, \"{address}\")}}"
            )
        }
        _ => format!("{{sa_family={}}}", self::family(family.into())),
    })
}

/// A list of buffers, of whose bytes at most so many count.
fn iovec(
    at: u64,
    count: u64,
    most: u64,
    read: Reader<'_>,
    shown: &dyn Fn(u64, u64) -> Option<String>,
) -> Option<String> {
    let (mut parts, mut rest) = (Vec::new(), most);
    for n in 0..count.min(SHOWN) {
        let bytes = load::<16>(at.wrapping_add(16 * n), read)?;
        let (base, len) = (word(&bytes, 0), word(&bytes, 8));
        let part = len.min(rest);
        rest -= part;
        let text = shown(base, part).unwrap_or_else(|| format!("{base:#x}"));
        parts.push(format!("{{iov_base={text}, iov_len={len}}}"));
    }
    let more = if count > SHOWN { ", ..." } else { "" };
    Some(format!("[{}{more}]", parts.join(", ")))
}

/// Two descriptors.
fn pair(at: u64, read: Reader<'_>) -> Option<String> {
    load::<8>(at, read).map(|bytes| format!("[{}, {}]", half(&bytes, 0), half(&bytes, 4)))
}

/// How a process has ended.
fn status(at: u64, read: Reader<'_>) -> Option<String> {
    let status = u32::from_le_bytes(load::<4>(at, read)?);
    let (low, high) = (status & 0x7f, status >> 8 & 0xff);
    Some(match low {
        0 => format!("[{{WIFEXITED(s) && WEXITSTATUS(s) == {high}}}]"),
        0x7f => {
            format!("[{{WIFSTOPPED(s) && WSTOPSIG(s) == {}}}]", linux_names::signal(high.into()))
        }
        signal => {
            format!("[{{WIFSIGNALED(s) && WTERMSIG(s) == {}}}]", linux_names::signal(signal.into()))
        }
    })
}

/// Files that poll waits for; with a result, also what has happened to them.
fn pollfds(at: u64, count: u64, has_ended: bool, read: Reader<'_>) -> Option<String> {
    const EVENTS: Bits = &[
        (1, "POLLIN"),
        (2, "POLLPRI"),
        (4, "POLLOUT"),
        (8, "POLLERR"),
        (0x10, "POLLHUP"),
        (0x20, "POLLNVAL"),
    ];
    let mut parts = Vec::new();
    for n in 0..count.min(SHOWN) {
        let bytes = load::<8>(at.wrapping_add(8 * n), read)?;
        let (fd, both) = (half(&bytes, 0) as i32, half(&bytes, 4));
        let events = |value: u32| bits(u64::from(value & 0xffff), EVENTS, "0");
        let happened =
            (has_ended && both >> 16 != 0).then(|| format!(", revents={}", events(both >> 16)));
        parts.push(format!("{{fd={fd}, events={}{}}}", events(both), happened.unwrap_or_default()));
    }
    Some(format!("[{}]", parts.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that has these bytes at 0x1000.
    fn at(bytes: &[u8]) -> impl Fn(u64, &mut [u8]) -> usize {
        move |gva, to| {
            let from = bytes.get(gva.wrapping_sub(0x1000) as usize..).unwrap_or_default();
            let count = from.len().min(to.len());
            to[..count].copy_from_slice(&from[..count]);
            count
        }
    }

    fn memory(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn bits_are_named() {
        assert_eq!(bits(0, PROTECTION, "PROT_NONE"), "PROT_NONE");
        assert_eq!(bits(3, PROTECTION, "PROT_NONE"), "PROT_READ|PROT_WRITE");
        assert_eq!(bits(0x22, MAPPING, "0"), "MAP_PRIVATE|MAP_ANONYMOUS");
        assert_eq!(bits(0x8000_0001, MAPPING, "0"), "MAP_SHARED|0x80000000");
        assert_eq!(clone_flags(0x120_0011), "CLONE_CHILD_CLEARTID|CLONE_CHILD_SETTID|SIGCHLD");
        assert_eq!((clone_flags(17), clone_flags(0x100)), ("SIGCHLD".into(), "CLONE_VM".into()));
        assert_eq!(socket_type(0o2000001), "SOCK_STREAM|SOCK_CLOEXEC");
        assert_eq!(
            (whence(2), fcntl(1030), family(2)),
            ("SEEK_END".into(), "F_DUPFD_CLOEXEC".into(), "AF_INET".into())
        );
    }

    #[test]
    fn structures_are_printed_as_strace_prints_them() {
        let file = memory(&[0, 0, 0, 0o100644, 0, 0, 123]);
        assert_eq!(
            stat(0x1000, &at(&file)).as_deref(),
            Some("{st_mode=S_IFREG|0644, st_size=123, ...}")
        );
        let null = memory(&[0, 0, 0, 0o020666, 0, 0x103, 0]);
        let shown = "{st_mode=S_IFCHR|0666, st_rdev=makedev(0x1, 0x3), ...}";
        assert_eq!(stat(0x1000, &at(&null)).as_deref(), Some(shown));
        let time = memory(&[1, 500]);
        assert_eq!(timespec(0x1000, &at(&time)).as_deref(), Some("{tv_sec=1, tv_nsec=500}"));
        let action = memory(&[0x1234, 0x1400_0000, 0x99, 0x1_0000]);
        let shown = "{sa_handler=0x1234, sa_mask=[CHLD], sa_flags=SA_RESTORER|SA_RESTART, sa_restorer=0x99}";
        assert_eq!(sigaction(0x1000, &at(&action)).as_deref(), Some(shown));
        assert_eq!(signal_set(!1), "~[HUP]");
        let v4 = b"\x02\0\x1f\x90\x7f\0\0\x01\0\0\0\0\0\0\0\0";
        let shown = "{sa_family=AF_INET, sin_port=htons(8080), sin_addr=inet_addr(\"127.0.0.1\")}";
        assert_eq!(sockaddr(0x1000, 16, &at(v4)).as_deref(), Some(shown));
        let shown = "{sa_family=AF_UNIX, sun_path=\"/run/x\"}";
        assert_eq!(
            sockaddr(0x1000, 110, &at(&[&b"\x01\0/run/x"[..], &[0; 110]].concat())).as_deref(),
            Some(shown)
        );
        assert_eq!(
            status(0x1000, &at(&memory(&[0x300]))).as_deref(),
            Some("[{WIFEXITED(s) && WEXITSTATUS(s) == 3}]")
        );
        let polled = memory(&[0x1_0001_0000_0003]);
        assert_eq!(
            pollfds(0x1000, 1, true, &at(&polled)).as_deref(),
            Some("[{fd=3, events=POLLIN, revents=POLLIN}]")
        );
        assert_eq!(pair(0x1000, &at(&memory(&[0x4_0000_0003]))).as_deref(), Some("[3, 4]"));
    }

    #[test]
    fn what_is_not_there_is_not_shown() {
        let nothing = at(b"");
        assert!(stat(0x1000, &nothing).is_none() && sigaction(0x1000, &nothing).is_none());
        assert!(
            sockaddr(0x1000, u64::MAX, &nothing).is_none()
                && iovec(0x1000, u64::MAX, 9, &nothing, &|_, _| None).is_none()
        );
        assert!(pollfds(0x1000, u64::MAX, false, &nothing).is_none());
    }
}
