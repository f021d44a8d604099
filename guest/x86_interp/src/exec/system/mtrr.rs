//! Memory type range registers (SDM 11.11): storage a kernel may program as it likes. All guest
//! memory behaves as write-back, which no guest can tell from the type it asked for.

use crate::{cpu::Cpu, system::System};
use x86::{Fault, Mtrr, msr, paging::PHYS_BITS};

/// IA32_MTRRCAP: variable ranges, fixed ranges, write-combining.
const CAPABILITIES: u64 = Mtrr::VARIABLE as u64 | 1 << 8 | 1 << 10;
/// IA32_MTRR_DEF_TYPE: type, fixed enable, enable.
const DEFAULT_TYPE_BITS: u64 = 0xcff;
/// A variable range's base: type and address. Its mask: valid bit and address.
const BASE_BITS: u64 = ((1 << PHYS_BITS) - 1) & !0xf00;
const MASK_BITS: u64 = ((1 << PHYS_BITS) - 1) & !0x7ff;

/// Which of the registers an index names.
enum Register {
    Capabilities,
    DefaultType,
    Fixed(usize),
    Variable { range: usize, mask: bool },
}

fn register(index: u32) -> Option<Register> {
    let first = msr::MTRR_PHYSBASE0;
    let fixed = msr::MTRR_FIXED.iter().position(|fixed| *fixed == index);
    Some(match index {
        msr::MTRR_CAP => Register::Capabilities,
        msr::MTRR_DEF_TYPE => Register::DefaultType,
        _ if (first..first + 2 * Mtrr::VARIABLE as u32).contains(&index) => {
            let slot = (index - first) as usize;
            Register::Variable { range: slot / 2, mask: slot & 1 != 0 }
        }
        _ => Register::Fixed(fixed?),
    })
}

/// UC, WC, WT, WP or WB.
fn is_type(kind: u8) -> bool {
    matches!(kind, 0 | 1 | 4 | 5 | 6)
}

impl<S: System> Cpu<S> {
    /// The register's value, if there is such an MTRR.
    pub(super) fn read_mtrr(&self, index: u32) -> Option<u64> {
        let state = &self.vcpu.mtrr;
        Some(match register(index)? {
            Register::Capabilities => CAPABILITIES,
            Register::DefaultType => state.default_type,
            Register::Fixed(n) => state.fixed[n],
            Register::Variable { range, mask } => state.variable[range][usize::from(mask)],
        })
    }

    /// Stores it, if there is such an MTRR; #GP(0) for a value it does not take.
    pub(super) fn write_mtrr(&mut self, index: u32, value: u64) -> Option<Result<(), Fault>> {
        let state = &mut self.vcpu.mtrr;
        let kind = is_type(value as u8);
        let (slot, valid) = match register(index)? {
            Register::Capabilities => return Some(Err(Fault::gp(0))),
            Register::DefaultType => {
                (&mut state.default_type, kind && value & !DEFAULT_TYPE_BITS == 0)
            }
            Register::Fixed(n) => {
                (&mut state.fixed[n], value.to_le_bytes().into_iter().all(is_type))
            }
            Register::Variable { range, mask: true } => {
                (&mut state.variable[range][1], value & !MASK_BITS == 0)
            }
            Register::Variable { range, mask: false } => {
                (&mut state.variable[range][0], kind && value & !BASE_BITS == 0)
            }
        };
        if !valid {
            return Some(Err(Fault::gp(0)));
        }
        *slot = value;
        Some(Ok(()))
    }
}
