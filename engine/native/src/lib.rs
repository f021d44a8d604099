//! Runs single vector instructions on the host CPU.
//!
//! The interpreter is the oracle of the project, yet nobody should re-implement x87 transcendentals
//! or FMA rounding by hand. Guest and host are both x86-64, so the exact result of a vector
//! instruction is what the host's own instruction gives for the guest's register values. For each
//! distinct instruction [`HostVectorUnit`] generates a small routine, a *stub*, that loads the
//! registers the instruction uses, executes it, and stores what it changed:
//!
//! - `features` says which instructions are accepted: those whose whole effect is on registers and
//!   at most 64 bytes of memory, and that the host has.
//! - `plan` turns the guest's instruction into the one the stub executes: memory operand replaced
//!   by a plain pointer to [`VectorOperands::memory`], registers the stub needs renamed.
//! - `stub` assembles the routine.
//! - `memory` holds the executable memory and makes the call; all `unsafe` is there.
//! - `float` decides which exceptions the guest sees; `precision` and `dot` tell it what a run with masked exceptions does not show.
//!
//! Why it is safe to run what the guest asks for: an instruction is decoded and encoded again, so
//! only instructions `features` lists reach the CPU; their one memory operand points to 64 bytes
//! we own; and no exception can be raised, because SIMD exceptions are masked while the stub runs
//! (see `float`), and x87 exceptions only fire at the *next* waiting instruction, which is never
//! reached with one pending (see `x87`).

mod dot;
mod features;
mod float;
mod memory;
mod plan;
mod precision;
mod stub;
mod x87;

use std::collections::HashMap;

use iced_x86::Instruction;
use memory::{Entry, StubMemory};
use plan::{Kind, Plan};
use x86::{Fault, flags, fpu::FpuState};
use x86_interp::{UnitCode, VectorOperands, VectorUnit};

/// Bytes of executable memory; a Debian system fills about a hundredth.
const STUB_MEMORY_SIZE: usize = 16 << 20;

/// What is known of one prepared instruction.
#[derive(Clone, Copy)]
struct Routine {
    entry: Entry,
    kind: Kind,
    /// Status flags the instruction changes, as in RFLAGS.
    flags_written: u64,
}

/// What a [`UnitCode`] of this unit says: 24 bits of index, 28 of generation (hours of nothing but
/// filling the memory make it wrap, and then only the guest that does it suffers), 11 of FOP.
#[derive(Clone, Copy)]
struct Handle {
    index: u32,
    generation: u32,
    fop: u16,
}

impl Handle {
    const GENERATION_MASK: u32 = (1 << 28) - 1;

    fn pack(self) -> UnitCode {
        let low = u64::from(self.index) | u64::from(self.generation) << 24;
        UnitCode(low | u64::from(self.fop) << 52)
    }

    fn unpack(code: UnitCode) -> Self {
        Self {
            index: (code.0 & 0xff_ffff) as u32,
            generation: (code.0 >> 24) as u32 & Self::GENERATION_MASK,
            fop: (code.0 >> 52) as u16,
        }
    }
}

/// The vector unit that uses the host's own instructions.
pub struct HostVectorUnit {
    memory: StubMemory,
    routines: Vec<Routine>,
    /// By the instruction as the stub executes it: the guest's many addressing forms share one.
    known: HashMap<Vec<u8>, u32>,
    /// Counts the times everything was dropped.
    generation: u32,
}

impl HostVectorUnit {
    /// A unit without any routine yet.
    ///
    /// # Errors
    /// The host gives no memory that can be executed.
    pub fn new() -> std::io::Result<Self> {
        Self::with_capacity(STUB_MEMORY_SIZE)
    }

    /// A unit whose executable memory has `bytes` bytes (a multiple of the page size). When they
    /// are used up, all routines are dropped.
    ///
    /// # Errors
    /// The host gives no memory that can be executed.
    pub fn with_capacity(bytes: usize) -> std::io::Result<Self> {
        Ok(Self {
            memory: StubMemory::new(bytes)?,
            routines: Vec::new(),
            known: HashMap::new(),
            generation: 0,
        })
    }

    /// How many routines exist.
    pub fn routines(&self) -> usize {
        self.routines.len()
    }

    fn index_for(&mut self, insn: &Instruction) -> Result<u32, Fault> {
        let plan = Plan::new(insn).ok_or(Fault::ud())?;
        let key = plan.encode().ok_or(Fault::ud())?;
        if let Some(&index) = self.known.get(&key) {
            return Ok(index);
        }
        let stub = stub::build(&plan).ok_or(Fault::ud())?;
        let entry = match self.memory.install(&stub) {
            Some(entry) => entry,
            None => {
                self.drop_all();
                self.memory.install(&stub).ok_or(Fault::ud())?
            }
        };
        let index = self.routines.len() as u32;
        self.routines.push(Routine { entry, kind: plan.kind, flags_written: plan.flags_written });
        self.known.insert(key, index);
        Ok(index)
    }

    fn drop_all(&mut self) {
        self.memory.clear();
        self.routines.clear();
        self.known.clear();
        self.generation = (self.generation + 1) & Handle::GENERATION_MASK;
    }

    /// Runs an instruction between registers that is none of the guest's.
    fn run_alone(&mut self, insn: &Instruction, fpu: &mut FpuState) -> Result<(), Fault> {
        let index = self.index_for(insn)?;
        let routine = self.routines.get(index as usize).copied().ok_or(Fault::ud())?;
        let call = |fpu: &mut FpuState, operands: &mut VectorOperands, mxcsr| {
            self.memory.call(routine.entry, fpu, operands, mxcsr)
        };
        float::run(insn, fpu, &mut VectorOperands::default(), call)
    }

    /// The routine for a handle, or for the instruction if the handle is stale.
    #[inline]
    fn routine(&mut self, handle: Handle, insn: &Instruction) -> Result<Routine, Fault> {
        if handle.generation == self.generation
            && let Some(&routine) = self.routines.get(handle.index as usize)
        {
            return Ok(routine);
        }
        let index = self.index_for(insn)?;
        self.routines.get(index as usize).copied().ok_or(Fault::ud())
    }
}

impl VectorUnit for HostVectorUnit {
    fn prepare(&mut self, insn: &Instruction, bytes: &[u8]) -> Result<UnitCode, Fault> {
        let index = self.index_for(insn)?;
        Ok(Handle { index, generation: self.generation, fop: x87::opcode(bytes) }.pack())
    }

    fn run(
        &mut self,
        code: UnitCode,
        insn: &Instruction,
        fpu: &mut FpuState,
        operands: &mut VectorOperands,
    ) -> Result<(), Fault> {
        let handle = Handle::unpack(code);
        let routine = self.routine(handle, insn)?;
        let rflags = operands.rflags;
        let call = |fpu: &mut FpuState, operands: &mut VectorOperands, mxcsr| {
            self.memory.call(routine.entry, fpu, operands, mxcsr)
        };
        match routine.kind {
            Kind::Plain => {
                call(fpu, operands, 0);
            }
            Kind::Float => {
                let before = fpu.mxcsr;
                if let Err(fault) = float::run(insn, fpu, operands, call) {
                    dot::settle(self, insn, before, operands, fpu);
                    return Err(fault);
                }
            }
            Kind::X87 { waits } => x87::run(handle.fop, waits, fpu, operands, call)?,
        }
        // An instruction that changes no flags leaves the field alone, whatever it holds.
        if routine.flags_written != 0 {
            debug_assert_eq!(routine.flags_written & !flags::STATUS, 0);
            operands.rflags =
                rflags & !routine.flags_written | operands.rflags & routine.flags_written;
        }
        Ok(())
    }
}

#[cfg(test)]
host::choose!(host_linux::Linux);
#[cfg(test)]
mod tests;
