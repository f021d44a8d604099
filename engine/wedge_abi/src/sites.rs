//! Patched system calls: the table they jump through, and their stubs.

use crate::{
    areas::AREA_LEN,
    window::{CACHE, CACHE_LEN},
};

/// Where a patched system call finds its stub: 8-byte pointers. `jmp [SITES + n]` takes the place of `mov
/// eax, nr; syscall`, and its last two bytes, the upper half of this address, that of the SYSCALL: 16 is no
/// instruction in 64-bit code, so a jump to the SYSCALL is #UD, and found by that. No program for Linux has
/// memory here unless it asks for that very address, and null pointers do not reach that far. gVisor patches
/// its programs' calls in the same way, has its own table at 0x60000, and counts on a fault as long as
/// nothing is there.
pub const SITES: usize = 0x0016_0000;
/// Bytes of the table, and of the page behind it ([`crate::AREA`]).
pub const SITES_LEN: usize = 0x1_0000;
/// A program with pages below this address may have, or come to have, some where the table is: what one page
/// table of the guest's leads to. Programs at fixed addresses begin here (lld's) or higher.
pub const NEAR_SITES_END: u64 = 2 << 20;
/// Entries of the table.
pub const MAX_SITES: usize = (SITES_LEN - AREA_LEN) / 8;
/// The stubs: the end of the code cache.
pub const STUBS: usize = CACHE + CACHE_LEN - MAX_SITES * STUB_LEN;
/// Bytes of a stub: `mov eax, nr; movabs rcx, behind the call; jmp` to the blob's entry; and its
/// tail, where the site goes on.
pub const STUB_LEN: usize = 64;
/// Offset in a stub of its tail: the instruction that the patch has displaced, and a jump back.
pub const STUB_TAIL: usize = 32;
/// Offset in a stub of the address behind the call.
pub const STUB_RETURN: usize = 7;
/// Bytes of a patch: of `mov eax, nr; syscall`, or of `syscall; cmp rax, imm32`, of which it leaves the last
/// byte.
pub const SITE_LEN: u64 = 7;
/// Bytes of `cmp rax, imm32`.
pub const CMP_LEN: u64 = 6;
/// What a patched INT 0x80 becomes: an interrupt that no kernel opens to programs, so that it faults. To have the
/// host trap the real one costs several times as much where that is a virtual machine.
pub const STAND_IN: u8 = 0x81;
/// System calls by trap after which a site is worth patching.
pub const HOT: u8 = 32;
/// Counters for that.
pub const HEAT: usize = 256;

/// What the user has at this address and up may be in the neighbourhood of [`SITES`].
pub const fn near_sites(address: u64) -> bool {
    address < NEAR_SITES_END
}

/// A range has something of [`SITES`] in it.
pub const fn hides_sites(start: u64, len: u64) -> bool {
    start < (SITES + SITES_LEN) as u64 && start.saturating_add(len) > SITES as u64
}
