//! Memory operands of up to 64 bytes, and vector registers as numbers.

use crate::{
    cpu::Cpu,
    memory::{ram_load, ram_store},
    op::Op,
    system::System,
    tlb::Right,
};
use contract::GuestRam;
use x86::Fault;

/// 128 bits. As bytes, not as a `u128`: that would live in general registers.
pub(super) type Vector = [u8; 16];

/// 256 bits: the low and the high half.
pub(super) type Wide = [Vector; 2];

impl<S: System> Cpu<S> {
    /// Linear address of the memory operand; #GP(0) if it must be aligned to its size and is not.
    #[inline(always)]
    pub(super) fn vector_address<const ALIGNED: bool>(
        &self,
        op: &Op<S>,
        size: u64,
        write: bool,
    ) -> Result<u64, Fault> {
        let linear = self.linear(op, size, write)?;
        if ALIGNED && linear & (size - 1) != 0 {
            return Err(Fault::gp(0));
        }
        Ok(linear)
    }

    /// Loads a memory operand of `N` (4, 8, 16, 32) bytes; the rest of the 32 are zero. Up to 8
    /// bytes are loaded at once.
    #[inline(always)]
    pub(super) fn load_vector<const N: usize, const ALIGNED: bool>(
        &mut self,
        sys: &mut S,
        op: &Op<S>,
    ) -> Result<Wide, Fault> {
        let linear = self.vector_address::<ALIGNED>(op, N as u64, false)?;
        let Some(at) = self.tlb.lookup(self.view, Right::Read, linear, N as u64) else {
            return self.load_vector_slow(sys, op, linear, N);
        };
        let mut value = [[0; 16]; 2];
        match N {
            4 => value[0] = u128::from(ram_load::<S, 4>(sys, at)).to_le_bytes(),
            8 => value[0] = u128::from(ram_load::<S, 8>(sys, at)).to_le_bytes(),
            16 => sys.ram().read(at, &mut value[0]),
            _ => sys.ram().read(at, value.as_flattened_mut()),
        }
        Ok(value)
    }

    #[cold]
    #[inline(never)]
    fn load_vector_slow(
        &mut self,
        sys: &mut S,
        op: &Op<S>,
        linear: u64,
        size: usize,
    ) -> Result<Wide, Fault> {
        let mut value = [[0; 16]; 2];
        let result = self.read_bytes(sys, linear, &mut value.as_flattened_mut()[..size]);
        result.map_err(|fault| self.blame_stack(op, fault))?;
        Ok(value)
    }

    /// Stores the first `N` (4, 8, 16, 32) bytes to the memory operand. Up to 8 bytes are stored
    /// at once.
    #[inline(always)]
    pub(super) fn store_vector<const N: usize, const ALIGNED: bool>(
        &mut self,
        sys: &mut S,
        op: &Op<S>,
        value: Wide,
    ) -> Result<(), Fault> {
        let linear = self.vector_address::<ALIGNED>(op, N as u64, true)?;
        let Some(at) = self.tlb.lookup(self.view, Right::Write, linear, N as u64) else {
            return self.store_vector_slow(sys, op, linear, value, N);
        };
        let word = u128::from_le_bytes(value[0]) as u64;
        match N {
            4 => ram_store::<S, 4>(sys, at, word),
            8 => ram_store::<S, 8>(sys, at, word),
            16 => sys.ram().write(at, &value[0]),
            _ => sys.ram().write(at, value.as_flattened()),
        }
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn store_vector_slow(
        &mut self,
        sys: &mut S,
        op: &Op<S>,
        linear: u64,
        value: Wide,
        size: usize,
    ) -> Result<(), Fault> {
        let result = self.write_bytes(sys, linear, &value.as_flattened()[..size]);
        result.map_err(|fault| self.blame_stack(op, fault))
    }

    /// The low 128 bits of a vector register.
    #[inline(always)]
    pub(super) fn low(&self, index: u8) -> Vector {
        self.vcpu.fpu.xmm[index as usize & 15]
    }

    /// The high 128 bits of a vector register.
    #[inline(always)]
    pub(super) fn high(&self, index: u8) -> Vector {
        self.vcpu.fpu.ymm_high[index as usize & 15]
    }

    /// Writes the low 128 bits of a vector register and leaves the rest alone.
    #[inline(always)]
    pub(super) fn set_low(&mut self, index: u8, value: Vector) {
        self.vcpu.fpu.xmm[index as usize & 15] = value;
    }

    /// Writes the high 128 bits of a vector register.
    #[inline(always)]
    pub(super) fn set_high(&mut self, index: u8, value: Vector) {
        self.vcpu.fpu.ymm_high[index as usize & 15] = value;
    }
}
