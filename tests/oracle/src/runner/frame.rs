//! The Linux x86-64 signal frame: a `ucontext_t` followed by the XSAVE area it points to.
//!
//! The kernel writes the complete user state into it before a handler runs, and loads it all back
//! at `rt_sigreturn`. So editing a frame is how a case's registers are loaded, and reading the
//! next frame is how the result is known; there is no assembly for it. Offsets are the kernel's
//! ABI (`struct sigcontext` and `_fpx_sw_bytes` in arch/x86/include/uapi/asm/sigcontext.h).

use x86::exception::{Fault, vector};
use x86::fpu::{FpuState, xstate};
use x86::{flags, reg, seg};

use crate::state::State;

/// `uc_mcontext`: R8.
const R8: usize = 40;
const RIP: usize = 168;
const EFLAGS: usize = 176;
/// CS, GS, FS, SS: 16 bits each.
const SELECTORS: usize = 184;
const ERR: usize = 192;
const TRAPNO: usize = 200;
const CR2: usize = 216;
const FPSTATE: usize = 224;
/// Within the XSAVE area: 48 bytes the kernel uses to describe the area.
const SW_RESERVED: usize = 464;
const XSTATE_BV: usize = 512;
const YMM_HIGH: usize = 576;
const XSAVE_END: usize = 832;
/// Bytes of a frame copied: the context, padding to 64, the XSAVE area up to AVX.
pub const FRAME_LEN: usize = 304 + 192 + XSAVE_END;

/// General registers in the order of the frame, from R8 at [`R8`].
const ORDER: [usize; 16] = [
    8,
    9,
    10,
    11,
    12,
    13,
    14,
    15,
    reg::RDI,
    reg::RSI,
    reg::RBP,
    reg::RBX,
    reg::RDX,
    reg::RAX,
    reg::RCX,
    reg::RSP,
];
/// Flags `rt_sigreturn` loads; the others it leaves to the handler's own.
pub const SIGRETURN_FLAGS: u64 = flags::STATUS | flags::DF | flags::TF | flags::AC | flags::RF;

/// A copy of a signal frame, of the memory from its `ucontext_t` on.
pub struct Frame {
    bytes: Box<[u8; FRAME_LEN]>,
    /// Offset of the XSAVE area in `bytes`.
    xsave: usize,
}

impl Frame {
    /// A frame whose `ucontext_t` was at address `at` of the native process. `None` if its XSAVE
    /// area is not where the kernel puts it.
    pub fn new(bytes: Box<[u8; FRAME_LEN]>, at: u64) -> Option<Self> {
        let xsave = read64(&bytes[..], FPSTATE).checked_sub(at)?;
        let xsave = usize::try_from(xsave).ok().filter(|x| x + XSAVE_END <= FRAME_LEN)?;
        Some(Self { bytes, xsave })
    }

    /// The bytes, to be put back where they came from.
    pub fn bytes(&self) -> &[u8; FRAME_LEN] {
        &self.bytes
    }

    /// Makes `rt_sigreturn` load `state`, except the ID and NT flags, FS and GS bases and the
    /// selectors other than CS and SS, which are not in a frame or not taken from it.
    pub fn load(&mut self, state: &State) {
        for (slot, register) in ORDER.into_iter().enumerate() {
            self.write64(R8 + 8 * slot, state.gpr[register]);
        }
        self.write64(RIP, state.rip);
        self.write64(EFLAGS, state.rflags);
        let [_, cs, ss, _, fs, gs] = state.selectors.map(u64::from);
        self.write64(SELECTORS, cs | gs << 16 | fs << 32 | ss << 48);
        self.load_fpu(&state.fpu);
    }

    fn load_fpu(&mut self, fpu: &FpuState) {
        let area = &mut self.bytes[self.xsave..self.xsave + XSAVE_END];
        area[0..2].copy_from_slice(&fpu.fcw.to_le_bytes());
        area[2..4].copy_from_slice(&fpu.fsw.to_le_bytes());
        area[4..6].copy_from_slice(&[fpu.ftw, 0]);
        area[6..8].copy_from_slice(&fpu.fop.to_le_bytes());
        area[8..16].copy_from_slice(&fpu.fip.to_le_bytes());
        area[16..24].copy_from_slice(&fpu.fdp.to_le_bytes());
        area[24..28].copy_from_slice(&fpu.mxcsr.to_le_bytes());
        area[32..160].copy_from_slice(fpu.st.as_flattened());
        area[160..416].copy_from_slice(fpu.xmm.as_flattened());
        area[XSTATE_BV..XSTATE_BV + 8].copy_from_slice(&xstate::SUPPORTED.to_le_bytes());
        area[XSTATE_BV + 8..YMM_HIGH].fill(0);
        area[YMM_HIGH..].copy_from_slice(fpu.ymm_high.as_flattened());
        debug_assert!(area[SW_RESERVED] == b'S', "the kernel's description stays as it was");
    }

    /// The state the frame holds. FS and GS bases and the selectors other than CS and SS are as by
    /// default.
    pub fn state(&self) -> State {
        let mut state = State { rip: self.read64(RIP), ..State::default() };
        for (slot, register) in ORDER.into_iter().enumerate() {
            state.gpr[register] = self.read64(R8 + 8 * slot);
        }
        // RF only says that the exception was a fault (SDM 17.3.1.1).
        state.rflags = self.read64(EFLAGS) & !flags::RF;
        let selectors = self.read64(SELECTORS);
        state.selectors[seg::CS] = selectors as u16;
        state.selectors[seg::SS] = (selectors >> 48) as u16;
        state.fpu = self.fpu();
        state
    }

    /// Components the hardware marked as in their initial configuration are given as such.
    fn fpu(&self) -> FpuState {
        let area = &self.bytes[self.xsave..self.xsave + XSAVE_END];
        let components = read64(area, XSTATE_BV);
        let mut fpu = FpuState { mxcsr: read64(area, 24) as u32, ..FpuState::default() };
        if components & xstate::X87 != 0 {
            let control = read64(area, 0);
            fpu.fcw = control as u16;
            fpu.fsw = (control >> 16) as u16;
            fpu.ftw = (control >> 32) as u8;
            fpu.fop = (control >> 48) as u16;
            fpu.fip = read64(area, 8);
            fpu.fdp = read64(area, 16);
            fpu.st.as_flattened_mut().copy_from_slice(&area[32..160]);
        }
        if components & xstate::SSE != 0 {
            fpu.xmm.as_flattened_mut().copy_from_slice(&area[160..416]);
        }
        if components & xstate::AVX != 0 {
            fpu.ymm_high.as_flattened_mut().copy_from_slice(&area[YMM_HIGH..]);
        }
        fpu
    }

    /// The exception that made the kernel write the frame.
    pub fn fault(&self) -> Fault {
        let number = self.read64(TRAPNO) as u8;
        let error = self.read64(ERR) as u32;
        match number {
            vector::PF => Fault::page(self.read64(CR2), error),
            vector::TS | vector::NP | vector::SS | vector::GP | vector::AC => {
                Fault::with_code(number, error)
            }
            _ => Fault::new(number),
        }
    }

    fn read64(&self, at: usize) -> u64 {
        read64(&self.bytes[..], at)
    }
    fn write64(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

fn read64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}
