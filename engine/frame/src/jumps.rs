//! The tables by which guest addresses of code become addresses in the code cache.

use crate::sites::STUBS;

/// Slots of one indirect-jump table: one for each value of an address's low 16 bits.
pub const TABLE_SLOTS: usize = 1 << 16;
/// Bytes of one table: an 8-byte key, the negated GVA, and an 8-byte HVA a slot.
pub const TABLE_LEN: usize = TABLE_SLOTS * 16;
/// Slots of the table behind them, which the wedge searches: 8-byte GVA, 8-byte HVA.
pub const DEEP_SLOTS: usize = 1 << 17;
/// Slots looked at for one GVA.
pub const DEEP_REACH: usize = 8;
/// Offset in the tables of that table, which is that much longer than its slots.
pub const DEEP: usize = 2 * TABLE_LEN;
/// A GVA times this, without its lowest [`DEEP_SHIFT`] bits, is where the search for it starts.
pub const DEEP_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// See [`DEEP_FACTOR`].
pub const DEEP_SHIFT: u32 = 64 - DEEP_SLOTS.trailing_zeros();

/// Where the search for a GVA starts; it ends before `DEEP_REACH` slots, the table never.
pub const fn deep_slot(guest: u64) -> usize {
    (guest.wrapping_mul(DEEP_FACTOR) >> DEEP_SHIFT) as usize
}

/// Offset in the tables of a bit for each page of user code, by [`site_page`]: it may hold patched
/// system calls.
pub const SITE_PAGES: usize = DEEP + (DEEP_SLOTS + DEEP_REACH) * 16;
/// log2 of those bits.
const SITE_PAGE_BITS: u32 = 16;

/// The word and the bit in it that stand for the page of a GVA, and for others.
pub const fn site_page(gva: u64) -> (usize, u32) {
    let bit = (gva >> 12).wrapping_mul(DEEP_FACTOR) >> (64 - SITE_PAGE_BITS);
    (bit as usize / 64, bit as u32 % 64)
}

/// Offset in the tables of those for translated user code, whole pages.
pub const USER_TABLES: usize = (SITE_PAGES + (1 << SITE_PAGE_BITS) / 8).next_multiple_of(4096);
/// Bytes of all.
pub const TABLES_LEN: usize = USER_TABLES + SITE_PAGES;
/// Translated user code lies at the end of the code cache, before the stubs: bytes.
pub const USER_CACHE_LEN: usize = 24 << 20;
/// Its first byte.
pub const USER_CACHE: usize = STUBS - USER_CACHE_LEN;
/// Words of [`crate::Told::code_pages`].
pub const CODE_PAGE_WORDS: usize = 64;

/// The word and the bit in it that stand for a page of translated user code, and for others.
pub const fn code_page(gva: u64) -> (usize, u32) {
    let bit = (gva >> 12).wrapping_mul(DEEP_FACTOR) >> 52;
    (bit as usize / 64, bit as u32 % 64)
}
