//! Host mappings for a guest address space: filled on faults, dropped on flushes.

use ram::Ram;
use std::collections::HashSet;
use wedge::{Error, Exit, Order, TOP, WINDOW, WINDOW_LEN, Wedge};
use x86::{
    exception::pf,
    paging::{self, Access, Roots, Translation, WalkMemory},
};
use x86_interp::GuestRam;

const READ: u64 = 1;
const WRITE: u64 = 2;
const EXECUTE: u64 = 4;
const PAGE: u64 = 4096;
const LARGE: u64 = 1 << 21;
/// Pages looked at around a fault.
const AROUND: u64 = 16;
/// Mappings one space may hold; the host allows 65,530 and fails badly near that.
const MAX_MAPPINGS: usize = 30_000;

/// What a page fault came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The page is mapped now: go on.
    Mapped,
    /// Not the host's to answer: interpret the instruction.
    Interpret,
}

/// A wedge and what is mapped in it.
pub struct Space {
    pub wedge: Wedge,
    /// CR3 without the no-flush bit.
    pub cr3: u64,
    /// Mappings made since the last clearing.
    mappings: usize,
    /// Large pages mapped as such.
    large: HashSet<u64>,
    /// RAM pages (by offset) that are mapped writable.
    pub writable: HashSet<u64>,
}

impl Space {
    pub fn new(wedge: Wedge, cr3: u64) -> Self {
        Self { wedge, cr3, mappings: 0, large: HashSet::new(), writable: HashSet::new() }
    }

    /// Runs guest code; `None` if the mappings ordered before could not all be made.
    pub fn run(&mut self) -> Result<Option<Exit>, Error> {
        self.wedge.run()
    }

    /// Drops every mapping.
    pub fn clear(&mut self) -> Result<(), Error> {
        if self.mappings != 0 {
            let above = (WINDOW + WINDOW_LEN) as u64;
            self.unmap(0, WINDOW as u64)?;
            self.unmap(above, TOP as u64 - above)?;
        }
        self.mappings = 0;
        self.large.clear();
        self.writable.clear();
        Ok(())
    }

    /// After orders have failed: starts over with nothing mapped.
    pub fn forget(&mut self) {
        self.mappings = 1;
        // A failure here shows again at the next run.
        let _ = self.clear();
    }

    /// Drops the mapping of one page.
    pub fn drop_page(&mut self, linear: u64) -> Result<(), Error> {
        if !usable(linear) || self.mappings == 0 {
            return Ok(());
        }
        let base = linear & !(LARGE - 1);
        if self.large.remove(&base) {
            return self.unmap(base, LARGE);
        }
        self.unmap(linear & !(PAGE - 1), PAGE)
    }

    fn unmap(&mut self, address: u64, len: u64) -> Result<(), Error> {
        self.wedge.order(Order { address, len, offset: 0, protection: 0 })
    }

    /// Answers a page fault of user code at `address` with the CPU's error code.
    pub fn answer(
        &mut self,
        ram: &Ram,
        roots: Roots,
        address: u64,
        error: u32,
    ) -> Result<Answer, Error> {
        if !usable(address) {
            return Ok(Answer::Interpret);
        }
        let access = Access {
            write: error & pf::WRITE != 0,
            fetch: error & pf::FETCH != 0,
            user: true,
            smap_override: false,
        };
        let Ok(found) = paging::walk(&mut &*ram, roots, address, access) else {
            return Ok(Answer::Interpret);
        };
        if self.mappings > MAX_MAPPINGS {
            self.clear()?;
        }
        if found.page_bits >= 21 && self.map_large(ram, address, &found)? {
            return Ok(Answer::Mapped);
        }
        if !self.map_page(ram, address & !(PAGE - 1), &found, access.write)? {
            return Ok(Answer::Interpret);
        }
        if found.page_bits == 12 {
            self.map_around(ram, roots, address)?;
        }
        Ok(Answer::Mapped)
    }

    /// Maps one 4 KiB page; false if it is not RAM, or written and not writable RAM.
    fn map_page(
        &mut self,
        ram: &Ram,
        address: u64,
        found: &Translation,
        write: bool,
    ) -> Result<bool, Error> {
        let Some(page) = ram.page(found.gpa & !(PAGE - 1)) else { return Ok(false) };
        if write && !page.writable {
            return Ok(false);
        }
        let writable = found.writable && found.dirty && page.writable;
        if writable {
            if ram.is_code(page.offset) {
                ram.note_write(page.offset, 1);
            }
            self.writable.insert(page.offset);
        }
        self.map(address, PAGE, page.offset, protection(found, writable))?;
        Ok(true)
    }

    /// Maps the 2 MiB around `address` if they are contiguous RAM without code.
    fn map_large(&mut self, ram: &Ram, address: u64, found: &Translation) -> Result<bool, Error> {
        let base = address & !(LARGE - 1);
        let gpa = found.gpa & !(LARGE - 1);
        let (first, last) = (ram.page(gpa), ram.page(gpa + LARGE - PAGE));
        let (Some(first), Some(last)) = (first, last) else { return Ok(false) };
        let pages = || (0..LARGE / PAGE).map(|n| first.offset + n * PAGE);
        let plain = first.writable && last.writable && last.offset == first.offset + LARGE - PAGE;
        let inside = usable(base) && usable(base + LARGE - 1);
        if !plain || !inside || pages().any(|offset| ram.is_code(offset)) {
            return Ok(false);
        }
        let writable = found.writable && found.dirty;
        if writable {
            self.writable.extend(pages());
        }
        self.large.insert(base);
        self.map(base, LARGE, first.offset, protection(found, writable))?;
        Ok(true)
    }

    /// Maps the neighbours whose page-table entries the guest has used already: a fault each
    /// would bring the same.
    fn map_around(&mut self, ram: &Ram, roots: Roots, address: u64) -> Result<(), Error> {
        let start = address & !(AROUND * PAGE - 1);
        for at in (start..start + AROUND * PAGE).step_by(PAGE as usize) {
            if at == address & !(PAGE - 1) || !usable(at) {
                continue;
            }
            let Some(found) = leaf(ram, roots, at) else { continue };
            if ram.page(found.gpa).is_some_and(|page| !ram.is_code(page.offset)) {
                self.map_page(ram, at, &found, false)?;
            }
        }
        Ok(())
    }

    fn map(&mut self, address: u64, len: u64, offset: u64, protection: u64) -> Result<(), Error> {
        self.mappings += 1;
        self.wedge.order(Order { address, len, offset, protection })
    }
}

fn protection(found: &Translation, writable: bool) -> u64 {
    READ | if writable { WRITE } else { 0 } | if found.executable { EXECUTE } else { 0 }
}

/// User addresses that may be mapped: not the window's, not the first 64 KiB, which the host may
/// refuse.
fn usable(address: u64) -> bool {
    let window = WINDOW as u64..(WINDOW + WINDOW_LEN) as u64;
    (0x1_0000..TOP as u64).contains(&address) && !window.contains(&address)
}

/// The translation of a user page that has been accessed already, without setting any bit.
fn leaf(ram: &Ram, roots: Roots, address: u64) -> Option<Translation> {
    let mut memory = ram;
    let mut table = roots.cr3 & paging::ADDRESS;
    let mut rights = paging::RW | paging::US;
    let mut no_execute = 0;
    for shift in [39, 30, 21, 12] {
        let entry = memory.read_u64(table + (address >> shift & 0x1ff) * 8);
        let large = shift != 12 && entry & paging::PS != 0;
        if entry & paging::P == 0 || entry & paging::A == 0 || large {
            return None;
        }
        rights &= entry;
        no_execute |= entry & paging::NX;
        table = entry & paging::ADDRESS;
        if shift == 12 && rights & paging::US != 0 {
            return Some(Translation {
                gpa: table,
                page_bits: 12,
                writable: rights & paging::RW != 0,
                user: true,
                executable: no_execute == 0,
                global: false,
                dirty: entry & paging::D != 0,
            });
        }
    }
    None
}
