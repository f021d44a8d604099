//! Exceptions (SDM chapter 6): vectors and the fault an instruction ends in.

/// Exception vectors.
pub mod vector {
    /// #DE divide error.
    pub const DE: u8 = 0;
    /// #DB debug.
    pub const DB: u8 = 1;
    /// Non-maskable interrupt.
    pub const NMI: u8 = 2;
    /// #BP breakpoint.
    pub const BP: u8 = 3;
    /// #OF overflow.
    pub const OF: u8 = 4;
    /// #BR bound range.
    pub const BR: u8 = 5;
    /// #UD invalid opcode.
    pub const UD: u8 = 6;
    /// #NM device not available.
    pub const NM: u8 = 7;
    /// #DF double fault.
    pub const DF: u8 = 8;
    /// #TS invalid TSS.
    pub const TS: u8 = 10;
    /// #NP segment not present.
    pub const NP: u8 = 11;
    /// #SS stack fault.
    pub const SS: u8 = 12;
    /// #GP general protection.
    pub const GP: u8 = 13;
    /// #PF page fault.
    pub const PF: u8 = 14;
    /// #MF x87 error.
    pub const MF: u8 = 16;
    /// #AC alignment check.
    pub const AC: u8 = 17;
    /// #MC machine check.
    pub const MC: u8 = 18;
    /// #XM SIMD floating point.
    pub const XM: u8 = 19;
}

/// Page-fault error code bits (SDM 4.7).
pub mod pf {
    /// The translation was present; the rights were not.
    pub const PRESENT: u32 = 1 << 0;
    /// The access was a write.
    pub const WRITE: u32 = 1 << 1;
    /// The access was from user mode.
    pub const USER: u32 = 1 << 2;
    /// A reserved bit was set in a paging entry.
    pub const RESERVED: u32 = 1 << 3;
    /// The access was an instruction fetch.
    pub const FETCH: u32 = 1 << 4;
}

/// An exception an instruction ends in. Nothing of the instruction has been committed except
/// what the SDM says stays committed (completed iterations of a string instruction).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Exception vector, see [`vector`].
    pub vector: u8,
    /// Error code, for the vectors that push one.
    pub code: Option<u32>,
    /// #PF: the faulting GVA, for CR2. #DB: the bits to set in DR6. Else zero.
    pub address: u64,
}

impl Fault {
    /// An exception without an error code.
    pub const fn new(vector: u8) -> Self {
        Self { vector, code: None, address: 0 }
    }
    /// An exception with an error code.
    pub const fn with_code(vector: u8, code: u32) -> Self {
        Self { vector, code: Some(code), address: 0 }
    }
    /// #GP(code).
    pub const fn gp(code: u32) -> Self {
        Self::with_code(vector::GP, code)
    }
    /// #UD.
    pub const fn ud() -> Self {
        Self::new(vector::UD)
    }
    /// #PF(code) at `address`, a GVA.
    pub const fn page(address: u64, code: u32) -> Self {
        Self { vector: vector::PF, code: Some(code), address }
    }
    /// #DB with the given DR6 bits.
    pub const fn debug(dr6: u64) -> Self {
        Self { vector: vector::DB, code: None, address: dr6 }
    }
}
