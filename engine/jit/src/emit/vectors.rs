//! XSAVE and XRSTOR: the guest's vector registers are the host's, but the host has more of them, so
//! the mask of what to save is cut to what the guest knows. And RDTSCP.

use super::Emitter;
use crate::{
    asm::{register, slot, spill, sum},
    recover::Fixes,
    translate::Flow,
};
use iced_x86::{Code, Instruction, MemoryOperand, Mnemonic, Register};
use wedge_abi::BlockExit;
use x86::fpu::xstate;

/// In XCOMP_BV: the area is in the compacted form.
const COMPACTED: u64 = 1 << 63;

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

    /// The CPU does what a program asks for, as far as the guest knows of it. The operand is mapped, not looked up: most are on the
    /// stack.
    pub(super) fn move_vectors(&mut self, insn: &Instruction, bytes: &[u8]) -> Flow {
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        self.put_aside(&mut fixes, 1, Register::RDX);
        self.put_aside(&mut fixes, 2, Register::RCX);
        let loads = loads_vectors(insn);
        let unknown = if loads { self.unknown_components(insn) } else { Vec::new() };
        let known = self.asm.slot_operand(slot!(system.vector_mask));
        self.asm.op3(Code::VEX_Pext_r32_r32_rm32, Register::EAX, Register::EAX, known);
        self.asm.mov_imm(Register::RDX, 0);
        self.asm.raw(bytes);
        self.take_back();
        if loads {
            let over = self.asm.jmp_short();
            unknown.into_iter().for_each(|jump| self.asm.bind(jump));
            self.mark(false, fixes);
            self.take_back();
            self.exit(BlockExit::CallOut, insn.code() as u32, insn.ip());
            self.asm.bind_short(over);
        }
        Flow::On
    }

    fn take_back(&mut self) {
        for (index, register) in [Register::RAX, Register::RDX, Register::RCX].iter().enumerate() {
            self.asm.load(*register, spill(index));
        }
    }

    /// Jumps that are taken if an area to be loaded names a component that the guest has not: the program is to get a
    /// general-protection fault, which the host, that has more of them, would not raise (SDM 13.8).
    fn unknown_components(&mut self, insn: &Instruction) -> Vec<usize> {
        let header = [(512, xstate::SUPPORTED), (520, xstate::SUPPORTED | COMPACTED)];
        let look = |(at, known): (i64, u64)| {
            let displacement = (insn.memory_displacement64() as i64).wrapping_add(at);
            let operand = MemoryOperand::new(
                insn.memory_base(),
                insn.memory_index(),
                insn.memory_index_scale(),
                displacement,
                8,
                false,
                Register::None,
            );
            self.asm.load_mem(Register::RCX, operand);
            self.asm.mov_imm(Register::RDX, !known);
            let all = [Register::RCX, Register::RCX, Register::RDX];
            self.asm.op3(Code::VEX_Pext_r64_r64_rm64, all[0], all[1], all[2]);
            let known = self.asm.jrcxz();
            let unknown = self.asm.jmp(self.stubs.exit);
            self.asm.bind_short(known);
            unknown
        };
        header.map(look).to_vec()
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

/// XRSTOR, as a program has it.
pub(super) fn loads_vectors(insn: &Instruction) -> bool {
    matches!(insn.mnemonic(), Mnemonic::Xrstor | Mnemonic::Xrstor64)
}
