//! What the host's CPU and kernel can do.
// UNSAFETY: reads a register of the CPU, and asks the host by calls that change nothing.
#![allow(unsafe_code)]

/// XCR0.
pub(crate) fn enabled_vectors() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the host's kernel has enabled XSAVE wherever signal frames carry AVX state; XCR0 exists.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
            options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// The host's kernel has told that FSGSBASE may be used.
pub(crate) fn has_fsgsbase() -> bool {
    const HWCAP2_FSGSBASE: u64 = 1 << 1;
    // SAFETY: reads the auxiliary vector.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & HWCAP2_FSGSBASE != 0 }
}

/// The host knows ARCH_SET_CPUID. Asks for what is the case anyway: that CPUID does not fault.
pub(crate) fn can_fault_cpuid() -> bool {
    const ARCH_SET_CPUID: i32 = 0x1012;
    // SAFETY: changes nothing.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_CPUID, 1) == 0 }
}

/// The host knows syscall user dispatch. Asks for what is the case anyway: that there is none.
pub(crate) fn can_dispatch() -> bool {
    // SAFETY: changes nothing.
    unsafe { libc::prctl(frame::SYSCALL_USER_DISPATCH as i32, 0, 0, 0, 0) == 0 }
}
