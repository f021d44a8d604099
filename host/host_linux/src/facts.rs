//! What the host's CPU and kernel can do.
// UNSAFETY: reads a register of the CPU, and asks the host by calls that change nothing.
#![allow(unsafe_code)]

use std::{fs, sync::OnceLock};

use host::Facts;

/// Mappings the host allows a process, if it does not say.
const DEFAULT_MAP_COUNT: usize = 65_530;
/// Below this address no host need let a process map anything: the least that Linux's security modules ask
/// for.
const LOWEST: u64 = 0x1_0000;
/// x87, SSE and AVX state.
const COMMON_VECTORS: u64 = 7;

pub(crate) fn facts() -> &'static Facts {
    static FACTS: OnceLock<Facts> = OnceLock::new();
    FACTS.get_or_init(|| Facts {
        keys: keys_load() && release() >= (6, 12),
        keys_load: keys_load(),
        bases: has_fsgsbase(),
        cpuid_faults: can_fault_cpuid(),
        user_dispatch: can_dispatch(),
        more_vectors: enabled_vectors() & !COMMON_VECTORS != 0,
        max_mappings: number_in("/proc/sys/vm/max_map_count").unwrap_or(DEFAULT_MAP_COUNT),
        lowest_address: lowest_address(),
    })
}

/// The CPU has protection keys, and the host has switched them on. They are of use where the host delivers
/// signals to a stack with a key (since Linux 6.12).
fn keys_load() -> bool {
    std::arch::x86_64::__cpuid_count(7, 0).ecx >> 4 & 1 == 1
}

fn lowest_address() -> u64 {
    let said = number_in("/proc/sys/vm/mmap_min_addr").unwrap_or(0);
    said.max(LOWEST).next_multiple_of(4096)
}

fn number_in<T: std::str::FromStr>(file: &str) -> Option<T> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The host's Linux version.
fn release() -> (u32, u32) {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = text.split(['.', '-', '\n']).map_while(|part| part.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// XCR0.
fn enabled_vectors() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the host's kernel has enabled XSAVE wherever signal frames carry AVX state; XCR0 exists.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
            options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// The host's kernel has told that FSGSBASE may be used.
fn has_fsgsbase() -> bool {
    const HWCAP2_FSGSBASE: u64 = 1 << 1;
    // SAFETY: reads the auxiliary vector.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & HWCAP2_FSGSBASE != 0 }
}

/// The host knows ARCH_SET_CPUID. Asks for what is the case anyway: that CPUID does not fault.
fn can_fault_cpuid() -> bool {
    // SAFETY: changes nothing.
    unsafe { libc::syscall(libc::SYS_arch_prctl, crate::cpuid_faults::ARCH_SET_CPUID, 1) == 0 }
}

/// Probes for syscall user dispatch by disabling it, which changes nothing.
fn can_dispatch() -> bool {
    const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
    // SAFETY: changes nothing.
    unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0) == 0 }
}
