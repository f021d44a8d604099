//! Descriptors in memory: finding, reading and marking them (SDM 3.4.2, 3.5).
//!
//! Table accesses are implicit supervisor accesses: they succeed whatever the CPL, and a page
//! fault in them is a supervisor fault. A selector that lies outside its table is an error whose
//! vector depends on who asked, so every look-up is told whom to blame.

use crate::{cpu::Cpu, system::System};
use x86::{Fault, Gate, Segment, paging, segment::attr};

/// A descriptor and where it was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    /// Linear address.
    pub address: u64,
    pub raw: u64,
    /// The raw value as a segment register would hold it.
    pub segment: Segment,
}

impl Descriptor {
    /// The same bytes as a gate; long-mode gates still lack the upper half of their offset.
    pub fn gate(&self) -> Gate {
        Gate::from_descriptor(self.raw)
    }
}

/// An exception that names a selector.
pub(crate) fn selector_fault(vector: u8, selector: u16) -> Fault {
    Fault::with_code(vector, (selector & !3).into())
}

/// The selector refers to no descriptor.
pub(crate) fn is_null(selector: u16) -> bool {
    selector & !3 == 0
}

impl<S: System> Cpu<S> {
    /// Reads the descriptor a non-null selector names; `vector` if there is none.
    pub(crate) fn descriptor(
        &mut self,
        sys: &mut S,
        selector: u16,
        vector: u8,
    ) -> Result<Descriptor, Fault> {
        let address = self.descriptor_address(selector, 8);
        let address = address.ok_or(selector_fault(vector, selector))?;
        let raw = self.load_system::<8>(sys, address)?;
        Ok(Descriptor { address, raw, segment: Segment::from_descriptor(selector, raw) })
    }

    /// Upper half of a 16-byte descriptor of long mode: the low word is address bits 63:32.
    pub(crate) fn descriptor_high(
        &mut self,
        sys: &mut S,
        selector: u16,
        vector: u8,
    ) -> Result<u64, Fault> {
        let address = self.descriptor_address(selector, 16);
        let address = address.ok_or(selector_fault(vector, selector))?;
        let high = self.load_system::<8>(sys, address.wrapping_add(8))?;
        if high >> 40 & 0x1f != 0 {
            return Err(selector_fault(vector, selector));
        }
        Ok(high & 0xffff_ffff)
    }

    /// Linear address of a descriptor of `size` bytes, if its table has it.
    fn descriptor_address(&self, selector: u16, size: u64) -> Option<u64> {
        let v = &self.vcpu;
        let (base, limit) = match selector & 4 {
            0 => (v.gdtr.base, u32::from(v.gdtr.limit)),
            _ if v.ldtr.present() => (v.ldtr.base, v.ldtr.limit),
            _ => return None,
        };
        let offset = u64::from(selector & !7);
        let inside = offset + size - 1 <= u64::from(limit);
        inside.then(|| self.wrap_linear(base.wrapping_add(offset)))
    }

    /// Linear addresses have 32 bits outside long mode.
    pub(crate) fn wrap_linear(&self, linear: u64) -> u64 {
        if self.vcpu.long_mode() { linear } else { linear & 0xffff_ffff }
    }

    /// Sets the accessed bit of a code or data descriptor that is being loaded.
    pub(crate) fn mark_accessed(&mut self, sys: &mut S, found: &Descriptor) -> Result<(), Fault> {
        if found.segment.attr & attr::ACCESSED != 0 {
            return Ok(());
        }
        let byte = found.raw >> 40 | u64::from(attr::ACCESSED);
        self.store_system::<1>(sys, found.address.wrapping_add(5), byte)
    }

    /// Completes a long-mode system segment with its upper base half; legacy ones are complete.
    pub(crate) fn complete_system_segment(
        &mut self,
        sys: &mut S,
        found: &Descriptor,
    ) -> Result<Segment, Fault> {
        let mut segment = found.segment;
        if self.vcpu.long_mode() {
            let selector = segment.selector;
            segment.base |= self.descriptor_high(sys, selector, x86::vector::GP)? << 32;
            if !paging::canonical(segment.base) {
                return Err(selector_fault(x86::vector::GP, selector));
            }
        }
        Ok(segment)
    }
}
