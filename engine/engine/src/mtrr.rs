//! Memory type range registers (SDM 11.11).
//!
//! They describe caching, which nothing here depends on, but kernels read and write them and expect
//! to read back what they wrote.

use x86::{Fault, msr};

/// Variable ranges.
const VARIABLE: usize = 8;
/// IA32_MTRR_PHYSBASE0; bases and masks alternate.
const PHYSBASE0: u32 = 0x200;
const PHYSMASK_LAST: u32 = PHYSBASE0 + 2 * VARIABLE as u32 - 1;
/// Fixed-range registers: one of 64 KiB units, two of 16 KiB, eight of 4 KiB.
const FIXED: [u32; 11] =
    [0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f];
/// IA32_MTRRCAP: the number of variable ranges, fixed ranges, write combining.
const CAPABILITIES: u64 = VARIABLE as u64 | 1 << 8 | 1 << 10;
/// Write-back.
const WRITE_BACK: u64 = 6;
/// IA32_MTRR_DEF_TYPE: enabled, fixed ranges enabled.
const ENABLED: u64 = 1 << 11;
const FIXED_ENABLED: u64 = 1 << 10;
/// IA32_MTRR_PHYSMASK: valid.
const VALID: u64 = 1 << 11;
/// Bits of a page-aligned physical address.
const ADDRESS: u64 = ((1 << x86::cpuid::PHYSICAL_ADDRESS_BITS) - 1) & !0xfff;

/// The registers of one CPU, as firmware would have left them: everything write-back.
#[derive(Clone, Debug)]
pub(crate) struct Mtrrs {
    default: u64,
    fixed: [u64; FIXED.len()],
    variable: [u64; 2 * VARIABLE],
}

impl Default for Mtrrs {
    fn default() -> Self {
        Self {
            default: ENABLED | WRITE_BACK,
            fixed: [0x0606_0606_0606_0606; FIXED.len()],
            variable: [0; 2 * VARIABLE],
        }
    }
}

impl Mtrrs {
    /// Reads a register; `None` if `index` is not one of ours.
    pub(crate) fn read(&self, index: u32) -> Option<u64> {
        match index {
            msr::MTRR_CAP => Some(CAPABILITIES),
            msr::MTRR_DEF_TYPE => Some(self.default),
            PHYSBASE0..=PHYSMASK_LAST => self.variable.get((index - PHYSBASE0) as usize).copied(),
            _ => self.fixed.get(fixed_index(index)?).copied(),
        }
    }

    /// Writes a register; `None` if `index` is not one of ours.
    pub(crate) fn write(&mut self, index: u32, value: u64) -> Option<Result<(), Fault>> {
        let (slot, valid) = match index {
            msr::MTRR_CAP => return Some(Err(Fault::gp(0))),
            msr::MTRR_DEF_TYPE => {
                let defined = value & !(ENABLED | FIXED_ENABLED | 0xff) == 0;
                (&mut self.default, defined && memory_type(value))
            }
            PHYSBASE0..=PHYSMASK_LAST => {
                let slot = self.variable.get_mut((index - PHYSBASE0) as usize)?;
                let mask = index & 1 == 1;
                let valid = if mask { value & !(ADDRESS | VALID) == 0 } else { base(value) };
                (slot, valid)
            }
            _ => {
                let slot = self.fixed.get_mut(fixed_index(index)?)?;
                (slot, value.to_le_bytes().iter().all(|&byte| memory_type(byte.into())))
            }
        };
        if !valid {
            return Some(Err(Fault::gp(0)));
        }
        *slot = value;
        Some(Ok(()))
    }
}

fn fixed_index(index: u32) -> Option<usize> {
    FIXED.iter().position(|&register| register == index)
}

fn base(value: u64) -> bool {
    value & !(ADDRESS | 0xff) == 0 && memory_type(value)
}

/// The low byte is a memory type: UC, WC, WT, WP, WB.
fn memory_type(value: u64) -> bool {
    matches!(value & 0xff, 0 | 1 | 4 | 5 | 6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut mtrrs = Mtrrs::default();
        for (index, value) in [(0x200, 0xc000_0000), (0x201, 0x3fff_c000_0800), (0x26f, 0x05)] {
            assert_eq!(mtrrs.write(index, value), Some(Ok(())), "{index:#x}");
            assert_eq!(mtrrs.read(index), Some(value));
        }
        assert_eq!(mtrrs.read(0xfe), Some(0x508));
        assert_eq!(mtrrs.read(0x2ff), Some(0x806));
    }

    #[test]
    fn bad_values_are_refused() {
        let mut mtrrs = Mtrrs::default();
        for (index, value) in
            [(0xfe, 0), (0x2ff, 2), (0x2ff, 1 << 12), (0x200, 3), (0x201, 1 << 46), (0x250, 7)]
        {
            assert_eq!(mtrrs.write(index, value), Some(Err(Fault::gp(0))), "{index:#x}");
        }
        assert_eq!(mtrrs.read(0x2ff), Some(0x806), "unchanged");
    }

    #[test]
    fn other_registers_are_not_ours() {
        let mut mtrrs = Mtrrs::default();
        for index in [0x10, 0x210, 0x251, 0x277] {
            assert_eq!(mtrrs.read(index), None);
            assert_eq!(mtrrs.write(index, 0), None);
        }
    }
}
