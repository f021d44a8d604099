//! Segment bases and selectors: words of the frame. The host's GS base stays the bias; the host's FS
//! base follows the guest's GS base.

use super::{
    Emitter,
    memory::{absolute, flat_operand, on_stack},
};
use crate::{
    asm::{Slot, slot, spill, sum},
    recover::Fixes,
    translate::Flow,
};
use iced_x86::{Code, Instruction, Mnemonic, Register};

impl Emitter<'_> {
    pub(super) fn swap_gs(&mut self) -> Flow {
        let (active, other) = (Register::RAX, Register::RCX);
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, active);
        self.put_aside(&mut fixes, 1, other);
        self.asm.load(active, slot!(kernel_gs_base));
        self.load_host_base(active, other);
        self.asm.load(other, slot!(gs_base));
        self.asm.store(slot!(kernel_gs_base), other);
        self.asm.store(slot!(gs_base), active);
        self.asm.load(other, spill(1));
        self.asm.load(active, spill(0));
        Flow::On
    }

    /// The host's FS base follows a new GS base of the guest; `scratch` is lost. It faults before
    /// anything is changed.
    fn load_host_base(&mut self, base: Register, scratch: Register) {
        self.bias_for(base, scratch);
        self.asm.lea(scratch, sum(scratch, base));
        self.asm.reg1(Code::Wrfsbase_r64, scratch);
        self.asm.store(slot!(percpu), scratch);
    }

    pub(super) fn read_selector(&mut self, insn: &Instruction) -> Flow {
        let (to, slot) = (insn.op0_register(), selector_slot(insn));
        if to.size() == 2 {
            self.asm.load_half(to, slot);
        } else {
            self.asm.load(to.full_register(), slot);
        }
        Flow::On
    }

    pub(super) fn store_selector(&mut self, insn: &Instruction) -> Flow {
        let [scratch, _] = self.scratch(insn);
        let mut changed = *insn;
        if self.alignment && !on_stack(insn) || scratch == Register::None {
            return self.call_out(insn);
        }
        if insn.is_ip_rel_memory_operand() && !absolute(&mut changed) {
            return self.call_out(insn);
        }
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, scratch);
        self.asm.load(scratch, selector_slot(insn));
        let to = flat_operand(&changed, Register::GS);
        let half = Register::AX + scratch.number() as u32;
        let store = Instruction::with2(Code::Mov_rm16_r16, to, half);
        self.asm.put(&store.expect("mov m16, r16"));
        self.asm.load(scratch, spill(0));
        Flow::On
    }

    pub(super) fn read_base(&mut self, insn: &Instruction) -> Flow {
        self.asm.load(insn.op0_register(), base_slot(insn));
        Flow::On
    }

    pub(super) fn write_base(&mut self, insn: &Instruction) -> Flow {
        let base = insn.op0_register();
        if !matches!(insn.mnemonic(), Mnemonic::Wrgsbase) {
            self.asm.store(slot!(fs_base), base);
            return Flow::On;
        }
        let scratch = if base == Register::RAX { Register::RCX } else { Register::RAX };
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, scratch);
        self.load_host_base(base, scratch);
        self.asm.store(slot!(gs_base), base);
        self.asm.load(scratch, spill(0));
        Flow::On
    }
}

fn selector_slot(insn: &Instruction) -> Slot {
    match insn.op1_register() {
        Register::CS => slot!(cs),
        Register::SS => slot!(ss),
        Register::DS => slot!(ds),
        Register::ES => slot!(es),
        Register::FS => slot!(fs),
        _ => slot!(gs),
    }
}

fn base_slot(insn: &Instruction) -> Slot {
    match insn.mnemonic() {
        Mnemonic::Rdgsbase | Mnemonic::Wrgsbase => slot!(gs_base),
        _ => slot!(fs_base),
    }
}
