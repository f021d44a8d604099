//! Control register bits (SDM 2.5) and EFER.

/// CR0 bits.
pub mod cr0 {
    /// Protection enable.
    pub const PE: u64 = 1 << 0;
    /// Monitor coprocessor.
    pub const MP: u64 = 1 << 1;
    /// Emulation: no x87.
    pub const EM: u64 = 1 << 2;
    /// Task switched.
    pub const TS: u64 = 1 << 3;
    /// Extension type, always one.
    pub const ET: u64 = 1 << 4;
    /// Numeric error: #MF instead of an external interrupt.
    pub const NE: u64 = 1 << 5;
    /// Write protect: supervisor honours read-only pages.
    pub const WP: u64 = 1 << 16;
    /// Alignment mask.
    pub const AM: u64 = 1 << 18;
    /// Not write-through.
    pub const NW: u64 = 1 << 29;
    /// Cache disable.
    pub const CD: u64 = 1 << 30;
    /// Paging.
    pub const PG: u64 = 1 << 31;
    /// Every defined bit.
    pub const ALL: u64 = PE | MP | EM | TS | ET | NE | WP | AM | NW | CD | PG;
}

/// CR4 bits.
pub mod cr4 {
    /// Virtual-8086 extensions.
    pub const VME: u64 = 1 << 0;
    /// Protected-mode virtual interrupts.
    pub const PVI: u64 = 1 << 1;
    /// Time-stamp disable for user mode.
    pub const TSD: u64 = 1 << 2;
    /// Debugging extensions: DR4/DR5 are #UD.
    pub const DE: u64 = 1 << 3;
    /// Page-size extensions.
    pub const PSE: u64 = 1 << 4;
    /// Physical-address extension.
    pub const PAE: u64 = 1 << 5;
    /// Machine check.
    pub const MCE: u64 = 1 << 6;
    /// Global pages.
    pub const PGE: u64 = 1 << 7;
    /// User RDPMC.
    pub const PCE: u64 = 1 << 8;
    /// FXSAVE and SSE enabled.
    pub const OSFXSR: u64 = 1 << 9;
    /// #XM enabled.
    pub const OSXMMEXCPT: u64 = 1 << 10;
    /// User-mode instruction prevention.
    pub const UMIP: u64 = 1 << 11;
    /// 57-bit linear addresses (never advertised).
    pub const LA57: u64 = 1 << 12;
    /// VMX enable (never advertised).
    pub const VMXE: u64 = 1 << 13;
    /// User RDFSBASE and friends.
    pub const FSGSBASE: u64 = 1 << 16;
    /// Process-context identifiers.
    pub const PCIDE: u64 = 1 << 17;
    /// XSAVE enabled.
    pub const OSXSAVE: u64 = 1 << 18;
    /// Supervisor-mode execution prevention.
    pub const SMEP: u64 = 1 << 20;
    /// Supervisor-mode access prevention.
    pub const SMAP: u64 = 1 << 21;
    /// User protection keys (never advertised).
    pub const PKE: u64 = 1 << 22;
}

/// EFER bits (SDM 2.2.1).
pub mod efer {
    /// SYSCALL enable.
    pub const SCE: u64 = 1 << 0;
    /// Long mode enable.
    pub const LME: u64 = 1 << 8;
    /// Long mode active.
    pub const LMA: u64 = 1 << 10;
    /// No-execute enable.
    pub const NXE: u64 = 1 << 11;
    /// Every bit software may write.
    pub const WRITABLE: u64 = SCE | LME | NXE;
}
