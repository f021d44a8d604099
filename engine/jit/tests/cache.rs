//! The code cache against a model: whatever is made, dropped, shown again and cleared, in whatever order, nothing
//! leads to a block but what asks for its guest address, and to none that was dropped. So it is with blocks that were kept.

mod support;

use jit::{
    Layout, Request,
    cache::{
        Cache, CodeMemory, CodeUser, Refused,
        kept::{Keeper, Kept, MadeBlock, Sleeper},
    },
    stubs::{self, Stubs},
    translate,
};
use std::{collections::HashMap, sync::LazyLock};
use support::LAYOUT;
use wedge_abi::{DEEP, DEEP_REACH, deep_slot, landing_slot};

/// GVAs of the blocks: zero, and such as meet in few slots of the searched table.
static GUESTS: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let all = (0xffff_ffff_8100_0000_u64..).step_by(32);
    let near = all.filter(|guest| deep_slot(*guest) < 64);
    [0].into_iter().chain(near).take(BLOCKS as usize).collect()
});
const BLOCKS: u64 = 160;
const PAGES: u64 = 16;
const LENGTH: usize = 16;
/// GVAs of blocks of which so many lie in a page.
static PAGEWISE: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let page = |index: u64| 0xffff_ffff_8100_0000 + ((index / PER_PAGE) << 12);
    (0..BLOCKS).map(|index| page(index) + index % PER_PAGE * 32).collect()
});
const PER_PAGE: u64 = 8;
/// Groups of blocks that are kept of each page.
const GROUPS: u16 = 3;
/// Bytes of a landing.
const LANDING_LEN: u64 = 28;

/// What wedges see.
#[derive(Default)]
struct Memory {
    code: HashMap<u64, u8>,
    tables: HashMap<u64, u64>,
}

impl CodeMemory for Memory {
    fn write_code(&mut self, offset: u64, bytes: &[u8]) {
        self.code.extend(bytes.iter().enumerate().map(|(n, byte)| (offset + n as u64, *byte)));
    }
    fn is_closed(&self, _: u64, _: &[u8]) -> bool {
        true
    }
    fn write_table(&mut self, offset: u64, value: u64) {
        self.tables.insert(offset, value);
    }
    fn table_word(&self, offset: u64) -> u64 {
        self.word(offset)
    }
}

impl Memory {
    fn word(&self, offset: u64) -> u64 {
        self.tables.get(&offset).copied().unwrap_or(0)
    }
    /// What a search for a GVA can find: HVAs.
    fn found(&self, gva: u64) -> impl Iterator<Item = u64> {
        let slots = deep_slot(gva)..deep_slot(gva) + DEEP_REACH;
        let keys = slots.map(|slot| (DEEP + slot * 16) as u64);
        keys.filter(move |at| self.word(*at) == gva).map(|at| self.word(at + 8))
    }
    /// The GVA that a landing (HVA) asks for.
    fn own(&self, landing: u64) -> u64 {
        let bytes = [3, 4, 5, 6].map(|n| self.code[&(landing - LAYOUT.cache + n)]);
        (i32::from_le_bytes(bytes) as u64).wrapping_neg()
    }
    /// The two words that the code at an HVA stores, which an unlinked jump leads to.
    fn missed(&self, hva: u64) -> [u64; 2] {
        const STORE: u64 = 11;
        [0, 1].map(|which| {
            let value = hva - LAYOUT.cache + which * STORE + 7;
            let bytes = [0, 1, 2, 3].map(|n| self.code[&(value + n)]);
            i32::from_le_bytes(bytes) as u64
        })
    }

    /// HVA a jump's displacement leads to.
    fn target(&self, site: u64) -> u64 {
        let bytes = [0, 1, 2, 3].map(|n| self.code[&(site - LAYOUT.cache + n)]);
        (site + 4).wrapping_add(i32::from_le_bytes(bytes) as u64)
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

/// Jumps or calls, perhaps under a condition, to another of these blocks.
fn code(guests: &[u64], index: u64, random: &mut Random) -> [u8; LENGTH] {
    let guest = |index: u64| guests[index as usize];
    let mut bytes = [0x90; LENGTH];
    let mut at = 0;
    for opcode in [&[0x0f, 0x84][..], if random.below(2) == 0 { &[0xe8] } else { &[0xe9] }] {
        let end = at + opcode.len() + 4;
        let to = guest(random.below(BLOCKS)).wrapping_sub(guest(index) + end as u64) as i32;
        bytes[at..at + opcode.len()].copy_from_slice(opcode);
        bytes[at + opcode.len()..end].copy_from_slice(&to.to_le_bytes());
        at = end;
    }
    bytes
}

/// What a keeper makes of blocks, each of which it is told of so often.
fn kept(layout: Layout, guests: &[u64], code: &[[u8; LENGTH]]) -> Vec<u8> {
    let made = |times| {
        let blocks = guests.iter().zip(code);
        blocks.map(move |(guest, bytes)| MadeBlock {
            guest: *guest,
            ac: false,
            times,
            landing: guest & 32 != 0,
            len: LENGTH,
            bytes,
        })
    };
    let mut all: Vec<_> = (0..GROUPS).flat_map(made).collect();
    all.sort_by_key(MadeBlock::rank);
    let mut keeper = Keeper::new(layout);
    all.iter().for_each(|made| keeper.add(made).expect("a block"));
    keeper.finish()
}

struct Model {
    layout: Layout,
    guests: &'static [u64],
    /// The code of the blocks that were kept, if some were.
    kept: Option<Vec<[u8; LENGTH]>>,
    /// How many groups have woken as a whole, and how many in part.
    woken: [u32; 2],
    cache: Cache,
    users: [CodeUser; 2],
    memory: Memory,
    code: Vec<[u8; LENGTH]>,
    random: Random,
    full: u32,
}

impl Model {
    fn new(seed: u64) -> Self {
        let layout = Layout { several: seed % 2 == 1, ..LAYOUT };
        Self::of(seed, layout, &GUESTS, |layout, memory, _| Cache::new(layout, memory))
    }

    /// With blocks from the start.
    fn with_kept(seed: u64) -> Self {
        let cache_len = stubs::LEN + 0xf400;
        let layout = Layout { several: seed % 2 == 1, cache_len, ..LAYOUT };
        let mut model = Self::of(seed, layout, &PAGEWISE, |layout, memory, code| {
            let kept = Kept::parse(&layout, kept(layout, &PAGEWISE, code));
            Cache::with_kept(layout, memory, kept.expect("blocks that were kept"))
        });
        model.kept = Some(model.code.clone());
        model
    }

    fn of(
        seed: u64,
        layout: Layout,
        guests: &'static [u64],
        cache: impl FnOnce(Layout, &mut Memory, &[[u8; LENGTH]]) -> Cache,
    ) -> Self {
        let (mut memory, mut random) = (Memory::default(), Random(seed));
        let code: Vec<_> = (0..BLOCKS).map(|index| code(guests, index, &mut random)).collect();
        let mut cache = cache(layout, &mut memory, &code);
        let users = [cache.add_user(), cache.add_user()];
        let (kept, woken, full) = Default::default();
        Self { layout, guests, kept, woken, cache, users, memory, code, random, full }
    }

    fn guest(&self, index: u64) -> u64 {
        self.guests[index as usize]
    }

    fn step(&mut self) {
        let index = self.random.below(BLOCKS);
        match self.random.below(20) {
            0..=1 => self.write_page(index % PAGES),
            2..=4 => self.cache.pass(self.users[(index % 2) as usize]),
            5..=6 => self.cache.publish(&mut self.memory, self.guests[index as usize], false),
            7..=9 if self.kept.is_some() => self.wake(index),
            _ if self.cache.find(self.guest(index), false).is_none() => self.add(index),
            _ => {}
        }
    }

    /// Wakes the blocks of a group of a block's page whose code is what it was, and for which there are no others.
    fn wake(&mut self, index: u64) {
        let times = self.random.below(GROUPS.into()) as u16;
        let Some(group) = self.cache.sleeping(self.guest(index), times) else { return };
        let pages = |sleeper: Sleeper| {
            let made = self.cache.made_from(sleeper)?;
            let index = self.guests.iter().position(|guest| *guest == made.guest)?;
            let same = self.code[index].starts_with(made.bytes);
            let page = (index as u64 % PAGES) << 12;
            let can = same && self.cache.find(made.guest, false).is_none();
            can.then_some((sleeper, [page; 2]))
        };
        let blocks: Vec<_> = group.all().filter_map(pages).collect();
        self.cache.wake(&mut self.memory, &group, &blocks);
        self.woken[usize::from(blocks.len() < PER_PAGE as usize)] += 1;
    }

    fn add(&mut self, index: u64) {
        let (bytes, page) = (self.code[index as usize], (index % PAGES) << 12);
        let memory = &mut self.memory;
        let made = self.cache.add(
            memory,
            self.guests[index as usize],
            &bytes,
            LENGTH,
            (false, false),
            [page; 2],
        );
        if made == Err(Refused::Full) {
            self.full += 1;
            self.cache.clear(memory);
        }
    }

    fn write_page(&mut self, page: u64) {
        for index in (page..BLOCKS).step_by(PAGES as usize) {
            let before = self.kept.as_ref().filter(|_| self.random.below(4) != 0);
            self.code[index as usize] = match before {
                Some(kept) => kept[index as usize],
                None => code(self.guests, index, &mut self.random),
            };
        }
        self.cache.drop_page(&mut self.memory, page << 12);
    }

    fn check(&self) {
        (0..BLOCKS).for_each(|index| self.check_block(index));
    }

    fn check_block(&self, index: u64) {
        let gva = self.guest(index);
        let host = self.cache.find(gva, false);
        let landing = self.memory.word(landing_slot(gva) as u64 * 8);
        if landing != Stubs::of(&self.layout).astray {
            let own = self.memory.own(landing);
            assert_eq!(self.cache.find(own, false), Some(landing + LANDING_LEN), "{own:x}");
            assert_eq!(landing_slot(own), landing_slot(gva));
        }
        self.memory.found(gva).for_each(|found| assert_eq!(Some(found), host, "deep, {gva:x}"));
        let Some(host) = host else { return };
        let bytes = &self.code[index as usize];
        let cache_offset = (host - LAYOUT.cache) as u32;
        let request = Request {
            guest: gva,
            bytes,
            here: LENGTH,
            ac: false,
            tap: false,
            landing: false,
            narrow: false,
            sought: 0,
            on_trial: false,
            version: None,
            host,
            stubs: host + 0x1000,
            cache_offset,
        };
        for link in translate(&self.layout, &request).expect("a block").links {
            let leads = self.memory.target(host + u64::from(link.displacement));
            match self.cache.find(link.target, false) {
                Some(block) => assert_eq!(leads, block, "from {gva:x}"),
                None => {
                    let [target, site] = self.memory.missed(leads);
                    assert_eq!(
                        (target, site),
                        (link.target, u64::from(cache_offset + link.displacement))
                    );
                }
            }
        }
    }
}

#[test]
fn nothing_leads_to_a_block_that_was_dropped() {
    let mut full = 0;
    for seed in 0..20 {
        let mut model = Model::new(seed);
        for _ in 0..500 {
            model.step();
            model.check();
        }
        full += model.full;
    }
    assert!(full > 10, "cleared {full} times");
}

#[test]
fn nothing_leads_to_a_block_that_sleeps() {
    let (mut full, mut woken) = (0, [0; 2]);
    for seed in 0..40 {
        let mut model = Model::with_kept(seed);
        model.check();
        for _ in 0..400 {
            model.step();
            model.check();
        }
        full += model.full;
        woken = [0, 1].map(|which| woken[which] + model.woken[which]);
    }
    assert!(full > 10 && woken.iter().all(|woken| *woken > 100), "full {full}, woken {woken:?}");
}

#[test]
fn what_is_not_as_it_was_kept_is_refused() {
    let mut random = Random(1);
    let code: Vec<_> = (0..16).map(|index| code(&PAGEWISE[..160], index, &mut random)).collect();
    let all = kept(LAYOUT, &PAGEWISE[..16], &code);
    assert!(Kept::parse(&LAYOUT, all.clone()).is_some());
    assert!(Kept::parse(&Layout { several: true, ..LAYOUT }, all.clone()).is_none());
    let cut_off = |len: usize| Kept::parse(&LAYOUT, all[..len].to_vec());
    assert!((0..all.len()).step_by(3).all(|len| cut_off(len).is_none()));
}

/// The slots of dropped blocks come to other addresses. Otherwise a kernel that runs for days would use up the searched
/// table.
#[test]
fn a_slot_of_the_searched_table_is_used_again() {
    let all = (GUESTS[1]..).step_by(32);
    let same = all.filter(|gva| deep_slot(*gva) == deep_slot(GUESTS[1]));
    let same: Vec<u64> = same.take(3 * DEEP_REACH).collect();
    for several in [false, true] {
        let mut memory = Memory::default();
        let mut cache = Cache::new(Layout { several, ..LAYOUT }, &mut memory);
        let users = [cache.add_user(), cache.add_user()];
        for gva in &same {
            let made = cache.add(&mut memory, *gva, &[0xf4], 1, (false, false), [0x1000; 2]);
            made.expect("a block");
            assert_eq!(memory.found(*gva).count(), 1, "{gva:x}, several: {several}");
            cache.drop_page(&mut memory, 0x1000);
            assert_eq!(memory.found(*gva).count(), 0, "{gva:x}, several: {several}");
            users.iter().for_each(|user| cache.pass(*user));
        }
    }
}

/// Whoever executes a jump while it is pointed elsewhere sees one word change.
#[test]
fn jumps_that_are_changed_lie_in_one_word() {
    let layout = Layout { several: true, ..LAYOUT };
    let mut random = Random(1);
    for index in 0..BLOCKS {
        let bytes = code(&GUESTS, index, &mut random);
        let host = LAYOUT.cache + stubs::LEN;
        // At any distance from a word's start.
        for skipped in 0..8 {
            let bytes = [&[0x90; 8][..skipped], &bytes].concat();
            let here = bytes.len();
            let request = Request {
                guest: GUESTS[index as usize],
                bytes: &bytes,
                here,
                ac: false,
                tap: false,
                landing: false,
                narrow: false,
                sought: 0,
                on_trial: false,
                version: None,
                host,
                stubs: host,
                cache_offset: 0,
            };
            for link in translate(&layout, &request).expect("a block").links {
                assert!((host + u64::from(link.displacement)) % 8 <= 4, "{link:?}");
            }
        }
    }
}
