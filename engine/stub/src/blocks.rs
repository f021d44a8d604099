//! Where the block of a guest address is: the tables that the monitor keeps of translated code.

use crate::here;
use core::sync::atomic::{AtomicU64, Ordering};
use wedge_abi::{
    DEEP, DEEP_REACH, TABLE_LEN, TABLE_SLOTS, TABLES, USER_TABLES, VcpuPage, deep_slot,
};

/// The first address (GVA) at which user code cannot be.
pub const USER_END: u64 = 0x7fff_ffff_f000;

/// HVA of the kernel's block for a guest address, zero if the tables do not know it.
pub fn find(guest: u64, ac: bool) -> u64 {
    BlockTables(here(TABLES)).find(guest, ac)
}

/// HVA of the block of the program that runs, zero if there is none or the blocks are another's.
pub fn find_user(vcpu: &VcpuPage, guest: u64) -> u64 {
    if vcpu.code_space != vcpu.regs.cr3 || guest >= USER_END {
        0
    } else {
        BlockTables(here(TABLES + USER_TABLES)).find(guest, false)
    }
}

/// Tables of blocks by guest address, mapped for good: the kernel's two, for code outside and inside STAC..CLAC, or the
/// program's one; and behind them a larger one ([`DEEP`]), which the first two overflow into. By their HVA.
#[derive(Clone, Copy)]
struct BlockTables(usize);

impl BlockTables {
    fn find(self, guest: u64, ac: bool) -> u64 {
        let table = if ac { TABLE_LEN } else { 0 };
        let at = table + (guest as usize & (TABLE_SLOTS - 1)) * 16;
        // SAFETY: a slot of one of the first two tables.
        let [key, block] = unsafe { self.slot(at) };
        if key.load(Ordering::Acquire).wrapping_add(guest) == 0 {
            block.load(Ordering::Acquire)
        } else {
            self.search(guest, ac)
        }
    }

    /// The same, in the table behind the others; it has no room for the rare blocks inside STAC..CLAC.
    fn search(self, guest: u64, ac: bool) -> u64 {
        if ac {
            return 0;
        }
        for n in 0..DEEP_REACH {
            // SAFETY: the table has `DEEP_REACH` slots behind the last at which a search begins.
            let [key, block] = unsafe { self.slot(DEEP + (deep_slot(guest) + n) * 16) };
            if key.load(Ordering::Acquire) == guest {
                return block.load(Ordering::Acquire);
            }
        }
        0
    }

    /// A slot, by its offset: a key and an HVA. Another vCPU may be changing them: who reads a key first has a value that was
    /// or is its own.
    ///
    /// # Safety
    /// There is one at the offset.
    unsafe fn slot(self, at: usize) -> [&'static AtomicU64; 2] {
        let word = |at: usize| (self.0 + at) as *const AtomicU64;
        // SAFETY: as asked of the caller.
        unsafe { [&*word(at), &*word(at + 8)] }
    }
}
