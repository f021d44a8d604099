//! Regions: user and kernel memory lie in different GiB of a wedge's address space.

use crate::{jumps::LANDINGS_LEN, window::BIAS};

/// The first kernel GVA that has an HVA.
pub const KERNEL_START: u64 = 0xffff_8200_0000_0000;
/// From here to [`UPPER_USER`] no user page is installed: small kernel addresses end up here.
pub const NO_USER: u64 = BIAS;
/// See [`NO_USER`].
pub const UPPER_USER: u64 = 0x7e80_0000_0000;
/// The host's FS base in translated code while the guest's GS base is a user address other than zero: whatever
/// kernel code adds to it, the host refuses the access.
pub const NOWHERE: u64 = 0xffff_8000_0000_0000;

/// The host's FS base in translated code, for a GS base of the guest. Linux uses a base of
/// zero for its first CPU's variables as it starts (since 6.15). These variables lie in the last 2 GiB.
pub fn percpu(gs_base: u64, bias: u64) -> u64 {
    let is_user = gs_base.wrapping_sub(1) >> 63 == 0;
    if is_user { NOWHERE } else { gs_base.wrapping_add(bias) }
}

/// log2 of the bytes of a region: user and kernel memory do not share one.
pub const REGION_BITS: u32 = 30;
/// So many bytes before and behind a region of the kernel's are no user pages installed: a string instruction
/// that begins there would go on into the kernel's memory. The length of a large page, so that none is cut.
pub const BORDER: u64 = 2 << 20;
/// Regions of a 48-bit address space.
pub const REGION_COUNT: usize = 1 << (48 - REGION_BITS);
/// HVA of the table of biases by region: what translated code adds to an address that may be the
/// user's or the kernel's. Within 2 GiB of [`BIAS`], so that it is reached by GS.
pub const REGIONS: usize = BIAS as usize + 0x7fc0_0000;
/// Bytes of that table.
pub const REGIONS_LEN: usize = REGION_COUNT * 8;
/// Entry of [`REGIONS`] that makes any address non-canonical.
pub const POISON: u64 = 1 << 62;

/// The region of an address, as an index into [`REGIONS`].
pub const fn region(address: u64) -> usize {
    (address >> REGION_BITS) as usize & (REGION_COUNT - 1)
}

/// HVA of the table of changed copies (`Lookups`), each wedge's own: what translated kernel code adds to an
/// address of the user's that it reads. Behind that of biases, so that it is reached by GS, too.
pub const COPIES: usize = REGIONS + REGIONS_LEN;
/// Entries of it.
pub const COPY_COUNT: usize = 1 << 17;
/// Bytes of it.
pub const COPIES_LEN: usize = COPY_COUNT * 8;
/// The bits of an address that are its index there. None of the kernel's has the index of one of the user's.
pub const COPY_INDEX: u64 = 0xffff << 12 | 1 << 47;
/// HVA of the kernel's table of landings ([`crate::landing_slot`]). Behind that of copies, so that it is reached by GS, too.
pub const LANDINGS: usize = COPIES + COPIES_LEN;
/// HVA behind the tables that are reached by GS.
pub const NEAR_END: usize = LANDINGS + LANDINGS_LEN;
const _: () = assert!(NEAR_END <= BIAS as usize + (1 << 31));

/// The index in the table of copies that stands for the page of an address, and for others.
pub const fn copy_slot(gva: u64) -> usize {
    (gva >> 12 & 0xffff | (gva >> 47 & 1) << 16) as usize
}
