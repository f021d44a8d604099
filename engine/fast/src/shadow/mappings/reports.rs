//! What a wedge has mapped and dropped by itself: it tells after the fact, and is not to be believed beyond
//! what [`MapReport::decode`] has checked.

use super::{
    super::LARGE, EMPTY, KERNEL_PAGE, LARGE_BITS, Large, Mappings, PAGE, READ, WRITE, part,
};
use wedge::{MapReport, Owner};

impl Mappings {
    /// Takes note of what the wedge has done. Returns the page (HVA) whose translation it has dropped, if it has.
    pub(in super::super) fn absorb(&mut self, report: MapReport) -> Option<u64> {
        match report {
            MapReport::Refused { page } => self.absorb_refused(page),
            MapReport::Dropped { start, len } => {
                self.absorb_dropped(start, len);
                return Some(start);
            }
            MapReport::KernelDropped { page } => {
                self.absorb_kernel_dropped(page);
                return Some(page);
            }
            MapReport::Shown { page, offset, rights } => {
                self.absorb_user(page);
                self.insert(page, offset, rights.bits());
                return Some(page); // the wedge has loaded the translation anew
            }
            MapReport::Code { start, len, offset } => self.absorb_code(start, len, offset),
            MapReport::ShownCode { page, offset } => {
                self.absorb_user(page);
                self.add_code(page, offset);
                return Some(page);
            }
            MapReport::Empty { start, len, offset } => self.absorb_empty(start, len, offset),
            MapReport::Mapped { start, len, offset, rights, owner, piece } => {
                self.made += 1;
                if piece {
                    self.parts.insert(part(start, LARGE_BITS));
                }
                let protection = self.absorb_owner(start, len, owner) | rights.bits();
                self.absorb_range(start, len, offset, protection);
            }
        }
        None
    }

    /// The wedge has unmapped a page instead of letting user code execute the page. The next fetch from there is
    /// interpreted.
    fn absorb_refused(&mut self, hva: u64) {
        self.user.remove(hva);
        self.refused.insert(hva);
    }

    /// The wedge has closed what was mapped in a range, or taken it away.
    fn absorb_dropped(&mut self, start: u64, len: u64) {
        self.forget_large_within(start, len);
        for (hva, page) in self.user.range_mut(start..start + len) {
            *page = (0, 0);
            self.seen.doubt(*hva);
        }
    }

    /// The wedge has unmapped a page of the kernel's, or nothing was mapped there.
    fn absorb_kernel_dropped(&mut self, hva: u64) {
        if self.kernel.remove(&hva).is_some() {
            self.others += 1; // what the page was mapped with may be cut in two
            self.local.forget(hva, PAGE);
        }
    }

    /// Shared copies of pages of code are mapped in a range.
    fn absorb_code(&mut self, start: u64, len: u64, offset: u64) {
        self.made += 1;
        self.absorb_user(start);
        for at in (0..len).step_by(PAGE as usize) {
            self.add_code(start + at, offset + at);
        }
    }

    /// Memory without content stands for an empty page of RAM in a range.
    fn absorb_empty(&mut self, start: u64, len: u64, offset: u64) {
        self.made += 1;
        self.empty.insert(offset);
        self.absorb_user(start);
        for at in (0..len).step_by(PAGE as usize) {
            self.insert(start + at, offset, READ | EMPTY);
        }
    }

    /// Something of the user's is mapped there.
    fn absorb_user(&mut self, hva: u64) {
        self.near.note(hva);
        self.user_regions.add(hva);
    }

    /// What goes beside the rights of pages that are mapped for this one.
    fn absorb_owner(&mut self, hva: u64, len: u64, owner: Owner) -> u64 {
        if len >= LARGE || owner == Owner::Kernel {
            self.others += 1;
        }
        match owner {
            Owner::User => {
                self.absorb_user(hva);
                0
            }
            Owner::Kernel => {
                self.local.forget(hva, len);
                KERNEL_PAGE
            }
        }
    }

    fn absorb_range(&mut self, hva: u64, len: u64, offset: u64, protection: u64) {
        if len >= LARGE {
            let writable = protection & WRITE != 0;
            self.add_large(hva, Large { len, offset, writable, protection });
            return;
        }
        for at in (0..len).step_by(PAGE as usize) {
            self.insert(hva + at, offset + at, protection);
        }
    }
}
