//! One experiment in a forked child.
#![allow(unsafe_code)]
// UNSAFETY: fork, and system calls that rustix does not wrap because they change how the calling
// process runs.

use libc::{c_int, c_long, c_ulong};

const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;
const PR_SYS_DISPATCH_ON: c_ulong = 1;
const ARCH_SET_CPUID: c_ulong = 0x1012;
const SECCOMP_GET_ACTION_AVAIL: c_ulong = 2;
const SECCOMP_RET_TRAP: u32 = 0x0003_0000;

/// Runs `experiment` in a child; true if it returned 0. The experiment must only make system
/// calls: the child of a process with threads may take no lock.
pub(super) fn succeeds(experiment: fn() -> c_long) -> bool {
    // SAFETY: the child makes system calls only and leaves by _exit, touching no lock and no
    // buffer it shares with the parent's other threads.
    let pid = unsafe { libc::fork() };
    match pid {
        0 => {
            let status = c_int::from(experiment() != 0);
            // SAFETY: always.
            unsafe { libc::_exit(status) }
        }
        1.. => exited_with_zero(pid),
        _ => false,
    }
}

fn exited_with_zero(pid: libc::pid_t) -> bool {
    let mut status = 0;
    loop {
        // SAFETY: `status` is a valid place for the result.
        let got = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        if got == pid {
            return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
        }
        if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return false;
        }
    }
}

pub(super) fn enable_syscall_user_dispatch() -> c_long {
    static SELECTOR: u8 = 0; // SYSCALL_DISPATCH_FILTER_ALLOW: nothing is diverted
    // SAFETY: the selector lives as long as the process and says that nothing is diverted.
    let result = unsafe {
        libc::prctl(
            PR_SET_SYSCALL_USER_DISPATCH,
            PR_SYS_DISPATCH_ON,
            0 as c_ulong,
            0 as c_ulong,
            &raw const SELECTOR,
        )
    };
    c_long::from(result)
}

pub(super) fn allocate_protection_key() -> c_long {
    // SAFETY: a new key guards no memory yet.
    let key = unsafe { libc::syscall(libc::SYS_pkey_alloc, 0 as c_ulong, 0 as c_ulong) };
    c_long::from(key < 0)
}

pub(super) fn enable_cpuid_faulting() -> c_long {
    // SAFETY: the child executes no CPUID afterwards.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_CPUID, 0 as c_ulong) }
}

pub(super) fn unshare_user_namespace() -> c_long {
    // SAFETY: the child owns no resources that depend on its namespace.
    c_long::from(unsafe { libc::unshare(libc::CLONE_NEWUSER) })
}

/// Asks only; installs nothing.
pub(super) fn seccomp_trap_available() -> bool {
    let action = SECCOMP_RET_TRAP;
    // SAFETY: the kernel reads the four bytes of `action`.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0 as c_ulong, &raw const action)
    };
    result == 0
}

/// The host knows filters whose calls another process hears of and which kicks do not take back (Linux 5.19). Flags that it does
/// not know are EINVAL, before the filter is looked at; there is none here, which is EFAULT.
pub(super) fn seccomp_notification_available() -> bool {
    let flags =
        libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    let filter: *const libc::sock_fprog = std::ptr::null();
    // SAFETY: without a filter the call changes nothing.
    unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, filter) };
    std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT)
}
