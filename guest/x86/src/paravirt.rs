//! What KVM offers guests whose CPUs do not all run at the same time (Linux, `Documentation/virt/kvm/x86/`: cpuid.rst,
//! msr.rst, hypercalls.rst), as far as ring3 offers it: feature bits, MSRs, what lies in memory, and hypercalls.

/// Feature bits, beside those of [`crate::kvm::feature`]. Bits 0 to 31 are EAX of CPUID's leaf, and bits 32 to 63 are EDX, which has hints.
pub mod feature {
    /// A vCPU is told how long it has waited for a CPU of the host, and others whether it waits now.
    pub const STEAL_TIME: u64 = 1 << 5;
    /// A vCPU is told in memory that it need not write the end of the interrupt it serves to its local APIC.
    pub const EOI: u64 = 1 << 6;
    /// A vCPU that halts can be woken by another one without an interrupt: locks are waited for so.
    pub const UNHALT: u64 = 1 << 7;
    /// A vCPU that waits for a CPU of the host can be left a note that it is to flush its TLB.
    pub const TLB_FLUSH: u64 = 1 << 9;
    /// One hypercall interrupts many vCPUs.
    pub const SEND_IPI: u64 = 1 << 11;
    /// A vCPU can let another one have its CPU.
    pub const SCHED_YIELD: u64 = 1 << 13;
    /// A hint (`KVM_HINTS_REALTIME`): the host keeps no vCPU waiting for a CPU. An idle CPU of Linux then looks for work for a while before it
    /// halts (`Documentation/virt/guest-halt-polling.rst`). As long as it looks, another CPU can wake a program there without an interrupt, which
    /// would stop both vCPUs.
    pub const DEDICATED: u64 = 1 << 32;
}

/// Each feature by the name that users have for it.
pub const NAMES: [(&str, u64); 7] = [
    ("steal-time", feature::STEAL_TIME),
    ("eoi", feature::EOI),
    ("unhalt", feature::UNHALT),
    ("tlb-flush", feature::TLB_FLUSH),
    ("send-ipi", feature::SEND_IPI),
    ("yield", feature::SCHED_YIELD),
    ("dedicated", feature::DEDICATED),
];

/// All features, and no hints.
pub const ALL: u64 = {
    let mut all = 0;
    let mut at = 0;
    while at < NAMES.len() {
        all |= NAMES[at].1;
        at += 1;
    }
    all & u32::MAX as u64
};

/// MSR `KVM_STEAL_TIME`: where the vCPU's record is kept, and in bit 0 whether it is.
pub const STEAL_TIME: u32 = 0x4b56_4d03;
/// Bits of [`STEAL_TIME`] that must be zero.
pub const STEAL_TIME_RESERVED: u64 = 0x3e;
/// Bit 0 of [`STEAL_TIME`], as of all of KVM's registers that hold a place.
pub use crate::kvm::ENABLED;

/// MSR `KVM_PV_EOI_EN`: where the vCPU's word is, and in bit 0 whether it has one. Bit 0 of the word is set while the end of the interrupt
/// that the vCPU serves is told by clearing it.
pub const EOI: u32 = 0x4b56_4d04;
/// Bits of [`EOI`] that must be zero.
pub const EOI_RESERVED: u64 = 2;

/// The record: where in it things are.
pub mod record {
    /// Nanoseconds the vCPU has waited for a CPU of the host: eight bytes.
    pub const STEAL: u64 = 0;
    /// Odd while the time before it is being changed: four bytes.
    pub const VERSION: u64 = 8;
    /// A byte: [`PREEMPTED`] and [`FLUSH`].
    pub const STANDING: u64 = 16;
    /// The vCPU waits for a CPU of the host.
    pub const PREEMPTED: u8 = 1;
    /// It is to flush its TLB before it goes on.
    pub const FLUSH: u8 = 2;
}

/// Hypercalls.
pub mod call {
    /// Wakes a vCPU, whose APIC identifier is the second argument.
    pub const KICK_CPU: u64 = 5;
    /// Writes the host's time of day, and the counter at that moment, to the place in the first argument. The second is which of the
    /// host's clocks is asked for: [`crate::kvm::PAIRED_WALL_CLOCK`].
    pub const CLOCK_PAIRING: u64 = 9;
    /// Interrupts several vCPUs. The first two arguments are 128 bits, one for each vCPU. The third is the APIC identifier of the
    /// first bit's vCPU, and the fourth what would be written to the interrupt command register.
    pub const SEND_IPI: u64 = 10;
    /// Gives the caller's host CPU to the vCPU whose APIC identifier is the first argument.
    pub const SCHED_YIELD: u64 = 11;
}

/// Answers of hypercalls.
pub mod answer {
    /// Done.
    pub const DONE: u64 = 0;
    /// `-KVM_EPERM`: user code may not.
    pub const NOT_PERMITTED: u64 = -1_i64 as u64;
    /// `-KVM_EFAULT`: the place is not in memory.
    pub const NO_MEMORY: u64 = -14_i64 as u64;
    /// `-KVM_EINVAL`.
    pub const INVALID: u64 = -22_i64 as u64;
    /// `-KVM_EOPNOTSUPP`.
    pub const NOT_SUPPORTED: u64 = -95_i64 as u64;
    /// `-KVM_ENOSYS`: there is no such call.
    pub const UNKNOWN: u64 = -1000_i64 as u64;
}
