//! What a wedge has mapped and dropped by itself: it tells after the fact, and is not to be believed beyond
//! what [`MapReport::decode`] has checked.

use super::{EMPTY, KERNEL_PAGE, LARGE, LARGE_BITS, Large, PAGE, READ, Space, WRITE, part};
use crate::process::Process;
use wedge::{Error, MapReport, Owner};

impl<W: Process> Space<W> {
    /// Takes note of what the wedge has done by itself; how much that was.
    pub fn catch_up(&mut self) -> Result<usize, Error> {
        let made = self.wedge.take_made();
        made.iter().for_each(|report| self.absorb(*report));
        if self.mappings > W::max_mappings() + frame::MAX_MADE {
            self.clear_all()?; // more than it was allowed: it is not the wedge's own code that counts
        }
        Ok(made.len())
    }

    /// User pages whose translations the wedge has dropped by itself: GVAs.
    pub fn take_invalidated(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.invalidated)
    }

    /// Takes note of what the wedge has done.
    pub(super) fn absorb(&mut self, report: MapReport) {
        match report {
            MapReport::Refused { page } => self.refuse(page),
            MapReport::Dropped { start, len } => {
                self.forget_within(start, len);
                self.close_pages(start, len);
                self.invalidated.push(start);
            }
            MapReport::Shown { page, offset, rights } => {
                self.invalidated.push(page); // the wedge has loaded the translation anew
                self.absorb_user(page);
                self.absorb_page(page, offset, rights.bits());
            }
            MapReport::Empty { start, len, offset } => {
                self.mappings += 1;
                self.empty.insert(offset);
                self.absorb_user(start);
                (0..len)
                    .step_by(PAGE as usize)
                    .for_each(|at| self.absorb_page(start + at, offset, READ | EMPTY));
            }
            MapReport::Mapped { start, len, offset, rights, owner, piece } => {
                self.mappings += 1;
                if piece {
                    self.parts.insert(part(start, LARGE_BITS));
                }
                let protection = self.absorb_owner(start, len, owner) | rights.bits();
                self.absorb_range(start, len, offset, protection);
            }
        }
    }

    /// Something of the user's is mapped there.
    fn absorb_user(&mut self, hva: u64) {
        self.note_near(hva);
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
                self.local_kernel.forget(hva, len);
                KERNEL_PAGE
            }
        }
    }

    fn absorb_range(&mut self, hva: u64, len: u64, offset: u64, protection: u64) {
        if len >= LARGE {
            self.forget_within(hva, len);
            self.forget_pages(hva, len);
            let writable = protection & WRITE != 0;
            self.large.insert(hva, Large { len, offset, writable, protection });
            return;
        }
        for at in (0..len).step_by(PAGE as usize) {
            self.absorb_page(hva + at, offset + at, protection);
        }
    }

    fn absorb_page(&mut self, hva: u64, offset: u64, protection: u64) {
        self.pages_of(protection).insert(hva, (offset, protection));
        if protection & WRITE != 0 {
            self.writable.add(offset, hva);
        }
    }

    /// The wedge has closed what was mapped in a range, or taken it away.
    fn close_pages(&mut self, start: u64, len: u64) {
        for (_, page) in self.pages.range_mut(start..start + len) {
            *page = (0, 0);
        }
    }
}
