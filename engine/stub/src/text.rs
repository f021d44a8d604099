//! Pages of user code: which the wedge may map without the monitor, and which may be executed at all where
//! there are protection keys.
//!
//! The monitor changes some instructions before user code may execute them (`fast::scan`), and patches
//! system calls (`fast::sites`). A page may be mapped here only if it surely has neither: what is looked
//! for is a superset, found without decoding. The bytes are
//! looked at each time, so that nothing has to be known about writes to the page.
//!
//! Where there are protection keys ([`is_closed`]) user code executes copies of pages that only this process
//! has: devices write guest RAM while user code runs, and what they write nobody has searched. A copy is
//! searched when it is complete, byte by byte, and with the bytes beside it: whichever of two neighbours
//! comes later sees the other. What is beside it counts even if it is not to be executed; that is seldom
//! wrong, and costs no more than that the page is interpreted.

use crate::{
    host::{shown, user_word},
    reach,
    search::{ESCAPE, PageBytes, has},
    word,
};
use wedge_abi::{PLAIN_PAGES, RAM, SITE_PAGES, TABLES, keys, plain_slot, print_of, site_page};

const PAGE: u64 = 4096;

/// The page at `gva`, at this offset in RAM, may be executed as it is: it has nothing that looks like what is
/// changed, or the monitor has looked at a page with the same bytes.
pub fn is_plain(gva: u64, offset: u64) -> bool {
    // SAFETY: inside RAM, which is mapped for good.
    let bytes = unsafe { PageBytes::at(reach(RAM) as u64 + offset) };
    !has_sites(gva) && (!has(bytes, is_odd) || is_known(bytes))
}

/// The monitor has found nothing to change in these bytes ([`wedge_abi::print`]).
fn is_known(bytes: PageBytes) -> bool {
    let print = print_of(bytes.words());
    // SAFETY: inside the tables, which are mapped for good.
    unsafe { word(reach(TABLES) + PLAIN_PAGES + plain_slot(print) * 8) == print }
}

/// The copy mapped at `page` (HVA) has no bytes that open protection keys, nor do bytes across its borders.
///
/// # Safety
/// The page is mapped and readable.
pub unsafe fn is_closed(page: u64) -> bool {
    // SAFETY: as asked of the caller.
    let bytes = unsafe { PageBytes::at(shown(page)) };
    !has(bytes, opens_keys) && is_closed_below(page, bytes) && is_closed_above(page, bytes)
}

/// Two bytes of the page below and one of this one, or one and two.
fn is_closed_below(page: u64, bytes: PageBytes) -> bool {
    let [first, second] = bytes.two(0);
    let may_end = matches!(first, 0x01 | 0xae)
        || keys::opens([0x0f, 0x01, first])
        || keys::opens([0x0f, 0xae, first]);
    let below = if may_end { user_word(page.wrapping_sub(8)).unwrap_or(0) } else { 0 };
    let [last_but_one, last] = [(below >> 48) as u8, (below >> 56) as u8];
    !keys::opens([last_but_one, last, first]) && !keys::opens([last, first, second])
}

/// The same with the page above.
fn is_closed_above(page: u64, bytes: PageBytes) -> bool {
    let [last_but_one, last] = bytes.two(PAGE - 2);
    let above =
        if keys::may_begin([last_but_one, last]) { user_word(page + PAGE).unwrap_or(0) } else { 0 };
    let [first, second] = [above as u8, (above >> 8) as u8];
    !keys::opens([last_but_one, last, first]) && !keys::opens([last, first, second])
}

/// There may be patched system calls in the page.
pub(crate) fn has_sites(gva: u64) -> bool {
    let (index, bit) = site_page(gva);
    // SAFETY: inside the tables, which are mapped for good.
    unsafe { word(reach(TABLES) + SITE_PAGES + index * 8) >> bit & 1 == 1 }
}

/// The escape byte at `at` begins bytes that open keys, all of them in the page.
fn opens_keys(page: PageBytes, at: u64) -> bool {
    let [second, third] = if at + 2 < PAGE { page.two(at + 1) } else { [0; 2] };
    keys::opens([ESCAPE, second, third])
}

/// The escape byte at `at` may begin one of the instructions the monitor looks for, as far as it finds them,
/// which is inside a page: LAR, LSL, CPUID; WRPKRU; XSAVE, XRSTOR; RDPID.
fn is_odd(page: PageBytes, at: u64) -> bool {
    if at + 1 >= PAGE {
        return false;
    }
    let second = page.byte(at + 1);
    let third = if at + 2 < PAGE { page.byte(at + 2) } else { 0 };
    match second {
        0x02 | 0x03 | 0xa2 => true,
        0x01 => third == 0xef,
        0xae => matches!(third >> 3 & 7, 4 | 5) && third >> 6 != 3,
        0xc7 => third >= 0xf8,
        _ => false,
    }
}
