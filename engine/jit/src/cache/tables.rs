//! The jump tables: which block a computed jump finds for a guest address.
//!
//! The searched table has all blocks. Before it, jumps of kernel code look into a table of landings, and those of user code into one
//! that an address's low bits are the index of, which has keys.
//!
//! A landing lets in only jumps to its own address, so the slot that leads to it may change at any time.
//!
//! A slot of the searched table is two words, a key and where its block lies, and whoever looks takes no lock: it reads the key first and the
//! other word after. Other vCPUs may look while a slot changes, so once a slot has been an address's, another address
//! gets it only when no vCPU can still be between those two reads. So a slot is emptied when its block is dropped, and
//! given away when each vCPU has been outside of all translated code since.

use super::{CodeMemory, Key, Variant};
use crate::{
    Layout, Level,
    stubs::{self, Stubs},
};
use std::collections::VecDeque;
use wedge_abi::{
    CROSSES, DEEP, DEEP_REACH, DEEP_SLOTS, LANDING_SLOTS, TABLE_SLOTS, deep_slot, kernel_key,
    landing_slot, versioned,
};

/// log2 of the bytes of a page.
const PAGE_BITS: u32 = 12;

/// What an empty slot of the searched table holds: no GVA that is searched for there. Where that for zero begins it
/// is not zero.
const fn empty_deep(slot: usize) -> u64 {
    (slot < DEEP_REACH) as u64
}

const _: () = assert!(deep_slot(0) == 0 && deep_slot(1) >= DEEP_REACH);

/// The slots of the searched table where a GVA can be.
fn deep_slots(guest: u64) -> impl Iterator<Item = usize> {
    (0..DEEP_REACH).map(move |n| deep_slot(guest) + n)
}

/// Offset in the tables of the key of a slot of the searched one.
fn deep_key(slot: usize) -> u64 {
    (DEEP + slot * 16) as u64
}

/// One of those who execute what the tables lead to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeUser(usize);

impl CodeUser {
    /// It was the first.
    #[must_use]
    pub fn is_first(self) -> bool {
        self.0 == 0
    }
}

/// The records of the tables.
pub(super) struct Tables {
    layout: Layout,
    /// Whose the slots of the searched table are: GVAs, zero for nobody's.
    deep: Vec<u64>,
    shared: Option<Shared>,
}

/// What is known of several users.
#[derive(Default)]
struct Shared {
    /// Slots emptied so far.
    emptied: u64,
    /// For each slot of the searched table the value of `emptied` when the slot was emptied. Zero while the slot leads
    /// to a block, or is nobody's.
    deep_emptied: Vec<u64>,
    /// The slots of the searched table that have been emptied and the values of `emptied` then, the earliest first. Some
    /// of the slots lead to a block again.
    deep_left: VecDeque<(usize, u64)>,
    /// How many there were when a user was last outside of translated code; the most there can be while it stays outside.
    seen: Vec<u64>,
}

/// A block that the tables are to lead to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shown {
    /// HVA at which others enter it.
    pub host: u64,
    /// HVA of its landing.
    pub landing: Option<u64>,
    /// It has a gate and reaches into the page behind.
    pub crosses: bool,
}

/// The key of a block in the searched table.
fn searched_for((guest, variant): Key) -> u64 {
    match variant.page() {
        Some(page) => versioned(guest, page.into()),
        None => kernel_key(guest, variant == Variant::AC),
    }
}

/// Offset in the tables of the landing for a GVA.
fn landing_at(guest: u64) -> u64 {
    landing_slot(guest) as u64 * 8
}

impl Tables {
    /// Empty tables; writes what is not zero in them.
    pub fn new(layout: Layout, memory: &mut impl CodeMemory) -> Self {
        let shared = layout.several.then(|| Shared {
            deep_emptied: vec![0; DEEP_SLOTS + DEEP_REACH],
            ..Shared::default()
        });
        let new = Self { layout, deep: vec![0; DEEP_SLOTS + DEEP_REACH], shared };
        new.reset(memory);
        new
    }

    /// Without a landing a jump searches. No slot must match address zero while it is empty: the first key of user code is one no
    /// address of that slot negates to, and for those of the searched table see [`empty_deep`].
    fn reset(&self, memory: &mut impl CodeMemory) {
        if self.has_keyed() {
            memory.write_table(0, 1);
        }
        if self.layout.landings.is_some() {
            (0..LANDING_SLOTS as u64).for_each(|slot| self.empty_landing(memory, slot * 8));
        }
        for slot in deep_slots(0) {
            memory.write_table(deep_key(slot), empty_deep(slot));
        }
    }

    /// There is the table with keys.
    fn has_keyed(&self) -> bool {
        self.layout.level == Level::User
    }

    /// Blocks are for places.
    fn has_places(&self) -> bool {
        self.layout.origins.is_some()
    }

    /// Has the table with keys not lead to a block for a GVA, or for a place. A place says where in a page its addresses are, and not in
    /// which page, so the slots of all such addresses are emptied.
    fn empty_keyed(&self, memory: &mut impl CodeMemory, guest: u64) {
        if !self.has_keyed() {
            return;
        }
        let pages = if self.has_places() { (TABLE_SLOTS as u64) >> PAGE_BITS } else { 1 };
        for page in 0..pages {
            let guest = guest.wrapping_add(page << PAGE_BITS);
            let (key, _) = stubs::table_slot(guest);
            memory.write_table(key as u64, u64::from(guest & (TABLE_SLOTS as u64 - 1) == 0));
        }
    }

    fn empty_landing(&self, memory: &mut impl CodeMemory, at: u64) {
        memory.write_table(at, Stubs::of(&self.layout).astray);
    }

    /// Has the tables lead to a block.
    pub fn show(&mut self, memory: &mut impl CodeMemory, key: Key, shown: Shown) {
        let Shown { host, landing, crosses } = shown;
        // Wedges enter blocks for places there, when they know the addresses.
        if self.has_keyed() && !self.has_places() {
            write_keyed(memory, key.0, host);
        }
        if let Some(landing) = landing {
            memory.write_table(landing_at(key.0), landing);
        }
        if key.0 != 0 {
            let mark = if crosses && key.1.page().is_some() { CROSSES } else { 0 };
            self.enter_deep(memory, searched_for(key), host | mark);
        }
    }

    /// Has the tables not lead to a block any more, which has this landing.
    pub fn hide(&mut self, memory: &mut impl CodeMemory, key: Key, landing: Option<u64>) {
        self.empty_keyed(memory, key.0);
        if let Some(landing) = landing {
            self.hide_landing(memory, landing_at(key.0), landing);
        }
        if let Some(slot) = self.deep_slot_of(searched_for(key)) {
            memory.write_table(deep_key(slot), empty_deep(slot));
            match &mut self.shared {
                None => self.deep[slot] = 0,
                Some(shared) => shared.leave_deep(slot),
            }
        }
    }

    /// The slot may have become another address's.
    fn hide_landing(&self, memory: &mut impl CodeMemory, at: u64, landing: u64) {
        if memory.table_word(at) == landing {
            self.empty_landing(memory, at);
        }
    }

    /// The slot of the searched table that is a GVA's.
    fn deep_slot_of(&self, guest: u64) -> Option<usize> {
        deep_slots(guest).find(|at| self.deep[*at] == guest)
    }

    /// Puts a block into the searched table, if there is room for it: into the slot that is its address's, or one that
    /// is nobody's.
    fn enter_deep(&mut self, memory: &mut impl CodeMemory, guest: u64, host: u64) {
        let mut free = None;
        let own = deep_slots(guest).find(|at| {
            if self.deep[*at] == 0 {
                free = free.or(Some(*at));
            }
            self.deep[*at] == guest
        });
        let Some(slot) = own.or(free) else { return };
        self.deep[slot] = guest;
        if let Some(shared) = &mut self.shared {
            shared.deep_emptied[slot] = 0;
        }
        memory.write_table(deep_key(slot) + 8, host);
        memory.write_table(deep_key(slot), guest);
    }

    /// Empties the tables. Nobody may be executing what they lead to.
    pub fn clear(&mut self, memory: &mut impl CodeMemory, keys: impl Iterator<Item = Key>) {
        keys.for_each(|key| match self.layout.landings {
            Some(_) => self.empty_landing(memory, landing_at(key.0)),
            None => self.empty_keyed(memory, key.0),
        });
        for (slot, guest) in self.deep.iter_mut().enumerate().filter(|(_, guest)| **guest != 0) {
            *guest = 0;
            memory.write_table(deep_key(slot), empty_deep(slot));
        }
        if let Some(shared) = &mut self.shared {
            shared.deep_emptied.fill(0);
            shared.deep_left.clear();
        }
    }

    /// One more is going to execute what the tables lead to. It is outside now.
    pub fn add_user(&mut self) -> CodeUser {
        let Some(shared) = &mut self.shared else { return CodeUser(0) };
        shared.seen.push(u64::MAX);
        CodeUser(shared.seen.len() - 1)
    }

    /// A user is outside of translated code, and stays there until it passes.
    pub fn rest(&mut self, user: CodeUser) {
        if let Some(shared) = &mut self.shared {
            shared.seen[user.0] = u64::MAX;
        }
    }

    /// All users but this one are outside.
    pub fn is_alone(&self, user: CodeUser) -> bool {
        let others = self.shared.iter().flat_map(|shared| shared.seen.iter().enumerate());
        others.filter(|(at, _)| *at != user.0).all(|(_, seen)| *seen == u64::MAX)
    }

    /// A user is outside of translated code, and about to execute it again.
    pub fn pass(&mut self, user: CodeUser) {
        let Some(shared) = &mut self.shared else { return };
        shared.seen[user.0] = shared.emptied;
        let all = shared.seen_by_all();
        shared.free_deep(&mut self.deep, all);
    }
}

impl Shared {
    /// How many slots had been emptied when each user was last outside.
    fn seen_by_all(&self) -> u64 {
        self.seen.iter().copied().min().unwrap_or(0)
    }

    /// Notes that a slot of the searched table has been emptied.
    fn leave_deep(&mut self, slot: usize) {
        self.emptied += 1;
        self.deep_emptied[slot] = self.emptied;
        self.deep_left.push_back((slot, self.emptied));
    }

    /// Makes those emptied slots of the searched table nobody's whose key no user can have read.
    fn free_deep(&mut self, deep: &mut [u64], all: u64) {
        while let Some((slot, number)) = self.deep_left.pop_front_if(|(_, number)| *number <= all) {
            if self.deep_emptied[slot] == number {
                (deep[slot], self.deep_emptied[slot]) = (0, 0);
            }
        }
    }
}

/// Enters the block at a GVA into the table with keys, which only user code has.
fn write_keyed(memory: &mut impl CodeMemory, guest: u64, host: u64) {
    let (key, value) = stubs::table_slot(guest);
    memory.write_table(value as u64, host);
    memory.write_table(key as u64, guest.wrapping_neg());
}
