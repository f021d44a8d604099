//! The jump tables: which block an indirect jump finds for a guest address.
//!
//! A slot is two words, a key and where its block lies, and whoever looks takes no lock: it reads the key first and the
//! other word after. Other vCPUs may look while a slot changes, so once a slot has been an address's, another address
//! gets it only when no vCPU can still be between those two reads: the slot is emptied, and given to the other address
//! when each vCPU has been outside of all translated code since. In the table that is searched a slot is emptied when
//! its block is dropped. In the one that an address's low bits are the index of, it is when another address asks for it.

use super::{CodeMemory, Key, Variant};
use crate::{Layout, stubs};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use wedge_abi::{CROSSES, DEEP, DEEP_REACH, DEEP_SLOTS, TABLE_SLOTS, deep_slot, versioned};

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
    /// Whose the slots of the other tables are: GVAs, zero for nobody's.
    owners: Vec<u64>,
    /// Slots emptied so far, of all tables.
    emptied: u64,
    /// For each slot of the searched table the value of `emptied` when the slot was emptied. Zero while the slot leads
    /// to a block, or is nobody's.
    deep_emptied: Vec<u64>,
    /// The slots of the searched table that have been emptied and the values of `emptied` then, the earliest first. Some
    /// of the slots lead to a block again.
    deep_left: VecDeque<(usize, u64)>,
    /// How many there were when a user was last outside of translated code; the most there can be while it stays outside.
    seen: Vec<u64>,
    /// Slots that have been emptied, by their index among the owners.
    waiting: FxHashMap<usize, Waiting>,
}

/// A slot that has been emptied for another address.
struct Waiting {
    key: Key,
    /// Which of the emptied ones it was.
    number: u64,
}

/// The key of a block in the searched table, which has no blocks for RFLAGS.AC set.
fn searched_for((guest, variant): Key) -> Option<u64> {
    let page = variant.page().unwrap_or(0);
    (variant != Variant::AC).then(|| versioned(guest, page.into()))
}

/// The index of a slot among the owners.
fn index(key: Key) -> usize {
    usize::from(key.1 == Variant::AC) * TABLE_SLOTS + (key.0 as usize & (TABLE_SLOTS - 1))
}

impl Tables {
    /// Empty tables; writes what is not zero in them.
    pub fn new(layout: Layout, memory: &mut impl CodeMemory) -> Self {
        let shared = layout.several.then(|| Shared {
            owners: vec![0; 2 * TABLE_SLOTS],
            deep_emptied: vec![0; DEEP_SLOTS + DEEP_REACH],
            ..Shared::default()
        });
        let new = Self { layout, deep: vec![0; DEEP_SLOTS + DEEP_REACH], shared };
        new.reset(memory);
        new
    }

    /// No slot must match address zero while it is empty: the key of slot 0 is one no address of that slot negates
    /// to, and for those of the searched table see [`empty_deep`].
    fn reset(&self, memory: &mut impl CodeMemory) {
        for ac in [false, true] {
            let table = stubs::table(&self.layout, ac) - self.layout.table;
            memory.write_table(table, 1);
        }
        for slot in deep_slots(0) {
            memory.write_table(deep_key(slot), empty_deep(slot));
        }
    }

    fn words(&self, key: Key) -> (u64, u64) {
        let table = stubs::table(&self.layout, key.1 == Variant::AC) - self.layout.table;
        let (keys, values) = stubs::table_slot(key.0);
        (table + keys as u64, table + values as u64)
    }

    /// Has the tables lead to a block. The searched one says whether a block with a gate `crosses` into the page behind.
    pub fn show(&mut self, memory: &mut impl CodeMemory, key: Key, host: u64, crosses: bool) {
        let may = self.shared.as_mut().is_none_or(|shared| shared.claim(key));
        if may {
            self.write(memory, key, host)
        } else {
            self.empty(memory, key)
        }
        if let Some(searched_for) = searched_for(key).filter(|_| key.0 != 0) {
            let mark = if crosses && key.1.page().is_some() { CROSSES } else { 0 };
            self.enter_deep(memory, searched_for, host | mark);
        }
    }

    fn write(&self, memory: &mut impl CodeMemory, key: Key, host: u64) {
        let (keys, values) = self.words(key);
        memory.write_table(values, host);
        memory.write_table(keys, key.0.wrapping_neg());
    }

    fn empty(&self, memory: &mut impl CodeMemory, key: Key) {
        memory.write_table(self.words(key).0, u64::from(key.0 & 0xffff == 0));
    }

    /// Has the tables not lead to a block any more.
    pub fn hide(&mut self, memory: &mut impl CodeMemory, key: Key) {
        self.empty(memory, key);
        let slot = searched_for(key).and_then(|guest| self.deep_slot_of(guest));
        if let Some(slot) = slot {
            memory.write_table(deep_key(slot), empty_deep(slot));
            match &mut self.shared {
                None => self.deep[slot] = 0,
                Some(shared) => shared.leave_deep(slot),
            }
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
        keys.for_each(|key| self.empty(memory, key));
        for (slot, guest) in self.deep.iter_mut().enumerate().filter(|(_, guest)| **guest != 0) {
            *guest = 0;
            memory.write_table(deep_key(slot), empty_deep(slot));
        }
        if let Some(shared) = &mut self.shared {
            shared.owners.fill(0);
            shared.waiting.clear();
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

    /// A user is outside of translated code, and about to execute it again. Returns the addresses whose slots have
    /// become theirs: their blocks are to be shown.
    pub fn pass(&mut self, user: CodeUser) -> Vec<Key> {
        let Some(shared) = &mut self.shared else { return Vec::new() };
        shared.seen[user.0] = shared.emptied;
        let all = shared.seen_by_all();
        shared.free_deep(&mut self.deep, all);
        shared.hand_over(all)
    }
}

impl Shared {
    /// An address may have its slot at once; if not, it waits for it.
    fn claim(&mut self, key: Key) -> bool {
        let slot = index(key);
        let owner = &mut self.owners[slot];
        if *owner == 0 || *owner == key.0 {
            *owner = key.0;
            self.waiting.remove(&slot);
            return true;
        }
        let empty = self.waiting.get(&slot).map(|waiting| waiting.number);
        let number = empty.unwrap_or_else(|| {
            self.emptied += 1;
            self.emptied
        });
        self.waiting.insert(slot, Waiting { key, number });
        false
    }

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

    /// Gives emptied slots whose key no user can have read to the addresses that wait for them, and returns those.
    fn hand_over(&mut self, all: u64) -> Vec<Key> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let due = self.waiting.extract_if(|_, waiting| waiting.number <= all);
        let due: Vec<_> = due.map(|(slot, waiting)| (slot, waiting.key)).collect();
        for (slot, key) in &due {
            self.owners[*slot] = key.0;
        }
        due.into_iter().map(|(_, key)| key).collect()
    }
}
