//! A local APIC's registers: their numbers, and their bits (SDM chapter 10).

/// APIC_BASE: this is the bootstrap processor.
pub(crate) const BASE_BSP: u64 = 1 << 8;
/// APIC_BASE: x2APIC mode.
pub(crate) const BASE_X2APIC: u64 = 1 << 10;
/// APIC_BASE: the local APIC is enabled.
pub(crate) const BASE_ENABLED: u64 = 1 << 11;
/// APIC_BASE: where the registers are, a GPA.
pub(crate) const BASE_ADDRESS: u64 = x86::paging::ADDRESS;
/// Where the registers are after reset, a GPA.
pub(crate) const DEFAULT_BASE: u64 = 0xfee0_0000;

/// Version 0x14 (integrated), seven LVT entries.
pub(super) const VERSION: u32 = 0x0006_0014;
pub(super) const SVR_ENABLED: u32 = 1 << 8;
pub(super) const LVT_MASKED: u32 = 1 << 16;
pub(super) const LVT_PENDING: u32 = 1 << 12;
pub(super) const LVT_REMOTE_IRR: u32 = 1 << 14;
/// ESR: an interrupt was sent with a vector below 16.
pub(super) const ESR_SEND_VECTOR: u32 = 1 << 5;
/// ESR: an interrupt arrived with a vector below 16.
pub(super) const ESR_RECEIVE_VECTOR: u32 = 1 << 6;
/// ESR: a register that does not exist was accessed.
pub(super) const ESR_REGISTER: u32 = 1 << 7;

/// Register numbers: MMIO offset / 16, MSR - 0x800.
pub(crate) mod register {
    pub(crate) const ID: u32 = 0x02;
    pub(crate) const VERSION: u32 = 0x03;
    pub(crate) const TPR: u32 = 0x08;
    pub(crate) const APR: u32 = 0x09;
    pub(crate) const PPR: u32 = 0x0a;
    pub(crate) const EOI: u32 = 0x0b;
    pub(crate) const RRD: u32 = 0x0c;
    pub(crate) const LDR: u32 = 0x0d;
    pub(crate) const DFR: u32 = 0x0e;
    pub(crate) const SVR: u32 = 0x0f;
    pub(crate) const ISR: u32 = 0x10;
    pub(crate) const TMR: u32 = 0x18;
    pub(crate) const IRR: u32 = 0x20;
    pub(crate) const IRR_LAST: u32 = 0x27;
    pub(crate) const ESR: u32 = 0x28;
    pub(crate) const LVT_CMCI: u32 = 0x2f;
    pub(crate) const ICR_LOW: u32 = 0x30;
    pub(crate) const ICR_HIGH: u32 = 0x31;
    pub(crate) const LVT_TIMER: u32 = 0x32;
    pub(crate) const LVT_LINT0: u32 = 0x35;
    pub(crate) const LVT_LINT1: u32 = 0x36;
    pub(crate) const LVT_ERROR: u32 = 0x37;
    pub(crate) const TIMER_INITIAL: u32 = 0x38;
    pub(crate) const TIMER_CURRENT: u32 = 0x39;
    pub(crate) const TIMER_DIVIDE: u32 = 0x3e;
    pub(crate) const SELF_IPI: u32 = 0x3f;
}

/// Bits software may set in the LVT entries: timer, thermal, performance counter, LINT0, LINT1, error, and corrected
/// machine check.
pub(super) const LVT_WRITABLE: [u32; 7] =
    [0x7_00ff, 0x1_07ff, 0x1_07ff, 0x1_a7ff, 0x1_a7ff, 0x1_00ff, 0x1_07ff];
/// Bits software may set in the low half of the ICR.
pub(super) const ICR_WRITABLE: u64 = 0x000c_cfff;
pub(super) const ICR_PENDING: u64 = 1 << 12;

/// Bits an x2APIC MSR takes; `None` if it cannot be written.
pub(super) fn msr_writable(register: u32) -> Option<u64> {
    Some(match register {
        register::TPR | register::SELF_IPI => 0xff,
        register::EOI | register::ESR => 0,
        register::SVR => 0x3ff,
        // The delivery status bits are read-only, and writing back what was read is no error.
        register::ICR_LOW => ICR_WRITABLE | ICR_PENDING | 0xffff_ffff << 32,
        register::LVT_TIMER..=register::LVT_ERROR | register::LVT_CMCI => {
            u64::from(LVT_WRITABLE[lvt_index(register)] | lvt_status(register))
        }
        register::TIMER_INITIAL => 0xffff_ffff,
        register::TIMER_DIVIDE => 0xb,
        _ => return None,
    })
}

/// The read-only bits of a register of the local vector table: delivery status, and remote IRR for LINT0 and LINT1 (SDM 10.5.1).
/// In x2APIC mode a write of these bits is no fault: Linux writes both when it powers off.
fn lvt_status(register: u32) -> u32 {
    let remote = matches!(register, register::LVT_LINT0 | register::LVT_LINT1);
    LVT_PENDING | if remote { LVT_REMOTE_IRR } else { 0 }
}

/// Where an entry stands in the table: in the order of the registers, but for the one that came last.
pub(super) fn lvt_index(register: u32) -> usize {
    match register {
        register::LVT_CMCI => LVT_WRITABLE.len() - 1,
        _ => (register - register::LVT_TIMER) as usize,
    }
}
