//! Translated code: finding it, making it, and dropping what has become stale.

mod layout;
mod programs;
mod sleepers;

use crate::{
    breakpoints::{Breakpoints, Stands},
    devices::Devices,
    fleeting::Fleeting,
    known_blocks::KnownBlocks,
    tops::Tops,
    versions::Versions,
};
use engine::Board;
use jit::{
    Layout, Level,
    cache::{
        Cache, CodeMemory, CodeUser, How, Newest, Position, Refused, kept::MadeBlock, trial::ALWAYS,
    },
    stubs::Stubs,
};
pub use layout::{CodeKind, Operands, layout};
use ram::Ram;
use rustc_hash::{FxHashMap, FxHashSet};
use std::{collections::VecDeque, sync::Arc};
use wedge::{CodeArea, Pages};
use wedge_abi::{Base, keys};
use x86::{
    narrow::KERNEL_START,
    paging::{self, Access, Roots},
};
use x86_interp::{Flush, GuestRam, Probes, Record, System};

const PAGE: u64 = 4096;
/// Bytes of the longest instruction.
const LONGEST: usize = 15;
/// Blocks made beside the one that is asked for.
const AHEAD: usize = 10;
/// Bytes of the longest block.
const NEAR_END: u64 = 64 * LONGEST as u64;
const FETCH: Access = Access { write: false, fetch: true, user: false, smap_override: false };

/// Where the code of a level lies.
struct View {
    area: Arc<CodeArea>,
    /// Jumps are changed while others may execute them.
    several: bool,
}

impl CodeMemory for View {
    fn write_code(&mut self, offset: u64, bytes: &[u8]) {
        self.area.write(offset, bytes);
    }
    fn write_jump(&mut self, offset: u64, distance: [u8; 4]) {
        if self.several {
            self.area.write_jump(offset, distance);
        } else {
            self.area.write(offset, &distance);
        }
    }
    fn is_closed(&self, offset: u64, bytes: &[u8]) -> bool {
        !wedge::keys_load() || !keys::opened(offset, bytes, |at| self.area.byte(at))
    }
    fn write_table(&mut self, offset: u64, value: u64) {
        self.area.write_table(offset, value);
    }
    fn table_word(&self, offset: u64) -> u64 {
        self.area.table_word(offset)
    }
}

/// Why there is no block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoBlock {
    /// The instruction has to be interpreted.
    Interpret,
    /// There is no more room, and others are in the code.
    Full,
    /// Others have the kernel's memory mapped otherwise than this vCPU.
    Foreign,
}

/// The translated code of a machine's kernel, or of a vCPU's current address space.
pub struct Code {
    pub cache: Cache,
    memory: View,
    layout: Layout,
    tops: Tops,
    /// Users whose flushes concern translations by which they cannot have come to this code: they look when they come.
    unchecked: Vec<CodeUser>,
    /// RAM offset of each page that kernel code was made from, by GVA: at most two for each block that was made since the last clearing.
    pages: FxHashMap<u64, u64>,
    /// The GVA behind all that have been in `pages` since the last clearing.
    end: u64,
    /// The pages that user code was made from.
    pub versions: Versions,
    /// Slots of the wedges' table of faults that are in use.
    told_faults: FxHashSet<usize>,
    pub devices: Devices,
    fleeting: Fleeting,
    /// Those of all that execute the code ([`crate::breakpoints`]).
    breakpoints: Breakpoints,
    /// Where blocks are noted for later machines.
    known: Arc<KnownBlocks>,
    /// The pages (GVA) whose known blocks have been woken, each with the number of times that its blocks had been dropped by then.
    done: FxHashSet<(u64, u16)>,
}

impl Code {
    /// No translations yet. `known`: blocks of a kernel that an earlier machine has run.
    pub fn new(area: Arc<CodeArea>, base: Base, kind: CodeKind, known: Arc<KnownBlocks>) -> Self {
        let layout = layout(kind, base);
        let mut memory = View { area, several: kind.several };
        let kept = if kind.level == Level::Kernel { known.take(&layout) } else { None };
        let cache = match kept {
            Some(kept) => Cache::with_kept(layout, &mut memory, kept),
            None => Cache::new(layout, &mut memory),
        };
        let (pages, devices, fleeting, breakpoints, tops) = Default::default();
        let (unchecked, done) = Default::default();
        Self {
            cache,
            memory,
            layout,
            tops,
            unchecked,
            pages,
            end: 0,
            versions: Versions::new(layout.origins.is_some()),
            told_faults: FxHashSet::default(),
            devices,
            fleeting,
            breakpoints,
            known,
            done,
        }
    }

    /// A vCPU is outside of translated code, and about to execute it again.
    pub fn pass(&mut self, user: CodeUser) {
        self.cache.pass(user);
    }

    /// From now on no block goes over these breakpoints of one of those that execute the code.
    pub fn set_probes(&mut self, user: CodeUser, probes: &Probes) {
        for gva in self.breakpoints.replace(user, probes) {
            self.forget_page(gva);
        }
    }

    /// Drops everything.
    pub fn clear(&mut self, pages: &mut Pages) {
        self.cache.clear(&mut self.memory);
        self.tops.clear();
        self.pages.clear();
        self.end = 0;
        self.done.clear();
        self.forget_faults();
        if self.layout.level == Level::User {
            self.forget_programs(pages);
        }
    }

    fn access(&self) -> Access {
        Access { user: self.layout.level == Level::User, ..FETCH }
    }

    /// Kernel code has been translated from no page at this GVA or beyond. Of user code that is not known.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Code can be made from what lies at this GVA.
    pub fn covers(&self, gva: u64) -> bool {
        match self.layout.level {
            Level::Kernel if gva >> 32 == 0 => gva >= KERNEL_START,
            Level::Kernel => gva >= self.layout.bias.wrapping_neg(),
            Level::User => gva >> 47 == 0,
        }
    }

    /// HVA of the block at a GVA for a value of RFLAGS.AC, made if need be, for one of those that execute the code. RAM
    /// pages that now hold code are added to `marked`.
    ///
    /// # Errors
    /// Says what to do without one.
    pub fn block(
        &mut self,
        pages: &mut Pages,
        board: &Board,
        roots: Roots,
        (guest, ac): (u64, bool),
        user: CodeUser,
        marked: &mut Vec<u64>,
    ) -> Result<u64, NoBlock> {
        self.come_in(board.ram(), roots, user)?;
        let key = self.key(pages, board.ram(), roots, (guest, ac));
        let (known, variant) = key.ok_or(NoBlock::Interpret)?;
        if let Some(host) = self.cache.find(known, variant)
            && self.is_whole(board.ram(), roots, (guest, host))
        {
            self.cache.publish(&mut self.memory, known, variant);
            return Ok(host);
        }
        if self.devices.leaves_out(guest) {
            return Err(NoBlock::Interpret);
        }
        let mut made = self.make(board, roots, (guest, ac), marked);
        if made == Some(Err(Refused::Full)) {
            if !self.cache.is_alone(user) {
                return Err(NoBlock::Full);
            }
            self.clear(pages);
            made = self.make(board, roots, (guest, ac), marked);
        }
        let host = made.and_then(Result::ok).ok_or(NoBlock::Interpret)?;
        self.go_ahead(pages, board, roots, guest, marked);
        Ok(host)
    }

    /// One of several vCPUs is about to execute what others have made, if it has the same memory where code was found.
    /// If none of them is there, what is there is made to fit.
    pub fn come_in(&mut self, ram: &Ram, roots: Roots, user: CodeUser) -> Result<(), NoBlock> {
        if !self.layout.several {
            return Ok(());
        }
        if !self.tops.are_those_of(ram, roots) {
            if !self.cache.is_alone(user) {
                return Err(NoBlock::Foreign);
            }
            self.check_all(ram, roots);
            self.tops.clear();
            self.pages.keys().for_each(|gva| self.tops.note(ram, roots, *gva));
        }
        if let Some(at) = self.unchecked.iter().position(|one| *one == user) {
            self.unchecked.swap_remove(at);
            self.check_all(ram, roots);
        }
        self.pass(user);
        Ok(())
    }

    /// Makes what the newest block (`newest`: its GVA) leads to for certain, and what that leads to, what is called and what follows a
    /// call: asking for each in turn would cost more than some that are never used.
    fn go_ahead(
        &mut self,
        pages: &mut Pages,
        board: &Board,
        roots: Roots,
        newest: u64,
        marked: &mut Vec<u64>,
    ) {
        let mut queue: VecDeque<_> = self.ahead(newest).into();
        let mut left = AHEAD;
        while let Some(target) = queue.pop_front().filter(|_| left > 0) {
            let new = self.covers(target.0) && self.is_new(pages, board.ram(), roots, target);
            if new && let Some(Ok(_)) = self.make(board, roots, target, marked) {
                left -= 1;
                queue.extend(self.ahead(target.0));
            }
        }
    }

    /// Makes the block at a GVA for a value of the virtual AC; `None` if there is no RAM. A block of user code is of one
    /// page if it can be, so that its look is for one.
    fn make(
        &mut self,
        board: &Board,
        roots: Roots,
        target: (u64, bool),
        marked: &mut Vec<u64>,
    ) -> Option<Result<u64, Refused>> {
        if let Some(host) = self.woken(board, roots, target, marked) {
            return Some(Ok(host));
        }
        let near_end = target.0 & (PAGE - 1) >= PAGE - NEAR_END;
        let of_one = !near_end || self.layout.level == Level::User;
        let made = self.make_of(board, roots, (target, !of_one), marked)?;
        let of_two = of_one && near_end && made == Err(Refused::Untranslatable);
        if !of_two {
            return Some(made);
        }
        self.make_of(board, roots, (target, true), marked)
    }

    /// Makes a block whose last instruction ends in the block's first page or, if it may, in the `next`.
    fn make_of(
        &mut self,
        board: &Board,
        roots: Roots,
        ((guest, ac), next): ((u64, bool), bool),
        marked: &mut Vec<u64>,
    ) -> Option<Result<u64, Refused>> {
        let stands = self.breakpoints.at(guest);
        if stands == Some(Stands::Breakpoint) {
            return Some(Err(Refused::Untranslatable));
        }
        self.cache.writes = board.ram().code_writes();
        let (first, mut bytes) = self.fetch(board, roots, guest, NEAR_END, marked)?;
        let last = guest + (bytes.len() - 1) as u64;
        let breakpoint = self.breakpoints.first_behind(guest, last);
        if let Some(breakpoint) = breakpoint {
            bytes.truncate((breakpoint - guest) as usize);
        }
        let mut sources = [first; 2];
        let behind = guest.wrapping_add(bytes.len() as u64);
        let here = self.devices.before(guest, bytes.len());
        // Only the last instruction of a page can need the next one.
        if breakpoint.is_none()
            && next
            && let Some((second, more)) = self.fetch(board, roots, behind, NEAR_END, marked)
        {
            if self.layout.level == Level::User && second == first {
                return Some(Err(Refused::Untranslatable)); // it could not be told from one page
            }
            bytes.extend(more.iter().take(LONGEST));
            sources[1] = second;
        }
        let named = self.version_of(board.ram(), roots, guest, sources);
        let Some((known, version)) = named else { return Some(Err(Refused::Full)) };
        let (tap, narrow) = (stands == Some(Stands::Tap), !roots.long_mode());
        let sought = self.fleeting.within(guest, bytes.len());
        let how = How { ac, tap, version, narrow, sought, ..How::default() };
        let made = self.cache.add(&mut self.memory, known, &bytes, here, how, sources);
        if made.is_ok() {
            self.note(guest, ac, &bytes, first);
            if self.layout.level == Level::User {
                return Some(made);
            }
            // Not before: a page of which nothing is made need not be remembered, at however many addresses a guest has it.
            self.note_pages(board, roots, guest & !(PAGE - 1), sources);
        }
        Some(made)
    }

    /// Kernel code has been made from a page (GVA), or from it and the next: their RAM offsets.
    fn note_pages(&mut self, board: &Board, roots: Roots, page: u64, [first, second]: [u64; 2]) {
        self.note_page(board, roots, page, first);
        if second != first {
            self.note_page(board, roots, page.wrapping_add(PAGE), second);
        }
    }

    fn note_page(&mut self, board: &Board, roots: Roots, page: u64, offset: u64) {
        let is_new = self.pages.insert(page, offset) != Some(offset);
        self.end = self.end.max(page.saturating_add(PAGE));
        if is_new && self.layout.several {
            self.tops.note(board.ram(), roots, page);
        }
    }

    /// Notes for later machines the block that has just been made at a GVA, from a page of RAM and perhaps the next.
    fn note(&self, guest: u64, ac: bool, bytes: &[u8], page: u64) {
        let Newest { len, read, landing, .. } = self.cache.newest();
        let is_noted = self.layout.level == Level::Kernel && guest >> 32 != 0;
        if self.known.are_noted() && is_noted {
            let (bytes, len) = (&bytes[..read as usize], len as usize);
            let times = self.cache.drops(page);
            self.known.note(&MadeBlock { guest, ac, times, landing, len, bytes });
        }
    }

    /// The guest's bytes from `guest` to the end of its page, `most` of them at the most, and the RAM page's offset.
    fn fetch(
        &mut self,
        board: &Board,
        roots: Roots,
        guest: u64,
        most: u64,
        marked: &mut Vec<u64>,
    ) -> Option<(u64, Vec<u8>)> {
        let ram = board.ram();
        let offset = offset(ram, roots, guest, self.access())?;
        let page = offset & !(PAGE - 1);
        if ram.mark_code(page) {
            marked.push(page);
        }
        let mut bytes = vec![0; (PAGE - (guest & (PAGE - 1))).min(most) as usize];
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
    pub fn ran_alone(&mut self, host: u64) {
        self.cache.ran_alone(&mut self.memory, host);
    }

    /// Drops what the interpreter has reported stale.
    pub fn apply(&mut self, ram: &Ram, roots: Roots, user: CodeUser, record: &Record) {
        for (page, write) in record.stale_pages.iter().zip(&record.writes) {
            self.cache.drop_older(&mut self.memory, *page, *write);
        }
        // Blocks of user code ask each time that they are entered from another page.
        if self.layout.level == Level::User {
            record.stale_pages.iter().for_each(|page| self.versions.note_write(*page));
            return;
        }
        if self.layout.several && !record.flushes.is_empty() && !self.is_seen_by(ram, roots) {
            if !self.unchecked.contains(&user) {
                self.unchecked.push(user);
            }
            return;
        }
        for flush in &record.flushes {
            match *flush {
                Flush::Page { linear, .. } => self.check(ram, roots, linear & !(PAGE - 1)),
                Flush::All => self.check_all(ram, roots),
                Flush::Space { .. } => {}
            }
        }
    }

    /// These page tables can lead to what is here. Those of a vCPU that is just being started cannot.
    fn is_seen_by(&self, ram: &Ram, roots: Roots) -> bool {
        roots.long_mode() && self.tops.are_those_of(ram, roots)
    }

    /// Kernel code at a GVA has faulted in a page that is mapped only for a moment.
    pub fn note_fleeting(&mut self, guest: u64) {
        if self.fleeting.note_fault(guest) {
            self.forget_page(guest);
        }
    }

    /// Drops the code made from a page, by GVA.
    pub fn forget_page(&mut self, gva: u64) {
        for page in self.versions.of(gva & !(PAGE - 1)) {
            self.cache.drop_page(&mut self.memory, page);
        }
        if let Some(page) = self.pages.remove(&(gva & !(PAGE - 1))) {
            self.cache.drop_page(&mut self.memory, page);
        }
    }

    /// Drops the code made from a page that is not mapped as it was.
    fn check(&mut self, ram: &Ram, roots: Roots, gva: u64) {
        let Some(page) = self.pages.get(&gva).copied() else { return };
        if offset(ram, roots, gva, self.access()) != Some(page) {
            self.forget_page(gva);
        }
    }

    pub fn check_all(&mut self, ram: &Ram, roots: Roots) {
        let all: Vec<u64> = self.pages.keys().copied().collect();
        for gva in all {
            self.check(ram, roots, gva);
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use jit::stubs;

    fn opened(area: &CodeArea, offset: u64, bytes: &[u8]) -> bool {
        keys::opened(offset, bytes, |at| area.byte(at))
    }

    /// What is in front of a block is another's, and what is behind it may be an old one's.
    #[test]
    fn keys_are_not_opened_across_blocks() {
        let area = CodeArea::of_kernel(Base::default()).expect("the host has memory");
        area.write(0x5002, &[0x0f, 0x01]);
        assert!(opened(&area, 0x5004, &[0xef]));
        assert!(!opened(&area, 0x5005, &[0xef]));
        area.write(0x6004, &[0xef]);
        assert!(opened(&area, 0x6000, &[0x90, 0x90, 0x0f, 0x01]));
        assert!(!opened(&area, 0x6000, &[0x90, 0x90, 0x0f, 0x0f]));
    }

    /// Three bytes that open keys are found if one of them is new, wherever the new bytes begin.
    #[test]
    fn what_opens_keys_is_found_at_every_place() {
        let area = CodeArea::of_kernel(Base::default()).expect("the host has memory");
        let open = [0x0f, 0xae, 0x2f];
        for (first, len) in (0..10).flat_map(|first| (1..=6).map(move |len| (first, len))) {
            let mut all = [0x90; 12];
            all[first..first + 3].copy_from_slice(&open);
            let (begin, end) = (3, 3 + len);
            area.write(0x7000, &all);
            let overlaps = first + 3 > begin && first < end;
            let found = opened(&area, 0x7000 + begin as u64, &all[begin..end]);
            assert_eq!(found, overlaps, "{len} bytes, from {first}");
        }
        assert!(!opened(&area, 0, &[0x01, 0xef]), "nothing is before");
    }

    /// Page tables in which all of the upper half is one page of code.
    pub(super) fn endless(code: &[u8]) -> (Ram, Roots) {
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
    fn runs_everywhere(code: &[u8], pages: u64, beside_another: bool) -> (Code, Option<NoBlock>) {
        let (ram, roots) = endless(code);
        let mut host = Pages::new().expect("the host has memory");
        let board = crate::test_machine::board(ram, Default::default());
        let area = Arc::clone(host.kernel());
        let kind = CodeKind::kernel(beside_another);
        let mut translated = Code::new(area, host.base(), kind, Arc::default());
        let user = translated.cache.add_user();
        let other = translated.cache.add_user();
        translated.pass(other);
        let mut last = None;
        let mut marked = Vec::new();
        for page in 0..pages {
            let gva = wedge_abi::KERNEL_START + page * PAGE;
            let block = translated.block(&mut host, &board, roots, (gva, false), user, &mut marked);
            last = block.err().or(last);
        }
        (translated, last)
    }

    #[test]
    fn a_page_at_ever_new_addresses_is_forgotten_when_the_cache_is_full() {
        const MOST: usize = 3 << 16;
        const MORE: usize = MOST + 10_000;
        let (code, _) = runs_everywhere(&[0xc3], MORE as u64, false); // ret
        let (blocks, _) = code.cache.size();
        assert!(code.cache.counters.cleared > 0 && blocks <= MOST, "{blocks} blocks");
        assert!(code.pages.len() <= 2 * blocks, "{} pages", code.pages.len());
    }

    #[test]
    fn a_full_cache_that_another_vcpu_is_in_is_not_cleared() {
        let (code, last) = runs_everywhere(&[0xc3], (3 << 16) + 100, true);
        assert_eq!((code.cache.counters.cleared, last), (0, Some(NoBlock::Full)));
    }

    /// The routines of both levels have nothing that opens keys.
    #[test]
    fn routines_do_not_open_keys() {
        let searching = CodeKind { landings: false, ..CodeKind::kernel(true) };
        let user = [Operands::LookedUp, Operands::Checked].map(|how| CodeKind::user(how, true));
        for kind in [CodeKind::kernel(true), searching].into_iter().chain(user) {
            let layout = layout(kind, Base::default());
            assert_eq!(keys::find(&stubs::generate(&layout)), None, "{kind:?}");
        }
    }
}
