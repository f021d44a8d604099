//! A test case and what came of running it, independent of who ran it.

use std::fmt;

use iced_x86::{Decoder, DecoderOptions, Instruction};
use x86::fpu::FpuState;
use x86::{Fault, flags, seg, vector};

use crate::background;
use crate::layout::{CODE, HLT, IMAGE_LEN, address, image_offset};

/// Flags a user program can set and a case may start with.
pub const START_FLAGS: u64 =
    flags::STATUS | flags::DF | flags::AC | flags::ID | flags::NT | flags::TF;

/// The registers a user program sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// General registers, indexed by [`x86::reg`].
    pub gpr: [u64; 16],
    /// Instruction pointer.
    pub rip: u64,
    /// RFLAGS; bits 1 and IF always set.
    pub rflags: u64,
    /// Base of FS.
    pub fs_base: u64,
    /// Base of GS.
    pub gs_base: u64,
    /// ES, CS, SS, DS, FS, GS, indexed by [`x86::seg`]. Cases start with [`LINUX_SELECTORS`] or
    /// [`LINUX_SELECTORS_32`].
    pub selectors: [u16; 6],
    /// x87, SSE and AVX.
    pub fpu: FpuState,
}

/// What every 64-bit Linux program starts with: user CS and SS, the others null.
pub const LINUX_SELECTORS: [u16; 6] = [0, 0x33, 0x2b, 0, 0, 0];
/// What a 32-bit Linux program has, FS and GS as far as they need a descriptor.
pub const LINUX_SELECTORS_32: [u16; 6] = [0x2b, 0x23, 0x2b, 0x2b, 0x2b, 0x2b];

impl State {
    /// Whether CS selects 64-bit or 32-bit code, in bits.
    pub fn bits(&self) -> u32 {
        if self.selectors[seg::CS] == LINUX_SELECTORS_32[seg::CS] { 32 } else { 64 }
    }
}

impl Default for State {
    fn default() -> Self {
        Self {
            gpr: [0; 16],
            rip: CODE.base,
            rflags: flags::FIXED | flags::IF,
            fs_base: 0,
            gs_base: 0,
            selectors: LINUX_SELECTORS,
            fpu: FpuState::default(),
        }
    }
}

/// Bytes of memory that differ from the background.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    /// Address of the first (GVA), inside a window.
    pub address: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// A test case: what to run on which state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Registers before; `state.rip` is where `code` lies.
    pub state: State,
    /// The instructions. HLT follows them, up to the end of the code window.
    pub code: Vec<u8>,
    /// Which [`background`] fills memory.
    pub background: u8,
    /// Further memory contents, later patches over earlier ones.
    pub patches: Vec<Patch>,
}

impl Case {
    /// The memory before: background, HLT in the code window, patches, code. Bytes outside the
    /// windows are dropped.
    pub fn image(&self) -> Box<[u8; IMAGE_LEN]> {
        let mut image = background::image(self.background);
        let code = CODE.offset as usize;
        image[code..code + CODE.len as usize].fill(HLT);
        for patch in &self.patches {
            write_image(&mut image, patch.address, &patch.bytes);
        }
        write_image(&mut image, self.state.rip, &self.code);
        image
    }

    /// The code, decoded.
    pub fn instructions(&self) -> Vec<Instruction> {
        let bits = self.state.bits();
        let decoder = Decoder::with_ip(bits, &self.code, self.state.rip, DecoderOptions::NONE);
        decoder.into_iter().collect()
    }

    /// The instruction at an address, in the code or wherever a jump led; `None` outside memory.
    pub fn instruction_at(&self, rip: u64) -> Option<Instruction> {
        const LONGEST: u64 = 15;
        let image = self.image();
        let bytes = (rip..rip.saturating_add(LONGEST)).map_while(image_offset);
        let bytes: Vec<_> = bytes.map(|offset| image[offset]).collect();
        let mut decoder = Decoder::with_ip(self.state.bits(), &bytes, rip, DecoderOptions::NONE);
        decoder.can_decode().then(|| decoder.decode())
    }

    /// The address after the last instruction.
    pub fn end(&self) -> u64 {
        self.state.rip.wrapping_add(self.code.len() as u64)
    }
}

fn write_image(image: &mut [u8; IMAGE_LEN], start: u64, bytes: &[u8]) {
    for (i, byte) in bytes.iter().enumerate() {
        if let Some(offset) = image_offset(start.wrapping_add(i as u64)) {
            image[offset] = *byte;
        }
    }
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// An exception. The HLT after the code gives #GP(0) at [`Case::end`].
    Fault(Fault),
    /// A system call was made (and not executed).
    Syscall,
    /// It did not end.
    Timeout,
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(fault) => {
                write!(f, "fault {}", fault.vector)?;
                if let Some(code) = fault.code {
                    write!(f, " {code:#x}")?;
                }
                if fault.vector == vector::PF { write!(f, " {:#x}", fault.address) } else { Ok(()) }
            }
            Self::Syscall => f.write_str("syscall"),
            Self::Timeout => f.write_str("timeout"),
        }
    }
}

/// What came of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Why it ended.
    pub stop: Stop,
    /// Registers after.
    pub state: State,
    /// Memory that changed, as runs of changed bytes in address order.
    pub changes: Vec<Patch>,
}

/// The runs of bytes in which `after` differs from `before`.
pub fn changes(before: &[u8; IMAGE_LEN], after: &[u8; IMAGE_LEN]) -> Vec<Patch> {
    const CHUNK: usize = 64;
    let mut runs: Vec<Patch> = Vec::new();
    let chunks = before.chunks_exact(CHUNK).zip(after.chunks_exact(CHUNK)).enumerate();
    for (chunk, (old, new)) in chunks.filter(|(_, (old, new))| old != new) {
        for i in (0..CHUNK).filter(|&i| old[i] != new[i]) {
            if let Some(address) = address(chunk * CHUNK + i) {
                push_change(&mut runs, address, new[i]);
            }
        }
    }
    runs
}

fn push_change(runs: &mut Vec<Patch>, address: u64, byte: u8) {
    match runs.last_mut() {
        Some(run) if run.address + run.bytes.len() as u64 == address => run.bytes.push(byte),
        _ => runs.push(Patch { address, bytes: vec![byte] }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::DATA;

    #[test]
    fn changes_are_runs() {
        let case = Case {
            state: State::default(),
            code: vec![0x90],
            background: 1,
            patches: vec![Patch { address: DATA.base, bytes: vec![1, 2, 3] }],
        };
        let before = case.image();
        let mut after = before.clone();
        after[1] = 7;
        after[2] = 8;
        after[100] = !after[100];
        let runs = changes(&before, &after);
        assert_eq!(runs.len(), 2);
        assert_eq!(runs[0], Patch { address: DATA.base + 1, bytes: vec![7, 8] });
        assert_eq!(runs[1].address, DATA.base + 100);
    }

    #[test]
    fn instructions_are_found_off_the_beaten_track() {
        let (state, code) = (State::default(), vec![0x66, 0x90, 0xca, 0xfa, 0x1e]);
        let case = Case { state, code, background: 0, patches: vec![] };
        let code = |offset| Some(case.instruction_at(CODE.base + offset)?.code());
        assert_eq!(code(1), Some(iced_x86::Code::Nopd), "in the middle of another");
        assert_eq!(code(2), Some(iced_x86::Code::Retfd_imm16));
        assert_eq!(code(5), Some(iced_x86::Code::Hlt), "behind the code");
        assert!(case.instruction_at(0).is_none());
    }

    #[test]
    fn code_is_followed_by_hlt() {
        let state = State { rip: CODE.end() - 2, ..State::default() };
        let case = Case { state, code: vec![0x90; 4], background: 0, patches: vec![] };
        let image = case.image();
        let end = image.len();
        assert_eq!(image[end - 3..], [HLT, 0x90, 0x90], "bytes beyond the window are dropped");
    }
}
