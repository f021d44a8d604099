//! String instructions. ES:RDI takes no override, so the pointers are biased around them.

use super::{Emitter, memory::with_gs};
use crate::{
    asm::{plus, register, spill, sum},
    recover::{Bias, Fixes},
    translate::Flow,
};
use iced_x86::{Code, Instruction, MemoryOperand, Mnemonic, OpKind, Register};
use wedge_abi::{POISON, STRING_BIASES};

pub(super) const PAGE: u64 = 4096;
/// Elements of a repeated instruction whose pages are looked for one by one.
pub(super) const MOST: u64 = 1 << 24;

/// What an instruction addresses.
pub(super) struct Pointers {
    pub source: bool,
    pub destination: bool,
}

pub(super) fn pointers(insn: &Instruction) -> Option<Pointers> {
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

pub(super) fn is_repeated(insn: &Instruction) -> bool {
    insn.has_rep_prefix() || insn.has_repne_prefix()
}

impl Emitter<'_> {
    pub(super) fn string(&mut self, insn: &Instruction, bytes: &[u8]) -> Flow {
        let (Some(pointers), Some(prefixed)) = (pointers(insn), with_gs(bytes)) else {
            return self.call_out(insn);
        };
        match (self.ac, pointers.destination) {
            (true, _) if self.compares_hidden(insn) => return self.call_out(insn),
            (true, _) => self.string_either(insn, bytes, &pointers),
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

    /// It reads at RDI, too, where there may be changed copies of the user's pages.
    pub(super) fn compares_hidden(&self, insn: &Instruction) -> bool {
        use Mnemonic::*;
        let compares = matches!(
            insn.mnemonic(),
            Cmpsb | Cmpsw | Cmpsd | Cmpsq | Scasb | Scasw | Scasd | Scasq
        );
        compares && self.layout.copies.is_some()
    }

    /// Either pointer may be the user's: each gets the bias its sign asks for.
    fn string_either(&mut self, insn: &Instruction, bytes: &[u8], pointers: &Pointers) {
        let [for_rsi, for_rdi] = STRING_BIASES.map(|number| register(number.into()));
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, for_rsi);
        self.put_aside(&mut fixes, 1, for_rdi);
        self.bias_for(Register::RSI, for_rsi);
        if let Some(table) = self.layout.copies.filter(|_| pointers.source) {
            self.look_for_hidden(insn, table, &mut fixes, [for_rsi, for_rdi]);
        }
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

    /// `bias` makes RSI non-canonical if a page that is going to be read, upwards, is mapped as a changed copy. No
    /// flags; `left` is lost.
    fn look_for_hidden(
        &mut self,
        insn: &Instruction,
        table: u64,
        fixes: &mut Fixes,
        [bias, left]: [Register; 2],
    ) {
        let (rcx, at) = (Register::RCX, Register::R8);
        self.put_aside(fixes, 2, rcx);
        self.put_aside(fixes, 3, at);
        self.undoes();
        let repeated = is_repeated(insn);
        let nothing = repeated.then(|| self.asm.jrcxz());
        if !repeated {
            self.asm.mov_imm(rcx, 1);
        }
        // left := pages beyond the first.
        self.end_of_reads(insn, left, at);
        // So many that looking would take too long: as if there were a copy.
        self.asm.mov_imm(at, MOST.trailing_zeros().into());
        self.asm.op3(Code::VEX_Shrx_r64_rm64_r64, rcx, rcx, at);
        let few = self.asm.jrcxz();
        self.asm.mov_imm(rcx, POISON);
        self.asm.lea(bias, sum(bias, rcx));
        let many = self.asm.jmp_short();
        self.asm.bind_short(few);
        self.asm.mov_imm(at, PAGE.trailing_zeros().into());
        self.asm.op3(Code::VEX_Shrx_r64_rm64_r64, left, left, at);
        self.asm.mov(at, Register::RSI);
        let again = self.asm.here();
        self.hidden(table, at, rcx);
        let shown = self.asm.jrcxz();
        self.asm.lea(bias, sum(bias, rcx));
        let found = self.asm.jmp_short();
        self.asm.bind_short(shown);
        self.asm.mov(rcx, left);
        let last = self.asm.jrcxz();
        self.asm.lea(left, plus(left, -1));
        self.asm.lea(at, plus(at, PAGE as i64));
        self.asm.jmp(again);
        [Some(many), Some(found), Some(last), nothing]
            .into_iter()
            .flatten()
            .for_each(|jump| self.asm.bind_short(jump));
        self.asm.load(rcx, spill(2));
        self.asm.load(at, spill(3));
        (fixes.spilled[2], fixes.spilled[3]) = (None, None);
        self.mark(false, *fixes);
    }

    /// `into` := offset, from the start of the page that RSI is in, of the last byte that RCX elements upwards have. `scratch`
    /// is lost.
    pub(super) fn end_of_reads(&mut self, insn: &Instruction, into: Register, scratch: Register) {
        let width = insn.memory_size().size() as u32;
        self.asm.mov_imm(scratch, PAGE - 1);
        self.asm.op3(Code::VEX_Pext_r64_r64_rm64, into, Register::RSI, scratch);
        let last =
            MemoryOperand::with_base_index_scale_displ_size(into, Register::RCX, width, -1, 1);
        self.asm.lea(into, last);
    }

    /// `pointer -= bias`, without flags: -x is NOT x plus one. The bias register is not needed
    /// afterwards.
    fn take_off(&mut self, pointer: Register, bias: Register) {
        self.asm.reg1(Code::Not_rm64, bias);
        let one_more = MemoryOperand::with_base_index_scale_displ_size(pointer, bias, 1, 1, 1);
        self.asm.lea(pointer, one_more);
    }
}
