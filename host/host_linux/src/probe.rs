//! What this host offers, found out by trying.
//!
//! Version numbers and flags lie inside containers, so every mechanism is tried the way an engine
//! would use it. What cannot be undone in a process is tried in a child that then ends.

mod child;

use std::path::Path;

use rustix::system::uname;

use crate::cpu;

/// Kernel release, as `uname -r`.
pub fn kernel_release() -> String {
    uname().release().to_string_lossy().into_owned()
}

/// System calls outside a code range can be diverted to a signal handler (Linux 5.11).
pub fn syscall_user_dispatch() -> bool {
    child::succeeds(child::enable_syscall_user_dispatch)
}

/// Seccomp filters can divert system calls to a signal handler.
pub fn seccomp_trap() -> bool {
    child::seccomp_trap_available()
}

/// Seccomp filters can have another process hear of a call, for as long as that waits (Linux 5.19).
pub fn seccomp_notification() -> bool {
    child::seccomp_notification_available()
}

/// Protection keys can be allocated: CPU and kernel have them, and one is free.
pub fn protection_keys() -> bool {
    child::succeeds(child::allocate_protection_key)
}

/// A guest's programs can be closed off from its kernel and run directly.
pub fn can_isolate() -> bool {
    protection_keys() || seccomp_notification()
}

/// User code may read and write FS and GS bases (Linux 5.9 and a CPU from 2012 on).
pub fn fsgsbase() -> bool {
    const HWCAP2_FSGSBASE: usize = 1 << 1;
    let (_, hwcap2) = rustix::param::linux_hwcap();
    hwcap2 & HWCAP2_FSGSBASE != 0
}

/// CPUID can be made to fault.
pub fn cpuid_faulting() -> bool {
    child::succeeds(child::enable_cpuid_faulting)
}

/// An unprivileged process can make a user namespace.
pub fn user_namespaces() -> bool {
    child::succeeds(child::unshare_user_namespace)
}

/// Anonymous memory files can be made.
pub fn memfd() -> bool {
    rustix::fs::memfd_create("ring3-probe", rustix::fs::MemfdFlags::CLOEXEC).is_ok()
}

/// Bytes of memory the process may lock; `None` for no limit.
pub fn memory_lock_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// Most mappings a process can have.
pub fn max_map_count() -> Option<u64> {
    number_in("/proc/sys/vm/max_map_count")
}

/// Lowest address a process can map.
pub fn mmap_min_addr() -> Option<u64> {
    number_in("/proc/sys/vm/mmap_min_addr")
}

/// Bytes of memory the host has.
pub fn memory_total() -> Option<u64> {
    meminfo("MemTotal:")
}

/// Bytes of memory the host could give without swapping.
pub fn memory_available() -> Option<u64> {
    meminfo("MemAvailable:")
}

/// The host is itself a virtual machine.
pub fn under_hypervisor() -> bool {
    cpu::cpuid(1, 0).ecx >> 31 == 1
}

/// The host CPU's name.
pub fn cpu_name() -> String {
    let leaves = [0x8000_0002, 0x8000_0003, 0x8000_0004].map(|leaf| cpu::cpuid(leaf, 0));
    let words = leaves.iter().flat_map(|r| [r.eax, r.ebx, r.ecx, r.edx]);
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

/// Instruction-set extensions of the host that matter to guests, with whether it has each.
pub fn instruction_sets() -> Vec<(&'static str, bool)> {
    macro_rules! detected {
        ($($name:tt),*) => { vec![$(($name, std::is_x86_feature_detected!($name))),*] };
    }
    detected!(
        "sse4.2",
        "popcnt",
        "aes",
        "pclmulqdq",
        "sha",
        "avx",
        "avx2",
        "fma",
        "bmi1",
        "bmi2",
        "adx",
        "rdrand",
        "rdseed",
        "avx512f"
    )
}

fn number_in(path: impl AsRef<Path>) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn meminfo(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_agree_with_the_kernel() {
        assert!(!kernel_release().is_empty());
        assert!(memory_total() >= memory_available());
        assert!(memory_total().is_some_and(|bytes| bytes > 1 << 26));
        assert!(max_map_count().is_some_and(|count| count >= 1024));
    }

    #[test]
    fn children_end_and_are_waited_for() {
        assert!(child::succeeds(|| 0));
        assert!(!child::succeeds(|| 1));
        // Whatever the answers, the probes come back and this process is as before.
        let answers = [syscall_user_dispatch(), cpuid_faulting(), user_namespaces()];
        assert_eq!(answers, [syscall_user_dispatch(), cpuid_faulting(), user_namespaces()]);
        assert_ne!(cpu::cpuid(0, 0).eax, 0, "CPUID still works here");
    }
}
