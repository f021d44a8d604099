//! XSAVE and XRSTOR: the guest's vector registers are the host's, but the host has more of them, so
//! the mask of what to save is cut to what the guest knows. And RDTSCP.

use super::{Emitter, memory::{flat_operand, on_stack}};
use crate::{
    asm::{slot, spill},
    recover::Fixes,
    translate::Flow,
};
use frame::ExitKind;
use iced_x86::{Code, Instruction, MemoryOperand, Register};

impl Emitter<'_> {
    /// XSAVEOPT may save what it would rather leave out; so it becomes XSAVE.
    pub(super) fn save_vectors(&mut self, insn: &Instruction) -> Flow {
        if self.alignment && !on_stack(insn) {
            return self.call_out(insn);
        }
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        self.put_aside(&mut fixes, 1, Register::RDX);
        let hva = self.asm.slot_hva(slot!(vector_mask));
        let known = MemoryOperand::with_base_displ(Register::RIP, hva as i64);
        let cut = Instruction::with3(Code::VEX_Pext_r32_r32_rm32, Register::EAX, Register::EAX, known);
        self.asm.put(&cut.expect("pext"));
        self.asm.mov_imm(Register::RDX, 0);
        let to = flat_operand(insn, Register::GS);
        let save = Instruction::with1(Code::Xsave64_mem, to);
        self.asm.put(&save.expect("xsave64"));
        self.asm.load(Register::RAX, spill(0));
        self.asm.load(Register::RDX, spill(1));
        Flow::On
    }

    /// The wedge does it: user code that can jump here must not find an XRSTOR.
    pub(super) fn load_vectors(&mut self, insn: &Instruction) -> Flow {
        if self.alignment && !on_stack(insn) {
            return self.call_out(insn);
        }
        self.with_address(insn, ExitKind::LoadVectors)
    }

    /// RDTSC that waits for what comes before it, and the guest's TSC_AUX.
    pub(super) fn read_time(&mut self) -> Flow {
        self.asm.op(Code::Lfence);
        self.asm.op(Code::Rdtsc);
        self.asm.load(Register::RCX, slot!(tsc_aux));
        Flow::On
    }
}
