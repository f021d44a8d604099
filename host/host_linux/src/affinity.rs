//! Which CPU a process runs on.
// UNSAFETY: plain system calls on sets that live on the stack.
#![allow(unsafe_code)]

use std::mem::{size_of, zeroed};

/// The CPUs this thread may run on.
pub(crate) fn allowed() -> Vec<usize> {
    // SAFETY: all-zero is an empty set; the call fills it.
    let set = unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return Vec::new();
        }
        set
    };
    // SAFETY: the index is below the size of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

/// The CPU this thread runs on now.
pub(crate) fn current() -> usize {
    // SAFETY: no arguments.
    unsafe { libc::sched_getcpu() }.max(0) as usize
}

/// Has a process, or with zero this thread, run on one CPU only. Best effort.
pub(crate) fn pin(pid: i32, cpu: usize) {
    if cpu >= libc::CPU_SETSIZE as usize {
        return;
    }
    // SAFETY: a set on the stack, and an index inside it.
    unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(pid, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

/// Has a process run where this thread may. Best effort.
pub(crate) fn share(pid: i32) {
    // SAFETY: all-zero is an empty set; the first call fills it, the second reads it.
    unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) == 0 {
            libc::sched_setaffinity(pid, size_of::<libc::cpu_set_t>(), &raw const set);
        }
    }
}
