//! Assembles stubs.
//!
//! A stub is a leaf function `fn(fpu, operands, mxcsr) -> mxcsr` in the System V calling
//! convention:
//!
//! ```text
//!     mov   [rsp-16], edx          ; only if MXCSR matters (the red zone is ours)
//!     ldmxcsr [rsp-16]
//!     movups xmm1, [rdi + ...]     ; registers it uses  (or: fxrstor64 [rdi])
//!     mov   rcx, [rsi + ...]
//!     addps xmm1, [rsi]            ; the instruction
//!     mov   [rsi + ...], rcx       ; what it changed
//!     movups [rdi + ...], xmm1     ;                    (or: fxsave64 [rdi]; fninit)
//!     stmxcsr [rsp-16]             ; its flags are the result
//!     mov   eax, [rsp-16]
//!     mov   dword [rsp-16], 1f80h  ; what Rust code runs with
//!     ldmxcsr [rsp-16]
//!     ret
//! ```
//!
//! Upper halves come out exactly by construction: a legacy instruction's stub never touches them;
//! a VEX instruction's stub stores whatever the CPU left in the whole register, and if it had no
//! YMM operand that is zero, because the encoding zeroes it.

use core::mem::offset_of;

use iced_x86::{IcedError, Register, code_asm::*};
use x86::{
    flags,
    fpu::{FpuState, MXCSR_INIT},
};
use x86_interp::VectorOperands;

use crate::plan::{General, Kind, Plan, Vector};

/// Where MXCSR passes through memory, below the stack pointer and clear of what `pushfq` uses.
const MXCSR_SLOT: i32 = -16;

/// The machine code of a stub. Only [`build`] makes one: `memory` relies on that to call it.
pub(crate) struct Stub {
    code: Vec<u8>,
}

impl Stub {
    /// The bytes, position-independent.
    pub(crate) fn code(&self) -> &[u8] {
        &self.code
    }
}

/// Makes the stub for a plan; `None` if the instruction cannot be encoded.
pub(crate) fn build(plan: &Plan) -> Option<Stub> {
    let code = Assembly::new(plan).ok()?.assemble().ok()?;
    Some(Stub { code })
}

struct Assembly<'a> {
    asm: CodeAssembler,
    plan: &'a Plan,
    fpu: AsmRegister64,
    operands: AsmRegister64,
    scratch: AsmRegister64,
}

impl<'a> Assembly<'a> {
    fn new(plan: &'a Plan) -> Result<Self, IcedError> {
        Ok(Self {
            asm: CodeAssembler::new(64)?,
            plan,
            fpu: general(plan.fpu),
            operands: general(plan.operands),
            scratch: general(plan.scratch),
        })
    }

    fn assemble(mut self) -> Result<Vec<u8>, IcedError> {
        self.place_pointers()?;
        self.load_vectors()?;
        self.load_flags()?;
        for g in &self.plan.general {
            let slot = self.general_slot(g);
            self.asm.mov(general(g.host), slot)?;
        }
        self.asm.add_instruction(self.plan.insn)?;
        for g in self.plan.general.iter().filter(|g| g.written) {
            let slot = self.general_slot(g);
            self.asm.mov(slot, general(g.host))?;
        }
        self.store_flags()?;
        self.store_vectors()?;
        self.asm.ret()?;
        self.asm.assemble(0)
    }

    /// Takes MXCSR from its argument register, then moves the pointers where they stay.
    fn place_pointers(&mut self) -> Result<(), IcedError> {
        if self.plan.kind == Kind::Float {
            self.asm.mov(dword_ptr(rsp + MXCSR_SLOT), edx)?;
            self.asm.ldmxcsr(dword_ptr(rsp + MXCSR_SLOT))?;
        }
        if self.fpu != rdi {
            self.asm.mov(self.fpu, rdi)?;
        }
        if self.operands != rsi {
            self.asm.mov(self.operands, rsi)?;
        }
        Ok(())
    }

    fn load_vectors(&mut self) -> Result<(), IcedError> {
        if let Kind::X87 { .. } = self.plan.kind {
            return self.asm.fxrstor64(ptr(self.fpu));
        }
        for v in self.plan.vectors.iter().filter(|v| v.read) {
            let (low, high) = self.vector_slots(v);
            if !self.plan.vex {
                self.asm.movups(xmm(v), low)?;
                continue;
            }
            self.asm.vmovups(xmm(v), low)?;
            if self.plan.wide {
                self.asm.vinsertf128(ymm(v), ymm(v), high, 1)?;
            }
        }
        Ok(())
    }

    /// Stores the vector registers and leaves the CPU as Rust code expects it.
    fn store_vectors(&mut self) -> Result<(), IcedError> {
        if let Kind::X87 { .. } = self.plan.kind {
            self.asm.fxsave64(ptr(self.fpu))?;
            self.asm.fninit()?;
            return self.restore_mxcsr();
        }
        for v in self.plan.vectors.iter().filter(|v| v.written) {
            let (low, high) = self.vector_slots(v);
            if self.plan.vex {
                self.asm.vmovups(low, xmm(v))?;
                self.asm.vextractf128(high, ymm(v), 1)?;
            } else {
                self.asm.movups(low, xmm(v))?;
            }
        }
        if self.plan.vex && !self.plan.vectors.is_empty() {
            self.asm.vzeroupper()?;
        }
        if self.plan.kind == Kind::Float {
            self.asm.stmxcsr(dword_ptr(rsp + MXCSR_SLOT))?;
            self.asm.mov(eax, dword_ptr(rsp + MXCSR_SLOT))?;
            self.restore_mxcsr()?;
        }
        Ok(())
    }

    fn restore_mxcsr(&mut self) -> Result<(), IcedError> {
        self.asm.mov(dword_ptr(rsp + MXCSR_SLOT), MXCSR_INIT)?;
        self.asm.ldmxcsr(dword_ptr(rsp + MXCSR_SLOT))
    }

    fn load_flags(&mut self) -> Result<(), IcedError> {
        if !self.plan.reads_flags {
            return Ok(());
        }
        self.asm.mov(self.scratch, self.flags_slot())?;
        self.asm.and(self.scratch, flags::STATUS as i32)?;
        self.asm.push(self.scratch)?;
        self.asm.popfq()
    }

    /// Stores all of the host's flags: the caller takes the ones the instruction changed.
    fn store_flags(&mut self) -> Result<(), IcedError> {
        if self.plan.flags_written == 0 {
            return Ok(());
        }
        self.asm.pushfq()?;
        self.asm.pop(self.scratch)?;
        let slot = self.flags_slot();
        self.asm.mov(slot, self.scratch)
    }

    fn flags_slot(&self) -> AsmMemoryOperand {
        qword_ptr(self.operands + offset_of!(VectorOperands, rflags))
    }

    fn general_slot(&self, g: &General) -> AsmMemoryOperand {
        qword_ptr(self.operands + offset_of!(VectorOperands, gpr) + 8 * g.guest)
    }

    /// Where the low and the high 128 bits of a vector register are.
    fn vector_slots(&self, v: &Vector) -> (AsmMemoryOperand, AsmMemoryOperand) {
        let slot = |array| xmmword_ptr(self.fpu + array + 16 * v.number);
        (slot(offset_of!(FpuState, xmm)), slot(offset_of!(FpuState, ymm_high)))
    }
}

fn general(register: Register) -> AsmRegister64 {
    registers::get_gpr64(register).expect("plans name 64-bit general registers")
}

fn xmm(v: &Vector) -> AsmRegisterXmm {
    registers::get_xmm(Register::XMM0 + v.number as u32).expect("plans name XMM0 to XMM15")
}

fn ymm(v: &Vector) -> AsmRegisterYmm {
    registers::get_ymm(Register::YMM0 + v.number as u32).expect("plans name YMM0 to YMM15")
}
