//! 32-bit user code as 64-bit Linux has it: flat segments with selectors that every such kernel uses.

use crate::{Segment, Vcpu, seg, segment::attr};

/// The selector of 32-bit user code.
pub const USER_CS_32: u16 = 0x23;
/// The selector of a program's data and stack.
pub const USER_DS: u16 = 0x2b;
/// The selector of 64-bit user code.
pub const USER_CS_64: u16 = 0x33;

/// User code with this state is 32-bit code in Linux's flat segments, below 4 GiB.
pub fn is_narrow(vcpu: &Vcpu) -> bool {
    let [cs, ss] = [seg::CS, seg::SS].map(|segment| &vcpu.seg[segment]);
    vcpu.long_mode()
        && vcpu.rip >> 32 == 0
        && cs.selector == USER_CS_32
        && ss.selector == USER_DS
        && is_flat(cs, attr::CODE)
        && is_flat(ss, 0)
        && [seg::DS, seg::ES].iter().all(|segment| is_plain(&vcpu.seg[*segment]))
}

/// A program's data segment that reaches everywhere, or none at all.
fn is_plain(segment: &Segment) -> bool {
    match segment.selector {
        0..=3 => !segment.present(),
        USER_DS => is_flat(segment, 0),
        _ => false,
    }
}

/// All of the lower 4 GiB, for user code, 32-bit, readable if it is code and else writable.
fn is_flat(segment: &Segment, code: u16) -> bool {
    const WANTED: u16 = attr::P | attr::S | attr::G | attr::DB | attr::RW | 3 << attr::DPL_SHIFT;
    let known = segment.attr & !attr::ACCESSED;
    known == WANTED | code && segment.base == 0 && segment.limit == u32::MAX
}
