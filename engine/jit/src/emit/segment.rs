//! Segment bases and selectors: words of the vCPU page. The host's GS base stays the bias; the host's FS
//! base follows the guest's GS base.

use super::{
    Emitter,
    memory::{absolute, flat_operand, on_stack},
};
use crate::{
    asm::{Slot, slot, spill, sum},
    recover::Fixes,
    rules::Rule,
    translate::Flow,
};
use iced_x86::{Code, Instruction, Mnemonic, Register};
use wedge_abi::BlockExit;

impl Emitter<'_> {
    /// Exchanges the guest's GS bases. The host's FS base is written only if translated code may use FS before it exits,
    /// since a write takes 10 ns: SYSRET and IRET exit, and the entry to translated code loads FS base from its slot.
    pub(super) fn swap_gs(&mut self, follower: Option<Rule>) -> Flow {
        let exits = matches!(follower, Some(Rule::Sysret | Rule::SysretNarrow | Rule::Iret));
        let (active, other, scratch) = (Register::RAX, Register::RCX, Register::RDX);
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, active);
        self.put_aside(&mut fixes, 1, other);
        self.put_aside(&mut fixes, 2, scratch);
        self.asm.load(active, slot!(regs.kernel_gs_base));
        self.set_host_base(active, [other, scratch], !exits);
        self.asm.load(other, slot!(regs.gs_base));
        self.asm.store(slot!(regs.kernel_gs_base), other);
        self.asm.store(slot!(regs.gs_base), active);
        self.asm.load(scratch, spill(2));
        self.asm.load(other, spill(1));
        self.asm.load(active, spill(0));
        Flow::On
    }

    /// Computes the host's FS base for a new GS base of the guest (GVA), as [`wedge_abi::percpu`] says, by the sign of the
    /// base minus one and without flags. Writes it to its slot, and to the CPU if `write`. Both scratch registers are lost. A
    /// base that is not canonical faults before the slot changes.
    fn set_host_base(&mut self, base: Register, [host, biased]: [Register; 2], write: bool) {
        self.asm.mov_imm(host, u64::MAX);
        self.asm.lea(biased, sum(base, host));
        self.asm.op3(Code::VEX_Sarx_r64_rm64_r64, host, biased, host);
        self.asm.mov_imm(biased, self.layout.bias);
        self.asm.lea(biased, sum(base, biased));
        self.asm.op3(Code::VEX_Pext_r64_r64_rm64, biased, biased, host);
        self.asm.reg1(Code::Not_rm64, host);
        let nowhere = self.asm.slot_operand(slot!(block.nowhere));
        self.asm.op3(Code::VEX_Pdep_r64_r64_rm64, host, host, nowhere);
        self.asm.lea(host, sum(host, biased));
        if write {
            self.asm.reg1(Code::Wrfsbase_r64, host);
        }
        self.asm.store(slot!(block.percpu), host);
    }

    pub(super) fn read_selector(&mut self, insn: &Instruction) -> Flow {
        let (to, slot) = (insn.op0_register(), selector_slot(insn.op1_register()));
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
        if self.ac && !on_stack(insn) || scratch == Register::None {
            return self.call_out(insn);
        }
        if insn.is_ip_rel_memory_operand() && !absolute(&mut changed) {
            return self.call_out(insn);
        }
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, scratch);
        self.asm.load(scratch, selector_slot(insn.op1_register()));
        let to = flat_operand(&changed, Register::GS);
        let store = Instruction::with2(Code::Mov_rm16_r16, to, half(scratch));
        self.asm.put(&store.expect("mov m16, r16"));
        self.asm.load(scratch, spill(0));
        Flow::On
    }

    /// Linux clears selectors whenever it starts a program. Any other selector is the interpreter's, which reads its descriptor. A
    /// cleared FS or GS has the base zero (SDM 3.4.4.1).
    pub(super) fn load_selector(&mut self, insn: &Instruction) -> Flow {
        let zero = Register::RCX;
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, zero);
        let from = half(insn.op1_register());
        let load = Instruction::with2(Code::Movzx_r32_rm16, Register::ECX, from);
        self.asm.put(&load.expect("movzx r32, r16"));
        let is_zero = self.asm.jrcxz();
        self.asm.load(zero, spill(0));
        self.exit(BlockExit::CallOut, insn.code() as u32, insn.ip());
        self.asm.bind_short(is_zero);
        match insn.op0_register() {
            Register::FS => self.asm.store(slot!(regs.fs_base), zero),
            Register::GS => self.clear_gs_base(&mut fixes, zero),
            _ => {}
        }
        self.asm.store(selector_slot(insn.op0_register()), zero);
        self.asm.load(zero, spill(0));
        Flow::On
    }

    fn clear_gs_base(&mut self, fixes: &mut Fixes, zero: Register) {
        let [host, bias] = [Register::RAX, Register::RDX];
        self.put_aside(fixes, 1, host);
        self.put_aside(fixes, 2, bias);
        self.set_host_base(zero, [host, bias], true);
        self.asm.store(slot!(regs.gs_base), zero);
        self.asm.load(host, spill(1));
        self.asm.load(bias, spill(2));
    }

    pub(super) fn read_base(&mut self, insn: &Instruction) -> Flow {
        self.asm.load(insn.op0_register(), base_slot(insn));
        Flow::On
    }

    /// The host's CPU judges whether the new base is canonical.
    pub(super) fn write_base(&mut self, insn: &Instruction) -> Flow {
        let base = insn.op0_register();
        let [host, bias] = self.scratch(insn);
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, host);
        self.put_aside(&mut fixes, 1, bias);
        self.asm.reg1(Code::Wrfsbase_r64, base);
        if insn.mnemonic() == Mnemonic::Wrgsbase {
            self.set_host_base(base, [host, bias], true);
        } else {
            self.asm.load(host, slot!(block.percpu));
            self.asm.reg1(Code::Wrfsbase_r64, host);
        }
        self.asm.store(base_slot(insn), base);
        self.asm.load(host, spill(0));
        self.asm.load(bias, spill(1));
        Flow::On
    }
}

/// The 16-bit register that is part of a register of any size.
pub(super) fn half(register: Register) -> Register {
    Register::AX + register.full_register().number() as u32
}

pub(super) fn selector_slot(segment: Register) -> Slot {
    match segment {
        Register::CS => slot!(regs.cs),
        Register::SS => slot!(regs.ss),
        Register::DS => slot!(regs.ds),
        Register::ES => slot!(regs.es),
        Register::FS => slot!(regs.fs),
        _ => slot!(regs.gs),
    }
}

fn base_slot(insn: &Instruction) -> Slot {
    match insn.mnemonic() {
        Mnemonic::Rdgsbase | Mnemonic::Wrgsbase => slot!(regs.gs_base),
        _ => slot!(regs.fs_base),
    }
}
