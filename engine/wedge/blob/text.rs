//! Pages of user code without the monitor.
//!
//! The monitor changes some instructions before user code may execute them (`fast::scan`), and patches
//! system calls (`fast::sites`). A page may be mapped here only if it surely has neither: what is looked
//! for is a superset, found without decoding, and what may begin at the page's end counts. The bytes are
//! looked at each time, so that nothing has to be known about writes to the page.

use crate::layout::{RAM, SITE_PAGES, TABLES, site_page};

const PAGE: u64 = 4096;
/// First byte of all that is looked for.
const ESCAPE: u8 = 0x0f;
const EACH: u64 = 0x0101_0101_0101_0101;

/// The page at `gva`, at this offset in RAM, may be executed as it is.
pub fn is_plain(gva: u64, offset: u64) -> bool {
    !has_sites(gva) && (0..PAGE).step_by(8).all(|at| is_plain_word(RAM as u64 + offset, at))
}

/// There may be patched system calls in the page.
fn has_sites(gva: u64) -> bool {
    let (word, bit) = site_page(gva);
    // SAFETY: inside the tables, which are mapped for good.
    unsafe { *((TABLES + SITE_PAGES + word * 8) as *const u64) >> bit & 1 == 1 }
}

/// Nothing begins in these eight bytes of a page.
fn is_plain_word(page: u64, at: u64) -> bool {
    // SAFETY: inside the RAM window, aligned.
    let word = unsafe { core::ptr::read_volatile((page + at) as *const u64) };
    let other = word ^ (EACH * ESCAPE as u64);
    // The lowest bit set is at a zero byte; higher ones may not be.
    let mut zeros = other.wrapping_sub(EACH) & !other & EACH << 7;
    while zeros != 0 {
        let n = zeros.trailing_zeros() as u64 / 8;
        if word >> (n * 8) & 0xff == ESCAPE as u64 && is_odd(page, at + n) {
            return false;
        }
        zeros &= zeros - 1;
    }
    true
}

/// The escape byte at `at` may begin one of the instructions the monitor looks for: LAR, LSL, CPUID;
/// WRPKRU; XSAVE, XRSTOR; RDPID.
fn is_odd(page: u64, at: u64) -> bool {
    if at + 2 >= PAGE {
        return true;
    }
    // SAFETY: inside the page, as was just checked.
    let [second, third] = unsafe { core::ptr::read_volatile((page + at + 1) as *const [u8; 2]) };
    match second {
        0x02 | 0x03 | 0xa2 => true,
        0x01 => third == 0xef,
        0xae => matches!(third >> 3 & 7, 4 | 5) && third >> 6 != 3,
        0xc7 => third >= 0xf8,
        _ => false,
    }
}
