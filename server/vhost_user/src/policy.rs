//! What each kind of server may ask of the host once it has opened what it serves: the policy, and nothing else.
//!
//! A server has the calls of [`EVERY`], and those of its kind. Anything else fails with EPERM, so that a library's optional question
//! harms nobody. Where an argument must be this or that, a list below says so; the other arguments are free.
//! `docs/isolation.md` says what this leaves to a server that was taken over.

use std::iter;

use seccompiler::{
    BackendError, SeccompCmpArgLen::Dword, SeccompCmpOp, SeccompCondition, SeccompRule,
};

/// What a server serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// Files that are open.
    Disk,
    /// A network: connections that it makes for the guest, and accepts at ports it listens at already.
    Network,
    /// A cable: descriptors that are open, and connections at a socket it listens at already.
    Cable,
    /// A folder.
    Folder {
        /// The guest cannot change it.
        readonly: bool,
        /// The guest may make programs that run with the rights of their owners.
        privileged: bool,
    },
}

/// Of every server: descriptors it has, memory, waiting, and the end.
const EVERY: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_fcntl, // see below
    libc::SYS_close,
    libc::SYS_dup,
    // The monitor.
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_poll,
    libc::SYS_ppoll,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // Threads, the beginning of those that were just made included; time; the end.
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_sched_getaffinity,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Files by descriptor.
const FILES: &[i64] = &[
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_flock,
];

/// Sockets there are: who is at the other end, and how it is going. There is no bind and no listen.
const SOCKETS: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt, // see below
    libc::SYS_getsockname,
    libc::SYS_getpeername,
];

/// New connections, and waiting for many.
const CONNECTIONS: &[i64] = &[
    libc::SYS_socket, // see below
    libc::SYS_connect,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
];

/// Names, to look at. What they reach is settled by where the server is (`sandbox`).
const NAMES: &[i64] = &[
    libc::SYS_openat, // see below
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_getxattr,
    libc::SYS_listxattr,
    // As whom: root's server becomes the user who asks, within the capabilities it has kept.
    libc::SYS_getuid,
    libc::SYS_getgid,
    libc::SYS_geteuid,
    libc::SYS_getegid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_capget,
    libc::SYS_capset,
];

/// Names, to change.
const CHANGES: &[i64] = &[
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_removexattr,
];

/// To be told of changes in folders.
const NOTICES: &[i64] = &[libc::SYS_inotify_add_watch, libc::SYS_inotify_rm_watch];

/// What an argument must be: its number, how it is compared, and with what.
type Condition = (u8, SeccompCmpOp, u64);
/// A call, and what must hold of its arguments. With several for one call, one of them must.
type Rule = (i64, &'static [Condition]);

const fn without(bits: i32) -> SeccompCmpOp {
    SeccompCmpOp::MaskedEq(bits.cast_unsigned() as u64)
}

/// Of every server: memory that is not executable.
const MEMORY: &[Rule] = &[
    (libc::SYS_mmap, &[(2, without(libc::PROT_EXEC), 0)]),
    (libc::SYS_mprotect, &[(2, without(libc::PROT_EXEC), 0)]),
];

const fn command(number: i32) -> Condition {
    (1, SeccompCmpOp::Eq, number.cast_unsigned() as u64)
}

/// Of every server: copies of descriptors, and what their flags are. Nobody's signals: an owner, a signal number, leases and notices
/// of changes send those.
const DESCRIPTORS: &[Rule] = &[
    (libc::SYS_fcntl, &[command(libc::F_DUPFD_CLOEXEC)]),
    (libc::SYS_fcntl, &[command(libc::F_GETFD)]),
    (libc::SYS_fcntl, &[command(libc::F_SETFD)]),
    (libc::SYS_fcntl, &[command(libc::F_GETFL)]),
    (libc::SYS_fcntl, &[command(libc::F_GET_SEALS)]),
    // Whoever waits for an event that a server shares with it must not be made to wait for ever.
    (libc::SYS_fcntl, &[command(libc::F_SETFL), (2, ONLY_SILENT, SILENT)]),
];

/// Never waits, and sends no signals.
const SILENT: u64 = libc::O_NONBLOCK.cast_unsigned() as u64;
const ONLY_SILENT: SeccompCmpOp =
    SeccompCmpOp::MaskedEq((libc::O_NONBLOCK | libc::O_ASYNC).cast_unsigned() as u64);

/// What the guest has opened a file for changes with each request: whether it appends, for one. Still no signals.
const FILE_RULES: &[Rule] =
    &[(libc::SYS_fcntl, &[command(libc::F_SETFL), (2, without(libc::O_ASYNC), 0)])];

const IPV4: Condition = (0, SeccompCmpOp::Eq, libc::AF_INET as u64);
const IPV6: Condition = (0, SeccompCmpOp::Eq, libc::AF_INET6 as u64);
/// A socket's type is beside flags.
const TYPE: SeccompCmpOp = SeccompCmpOp::MaskedEq(0xf);
const STREAM: Condition = (1, TYPE, libc::SOCK_STREAM as u64);
const DATAGRAM: Condition = (1, TYPE, libc::SOCK_DGRAM as u64);

/// Internet sockets, none of them raw, and of their options TCP's.
const CONNECTION_RULES: &[Rule] = &[
    (libc::SYS_socket, &[IPV4, STREAM]),
    (libc::SYS_socket, &[IPV4, DATAGRAM]),
    (libc::SYS_socket, &[IPV6, STREAM]),
    (libc::SYS_socket, &[IPV6, DATAGRAM]),
    (libc::SYS_setsockopt, &[(1, SeccompCmpOp::Eq, libc::IPPROTO_TCP as u64)]),
];

/// How long the other end of a cable may leave a frame unread.
const CABLE_RULES: &[Rule] = &[(
    libc::SYS_setsockopt,
    &[
        (1, SeccompCmpOp::Eq, libc::SOL_SOCKET as u64),
        (2, SeccompCmpOp::Eq, libc::SO_SNDTIMEO as u64),
    ],
)];

const CHANGING: i32 =
    libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND;

/// A folder that is not to change is not opened for that.
const READONLY_RULES: &[Rule] = &[(libc::SYS_openat, &[(2, without(CHANGING), 0)])];

/// Nothing becomes a program that runs with the rights of its owner. (The argument says nothing where no file is made.)
const PLAIN_RULES: &[Rule] = &[
    (libc::SYS_openat, &[(3, without(SETUID), 0)]),
    (libc::SYS_mknodat, &[(2, without(SETUID), 0)]),
    (libc::SYS_fchmod, &[(1, without(SETUID), 0)]),
    (libc::SYS_fchmodat, &[(2, without(SETUID), 0)]),
];
const SETUID: i32 = libc::S_ISUID.cast_signed();

/// A server's calls: each with the rules of which one must hold, or with none.
pub(crate) fn of(served: Served) -> Result<Vec<(i64, Vec<SeccompRule>)>, BackendError> {
    let (calls, rules): (&[&[i64]], &[&[Rule]]) = match served {
        Served::Disk => (&[FILES], &[]),
        Served::Cable => (&[SOCKETS], &[CABLE_RULES]),
        Served::Network => (&[SOCKETS, CONNECTIONS], &[CONNECTION_RULES]),
        Served::Folder { readonly: true, .. } => (&[FILES, NAMES], &[FILE_RULES, READONLY_RULES]),
        Served::Folder { privileged: true, .. } => {
            (&[FILES, NAMES, CHANGES, NOTICES], &[FILE_RULES])
        }
        Served::Folder { .. } => (&[FILES, NAMES, CHANGES, NOTICES], &[FILE_RULES, PLAIN_RULES]),
    };
    let calls = iter::once(EVERY).chain(calls.iter().copied()).flatten().copied();
    let rules: Vec<_> =
        [MEMORY, DESCRIPTORS].into_iter().chain(rules.iter().copied()).flatten().collect();
    let calls = calls.chain(MEMORY.iter().map(|(call, _)| *call));
    calls.map(|call| Ok((call, rules_of(call, &rules)?))).collect()
}

fn rules_of(call: i64, rules: &[&Rule]) -> Result<Vec<SeccompRule>, BackendError> {
    let own = rules.iter().filter(|rule| rule.0 == call);
    let condition = |(index, operator, value): &Condition| {
        SeccompCondition::new(*index, Dword, operator.clone(), *value)
    };
    own.map(|rule| SeccompRule::new(rule.1.iter().map(condition).collect::<Result<_, _>>()?))
        .collect()
}
