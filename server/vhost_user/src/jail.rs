//! What a server may ask of the host once it has opened what it serves.
//!
//! Its files are open, its memory comes by the protocol; what is left is reading and writing them, memory that is not executable, and
//! waiting. There is no name of a file, no process, no socket that it could make in this. Whatever else is asked for fails
//! with EPERM, so that a library's optional question harms nobody.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// Calls with any arguments. Those that take a name do not take one here: see [`rules`].
const CALLS: [i64; 45] = [
    // Files that are open.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_flock,
    libc::SYS_fcntl,
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
    // Threads, time, the end.
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

const EPERM: u32 = libc::EPERM.cast_unsigned();

/// Shuts this process in, for good.
///
/// # Errors
/// The host has no such filters; it says why.
pub fn enter() -> Result<(), String> {
    let filter = filter().map_err(|error| error.to_string())?;
    seccompiler::apply_filter(&filter).map_err(|error| error.to_string())
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let (refuse, allow) = (SeccompAction::Errno(EPERM), SeccompAction::Allow);
    SeccompFilter::new(rules()?, refuse, allow, TargetArch::x86_64)?.try_into()
}

fn rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let mut rules: BTreeMap<_, _> = CALLS.into_iter().map(|call| (call, Vec::new())).collect();
    // Memory, as long as it cannot be executed.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![without(2, libc::PROT_EXEC)?]);
    }
    Ok(rules)
}

/// An argument without these bits.
fn without(argument: u8, bits: i32) -> Result<SeccompRule, seccompiler::BackendError> {
    let bits = u64::from(bits.cast_unsigned());
    let masked = SeccompCmpOp::MaskedEq(bits);
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, masked, 0)?])
}
