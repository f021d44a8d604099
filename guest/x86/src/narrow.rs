//! 32-bit code that needs no look at its segments: user code as 64-bit Linux has it, and kernels like Linux.

use crate::{
    Segment, Vcpu,
    control::{cr0, cr4},
    flags, seg,
    segment::attr,
};

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

/// Where 32-bit kernels have their memory, and programs none: the last GiB (GVA).
pub const KERNEL_START: u64 = 0xc000_0000;

/// The GVA by which engines know one of a 32-bit guest's. The last GiB of 32 bits becomes the last GiB of 64: the kernel's memory is in
/// the upper half then, as a 64-bit kernel's is.
pub const fn wide(gva: u64) -> u64 {
    if gva >= KERNEL_START && gva >> 32 == 0 { gva | !0 << 32 } else { gva }
}

/// The GVA, as [`wide`] gives it, that translated code of a 32-bit guest has accessed at an HVA. `None` if this code has no memory
/// there.
///
/// The HVA of the kernel's memory is its wide GVA plus `bias`. The HVA of a program's memory is its GVA. `is_user`: the code is a
/// program's. `reaches_user`: the code may access a program's memory, since it is a program's itself, or the kernel's inside
/// STAC..CLAC.
pub fn accessed(hva: u64, bias: u64, is_user: bool, reaches_user: bool) -> Option<u64> {
    let kernels = hva.wrapping_sub(bias);
    match hva < KERNEL_START {
        true => reaches_user.then_some(hva),
        false => (!is_user && kernels >= wide(KERNEL_START)).then_some(kernels),
    }
}

/// Code with this state is a 32-bit guest's under PAE paging, and its segments are flat, as Linux has them. The segment that
/// finds what each CPU or thread has of its own ([`own_segment`]) may have any base, or be none. The other one may be anything. Kernel code lies
/// in the last GiB. All may use x87, and programs vectors and the counter of time, so no instruction is refused that 64-bit code
/// executes. A kernel uses no vectors before it lets programs do so.
pub fn is_of_narrow_guest(vcpu: &Vcpu) -> bool {
    let flat = |segment: usize, wanted: u16| {
        let segment = &vcpu.seg[segment];
        is_whole(segment, wanted) && segment.base == 0
    };
    const MODE: u64 = cr0::PE | cr0::PG | cr0::TS | cr0::EM;
    let place = if vcpu.cpl() == 0 { KERNEL_START..1 << 32 } else { 0..KERNEL_START };
    let own = &vcpu.seg[own_segment(vcpu.cpl())];
    vcpu.cr0 & MODE == cr0::PE | cr0::PG
        && vcpu.cr4 & cr4::PAE != 0
        && (vcpu.cr4 & (cr4::OSFXSR | cr4::TSD) == cr4::OSFXSR || vcpu.cpl() == 0)
        && !vcpu.long_mode()
        && vcpu.rflags & flags::VM == 0
        && place.contains(&vcpu.rip)
        && flat(seg::CS, attr::CODE | attr::DB)
        && flat(seg::SS, attr::DB)
        && [seg::DS, seg::ES].iter().all(|data| flat(*data, 0))
        && (is_whole(own, 0) || !own.present())
}

/// The segment by which code of a 32-bit Linux at a privilege level finds what its CPU, or its thread, has of its own.
pub const fn own_segment(cpl: u8) -> usize {
    if cpl == 0 { seg::FS } else { seg::GS }
}

/// A segment of 4 GiB that may be read, and written unless it is code; with these bits set as well.
fn is_whole(segment: &Segment, wanted: u16) -> bool {
    const ALWAYS: u16 = attr::P | attr::S | attr::G | attr::RW;
    const LOOKED_AT: u16 = ALWAYS | attr::CODE | attr::DC;
    segment.limit == u32::MAX && segment.attr & (LOOKED_AT | wanted) == ALWAYS | wanted
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A 32-bit Linux at a privilege level.
    fn guest(cpl: u8) -> Vcpu {
        let dpl = u16::from(cpl) << attr::DPL_SHIFT;
        let data = attr::P | attr::S | attr::G | attr::DB | attr::RW | dpl;
        let flat = |attr: u16| Segment { selector: 8, attr, limit: u32::MAX, base: 0 };
        let mut seg = [flat(data); 6];
        seg[seg::CS] = flat(data | attr::CODE);
        seg[own_segment(cpl)].base = 0x1234;
        Vcpu {
            cr0: cr0::PE | cr0::PG,
            cr4: cr4::PAE | cr4::OSFXSR,
            rip: if cpl == 0 { KERNEL_START } else { 0x0804_8000 },
            seg,
            ..Vcpu::default()
        }
    }

    #[test]
    fn linux_for_32_bits_is_known() {
        assert!([0, 3].iter().all(|cpl| is_of_narrow_guest(&guest(*cpl))));
    }

    #[test]
    fn what_differs_from_it_is_interpreted() {
        let changes: [fn(&mut Vcpu); 11] = [
            |v| v.cr0 &= !cr0::PG,
            |v| v.cr0 |= cr0::TS,
            |v| v.cr4 &= !cr4::PAE,
            |v| v.efer |= crate::control::efer::LMA,
            |v| v.rflags |= flags::VM,
            |v| v.seg[seg::DS].base = 1,
            |v| v.seg[seg::ES].limit = 0xffff_f000,
            |v| v.seg[seg::SS].attr &= !attr::DB,
            |v| v.seg[seg::DS].attr |= attr::DC,
            |v| v.seg[seg::CS].attr |= attr::DC,
            |v| v.seg[own_segment(v.cpl())].limit = 0xffff,
        ];
        for (cpl, (at, change)) in
            [0, 3].into_iter().flat_map(|cpl| changes.iter().enumerate().map(move |c| (cpl, c)))
        {
            let mut vcpu = guest(cpl);
            change(&mut vcpu);
            assert!(!is_of_narrow_guest(&vcpu), "change {at} at level {cpl}");
        }
        for change in [cr4::OSFXSR, cr4::TSD] {
            let mut program = guest(3);
            program.cr4 ^= change;
            assert!(!is_of_narrow_guest(&program), "a program may do less: {change:#x}");
        }
        let mut low = guest(0);
        low.rip = 0x10_0000;
        assert!(!is_of_narrow_guest(&low), "a kernel's code below the last GiB");
    }

    #[test]
    fn the_segment_of_its_own_may_be_none() {
        for cpl in [0, 3] {
            let mut vcpu = guest(cpl);
            vcpu.seg[own_segment(cpl)] = Segment::null(0, 0);
            assert!(is_of_narrow_guest(&vcpu), "level {cpl}");
        }
    }
}
