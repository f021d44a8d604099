//! What the parent and its child share, and where it lies.
// UNSAFETY: refers to memory that is mapped at fixed addresses.
#![allow(unsafe_code)]

use std::slice;

use anyhow::{Result, ensure};
use jit::{Layout, Level, Version};
use wedge_abi::{Lookup, MAX_TEXTS, VcpuPage, place};
use x86::flags;

pub(super) const WINDOW: u64 = 0x2100_0000_0000;
pub(super) const CACHE_LEN: u64 = 1 << 20;
pub(super) const TABLES_LEN: u64 = wedge_abi::TABLES_LEN as u64;
pub(super) const BIAS: u64 = 0x7e00_0000_0000;
/// Where everything is in parent and child; a program's code has no bias.
pub(super) const LAYOUT: Layout = Layout {
    level: Level::Kernel,
    several: true,
    bias: BIAS,
    regions: BIAS + 0x7fff_0000,
    copies: Some(BIAS + 0x7fff_0000 + REGIONS_LEN),
    cache: WINDOW,
    cache_len: CACHE_LEN,
    vcpu_page: WINDOW + CACHE_LEN,
    table: WINDOW + CACHE_LEN + VCPU_PAGE_LEN,
    landings: Some(LANDINGS),
    checks: false,
    lookups: None,
    verified: None,
    origins: None,
};
/// The same for a program's code.
pub(super) const OF_USER: Layout = Layout { level: Level::User, bias: 0, landings: None, ..LAYOUT };
/// HVA of the table of landings: the start of the jump tables, mapped once more within 2 GiB of the bias.
pub(super) const LANDINGS: u64 = BIAS + 0x7ff0_0000;
/// The parent's writable view of cache and tables.
pub(super) const VIEW: u64 = 0x2200_0000_0000;
/// [`Mailbox`] lies behind the vCPU page.
pub(super) const MAILBOX: u64 = LAYOUT.vcpu_page + 0x8000;
const _: () = assert!(0x8000 + size_of::<Mailbox>() <= VCPU_PAGE_LEN as usize);
/// Bytes of both.
pub(super) const VCPU_PAGE_LEN: u64 = 0x2_0000;
/// The table of look-ups, if operands are looked up.
pub(super) const LOOKUPS: u64 = WINDOW + 0x2000_0000;
/// Where look-ups find text, data and user memory, one behind the other.
pub(super) const SHOWN: u64 = 0x2300_0000_0000;
pub(super) const REGIONS_LEN: u64 = 512 * 8;
/// Of the table of copies, in which nothing is hidden.
pub(super) const COPIES_LEN: u64 = 512 * 8;
pub(super) const LOOKUPS_LEN: u64 = (wedge_abi::LOOKUP_COUNT * size_of::<Lookup>()) as u64;
/// Behind it the words that say which pages of a program's code may be executed.
pub(super) const VERIFIED: u64 = LOOKUPS + LOOKUPS_LEN;
pub(super) const VERIFIED_LEN: u64 = 4096;
/// Behind them the origins of texts.
pub(super) const ORIGINS: u64 = VERIFIED + VERIFIED_LEN;
pub(super) const ORIGINS_LEN: u64 = MAX_TEXTS as u64 * 8;
/// The place of the only page of a program's code.
pub(super) const TEXT_PLACE: u64 = place(TEXT, 0x12_3000);
/// The text of that place.
pub(super) const TEXT: usize = 5;
/// The only page of a program's code, and what its word holds once it may be executed.
pub(super) const VERSION: Version =
    Version { index: wedge_abi::FIRST_VERSION as u32, second: None, generation: 7 };

/// What parent and child tell each other.
#[repr(C, align(64))]
pub(super) struct Mailbox {
    pub(super) guest_fx: [u8; 512],
    pub(super) host_fx: [u8; 512],
    /// Signal that ended the run, zero for an exit.
    pub(super) signal: u64,
    /// Host PC it interrupted.
    pub(super) pc: u64,
    /// Host instructions that are left until an interrupt comes; [`NEVER`]: none comes.
    pub(super) steps: u64,
    /// Host instructions single-stepped so far.
    pub(super) stepped: u64,
    /// PC of the last one.
    pub(super) last: u64,
    /// The interrupt has been taken.
    pub(super) interrupted: u64,
    /// PCs at which it can be.
    pub(super) boundaries: [u64; MAX_BOUNDARIES],
    pub(super) boundary_count: usize,
}

/// Flags translated code keeps in the host's.
pub(super) const IN_HOST: u64 = flags::STATUS | flags::DF | flags::ID;
/// For [`Mailbox::steps`].
pub(super) const NEVER: u64 = u64::MAX;
/// Boundaries of a case's code, at the most.
pub(super) const MAX_BOUNDARIES: usize = 1 << 13;

/// # Safety
/// The bytes are mapped for good and nobody else uses them meanwhile.
pub(super) unsafe fn bytes_at(address: u64, len: usize) -> &'static mut [u8] {
    // SAFETY: the caller's promise.
    unsafe { slice::from_raw_parts_mut(address as *mut u8, len) }
}

pub(super) fn vcpu_page() -> &'static mut VcpuPage {
    // SAFETY: mapped by `Rig::new`, and only one of the two processes runs at a time.
    unsafe { &mut *(LAYOUT.vcpu_page as *mut VcpuPage) }
}

pub(super) fn mailbox() -> &'static mut Mailbox {
    // SAFETY: as for the vCPU page.
    unsafe { &mut *(MAILBOX as *mut Mailbox) }
}

pub(super) fn memfd(len: u64) -> Result<i32> {
    // SAFETY: plain system calls.
    unsafe {
        let fd = libc::memfd_create(c"rig".as_ptr(), libc::MFD_CLOEXEC);
        ensure!(fd >= 0 && libc::ftruncate(fd, len as i64) == 0, "no memory object");
        Ok(fd)
    }
}

pub(super) fn map(fd: i32, offset: u64, at: u64, len: u64, protection: i32) -> Result<()> {
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: NOREPLACE never touches what is mapped.
    let got =
        unsafe { libc::mmap(at as *mut _, len as usize, protection, flags, fd, offset as i64) };
    ensure!(got as u64 == at, "cannot map {at:#x}: {}", std::io::Error::last_os_error());
    Ok(())
}
