//! The code cache: where blocks lie, how they are found, linked and dropped.
//!
//! The cache only keeps the records; what it wants written goes through [`CodeMemory`], because the
//! memory is the monitor's writable view of what the wedge executes. Space is handed out upwards;
//! when it is used up everything is dropped (a booted kernel fits several times over). Dropping a
//! block unlinks every jump to it, so that a block is never reached from a stale one.
//!
//! Several vCPUs may execute what is in the cache while one of them changes it. They change it under a lock
//! around all of it. To execute it takes no lock:
//!
//! - A block is complete before anything leads to it. Its bytes stay when it is dropped, so whoever is in it
//!   can go on to its end, and what a host PC in it stands for is still known.
//! - A jump is pointed elsewhere by one store ([`CodeMemory::write_jump`]).
//! - What is found in a jump table is right whatever becomes of its slot meanwhile ([`tables`]).
//! - [`Cache::clear`] is for a cache that nobody else executes ([`Cache::is_alone`]).
//!
//! Blocks can be put on trial ([`trial`]): they run alone, so that each run can be looked at.

mod block_records;
mod jumps;
pub mod kept;
mod tables;
pub mod trial;

use crate::{
    Layout, Request, Untranslatable, Version, block::Block, recover::Mark, stubs, translate,
};
use block_records::{BlockRecords, Number};
use kept::Sleepers;
use rustc_hash::{FxHashMap, FxHashSet};
use stubs::MISSED_LEN;
pub use tables::CodeUser;
use tables::{Shown, Tables};
use trial::Trials;
use wedge_abi::{FIRST_VERSION, HEAD_LEN};

/// Blocks begin at multiples of so many bytes.
const ALIGNMENT: u64 = 16;
/// The GS segment override.
const GS: u8 = 0x65;

/// The monitor's view of the code cache and the indirect-jump tables.
pub trait CodeMemory {
    /// Writes code at an offset into the cache.
    fn write_code(&mut self, offset: u64, bytes: &[u8]);
    /// Writes the displacement of a jump. With several users it lies in one aligned word and may be about to be executed.
    fn write_jump(&mut self, offset: u64, distance: [u8; 4]) {
        self.write_code(offset, &distance);
    }
    /// With these bytes there, user code that jumps into the cache finds nothing that opens protection keys, or
    /// there are none. Immediate operands are the guest's, and a program has a say in some of them: packet filters are compiled.
    fn is_closed(&self, offset: u64, bytes: &[u8]) -> bool;
    /// Writes a word at an offset into the tables, after all that was written before.
    fn write_table(&mut self, offset: u64, value: u64);
    /// The word at an offset in the tables of kernel code, which nobody else writes.
    fn table_word(&self, offset: u64) -> u64;
}

/// A block's identity: GVA, and which of the blocks there.
type Key = (u64, Variant);

/// Which of the blocks at a GVA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant(u32);

impl Variant {
    /// The newest block of whatever page, or the block for RFLAGS.AC clear.
    pub const ANY: Self = Self(0);
    /// The block for RFLAGS.AC set.
    const AC: Self = Self(1);

    /// Blocks of the page of user code with this index.
    #[must_use]
    pub fn of_page(index: u32) -> Self {
        Self(index)
    }

    /// The index of the page, if blocks of this variant ask whether their page may be executed.
    fn page(self) -> Option<u32> {
        (self.0 >= FIRST_VERSION as u32).then_some(self.0)
    }
}

impl From<bool> for Variant {
    /// By the virtual RFLAGS.AC.
    fn from(ac: bool) -> Self {
        if ac { Self::AC } else { Self::ANY }
    }
}

/// How a block is to be made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct How {
    /// The virtual RFLAGS.AC.
    pub ac: bool,
    /// The block begins with a tap.
    pub tap: bool,
    /// Computed jumps are likely to lead to the block: it gets a landing. [`Cache::add`] finds that out, whatever is said here.
    pub landing: bool,
    /// The pages of the block, if the block asks whether they may be executed.
    pub version: Option<Version>,
    /// It is 32-bit code.
    pub narrow: bool,
    /// See [`Request::sought`].
    pub sought: u64,
}

impl From<(bool, bool)> for How {
    fn from((ac, tap): (bool, bool)) -> Self {
        Self { ac, tap, ..Self::default() }
    }
}

/// Why a block could not be provided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The first instruction does not lie wholly in the bytes, or the code would open protection keys.
    Untranslatable,
    /// No room: call [`Cache::clear`] and try again.
    Full,
}

impl From<Untranslatable> for Refused {
    fn from(_: Untranslatable) -> Self {
        Self::Untranslatable
    }
}

/// What a block was made from, and how long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// GVA of its first instruction.
    pub guest: u64,
    /// Bytes of guest code.
    pub guest_len: u32,
    /// Bytes of host code.
    pub host_len: u32,
    /// RAM offsets of the two pages that hold the guest code; twice the same if the code does not cross a page's end.
    pub pages: [u64; 2],
}

/// What the newest block was made from, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Newest {
    /// GVA of its first instruction.
    pub guest: u64,
    /// Bytes of its guest instructions.
    pub len: u32,
    /// Bytes of guest code that the translator has looked at to make the block.
    pub read: u32,
    /// The block was to have a landing.
    pub landing: bool,
}

/// What the cache has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Blocks translated.
    pub translated: u64,
    /// Blocks that were there from the start and have been asked for.
    pub woken: u64,
    /// Jumps pointed at a block.
    pub linked: u64,
    /// Blocks dropped because their page was written.
    pub dropped: u64,
    /// Times everything was dropped.
    pub cleared: u64,
}

/// The records of the code cache.
pub struct Cache {
    layout: Layout,
    next: u64,
    records: BlockRecords,
    by_guest: FxHashMap<Key, Number>,
    by_page: FxHashMap<u64, Vec<Number>>,
    tables: Tables,
    /// The first of the jumps that wait for a block.
    waiting: FxHashMap<Key, Number>,
    /// Where the newest block leads for certain: its last jump, and its call when it returns. With the virtual RFLAGS.AC.
    ahead: Vec<(u64, bool)>,
    /// Where calls return to, as far as there has been no block yet.
    returns: FxHashSet<Key>,
    trials: Trials,
    /// The blocks that were there from the start.
    sleepers: Option<Sleepers>,
    newest: Newest,
    /// Writes to pages of code before the bytes were read that blocks are made from now on.
    pub writes: u64,
    /// How often blocks of a page have been dropped, by its RAM offset.
    drops: FxHashMap<u64, u16>,
    /// What happened.
    pub counters: CacheCounters,
}

/// Where a host PC stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// GVA of the guest instruction.
    pub guest: u64,
    /// Offset of the PC from the mark's first byte.
    pub into: u32,
    /// The mark.
    pub mark: Mark,
}

impl Position {
    /// The PC is an exact guest instruction boundary.
    pub fn exact(&self) -> bool {
        self.into == 0 && self.mark.boundary
    }

    /// Interrupts can be taken here; `code` is what lies at the PC.
    pub fn is_boundary(&self, code: [u8; 2]) -> bool {
        self.exact() || self.mark.undoes || self.repeats(code)
    }

    /// The host is about to execute a repeated string instruction, which can be interrupted between
    /// any two iterations: undoing what was done around it gives an exact state. `code` is what lies at
    /// the PC.
    pub fn repeats(&self, code: [u8; 2]) -> bool {
        let repeat = |byte: u8| matches!(byte, 0xf2 | 0xf3);
        let fixes = &self.mark.fixes;
        let string = fixes.rdi.is_some() || fixes.rsi.is_some();
        string && self.into == 0 && (repeat(code[0]) || code[0] == GS && repeat(code[1]))
    }
}

impl Cache {
    /// An empty cache; writes the fixed routines.
    pub fn new(layout: Layout, memory: &mut impl CodeMemory) -> Self {
        memory.write_code(0, &stubs::generate(&layout));
        Self {
            layout,
            next: stubs::LEN,
            records: BlockRecords::new(if layout.origins.is_some() { HEAD_LEN } else { 0 }),
            by_guest: FxHashMap::default(),
            by_page: FxHashMap::default(),
            tables: Tables::new(layout, memory),
            waiting: FxHashMap::default(),
            ahead: Vec::new(),
            returns: FxHashSet::default(),
            trials: Trials::default(),
            sleepers: None,
            newest: Newest::default(),
            writes: 0,
            drops: FxHashMap::default(),
            counters: CacheCounters::default(),
        }
    }

    /// HVA at which to enter the block for a guest address, if there is one.
    pub fn find(&self, guest: u64, variant: impl Into<Variant>) -> Option<u64> {
        self.number((guest, variant.into())).map(|number| self.records.front(number))
    }

    fn number(&self, key: Key) -> Option<Number> {
        self.by_guest.get(&key).copied()
    }

    /// Translates the bytes at `guest` and places the block. The first `here` bytes come from one
    /// page, the rest serves to complete the last instruction. With `tap` the block begins with a tap. `pages` are their
    /// RAM offsets, for [`Cache::drop_page`].
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn add(
        &mut self,
        memory: &mut impl CodeMemory,
        guest: u64,
        bytes: &[u8],
        here: usize,
        how: impl Into<How>,
        pages: [u64; 2],
    ) -> Result<u64, Refused> {
        let how = how.into();
        let How { ac, version, .. } = how;
        let landing = self.is_jumped_to((guest, ac.into()));
        let block = self.place(memory, guest, bytes, here, How { landing, ..how })?;
        let [first, second] = pages;
        // A gate that asks for two pages makes the block one of both, whether the block needs the second or not.
        let asks_for_two = version.is_some_and(|version| version.second.is_some());
        let crosses = block.guest_len as usize > here || asks_for_two;
        let variant = version.map_or(ac.into(), |version| Variant(version.index));
        let pages = [first, if crosses { second } else { first }];
        self.newest = Newest { guest, len: block.guest_len, read: block.read, landing };
        let number = self.enter(memory, block, variant, pages);
        Ok(self.records.front(number))
    }

    /// Computed jumps are likely to lead to the block that is about to be made: a call returns there, or no direct jump leads there.
    fn is_jumped_to(&mut self, key: Key) -> bool {
        self.returns.remove(&key) || !self.waiting.contains_key(&key)
    }

    /// Translates the bytes at `guest` as [`Cache::add`] does, and writes what comes of them to the next place. Code that would open keys
    /// may not do so elsewhere, where its operands have other bytes, or without a landing, which has the guest's address in it.
    fn place(
        &mut self,
        memory: &mut impl CodeMemory,
        guest: u64,
        bytes: &[u8],
        here: usize,
        how: How,
    ) -> Result<Block, Refused> {
        let without = How { landing: false, ..how };
        for (skipped, how) in [(0, how), (ALIGNMENT, how), (0, without)] {
            let at = self.next + skipped;
            let block = self.translate(at, guest, bytes, here, how)?;
            let stubs = self.stubs_end().saturating_sub(block.stubs.len() as u64);
            let end = at + block.code.len() as u64;
            if end + ALIGNMENT > stubs || !self.records.have_room(&block) {
                return Err(Refused::Full);
            }
            let parts = [(at, &block.code), (stubs, &block.stubs)];
            if parts.iter().all(|(at, code)| memory.is_closed(*at, code)) {
                parts.iter().for_each(|(at, code)| memory.write_code(*at, code));
                self.next = end.next_multiple_of(ALIGNMENT);
                self.counters.translated += 1;
                return Ok(block);
            }
        }
        Err(Refused::Untranslatable)
    }

    /// Translates the bytes at `guest` for an offset in the cache.
    fn translate(
        &self,
        at: u64,
        guest: u64,
        bytes: &[u8],
        here: usize,
        How { ac, tap, landing, version, narrow, sought }: How,
    ) -> Result<Block, Untranslatable> {
        let request = Request {
            guest,
            bytes,
            here,
            ac,
            tap,
            landing,
            narrow,
            sought,
            on_trial: self.trials.are_made(),
            version,
            host: self.layout.cache + at,
            stubs: self.layout.cache + self.stubs_end(),
            cache_offset: at as u32,
        };
        let mut block = translate(&self.layout, &request)?;
        self.isolate(&mut block);
        Ok(block)
    }

    /// Offset into the cache, below which the stubs of the next block's links will lie. Above are those of all other blocks.
    fn stubs_end(&self) -> u64 {
        self.layout.cache_len - self.records.jumps.len() as u64 * MISSED_LEN
    }

    fn enter(
        &mut self,
        memory: &mut impl CodeMemory,
        block: Block,
        variant: Variant,
        pages: [u64; 2],
    ) -> Number {
        let number = self.records.enter(&block, variant, pages, self.writes);
        self.file(number, pages);
        self.ahead.clear();
        let certain = block.links.iter().filter(|link| link.always);
        self.ahead.extend(certain.map(|link| (link.target, link.ac)));
        self.ahead.extend(block.returns);
        block.returns.into_iter().for_each(|to| self.expect_return(to));
        if !self.trials.begin(number, block.lookups) {
            self.integrate(memory, number);
        }
        number
    }

    /// Notes where a call of the kernel's returns to, if there is no block.
    fn expect_return(&mut self, (guest, ac): (u64, bool)) {
        let key = (guest, ac.into());
        if self.layout.landings.is_some() && self.number(key).is_none() {
            self.returns.insert(key);
        }
    }

    /// Has a block be found by its guest address, and by the pages it was made from.
    fn file(&mut self, number: Number, pages: [u64; 2]) {
        let (guest, variant) = self.records.key(number);
        self.by_guest.insert((guest, variant), number);
        if variant.page().is_some() {
            self.by_guest.insert((guest, Variant::ANY), number);
        }
        self.by_page.entry(pages[0]).or_default().push(number);
        if pages[1] != pages[0] {
            self.by_page.entry(pages[1]).or_default().push(number);
        }
    }

    /// The newest block.
    pub fn newest(&self) -> Newest {
        self.newest
    }

    /// What is likely to be asked for after the newest block: where its last jump leads, and where its call returns to. Half of what its branches
    /// lead to would never run.
    pub fn ahead(&self) -> &[(u64, bool)] {
        &self.ahead
    }

    /// Has others find a block, and lets it go on to others.
    fn integrate(&mut self, memory: &mut impl CodeMemory, number: Number) {
        self.show(memory, number);
        self.join(memory, number);
    }

    /// Lets indirect jumps find the block for a guest address again, after another one with the same
    /// low address bits had taken its place in the table.
    pub fn publish(
        &mut self,
        memory: &mut impl CodeMemory,
        guest: u64,
        variant: impl Into<Variant>,
    ) {
        let number = self.number((guest, variant.into()));
        if let Some(number) = number.filter(|number| self.trials.over(*number)) {
            self.show(memory, number);
        }
    }

    fn show(&mut self, memory: &mut impl CodeMemory, number: Number) {
        let records = &self.records;
        let shown = Shown {
            host: records.front(number),
            landing: records.landing(number),
            crosses: !records.is_of_one_page(number),
        };
        self.tables.show(memory, records.key(number), shown);
    }

    /// One more is going to execute what is here. It is outside of it now.
    pub fn add_user(&mut self) -> CodeUser {
        self.tables.add_user()
    }

    /// A user is outside of translated code, and about to execute it again.
    pub fn pass(&mut self, user: CodeUser) {
        self.tables.pass(user);
    }

    /// A user is outside of translated code, and stays there until it passes.
    pub fn rest(&mut self, user: CodeUser) {
        self.tables.rest(user);
    }

    /// All users but this one are outside of translated code.
    pub fn is_alone(&self, user: CodeUser) -> bool {
        self.tables.is_alone(user)
    }

    /// Makes the displacement at HVA `site` lead to HVA `to`; false if it must not have such bytes.
    fn point(&self, memory: &mut impl CodeMemory, site: u64, to: u64) -> bool {
        let at = site - self.layout.cache;
        let closed = memory.is_closed(at, &distance(site, to));
        if closed {
            memory.write_jump(at, distance(site, to));
        }
        closed
    }

    /// Makes a jump leave for want of a block again, as when its own block was made: that it may have such bytes was found
    /// then, and what is beside it has not changed.
    fn point_back(&self, memory: &mut impl CodeMemory, jump: Number) {
        let at = &self.records.jumps[jump as usize];
        let site = self.records.host(at.from) + at.site();
        let stub = self.layout.cache + self.layout.cache_len - (u64::from(jump) + 1) * MISSED_LEN;
        memory.write_jump(site - self.layout.cache, distance(site, stub));
    }

    /// The guest instruction a host PC belongs to. Its block may have been dropped: by another vCPU, say.
    pub fn position(&self, pc: u64) -> Option<Position> {
        let number = self.records.at(pc)?;
        let offset = (pc - self.records.host(number)) as u32;
        let mark = self.records.mark(number, offset)?;
        let guest = self.records.key(number).0.wrapping_add(mark.guest.into());
        Some(Position { guest, into: offset - mark.host, mark })
    }

    /// Drops every block made from the RAM page at `page`.
    pub fn drop_page(&mut self, memory: &mut impl CodeMemory, page: u64) {
        let all = self.by_page.remove(&page).unwrap_or_default();
        self.note_drop(page, &all);
        all.into_iter().for_each(|block| self.drop_block(memory, block));
    }

    fn note_drop(&mut self, page: u64, blocks: &[Number]) {
        if !blocks.is_empty() {
            let times = self.drops.entry(page).or_default();
            *times = times.saturating_add(1);
        }
    }

    /// How often blocks made from the RAM page at `page` have been dropped.
    pub fn drops(&self, page: u64) -> u16 {
        self.drops.get(&page).copied().unwrap_or(0)
    }

    /// Drops the blocks made from the RAM page at `page` before the write of a number. One that was made later, for a vCPU
    /// that had heard of the write before, stays.
    pub fn drop_older(&mut self, memory: &mut impl CodeMemory, page: u64, number: u64) {
        let all = self.by_page.remove(&page).unwrap_or_default();
        let (old, new): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|block| self.records.writes(*block) < number);
        self.note_drop(page, &old);
        old.into_iter().for_each(|block| self.drop_block(memory, block));
        if !new.is_empty() {
            self.by_page.insert(page, new);
        }
    }

    /// Drops the block that an HVA lies in.
    pub fn drop_at(&mut self, memory: &mut impl CodeMemory, host: u64) {
        if let Some(number) = self.records.live_at(host) {
            self.drop_block(memory, number);
        }
    }

    fn drop_block(&mut self, memory: &mut impl CodeMemory, number: Number) {
        if !self.records.drop(number) {
            return;
        }
        let key = self.records.key(number);
        self.counters.dropped += 1;
        for key in [key, (key.0, Variant::ANY)] {
            if self.by_guest.get(&key) == Some(&number) {
                self.by_guest.remove(&key);
            }
        }
        self.tables.hide(memory, key, self.records.landing(number));
        self.part(memory, number);
    }

    /// Drops everything. Nobody may be executing any of it.
    pub fn clear(&mut self, memory: &mut impl CodeMemory) {
        self.tables.clear(memory, self.by_guest.keys().copied());
        self.records.clear();
        self.sleepers = None;
        self.trials.forget();
        self.by_guest.clear();
        self.by_page.clear();
        self.waiting.clear();
        self.returns.clear();
        self.next = stubs::LEN;
        self.counters.cleared += 1;
    }

    /// Blocks, and bytes of code in use.
    pub fn size(&self) -> (usize, u64) {
        (self.by_guest.len(), self.next)
    }

    /// All blocks in order, with those that have been dropped: HVA, offset in the cache, and what it was made from.
    pub fn sources(&self) -> impl Iterator<Item = (u64, u64, Source)> {
        let first = self.layout.cache;
        self.records.all().map(move |(host, source)| (host, host - first, source))
    }

    /// What the block a host PC lies in was made from.
    pub fn source(&self, pc: u64) -> Option<Source> {
        self.records.live_at(pc).map(|number| self.records.source(number))
    }
}

/// The displacement at `site` that leads to `to`, both HVAs.
fn distance(site: u64, to: u64) -> [u8; 4] {
    (to.wrapping_sub(site + 4) as i32).to_le_bytes()
}

#[cfg(test)]
mod tests;
