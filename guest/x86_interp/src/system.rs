//! What the CPU asks of the machine around it.
//!
//! The interpreter knows no host, no device and no memory layout: it sees RAM through
//! [`GuestRam`] and everything else through [`System`]. Both are generic parameters, so that the
//! common case (a load or store that hits the software TLB) compiles to a few instructions.

use contract::GuestRam;
use x86::Fault;

pub use x86::cpuid::CpuidResult;

/// The machine around the CPU.
pub trait System {
    /// Guest RAM.
    type Ram: GuestRam;
    /// Guest RAM.
    fn ram(&self) -> &Self::Ram;
    /// What waits for the CPU, a set of [`contract::pending`] bits. Asked before every block: it
    /// should be one relaxed load.
    fn pending(&self) -> u32;
    /// Reads `data.len()` (1 to 8) bytes at a GPA that is not RAM. Nothing there: all ones.
    fn mmio_read(&mut self, gpa: u64, data: &mut [u8]);
    /// Writes 1 to 8 bytes at a GPA that is not RAM. Nothing there: lost.
    fn mmio_write(&mut self, gpa: u64, data: &[u8]);
    /// IN of `size` (1, 2, 4) bytes. Nothing there: all ones.
    fn port_read(&mut self, port: u16, size: u8) -> u32;
    /// OUT of `size` (1, 2, 4) bytes.
    fn port_write(&mut self, port: u16, size: u8, value: u32);
    /// RDMSR of a register that belongs to the machine (local APIC, TSC deadline, machine-check banks).
    /// # Errors
    /// #GP for one that does not exist.
    fn msr_read(&mut self, index: u32) -> Result<u64, Fault>;
    /// WRMSR of a register that belongs to the machine.
    /// # Errors
    /// #GP for one that does not exist, or a value it does not take.
    fn msr_write(&mut self, index: u32, value: u64) -> Result<(), Fault>;
    /// A model-specific register has been read or written, the CPU's own included.
    fn note_msr(&mut self, index: u32, write: bool, value: u64) {
        let _ = (index, write, value);
    }
    /// The CPUID model. The CPU itself overlays the bits that follow its state (OSXSAVE, XSAVE
    /// sizes).
    fn cpuid(&self, leaf: u32, subleaf: u32) -> CpuidResult;
    /// The time-stamp counter, in ticks.
    fn tsc(&mut self) -> u64;
    /// VMCALL or VMMCALL, with the number and the arguments in KVM's registers. `kernel` is false for user code. Returns `None` if
    /// this machine has no hypercalls; the instruction then raises #UD.
    fn hypercall(&mut self, kernel: bool, number: u64, arguments: [u64; 4]) -> Option<u64> {
        let _ = (kernel, number, arguments);
        None
    }
    /// PAUSE: the code spins until another CPU has done something.
    fn pause(&mut self) {}
    /// A random word for RDRAND and RDSEED.
    fn random(&mut self) -> Option<u64>;
    /// CR8: bits 7:4 of the local APIC's task priority.
    fn cr8(&mut self) -> u8;
    /// Sets CR8.
    fn set_cr8(&mut self, value: u8);
    /// The handler of an NMI has come to its IRET: NMIs are taken again.
    fn nmi_ended(&mut self) {}
    /// Executes a floating-point or SIMD instruction's computation, see [`VectorUnit`].
    fn vector_unit(&mut self) -> &mut dyn VectorUnit;
}

/// What a vector instruction works on. The interpreter has checked the instruction is permitted,
/// computed the effective address, loaded a memory source and will store a memory destination.
#[repr(C, align(64))]
#[derive(Clone, Debug)]
pub struct VectorOperands {
    /// The bytes at the instruction's memory operand, as loaded; the unit may change them, and if
    /// the instruction writes memory the interpreter stores them back.
    pub memory: [u8; 64],
    /// General registers (some vector instructions read or write them).
    pub gpr: [u64; 16],
    /// RFLAGS: only the status flags may change.
    pub rflags: u64,
    /// Offset of the instruction in CS: what an x87 instruction leaves in FIP.
    pub rip: u64,
    /// Effective address (offset in its segment) of the memory operand: what an x87 instruction
    /// leaves in FDP.
    pub address: u64,
}

impl Default for VectorOperands {
    fn default() -> Self {
        Self { memory: [0; 64], gpr: [0; 16], rflags: x86::flags::FIXED, rip: 0, address: 0 }
    }
}

/// A handle for an instruction that a [`VectorUnit`] has prepared; made once when the instruction
/// is decoded. A plain number whose meaning is the unit's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitCode(pub u64);

/// Executes x87, MMX, SSE, AVX (and AES, SHA, PCLMULQDQ, FMA, BMI...) instructions.
///
/// The reference CPU does not re-implement IEEE arithmetic: a unit uses the host's own
/// instructions on the guest's register values, which makes the results exact by construction.
///
/// Not for the unit: instructions that touch memory element by element (masked moves, gathers),
/// those that save or restore state (FXSAVE, XSAVE, FNSAVE, FNSTENV families, LDMXCSR, STMXCSR,
/// VZEROALL, VZEROUPPER) and WAIT.
pub trait VectorUnit {
    /// Prepares one instruction; `bytes` are its original encoding.
    ///
    /// # Errors
    /// #UD for an instruction the unit does not support.
    fn prepare(&mut self, insn: &iced_x86::Instruction, bytes: &[u8]) -> Result<UnitCode, Fault>;

    /// Executes an instruction: `code` is what [`VectorUnit::prepare`] returned for `insn`. Its
    /// memory operand, whatever its form, is `operands.memory`.
    ///
    /// # Errors
    /// #XM for an unmasked SIMD exception (MXCSR flags already updated in `fpu`, no other register
    /// changed); #MF for an x87 exception left pending by an earlier instruction; #UD as for
    /// `prepare` if the handle is of an earlier generation.
    fn run(
        &mut self,
        code: UnitCode,
        insn: &iced_x86::Instruction,
        fpu: &mut x86::fpu::FpuState,
        operands: &mut VectorOperands,
    ) -> Result<(), Fault>;
}
