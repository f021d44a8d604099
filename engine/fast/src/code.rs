//! Translated code: finding it, making it, and dropping what has become stale.

use crate::devices::Devices;
use engine::Board;
use frame::{
    Base, CACHE, CODE_PAGE_WORDS, COPIES, FRAME, LOOKUP_ENTRIES, LOOKUPS, REGIONS, TABLES,
    USER_CACHE, USER_CACHE_LEN, USER_TABLES, code_page, keys,
};
use jit::{
    Layout, Level,
    cache::{Cache, CodeMemory, Position, Refused, trial::ALWAYS},
    stubs::Stubs,
};
use ram::Ram;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use wedge::Pages;
use x86::paging::{self, Access, Roots};
use x86_interp::{Flush, GuestRam, Probes, Record, System};

const PAGE: u64 = 4096;
/// Bytes of the longest instruction.
const LONGEST: usize = 15;
/// Blocks made beside the one that is asked for.
const AHEAD: usize = 10;
/// Bytes of the longest block.
const NEAR_END: u64 = 64 * LONGEST as u64;
const FETCH: Access = Access { write: false, fetch: true, user: false, smap_override: false };

/// Where the code of a level lies: the kernel's and the user's share nothing, so that the user's can
/// be dropped whenever another address space comes.
fn layout(level: Level, base: Base, look_up: bool) -> Layout {
    let here = |usual: usize| base.at(usual as u64);
    let kernel = Layout {
        level,
        bias: base.bias(),
        regions: here(REGIONS),
        copies: Some(here(COPIES)),
        cache: here(CACHE),
        cache_len: (USER_CACHE - CACHE) as u64,
        frame: here(FRAME),
        table: here(TABLES),
        lookups: None,
    };
    match level {
        Level::Kernel => kernel,
        Level::User => Layout {
            bias: 0,
            copies: None,
            cache: here(USER_CACHE),
            cache_len: USER_CACHE_LEN as u64,
            table: here(TABLES + USER_TABLES),
            lookups: look_up.then(|| here(LOOKUPS + LOOKUP_ENTRIES)),
            ..kernel
        },
    }
}

/// The part of the shared pages where the code of a layout lies.
struct View<'a>(&'a mut Pages, &'a Layout);

impl View<'_> {
    /// Offset into the cache of all code.
    fn code_at(&self, offset: u64) -> u64 {
        self.1.cache - self.0.base().at(CACHE as u64) + offset
    }
}

impl CodeMemory for View<'_> {
    fn write_code(&mut self, offset: u64, bytes: &[u8]) {
        self.0.write_code(self.code_at(offset), bytes);
    }
    fn is_closed(&self, offset: u64, bytes: &[u8]) -> bool {
        !wedge::keys() || !opens_keys(self.0, self.code_at(offset), bytes)
    }
    fn write_table(&mut self, offset: u64, value: u64) {
        let tables = self.0.base().at(TABLES as u64);
        self.0.write_table(self.1.table - tables + offset, value);
    }
}

/// The translated code of a vCPU, the kernel's or the current address space's.
pub struct Code {
    pub cache: Cache,
    layout: Layout,
    /// RAM offset of each page that code was made from, by GVA: at most two for each block that was made since the last clearing.
    pages: FxHashMap<u64, u64>,
    pub devices: Devices,
    /// No block has a breakpoint in it; one that begins at one begins with a tap.
    probes: Probes,
}

impl Code {
    /// None yet. Memory operands are to be looked up, if `look_up` and it is the user's.
    pub fn new(pages: &mut Pages, level: Level, look_up: bool) -> Self {
        let layout = layout(level, pages.base(), look_up);
        let cache = Cache::new(layout, &mut View(pages, &layout));
        let (pages, devices, probes) = Default::default();
        Self { cache, layout, pages, devices, probes }
    }

    /// From now on no block goes over these breakpoints.
    pub fn set_probes(&mut self, pages: &mut Pages, probes: &Probes) {
        let before = std::mem::replace(&mut self.probes, probes.clone());
        let breakpoints = before.breakpoints.union(&probes.breakpoints);
        // What has a tap must lose it, and what has another must get that.
        let changed = |gva: &&u64| {
            let (old, new) = (before.tap(**gva), probes.tap(**gva));
            old != new || new.is_none() && !before.has(**gva)
        };
        let changed: Vec<u64> = breakpoints.filter(changed).copied().collect();
        for gva in changed {
            self.forget_page(pages, gva);
        }
    }

    /// The breakpoints that no block goes over.
    pub fn probes(&self) -> &Probes {
        &self.probes
    }

    /// Drops everything.
    pub fn clear(&mut self, pages: &mut Pages) {
        self.cache.clear(&mut View(pages, &self.layout));
        self.pages.clear();
        if self.layout.level == Level::User {
            pages.told().code_pages = [0; CODE_PAGE_WORDS];
        }
    }

    fn access(&self) -> Access {
        Access { user: self.layout.level == Level::User, ..FETCH }
    }

    /// Code can be made from what lies at this GVA.
    fn covers(&self, gva: u64) -> bool {
        match self.layout.level {
            Level::Kernel => gva >= self.layout.bias.wrapping_neg(),
            Level::User => gva >> 47 == 0,
        }
    }

    /// HVA of the block at a GVA, made if need be. RAM pages that now hold code are added to
    /// `marked`. `None`: the instruction has to be interpreted.
    pub fn block(
        &mut self,
        pages: &mut Pages,
        board: &Board,
        roots: Roots,
        guest: u64,
        alignment: bool,
        marked: &mut Vec<u64>,
    ) -> Option<u64> {
        if let Some(host) = self.cache.find(guest, alignment) {
            self.cache.publish(&mut View(pages, &self.layout), guest, alignment);
            return Some(host);
        }
        if self.devices.leaves_out(guest) {
            return None;
        }
        let made = self.make(pages, board, roots, (guest, alignment), marked);
        let host = match made? {
            Ok(host) => host,
            Err(Refused::Untranslatable) => return None,
            Err(Refused::Full) => {
                self.clear(pages);
                self.make(pages, board, roots, (guest, alignment), marked)?.ok()?
            }
        };
        self.go_ahead(pages, board, roots, marked);
        Some(host)
    }

    /// Makes what the newest block leads to for certain, and what that leads to, what is called and what follows a
    /// call: asking for each in turn would cost more than some that are never used.
    fn go_ahead(&mut self, pages: &mut Pages, board: &Board, roots: Roots, marked: &mut Vec<u64>) {
        let mut queue: VecDeque<_> = self.cache.ahead().to_vec().into();
        let mut left = AHEAD;
        while let Some(target) = queue.pop_front().filter(|_| left > 0) {
            let new = self.covers(target.0) && self.cache.find(target.0, target.1).is_none();
            if new && let Some(Ok(_)) = self.make(pages, board, roots, target, marked) {
                left -= 1;
                queue.extend(self.cache.ahead());
            }
        }
    }

    /// Makes the block at a GVA for a value of the virtual AC; `None` if there is no RAM.
    fn make(
        &mut self,
        pages: &mut Pages,
        board: &Board,
        roots: Roots,
        (guest, alignment): (u64, bool),
        marked: &mut Vec<u64>,
    ) -> Option<Result<u64, Refused>> {
        let tap = self.probes.tap(guest);
        if tap.is_none() && self.probes.has(guest) {
            return Some(Err(Refused::Untranslatable));
        }
        let (first, mut bytes) = self.fetch(board, roots, guest, marked)?;
        let last = guest + (bytes.len() - 1) as u64;
        let breakpoint = if guest < last { self.probes.first_in(guest + 1, last) } else { None };
        if let Some(breakpoint) = breakpoint {
            bytes.truncate((breakpoint - guest) as usize);
        }
        let mut sources = [first; 2];
        let behind = guest.wrapping_add(bytes.len() as u64);
        let here = self.devices.before(guest, bytes.len());
        // Only the last instruction of a page can need the next one.
        if breakpoint.is_none()
            && guest & (PAGE - 1) >= PAGE - NEAR_END
            && let Some((second, more)) = self.fetch(board, roots, behind, marked)
        {
            bytes.extend(more.iter().take(LONGEST));
            sources[1] = second;
        }
        let mut view = View(pages, &self.layout);
        tap.into_iter().for_each(|step| self.cache.tap_next(step));
        let made = self.cache.add(&mut view, guest, &bytes, here, alignment, sources);
        if made.is_ok() {
            // Not before: a page of which nothing is made need not be remembered, at however many addresses a guest has it.
            self.note_page(pages, guest, first);
            if sources[1] != first {
                self.note_page(pages, behind, sources[1]);
            }
        }
        Some(made)
    }

    /// Code has been made from a page.
    fn note_page(&mut self, pages: &mut Pages, gva: u64, offset: u64) {
        self.pages.insert(gva & !(PAGE - 1), offset);
        if self.layout.level == Level::User {
            let (word, bit) = code_page(gva);
            pages.told().code_pages[word] |= 1 << bit;
        }
    }

    /// The guest's bytes from `guest` to the end of its page, as far as a block can need them, and the
    /// RAM page's offset.
    fn fetch(
        &mut self,
        board: &Board,
        roots: Roots,
        guest: u64,
        marked: &mut Vec<u64>,
    ) -> Option<(u64, Vec<u8>)> {
        let ram = board.ram();
        let offset = offset(ram, roots, guest, self.access())?;
        let page = offset & !(PAGE - 1);
        if ram.mark_code(page) {
            marked.push(page);
        }
        let mut bytes = vec![0; (PAGE - (guest & (PAGE - 1))).min(NEAR_END) as usize];
        ram.read(offset, &mut bytes);
        Some((page, bytes))
    }

    /// The guest instruction that a host PC belongs to.
    pub fn position(&self, pc: u64) -> Option<Position> {
        self.cache.position(pc)
    }

    /// A host PC lies in the routines that leave translated code.
    pub fn is_exit(&self, pc: u64) -> bool {
        let routines = Stubs::of(&self.layout);
        (routines.exit..routines.indirect[0]).contains(&pc)
    }

    /// Drops everything; what is made from now on runs alone so many times (`None`: each time).
    pub fn start_trials(&mut self, pages: &mut Pages, runs: Option<u32>) {
        self.clear(pages);
        self.cache.try_new_blocks(runs.unwrap_or(ALWAYS));
    }

    /// A block on trial has run alone.
    pub fn ran_alone(&mut self, pages: &mut Pages, host: u64) {
        self.cache.ran_alone(&mut View(pages, &self.layout), host);
    }

    /// Drops what the interpreter has reported stale.
    pub fn apply(&mut self, pages: &mut Pages, ram: &Ram, roots: Roots, record: &Record) {
        for page in &record.stale_pages {
            self.cache.drop_page(&mut View(pages, &self.layout), *page);
        }
        for flush in &record.flushes {
            match *flush {
                Flush::Page { linear, .. } => self.check(pages, ram, roots, linear & !(PAGE - 1)),
                Flush::All if self.layout.level == Level::Kernel => {
                    self.check_all(pages, ram, roots);
                }
                Flush::All => {}
                // Of the user's code it is looked at when it comes next ([`crate::codes`]).
                Flush::Space { .. } => {}
            }
        }
    }

    /// Drops the code made from a page, by GVA.
    pub fn forget_page(&mut self, pages: &mut Pages, gva: u64) {
        if let Some(page) = self.pages.remove(&(gva & !(PAGE - 1))) {
            self.cache.drop_page(&mut View(pages, &self.layout), page);
        }
    }

    /// Drops the code made from a page that is not mapped as it was.
    fn check(&mut self, pages: &mut Pages, ram: &Ram, roots: Roots, gva: u64) {
        let Some(page) = self.pages.get(&gva).copied() else { return };
        if offset(ram, roots, gva, self.access()) != Some(page) {
            self.forget_page(pages, gva);
        }
    }

    pub fn check_all(&mut self, pages: &mut Pages, ram: &Ram, roots: Roots) {
        let all: Vec<u64> = self.pages.keys().copied().collect();
        for gva in all {
            self.check(pages, ram, roots, gva);
        }
    }
}

/// A byte of the code cache.
pub fn byte(pages: &Pages, pc: u64) -> u8 {
    pages.code_byte(pc.wrapping_sub(pages.base().at(CACHE as u64)))
}

/// RAM offset of a kernel GVA that may be executed.
pub fn physical(ram: &Ram, roots: Roots, gva: u64) -> Option<u64> {
    offset(ram, roots, gva, FETCH)
}

/// RAM offset of a GVA that may be accessed so.
pub fn offset(mut ram: &Ram, roots: Roots, gva: u64, access: Access) -> Option<u64> {
    let found = paging::walk(&mut ram, roots, gva, access).ok()?;
    let page = ram.page(found.gpa & !(PAGE - 1))?;
    Some(page.offset + (found.gpa & (PAGE - 1)))
}

/// These bytes at an offset into the cache, with those beside them, have what opens protection keys.
fn opens_keys(pages: &Pages, offset: u64, bytes: &[u8]) -> bool {
    let end = offset + bytes.len() as u64;
    let before = (offset.saturating_sub(2)..offset).map(|at| pages.code_byte(at));
    let behind = (end..end + 2).map(|at| pages.code_byte(at));
    let all: Vec<u8> = before.chain(bytes.iter().copied()).chain(behind).collect();
    keys::find(&all).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use jit::stubs;

    /// What is in front of a block is another's, and what is behind it may be an old one's.
    #[test]
    fn keys_are_not_opened_across_blocks() {
        let mut pages = Pages::new().expect("the host has memory");
        pages.write_code(0x5002, &[0x0f, 0x01]);
        assert!(opens_keys(&pages, 0x5004, &[0xef]));
        assert!(!opens_keys(&pages, 0x5005, &[0xef]));
        pages.write_code(0x6004, &[0xef]);
        assert!(opens_keys(&pages, 0x6000, &[0x90, 0x90, 0x0f, 0x01]));
        assert!(!opens_keys(&pages, 0x6000, &[0x90, 0x90, 0x0f, 0x0f]));
    }

    /// Page tables in which all of the upper half is one page of code.
    fn endless(code: &[u8]) -> (Ram, Roots) {
        use x86::paging::{P, RW};
        const PAGE_OF_CODE: u64 = 0x8000;
        let ram = Ram::new(2 << 20).expect("memory");
        for slot in 0..512 {
            for (table, next) in [(0x1000, 0x2000), (0x2000, 0x3000), (0x3000, 0x4000)] {
                ram.store64(table + slot * 8, next | P | RW);
            }
            ram.store64(0x4000 + slot * 8, PAGE_OF_CODE | P | RW);
        }
        ram.write(PAGE_OF_CODE, code);
        let state = crate::test_machine::kernel_state(0, 0);
        (ram, Roots::from(&state))
    }

    /// A guest that runs one page at ever-new addresses.
    fn runs_everywhere(code: &[u8], pages: u64) -> Code {
        let (ram, roots) = endless(code);
        let mut host = Pages::new().expect("the host has memory");
        let board = crate::test_machine::board(ram, Default::default());
        let mut translated = Code::new(&mut host, Level::Kernel, false);
        let mut marked = Vec::new();
        for page in 0..pages {
            let gva = frame::KERNEL_START + page * PAGE;
            translated.block(&mut host, &board, roots, gva, false, &mut marked);
        }
        translated
    }

    #[test]
    fn a_page_at_ever_new_addresses_is_forgotten_when_the_cache_is_full() {
        const MOST: usize = 3 << 16;
        const MORE: usize = MOST + 10_000;
        let code = runs_everywhere(&[0xc3], MORE as u64); // ret
        let (blocks, _) = code.cache.size();
        assert!(code.cache.counters.cleared > 0 && blocks <= MOST, "{blocks} blocks");
        assert!(code.pages.len() <= 2 * blocks, "{} pages", code.pages.len());
    }

    /// The routines of both levels have nothing that opens keys.
    #[test]
    fn routines_do_not_open_keys() {
        for level in [Level::Kernel, Level::User] {
            let routines = stubs::generate(&layout(level, Base::default(), true));
            assert_eq!(keys::find(&routines), None);
        }
    }
}
