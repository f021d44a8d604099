//! The hints: which pages (HVA) of the wedge's process are mapped, and to what, as far as the wedge remembers.
//!
//! A hash of its address gives each page one place in the table; a new hint overwrites that of another page there. What a
//! hint says is true, since every change of a mapping updates the page's hint.

use crate::{larges, mmu::PAGE};
use core::arch::asm;
use wedge_abi::{HINTS, Hint, Mapped, Rights};

/// Beside the offset in a hint: the monitor has looked at the page ([`keep`]).
pub const KEPT: u64 = 1;
/// The offset in the hint of a page that has been taken away. No page of RAM has this offset.
const DROPPED: u64 = !0xfff;

/// The place of a page's hint in the table. The hint there may be another page's.
pub fn slot(mapped: &mut Mapped, page: u64) -> Option<&mut Hint> {
    mapped.hints.get_mut(index(page))
}

fn index(hva: u64) -> usize {
    (hva / PAGE) as usize % HINTS
}

/// Remembers how a page is mapped.
pub fn set(mapped: &mut Mapped, page: u64, is: Hint) {
    if let Some(hint) = slot(mapped, page) {
        *hint = is;
    }
}

/// A range of HVAs is mapped anew or not at all: nothing is remembered of it, nor of large pages that lie in it as a whole.
pub fn forget_mapped(mapped: &mut Mapped, from: u64, to: u64) {
    forget(mapped, from, to);
    larges::forget(&mut mapped.larges, from, to);
}

/// Forgets the hints of the pages in a range of HVAs.
pub fn forget(mapped: &mut Mapped, from: u64, to: u64) {
    if to - from > HINTS as u64 * PAGE {
        clear(mapped);
    } else {
        for page in (from..to).step_by(PAGE as usize) {
            if let Some(hint) = slot(mapped, page) {
                // SAFETY: a reference. Of plain stores the compiler makes a memset, which is not here.
                unsafe { core::ptr::write_volatile(hint, Hint { page: 0, offset: 0 }) }
            }
        }
    }
}

/// The monitor closes a range: what is mapped there stays, to be shown again.
pub fn close(mapped: &mut Mapped, from: u64, to: u64) {
    for page in (from..to).step_by(PAGE as usize) {
        if let Some(hint) = slot(mapped, page)
            && hint.page & !7 == page
        {
            hint.page = page;
        }
    }
}

/// The monitor has looked at a page that is mapped for execution: [`wedge_abi::MapCommand::Keep`].
pub fn keep(mapped: &mut Mapped, page: u64, offset: u64) {
    set(mapped, page, Hint { page: page | Rights::READ_EXECUTE.bits(), offset: offset | KEPT });
}

/// What is mapped at a page shows the same of RAM, with these rights; none if it is closed.
pub fn shows(mapped: &Mapped, page: u64, offset: u64, rights: u64) -> bool {
    let hint = mapped.hints.get(index(page));
    page != 0 && hint.is_some_and(|hint| hint.page == page | rights && hint.offset == offset)
}

/// Remembers that a page has been taken away.
pub fn note_dropped(mapped: &mut Mapped, page: u64) {
    set(mapped, page, Hint { page, offset: DROPPED });
}

/// The same of the pages in a range of HVAs.
pub fn note_all_dropped(mapped: &mut Mapped, from: u64, to: u64) {
    for page in (from..to).step_by(PAGE as usize) {
        note_dropped(mapped, page);
    }
}

/// The wedge remembers that it has taken a page away, and nothing has been mapped there since.
pub fn is_dropped(mapped: &Mapped, page: u64) -> bool {
    shows(mapped, page, DROPPED, 0)
}

/// Forgets all hints.
pub fn clear(mapped: &mut Mapped) {
    // SAFETY: clears the table; there is no memset here.
    unsafe {
        asm!("rep stosq", inout("rdi") mapped.hints.as_mut_ptr() => _,
            inout("rcx") HINTS * size_of::<Hint>() / 8 => _, in("rax") 0);
    }
}

/// The page is known to be mapped, with some rights.
pub fn is_open(mapped: &Mapped, hva: u64) -> bool {
    mapped.hints.get(index(hva)).is_some_and(|hint| hint.page & !7 == hva && hint.page != hva)
}

/// The page is known to be mapped, with these rights.
pub fn is_open_with(mapped: &Mapped, hva: u64, rights: u64) -> bool {
    mapped.hints.get(index(hva)).is_some_and(|hint| hint.page == hva | rights & 7)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wedge_abi::Larges;

    const PAGES: [u64; 2] = [0x7f12_3456_7000, 0x7f12_3456_8000];
    const OFFSET: u64 = 0x1000;
    const READ: u64 = Rights::READ.bits();

    fn nothing_mapped() -> Mapped {
        Mapped {
            budget: 0,
            large: 0,
            lookups: 0,
            forks: 0,
            copied: 0,
            sites_closed: 0,
            shared_page: 0,
            larges: Larges::NONE,
            hints: [Hint::default(); HINTS],
        }
    }

    /// The hint of a page that was taken away is lost with each change that may map the page, and with no other.
    #[test]
    fn a_page_is_dropped_until_something_is_mapped() {
        type Change = fn(&mut Mapped);
        let changes: [(Change, bool); 7] = [
            (|mapped| set(mapped, PAGES[0], Hint { page: PAGES[0] | READ, offset: OFFSET }), false),
            (|mapped| keep(mapped, PAGES[0], OFFSET), false),
            (|mapped| forget(mapped, PAGES[0], PAGES[0] + PAGE), false),
            (|mapped| forget(mapped, 0, 1 << 47), false),
            // Another page in its place.
            (|mapped| note_dropped(mapped, PAGES[0] + HINTS as u64 * PAGE), false),
            (|mapped| close(mapped, PAGES[0], PAGES[1]), true),
            (|mapped| set(mapped, PAGES[1], Hint { page: PAGES[1] | READ, offset: OFFSET }), true),
        ];
        for (at, (change, stays)) in changes.into_iter().enumerate() {
            let mut mapped = nothing_mapped();
            assert!(!is_dropped(&mapped, PAGES[0]));
            note_dropped(&mut mapped, PAGES[0]);
            assert!(is_dropped(&mapped, PAGES[0]) && !is_open(&mapped, PAGES[0]));
            change(&mut mapped);
            assert_eq!(is_dropped(&mapped, PAGES[0]), stays, "change {at}");
        }
    }
}
