//! Instructions of the host CPU that have no safe wrapper elsewhere.
#![allow(unsafe_code)]
// UNSAFETY: the compiler's intrinsics for RDTSC and CPUID are unsafe functions.

pub use core::arch::x86_64::CpuidResult;

/// The host's time-stamp counter, in its own ticks, not before what precedes it: a guest's CPU that has seen what another
/// one wrote reads no time before that.
#[inline]
#[allow(unused_unsafe)] // safe functions in some compiler versions
pub fn rdtsc() -> u64 {
    // SAFETY: LFENCE and RDTSC exist on every x86-64 CPU, and Linux leaves CR4.TSD clear unless a process
    // asked for PR_TSC_SIGSEGV; we do not.
    unsafe {
        core::arch::x86_64::_mm_lfence();
        core::arch::x86_64::_rdtsc()
    }
}

/// The host's CPUID, as this process sees it.
#[allow(unused_unsafe)] // a safe function in some compiler versions
pub fn cpuid(leaf: u32, subleaf: u32) -> CpuidResult {
    // SAFETY: CPUID exists on every x86-64 CPU.
    unsafe { core::arch::x86_64::__cpuid_count(leaf, subleaf) }
}

/// Whether the CPU has random numbers of its own (RDRAND).
pub fn has_random_numbers() -> bool {
    const RDRAND: u32 = 1 << 30;
    cpuid(1, 0).ecx & RDRAND != 0
}
