//! x87, SSE and AVX state in the standard (non-compacted) XSAVE layout (SDM vol. 1, 13.4).

/// XCR0 / XSTATE_BV bits.
pub mod xstate {
    /// x87.
    pub const X87: u64 = 1 << 0;
    /// XMM registers and MXCSR.
    pub const SSE: u64 = 1 << 1;
    /// Upper halves of YMM.
    pub const AVX: u64 = 1 << 2;
    /// What the CPU model offers.
    pub const SUPPORTED: u64 = X87 | SSE | AVX;
}

/// Bytes of the area for [`xstate::SUPPORTED`].
pub const XSAVE_SIZE: usize = 832;
/// MXCSR after reset.
pub const MXCSR_INIT: u32 = 0x1f80;
/// Bits software may set in MXCSR.
pub const MXCSR_MASK: u32 = 0xffff;

/// The vector and floating-point registers, laid out so that the host's own XSAVE family can
/// load and store them.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FpuState {
    /// x87 control word.
    pub fcw: u16,
    /// x87 status word.
    pub fsw: u16,
    /// Abridged x87 tag word: one bit per *physical* register, set when not empty.
    pub ftw: u8,
    #[doc(hidden)]
    pub pad0: u8,
    /// Last x87 opcode.
    pub fop: u16,
    /// Last x87 instruction pointer.
    pub fip: u64,
    /// Last x87 operand pointer.
    pub fdp: u64,
    /// SSE control and status.
    pub mxcsr: u32,
    /// Bits of MXCSR that may be set.
    pub mxcsr_mask: u32,
    /// ST(0)..ST(7), 80 bits each in a 16-byte slot; MM0..MM7 alias the mantissas.
    pub st: [[u8; 16]; 8],
    /// XMM0..XMM15.
    pub xmm: [[u8; 16]; 16],
    #[doc(hidden)]
    pub pad1: [u8; 96],
    /// XSAVE header: state components present.
    pub xstate_bv: u64,
    /// XSAVE header: compaction, always zero here.
    pub xcomp_bv: u64,
    #[doc(hidden)]
    pub pad2: [u8; 48],
    /// Upper 128 bits of YMM0..YMM15.
    pub ymm_high: [[u8; 16]; 16],
}

const _: () = assert!(core::mem::size_of::<FpuState>() == XSAVE_SIZE);

impl Default for FpuState {
    /// The state after reset (SDM table 9-1): x87 as after FNINIT, all components valid.
    fn default() -> Self {
        Self {
            fcw: 0x37f,
            fsw: 0,
            ftw: 0,
            pad0: 0,
            fop: 0,
            fip: 0,
            fdp: 0,
            mxcsr: MXCSR_INIT,
            mxcsr_mask: MXCSR_MASK,
            st: [[0; 16]; 8],
            xmm: [[0; 16]; 16],
            pad1: [0; 96],
            xstate_bv: xstate::SUPPORTED,
            xcomp_bv: 0,
            pad2: [0; 48],
            ymm_high: [[0; 16]; 16],
        }
    }
}
