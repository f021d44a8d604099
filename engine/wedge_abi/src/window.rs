//! The reserved part of a wedge's address space: what lies where in it.
//!
//! The constants are the addresses of the usual base ([`Base`]).

use crate::regions::{BORDER, KERNEL_START, UPPER_USER};

/// Where the reserved part of a wedge's address space lies: what is the wedge's own, at the same distances
/// from each other wherever that is. The constants of this file are the addresses of the usual base. It is
/// one entry of the guest's uppermost page table, so a program whose pages are in its way has all of it
/// moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Base(u64);

impl Base {
    /// The base of the reserved part in this entry of the uppermost page table.
    pub const fn of_entry(entry: u16) -> Self {
        Self(((entry as u64) << ENTRY_BITS).wrapping_sub(BIAS))
    }

    /// The entry of the uppermost page table.
    pub const fn entry(self) -> u16 {
        (self.bias() >> ENTRY_BITS) as u16
    }

    /// Where something lies that has the address `usual` with the usual base.
    pub const fn at(self, usual: u64) -> u64 {
        usual.wrapping_add(self.0)
    }

    /// Where something lies with this base (HVA) that lies at `usual` with the usual base.
    pub const fn hva(self, usual: usize) -> usize {
        self.at(usual as u64) as usize
    }

    /// Added to a kernel GVA to get its HVA, modulo 2^64.
    pub const fn bias(self) -> u64 {
        self.at(BIAS)
    }

    /// Added to the GVA of a 32-bit kernel to get its HVA, modulo 2^64.
    pub const fn narrow_bias(self) -> u64 {
        narrow_bias(self.bias())
    }

    /// The first kernel GVA that has an HVA.
    pub const fn kernel_start(self) -> u64 {
        KERNEL_START.wrapping_sub(self.0)
    }
}

/// Added to the GVA of a 32-bit kernel to get its HVA, if `bias` is added to a 64-bit kernel's. The last GiB of 32 bits lies where
/// the last GiB of 64 bits does.
pub const fn narrow_bias(bias: u64) -> u64 {
    bias.wrapping_sub(1 << 32)
}

/// log2 of the bytes that an entry of the uppermost page table stands for.
pub const ENTRY_BITS: u32 = 39;
/// The wedge's window: one aligned 4 GiB, so that a filter needs one comparison per half. It lies, like
/// all that is not the guest's, between [`NO_USER`] and [`UPPER_USER`]. Programs choose addresses at
/// random (JavaScript engines do), so what is taken from them elsewhere is as little as possible.
pub const WINDOW: usize = BIAS as usize + 0x40_0000_0000;
/// Bytes of the window.
pub const WINDOW_LEN: usize = 1 << 32;
/// The blob: text and constants, read-execute.
pub const BLOB: usize = WINDOW;
/// The pages shared by the monitor and one wedge.
pub const SHARED: usize = WINDOW + 0x10_0000;
/// The stack the wedge runs on.
pub const STACK: usize = WINDOW + 0x20_0000;
/// Bytes of that stack.
pub const STACK_LEN: usize = 0x4000;
/// The alternate signal stack.
pub const ALT_STACK: usize = WINDOW + 0x30_0000;
/// Bytes of it.
pub const ALT_STACK_LEN: usize = 0x8000;
/// The gate page: what the last instructions before user code read. User code can read and write it.
pub const GATE: usize = WINDOW + 0x38_0000;
/// The page that says which process has the turn ([`TurnsPage`]). All wedges of a vCPU share the page.
pub const TURNS: usize = WINDOW + 0x39_0000;
/// What a wedge and the process of its user code tell each other ([`UserPage`]), where user code has one of
/// its own.
pub const USER_PAGE: usize = WINDOW + 0x3a_0000;
/// What that process is to do before user code runs ([`Journal`]); it cannot write it.
pub const JOURNAL: usize = WINDOW + 0x3b_0000;
/// The vCPU page, shared by all wedges of a vCPU.
pub const VCPU_PAGE: usize = WINDOW + 0x40_0000;
/// Bytes of it, and of the page behind it ([`crate::AREA_ALIAS`]).
pub const VCPU_PAGE_LEN: usize = 0x5000;
/// What taps do and have noted ([`Taps`]), shared by all wedges of a vCPU.
pub const TAPS: usize = WINDOW + 0x50_0000;
/// The indirect-jump tables, shared by all wedges.
pub const TABLES: usize = WINDOW + 0x1000_0000;
/// The code cache, shared by all wedges; writable in the monitor only.
pub const CACHE: usize = WINDOW + 0x2000_0000;
/// What the host calls the memory object of the kernel's part of the code cache.
pub const KERNEL_CODE_OBJECT: &str = "ring3-code";
/// Bytes of the code cache.
pub const CACHE_LEN: usize = 128 << 20;
/// The look-ups of a wedge's user code (`Lookups`), within 2 GiB of the code cache.
pub const LOOKUPS: usize = WINDOW + 0x3000_0000;
/// The marks of RAM pages, a byte each: not zero means that the monitor decides.
pub const MARKS: usize = WINDOW + 0x4000_0000;
/// The bits of the mark of a page from whose bytes something was made, as far as they are only that.
pub const CODE_MARKS: u8 = 3;
/// The mark of a page of code that has been copied. Programs execute the copy, which lies behind RAM in the memory object.
pub const COPIED_PAGE: u8 = 0x13;
/// The mark of an empty page that nobody can write unnoticed.
pub const EMPTY_PAGE: u8 = 11;
/// The pages of words behind RAM in the memory object ([`crate::words`]).
pub const WORDS: usize = MARKS + RAM_MAX / 4096;
/// End of the part of the window that may be mapped.
pub const WINDOW_END: usize = WORDS + crate::words::LEN;
/// End of user addresses.
pub const TOP: usize = 0x7fff_ffff_f000;
/// Added to a kernel GVA to get its HVA, modulo 2^64.
pub const BIAS: u64 = 0x7e00_0000_0000;
/// HVA of all of guest RAM, closed to user code: where the wedge reads page tables.
pub const RAM: usize = BIAS as usize + 0x48_0000_0000;
/// The most RAM that has room there, in bytes. Behind it is a border, and its marks fill whole pages.
pub const RAM_MAX: usize = UPPER_USER as usize - RAM - (4096 << 12);
const _: () = assert!(RAM + RAM_MAX + BORDER as usize <= UPPER_USER as usize);
/// The descriptor of guest RAM in a wedge, the only one it has.
pub const RAM_FD: u64 = 0;
/// The descriptor in a wedge by which it hears of the process of its user code, and lets it go on.
pub const LISTENER_FD: u64 = 1;
/// Where in the blob that process begins: bytes behind its start.
pub const USER_START: usize = 16;
