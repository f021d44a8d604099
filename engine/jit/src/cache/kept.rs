//! Blocks that are kept: translated once, for many caches.
//!
//! The code of a kernel's block depends on nothing but the layout and the guest's bytes and address. So what one process
//! has translated others can use where they find the same bytes at the same address. [`Keeper`] gives each block the place
//! that it has in all caches of this layout, so that neither code nor records have to be changed. A cache that begins with
//! blocks that were kept has all of them from the start, asleep: nothing leads to them before they are woken
//! ([`Cache::wake`]).
//!
//! They wake in groups: the blocks of a page that were made after the blocks of the page had been dropped as often. Within a
//! group jumps are linked already. If some blocks of a group cannot be woken, those links are taken back first.

mod keeper;
pub(super) mod packed;

use super::{
    Cache, CodeMemory,
    block_records::{BlockRecords, NONE, Number},
};
use crate::{Layout, stubs};
pub use keeper::Keeper;
use packed::{PackedTables, u16_at, u32_at, u64_at};
use std::ops::Range;

/// A block of a kernel's code that somebody has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MadeBlock<'a> {
    /// GVA of the first instruction.
    pub guest: u64,
    /// The virtual RFLAGS.AC.
    pub ac: bool,
    /// How often blocks of this block's page had been dropped when the block was made.
    pub times: u16,
    /// It begins with a landing.
    pub landing: bool,
    /// Length of the block's instructions in bytes.
    pub len: usize,
    /// The bytes of the instructions, and those behind them that the translator has looked at.
    pub bytes: &'a [u8],
}

impl MadeBlock<'_> {
    /// Blocks are kept in ascending order of this, so that those of a group lie one behind the other.
    #[must_use]
    pub fn rank(&self) -> (u64, u16, u64, bool) {
        (page(self.guest), self.times, self.guest, self.ac)
    }
}

/// GVA of the page that an address lies in.
fn page(guest: u64) -> u64 {
    guest & !0xfff
}

/// Blocks that were kept, for one cache.
pub struct Kept {
    layout: Layout,
    all: Box<dyn AsRef<[u8]> + Send>,
    code: Range<usize>,
    stubs: Range<usize>,
    records: BlockRecords,
    sleepers: Sleepers,
}

/// What the blocks of a cache that were there from the start have been made from.
pub(super) struct Sleepers {
    groups: Vec<Group>,
    /// Where the bytes of each block end among all bytes.
    ends: Vec<u32>,
    /// The bytes of all blocks that sleep, and at most as many bytes of blocks that are awake.
    bytes: Vec<u8>,
    /// How many of the bytes are those of blocks that are awake.
    spent: usize,
}

/// Blocks of one page, all made after the page's blocks had been dropped the same number of times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Group {
    /// GVA.
    page: u64,
    times: u16,
    /// The first block. The others are up to the first of the next group.
    first: Number,
}

impl Group {
    fn encoded(&self) -> [u8; 14] {
        let mut bytes = [0; 14];
        bytes[..8].copy_from_slice(&self.page.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.times.to_le_bytes());
        bytes[10..].copy_from_slice(&self.first.to_le_bytes());
        bytes
    }

    fn decoded(bytes: &[u8; 14]) -> Self {
        Self { page: u64_at(bytes, 0), times: u16_at(bytes, 8), first: u32_at(bytes, 10) }
    }
}

impl Kept {
    /// The blocks that a [`Keeper`] has made for caches of this layout; `None` if these are not such.
    #[must_use]
    pub fn parse(layout: &Layout, all: impl AsRef<[u8]> + Send + 'static) -> Option<Self> {
        let mut from = PackedTables::of(all.as_ref());
        if from.bytes()? != format!("{layout:?}").as_bytes() {
            return None;
        }
        let (code, stubs) = (from.range()?, from.range()?);
        let records = BlockRecords::decode(layout.cache, &mut from)?;
        let groups: Vec<_> = from.table()?.iter().map(Group::decoded).collect();
        let ends: Vec<_> = from.table()?.iter().map(|end| u32::from_le_bytes(*end)).collect();
        let bytes = from.bytes()?.to_vec();
        let whole = ends.len() == records.len()
            && ends.is_sorted()
            && ends.last().is_none_or(|last| *last as usize == bytes.len())
            && groups.is_sorted_by_key(|group| (group.page, group.times))
            && groups.is_sorted_by_key(|group| group.first)
            && groups.iter().all(|group| (group.first as usize) < ends.len())
            && stubs.len() as u64 == records.jumps.len() as u64 * stubs::MISSED_LEN
            && (code.len() + stubs.len()) as u64 + stubs::LEN + 16 <= layout.cache_len;
        let sleepers = Sleepers { groups, ends, bytes, spent: 0 };
        let is_of =
            |group: usize, number| page(records.key(number).0) == sleepers.groups[group].page;
        let in_place = |group| sleepers.blocks(group).all(|number| is_of(group, number));
        let whole = whole && (0..sleepers.groups.len()).all(in_place);
        let all = Box::new(all);
        whole.then_some(Self { layout: *layout, all, code, stubs, records, sleepers })
    }

    /// They are for caches of this layout.
    #[must_use]
    pub fn is_for(&self, layout: &Layout) -> bool {
        self.layout == *layout
    }
}

/// A block that was there from the start, and has not been asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sleeper {
    number: Number,
    /// [`MadeBlock::times`] of its group.
    times: u16,
}

/// All blocks of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sleeping {
    blocks: Range<Number>,
    times: u16,
}

impl Sleeping {
    /// Each block of the group; some may be awake.
    pub fn all(&self) -> impl Iterator<Item = Sleeper> + use<> {
        let times = self.times;
        self.blocks.clone().map(move |number| Sleeper { number, times })
    }
}

impl Sleepers {
    fn bytes_of(&self, number: Number) -> &[u8] {
        let end = |number: Number| self.ends[number as usize] as usize;
        &self.bytes[number.checked_sub(1).map_or(0, end)..end(number)]
    }

    /// These blocks have woken: their bytes are not needed any more.
    fn spend(&mut self, blocks: &[(Sleeper, [u64; 2])], records: &BlockRecords) {
        let spent = blocks.iter().map(|(sleeper, _)| self.bytes_of(sleeper.number).len());
        self.spent += spent.sum::<usize>();
        if self.spent > self.bytes.len() / 2 {
            self.give_back(records);
        }
    }

    /// Drops the bytes of all blocks that are awake.
    fn give_back(&mut self, records: &BlockRecords) {
        let mut bytes = Vec::with_capacity(self.bytes.len() - self.spent);
        let mut first = 0;
        for (number, end) in (0..).zip(&mut self.ends) {
            let own = first..*end as usize;
            first = own.end;
            if records.is_asleep(number) {
                bytes.extend_from_slice(&self.bytes[own]);
            }
            *end = bytes.len() as u32;
        }
        (self.bytes, self.spent) = (bytes, 0);
    }

    /// The indices of the groups of a page.
    fn of_page(&self, page: u64) -> Range<usize> {
        let first = self.groups.partition_point(|group| group.page < page);
        let count = self.groups[first..].iter().take_while(|group| group.page == page).count();
        first..first + count
    }

    fn sleeping(&self, group: usize) -> Sleeping {
        Sleeping { blocks: self.blocks(group), times: self.groups[group].times }
    }

    fn blocks(&self, group: usize) -> Range<Number> {
        let next = self.groups.get(group + 1).map(|next| next.first);
        self.groups[group].first..next.unwrap_or(self.ends.len() as Number)
    }
}

impl Cache {
    /// A cache that has these blocks from the start; writes all of their code.
    pub fn with_kept(layout: Layout, memory: &mut impl CodeMemory, kept: Kept) -> Self {
        let mut cache = Self::new(layout, memory);
        let Kept { all, code, stubs, records, sleepers, .. } = kept;
        let end = (cache.next + code.len() as u64).next_multiple_of(16);
        let all = (*all).as_ref();
        memory.write_code(cache.next, &all[code]);
        memory.write_code(layout.cache_len - stubs.len() as u64, &all[stubs]);
        cache.next = end;
        cache.by_guest.reserve(records.len());
        cache.records = records;
        cache.sleepers = Some(sleepers);
        cache
    }

    /// There are blocks that were there from the start.
    pub fn has_sleepers(&self) -> bool {
        self.sleepers.is_some()
    }

    /// Blocks of the page of RAM at `page` are there.
    pub fn has_code_of(&self, page: u64) -> bool {
        self.by_page.get(&page).is_some_and(|blocks| !blocks.is_empty())
    }

    /// The group of the page at a GVA whose blocks were made after blocks of the page had been dropped so many times.
    pub fn sleeping(&self, guest: u64, times: u16) -> Option<Sleeping> {
        let sleepers = self.sleepers.as_ref()?;
        let mut groups = sleepers.of_page(page(guest));
        let group = groups.find(|group| sleepers.groups[*group].times == times)?;
        Some(sleepers.sleeping(group))
    }

    /// The blocks at a GVA for a value of the virtual RFLAGS.AC that are asleep, each with its group.
    pub fn sleepers_at(&self, guest: u64, ac: bool) -> Vec<(Sleeper, Sleeping)> {
        let Some(sleepers) = &self.sleepers else { return Vec::new() };
        let key = (guest, ac.into());
        let in_group = |group: usize| {
            let group = sleepers.sleeping(group);
            let of_key = |number| self.records.key(number) == key && self.records.is_asleep(number);
            let sleeper = group.all().find(|sleeper| of_key(sleeper.number))?;
            Some((sleeper, group))
        };
        sleepers.of_page(page(guest)).filter_map(in_group).collect()
    }

    /// What a block was made from; `None` if it is awake.
    pub fn made_from(&self, Sleeper { number, times }: Sleeper) -> Option<MadeBlock<'_>> {
        let sleepers = self.sleepers.as_ref().filter(|_| self.records.is_asleep(number))?;
        let (guest, variant) = self.records.key(number);
        Some(MadeBlock {
            guest,
            ac: variant == true.into(),
            times,
            landing: self.records.landing(number).is_some(),
            len: self.records.source(number).guest_len as usize,
            bytes: sleepers.bytes_of(number),
        })
    }

    /// Wakes blocks of a group. Each comes with the two RAM pages that hold its bytes: twice the same page if the block does not cross a
    /// page's end. The caller has seen that the guest has the bytes that the block was made from.
    pub fn wake(
        &mut self,
        memory: &mut impl CodeMemory,
        group: &Sleeping,
        blocks: &[(Sleeper, [u64; 2])],
    ) {
        if blocks.len() < group.blocks.len() {
            self.loosen(memory, group.blocks.clone());
        }
        for (sleeper, pages) in blocks {
            self.records.wake(sleeper.number, *pages, self.writes);
            self.file(sleeper.number, *pages);
        }
        // Not before: they lead to each other.
        for (sleeper, _) in blocks {
            self.integrate(memory, sleeper.number);
        }
        self.counters.woken += blocks.len() as u64;
        self.ahead.clear();
        if let Some(sleepers) = &mut self.sleepers {
            sleepers.spend(blocks, &self.records);
        }
    }

    /// Takes back the links that a group has had from the start. None of its blocks has others.
    fn loosen(&mut self, memory: &mut impl CodeMemory, group: Range<Number>) {
        for number in group {
            for jump in self.records.jumps_of(number) {
                let at = &mut self.records.jumps[jump as usize];
                if std::mem::replace(&mut at.kept, false) {
                    at.next = NONE;
                    self.point_back(memory, jump);
                }
            }
            if self.records.is_asleep(number) {
                *self.records.incoming(number) = NONE;
            }
        }
    }
}
