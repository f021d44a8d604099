//! String instructions. ES:RDI takes no override, so the pointers are biased around them.

use super::{Emitter, memory::with_gs};
use crate::{
    asm::{spill, sum},
    recover::{Bias, Fixes},
    translate::Flow,
};
use iced_x86::{Instruction, MemoryOperand, Mnemonic, OpKind, Register};

/// What an instruction addresses.
struct Pointers {
    source: bool,
    destination: bool,
}

fn pointers(insn: &Instruction) -> Option<Pointers> {
    use Mnemonic::*;
    let wide = (0..insn.op_count()).all(|i| {
        matches!(insn.op_kind(i), OpKind::MemorySegRSI | OpKind::MemoryESRDI | OpKind::Register)
    });
    let flat = !matches!(insn.memory_segment(), Register::FS | Register::GS);
    let (source, destination) = match insn.mnemonic() {
        Movsb | Movsw | Movsd | Movsq | Cmpsb | Cmpsw | Cmpsd | Cmpsq => (true, true),
        Stosb | Stosw | Stosd | Stosq | Scasb | Scasw | Scasd | Scasq => (false, true),
        Lodsb | Lodsw | Lodsd | Lodsq => (true, false),
        _ => return None,
    };
    (wide && flat).then_some(Pointers { source, destination })
}

impl Emitter<'_> {
    pub(super) fn string(&mut self, insn: &Instruction, bytes: &[u8]) -> Flow {
        let (Some(pointers), Some(prefixed)) = (pointers(insn), with_gs(bytes)) else {
            return self.call_out(insn);
        };
        match (self.alignment, pointers.destination) {
            (true, _) => self.string_either(bytes, &pointers),
            (false, true) => self.string_biased(bytes, &prefixed, &pointers),
            (false, false) => self.asm.raw(&prefixed),
        }
        Flow::On
    }

    /// Both pointers are the kernel's: RSI by override, RDI by the fixed bias.
    fn string_biased(&mut self, bytes: &[u8], prefixed: &[u8], pointers: &Pointers) {
        let temporary = Register::RDX;
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, temporary);
        self.asm.mov_imm(temporary, self.layout.bias);
        self.asm.lea(Register::RDI, sum(Register::RDI, temporary));
        fixes.rdi = Some(Bias::Fixed);
        self.mark(false, fixes);
        self.asm.raw(if pointers.source { prefixed } else { bytes });
        self.asm.mov_imm(temporary, self.layout.bias.wrapping_neg());
        self.asm.lea(Register::RDI, sum(Register::RDI, temporary));
        fixes.rdi = None;
        self.mark(false, fixes);
        self.asm.load(temporary, spill(0));
    }

    /// Either pointer may be the user's: each gets the bias its sign asks for.
    fn string_either(&mut self, bytes: &[u8], pointers: &Pointers) {
        let (for_rsi, for_rdi) = (Register::RDX, Register::RBX);
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, for_rsi);
        self.put_aside(&mut fixes, 1, for_rdi);
        self.bias_for(Register::RSI, for_rsi);
        self.bias_for(Register::RDI, for_rdi);
        if pointers.source {
            self.asm.lea(Register::RSI, sum(Register::RSI, for_rsi));
            fixes.rsi = Some(Bias::Register(for_rsi.number() as u8));
            self.mark(false, fixes);
        }
        if pointers.destination {
            self.asm.lea(Register::RDI, sum(Register::RDI, for_rdi));
            fixes.rdi = Some(Bias::Register(for_rdi.number() as u8));
            self.mark(false, fixes);
        }
        self.asm.raw(bytes);
        if pointers.destination {
            self.take_off(Register::RDI, for_rdi);
            fixes.rdi = None;
            self.mark(false, fixes);
        }
        if pointers.source {
            self.take_off(Register::RSI, for_rsi);
            fixes.rsi = None;
            self.mark(false, fixes);
        }
        self.asm.load(for_rsi, spill(0));
        self.asm.load(for_rdi, spill(1));
    }

    /// `pointer -= bias`, without flags: -x is NOT x plus one. The bias register is not needed
    /// afterwards.
    fn take_off(&mut self, pointer: Register, bias: Register) {
        self.asm.reg1(iced_x86::Code::Not_rm64, bias);
        let one_more = MemoryOperand::with_base_index_scale_displ_size(pointer, bias, 1, 1, 1);
        self.asm.lea(pointer, one_more);
    }
}
