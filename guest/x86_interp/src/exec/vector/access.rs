//! Memory operands of up to 64 bytes, and vector registers as numbers.

use crate::{
    cpu::Cpu,
    memory::{ram_load, ram_store},
    op::Op,
    system::System,
    tlb::Right,
};
use x86::Fault;

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

    /// Loads a memory operand of `N` (4, 8, 16, 32) bytes; the rest of the 32 are zero.
    #[inline(always)]
    pub(super) fn load_vector<const N: usize, const ALIGNED: bool>(
        &mut self,
        sys: &mut S,
        op: &Op<S>,
    ) -> Result<[u128; 2], Fault> {
        let linear = self.vector_address::<ALIGNED>(op, N as u64, false)?;
        let Some(at) = self.tlb.lookup(self.view, Right::Read, linear, N as u64) else {
            return self.load_vector_slow(sys, op, linear, N);
        };
        let pair = |at| {
            let high = ram_load::<S, 8>(sys, at + 8);
            u128::from(ram_load::<S, 8>(sys, at)) | u128::from(high) << 64
        };
        Ok(match N {
            4 => [ram_load::<S, 4>(sys, at).into(), 0],
            8 => [ram_load::<S, 8>(sys, at).into(), 0],
            16 => [pair(at), 0],
            _ => [pair(at), pair(at + 16)],
        })
    }

    #[cold]
    #[inline(never)]
    fn load_vector_slow(
        &mut self,
        sys: &mut S,
        op: &Op<S>,
        linear: u64,
        size: usize,
    ) -> Result<[u128; 2], Fault> {
        let mut bytes = [0; 32];
        let result = self.read_bytes(sys, linear, &mut bytes[..size]);
        result.map_err(|fault| self.blame_stack(op, fault))?;
        Ok(to_words(&bytes))
    }

    /// Stores the first `N` (4, 8, 16, 32) bytes to the memory operand.
    #[inline(always)]
    pub(super) fn store_vector<const N: usize, const ALIGNED: bool>(
        &mut self,
        sys: &mut S,
        op: &Op<S>,
        value: [u128; 2],
    ) -> Result<(), Fault> {
        let linear = self.vector_address::<ALIGNED>(op, N as u64, true)?;
        let Some(at) = self.tlb.lookup(self.view, Right::Write, linear, N as u64) else {
            return self.store_vector_slow(sys, op, linear, value, N);
        };
        if N == 4 {
            ram_store::<S, 4>(sys, at, value[0] as u64);
            return Ok(());
        }
        for i in 0..N / 8 {
            let word = (value[i / 2] >> (64 * (i % 2))) as u64;
            ram_store::<S, 8>(sys, at + 8 * i as u64, word);
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
        value: [u128; 2],
        size: usize,
    ) -> Result<(), Fault> {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&value[0].to_le_bytes());
        bytes[16..].copy_from_slice(&value[1].to_le_bytes());
        let result = self.write_bytes(sys, linear, &bytes[..size]);
        result.map_err(|fault| self.blame_stack(op, fault))
    }

    /// The low 128 bits of a vector register.
    #[inline(always)]
    pub(super) fn low(&self, index: u8) -> u128 {
        u128::from_le_bytes(self.vcpu.fpu.xmm[index as usize & 15])
    }

    /// The high 128 bits of a vector register.
    #[inline(always)]
    pub(super) fn high(&self, index: u8) -> u128 {
        u128::from_le_bytes(self.vcpu.fpu.ymm_high[index as usize & 15])
    }

    /// Writes the low 128 bits of a vector register and leaves the rest alone.
    #[inline(always)]
    pub(super) fn set_low(&mut self, index: u8, value: u128) {
        self.vcpu.fpu.xmm[index as usize & 15] = value.to_le_bytes();
    }

    /// Writes the high 128 bits of a vector register.
    #[inline(always)]
    pub(super) fn set_high(&mut self, index: u8, value: u128) {
        self.vcpu.fpu.ymm_high[index as usize & 15] = value.to_le_bytes();
    }
}

fn to_words(bytes: &[u8; 32]) -> [u128; 2] {
    let (low, high) = bytes.split_at(16);
    [low, high].map(|half| half.iter().rev().fold(0, |word, byte| word << 8 | u128::from(*byte)))
}
