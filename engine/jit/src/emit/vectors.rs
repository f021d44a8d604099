//! XSAVE and XRSTOR: the guest's vector registers are the host's, but the host has more of them, so
//! the mask of what to save is cut to what the guest knows. And RDTSCP.

use super::Emitter;
use crate::{
    asm::{register, slot, spill, sum},
    recover::Fixes,
    translate::Flow,
};
use iced_x86::{Code, Instruction, Register};
use wedge_abi::BlockExit;

impl Emitter<'_> {
    /// XSAVEOPT may save what it would rather leave out; so it becomes XSAVE.
    pub(super) fn save_vectors(&mut self, insn: &Instruction) -> Flow {
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        self.put_aside(&mut fixes, 1, Register::RDX);
        let [address, bias] = self.scratch_beside_mask(insn);
        self.put_aside(&mut fixes, 2, address);
        self.put_aside(&mut fixes, 3, bias);
        self.effective_address(insn, address);
        if self.ac {
            self.bias_for(address, bias);
        } else {
            self.asm.mov_imm(bias, self.layout.bias);
        }
        let known = self.asm.slot_operand(slot!(system.vector_mask));
        self.asm.op3(Code::VEX_Pext_r32_r32_rm32, Register::EAX, Register::EAX, known);
        self.asm.mov_imm(Register::RDX, 0);
        let save = Instruction::with1(Code::Xsave64_mem, sum(address, bias));
        self.asm.put(&save.expect("xsave64"));
        for (index, register) in [Register::RAX, Register::RDX, address, bias].iter().enumerate() {
            self.asm.load(*register, spill(index));
        }
        Flow::On
    }

    /// Two registers that are neither the mask nor in the operand nor RSP.
    fn scratch_beside_mask(&self, insn: &Instruction) -> [Register; 2] {
        let used = [
            Register::RAX,
            Register::RDX,
            Register::RSP,
            insn.memory_base().full_register(),
            insn.memory_index().full_register(),
        ];
        let mut free = (0..16).map(register).filter(|r| !used.contains(r));
        [(); 2].map(|()| free.next().expect("eleven are free"))
    }

    /// The wedge does it: user code that can jump here must not find an XRSTOR.
    pub(super) fn load_vectors(&mut self, insn: &Instruction) -> Flow {
        self.with_address(insn, BlockExit::LoadVectors)
    }

    /// RDTSC that waits for what comes before it, and the guest's TSC_AUX.
    pub(super) fn read_time(&mut self) -> Flow {
        self.asm.op(Code::Lfence);
        self.asm.op(Code::Rdtsc);
        self.asm.load(Register::RCX, slot!(system.tsc_aux));
        Flow::On
    }
}
