//! What the monitor may ask of the host once its machine is ready: the policy, and nothing else.
//!
//! It has the descriptors it has opened, memory, threads, its children, and the time. Anything else fails with EPERM. Where an
//! argument must be this or that, a list below says so; the other arguments are free. `docs/isolation.md` says what this leaves to
//! a monitor that was taken over. What it needs beyond is done for it by the process that starts others.

use seccompiler::{
    BackendError,
    SeccompCmpArgLen::{Dword, Qword},
    SeccompCmpOp, SeccompCondition, SeccompRule,
};

/// Calls that are allowed with any arguments.
const ALWAYS: &[i64] = &[
    // Descriptors it has.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_statx, // by descriptor; a name says no more than whether it is there
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_memfd_create,
    // Sockets it has, and clients at those it listens at. There is no connect, bind or listen.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_socketpair,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_membarrier,
    // Threads, and where they run.
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_getcpu,
    libc::SYS_sched_yield,
    libc::SYS_futex,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getpgrp,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    // Children: their ends, and signals to those it has a descriptor of, which it cannot make.
    libc::SYS_waitid,
    libc::SYS_wait4,
    libc::SYS_pidfd_send_signal,
    // Signals of its own.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    // Time, chance, the end.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// What an argument must be: its number, how it is compared, and with what.
type Condition = (u8, SeccompCmpOp, u64);
/// A call, and what must hold of its arguments. With several for one call, one of them must.
type Rule = (i64, &'static [Condition]);

const fn bits(bits: i32) -> u64 {
    bits.cast_unsigned() as u64
}

const fn is(argument: u8, value: i32) -> Condition {
    (argument, SeccompCmpOp::Eq, bits(value))
}

const fn without(argument: u8, flags: i32) -> Condition {
    (argument, SeccompCmpOp::MaskedEq(bits(flags)), 0)
}

const fn with(argument: u8, flags: i32) -> Condition {
    (argument, SeccompCmpOp::MaskedEq(bits(flags)), bits(flags))
}

const IOCTL: i64 = libc::SYS_ioctl;
const FCNTL: i64 = libc::SYS_fcntl;
const PRCTL: i64 = libc::SYS_prctl;
const SETSOCKOPT: i64 = libc::SYS_setsockopt;

const RULES: &[Rule] = &[
    // Memory is not made executable. What executes was mapped before.
    (libc::SYS_mmap, &[without(2, libc::PROT_EXEC)]),
    (libc::SYS_mprotect, &[without(2, libc::PROT_EXEC)]),
    // A thread is no process.
    (libc::SYS_clone, &[with(0, libc::CLONE_THREAD)]),
    // Descriptors: copies, flags, seals. Nobody's signals: an owner, a signal's number, leases and notices of changes send those.
    (FCNTL, &[is(1, libc::F_DUPFD_CLOEXEC)]),
    (FCNTL, &[is(1, libc::F_GETFD)]),
    (FCNTL, &[is(1, libc::F_SETFD)]),
    (FCNTL, &[is(1, libc::F_GETFL)]),
    (FCNTL, &[is(1, libc::F_SETFL), without(2, libc::O_ASYNC)]),
    (FCNTL, &[is(1, libc::F_ADD_SEALS)]),
    (FCNTL, &[is(1, libc::F_GET_SEALS)]),
    // Turns with other machines.
    (FCNTL, &[is(1, libc::F_OFD_SETLK)]),
    (FCNTL, &[is(1, libc::F_OFD_SETLKW)]),
    // The terminal: its settings, its size, who has it. Nothing is typed into it (TIOCSTI).
    (IOCTL, &[is(1, libc::TCGETS as i32)]),
    (IOCTL, &[is(1, libc::TCGETS2 as i32)]),
    (IOCTL, &[is(1, libc::TCSETS as i32)]),
    (IOCTL, &[is(1, libc::TCSETS2 as i32)]),
    (IOCTL, &[is(1, libc::TIOCGWINSZ as i32)]),
    (IOCTL, &[is(1, libc::TIOCGPGRP as i32)]),
    (IOCTL, &[is(1, libc::FIONBIO as i32)]),
    (IOCTL, &[is(1, libc::FIONREAD as i32)]),
    // Its limits, to look at: the C library asks for the stack's.
    (libc::SYS_prlimit64, &[is(0, 0), (2, SeccompCmpOp::Eq, 0)]),
    // More filters, which forbid more.
    (libc::SYS_seccomp, &[is(0, libc::SECCOMP_SET_MODE_FILTER as i32)]),
    (PRCTL, &[is(0, libc::PR_SET_NO_NEW_PRIVS)]),
    // A thread's name, and whether CPUID faults in it.
    (PRCTL, &[is(0, libc::PR_SET_NAME)]),
    (libc::SYS_arch_prctl, &[is(0, ARCH_SET_CPUID)]),
    // How long the other end of a socket may take.
    (SETSOCKOPT, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_SNDTIMEO)]),
    (SETSOCKOPT, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_RCVTIMEO)]),
];

const ARCH_SET_CPUID: i32 = 0x1012;

/// The calls: each with the rules of which one must hold, or with none. `process` is this one's number: it may signal its own threads.
pub(crate) fn calls(process: u32) -> Result<Vec<(i64, Vec<SeccompRule>)>, BackendError> {
    let own = SeccompCondition::new(0, Dword, SeccompCmpOp::Eq, process.into())?;
    let mut calls = vec![(libc::SYS_tgkill, vec![SeccompRule::new(vec![own])?])];
    calls.extend(ALWAYS.iter().map(|call| (*call, Vec::new())));
    let mut numbers: Vec<_> = RULES.iter().map(|rule| rule.0).collect();
    numbers.dedup();
    for call in numbers {
        calls.push((call, rules_of(call)?));
    }
    Ok(calls)
}

fn rules_of(call: i64) -> Result<Vec<SeccompRule>, BackendError> {
    // Flags and addresses have 64 bits.
    let wide = [libc::SYS_clone, libc::SYS_prlimit64];
    let length = |call| if wide.contains(&call) { Qword } else { Dword };
    let condition = |(index, operator, value): &Condition| {
        SeccompCondition::new(*index, length(call), operator.clone(), *value)
    };
    let own = RULES.iter().filter(|rule| rule.0 == call);
    own.map(|rule| SeccompRule::new(rule.1.iter().map(condition).collect::<Result<_, _>>()?))
        .collect()
}
