//! Who translates blocks for later caches.

use super::{
    Group, MadeBlock,
    packed::{put, put_bytes},
    page,
};
use crate::{
    Layout,
    cache::{Cache, CodeMemory, How, Key, Refused, block_records::Number, distance},
    stubs,
};
use rustc_hash::FxHashMap;

/// Translates blocks for later caches of a layout.
pub struct Keeper {
    cache: Cache,
    memory: Collected,
    groups: Vec<Group>,
    /// The blocks of the newest group.
    newest: FxHashMap<Key, Number>,
    ends: Vec<u32>,
    bytes: Vec<u8>,
}

/// Code as it is written to a cache.
struct Collected {
    /// From the beginning of the cache on.
    code: Vec<u8>,
    /// The stubs at the cache's end, from the end downwards.
    stubs: Vec<Vec<u8>>,
    /// Offset in the cache of the last of these; the next one ends there.
    first_stub: usize,
}

impl CodeMemory for Collected {
    fn write_code(&mut self, offset: u64, bytes: &[u8]) {
        let offset = offset as usize;
        let end = offset + bytes.len();
        if end == self.first_stub {
            self.stubs.push(bytes.to_vec());
            self.first_stub = offset;
        } else {
            self.code.resize(end.max(self.code.len()), 0);
            self.code[offset..end].copy_from_slice(bytes);
        }
    }
    /// The code must be closed on every host, whether this one has keys or not. Stubs end with whole instructions of ours, so that only what lies within can open keys.
    fn is_closed(&self, offset: u64, bytes: &[u8]) -> bool {
        let old = |at: u64| self.code.get(at as usize).copied().unwrap_or(0);
        !wedge_abi::keys::opened(offset, bytes, old)
    }
    fn write_table(&mut self, _: u64, _: u64) {}
    fn table_word(&self, _: u64) -> u64 {
        0
    }
}

impl Keeper {
    /// No blocks yet, for caches of this layout.
    #[must_use]
    pub fn new(layout: Layout) -> Self {
        let first_stub = layout.cache_len as usize;
        let mut memory = Collected { code: Vec::new(), stubs: Vec::new(), first_stub };
        let cache = Cache::new(layout, &mut memory);
        let (groups, newest, ends, bytes) = Default::default();
        Self { cache, memory, groups, newest, ends, bytes }
    }

    /// Translates a block. Blocks come in order ([`MadeBlock::rank`]).
    ///
    /// # Errors
    /// It is none, or there is no room.
    pub fn add(&mut self, made: &MadeBlock<'_>) -> Result<(), Refused> {
        let &MadeBlock { guest, ac, times, landing, len, bytes } = made;
        let how = How { ac, landing, ..How::default() };
        let block = self.cache.place(&mut self.memory, guest, bytes, len, how)?;
        let page = page(guest);
        if self.groups.last().is_none_or(|last| (last.page, last.times) != (page, times)) {
            self.link();
            self.groups.push(Group { page, times, first: self.ends.len() as Number });
        }
        let number = self.cache.records.enter(&block, ac.into(), [0; 2], 0);
        self.newest.insert((guest, ac.into()), number);
        let read = (block.read as usize).min(bytes.len());
        self.bytes.extend_from_slice(&bytes[..read]);
        self.ends.push(self.bytes.len() as u32);
        Ok(())
    }

    /// Links the jumps within the newest group, which is complete.
    fn link(&mut self) {
        let newest = std::mem::take(&mut self.newest);
        for from in newest.values() {
            for jump in self.cache.records.jumps_of(*from) {
                let to = newest.get(&self.cache.records.jumps[jump as usize].key());
                to.into_iter().for_each(|to| self.lead(jump, *to));
            }
        }
    }

    /// Has a jump lead to a block, if it may have such bytes.
    fn lead(&mut self, jump: Number, to: Number) {
        let records = &mut self.cache.records;
        let at = &records.jumps[jump as usize];
        let site = records.host(at.from) + at.site();
        let bytes = distance(site, records.entry(jump, to));
        let offset = site - self.cache.layout.cache;
        if self.memory.is_closed(offset, &bytes) {
            self.memory.write_code(offset, &bytes);
            let next = std::mem::replace(records.incoming(to), jump);
            let at = &mut records.jumps[jump as usize];
            (at.next, at.kept) = (next, true);
        }
    }

    /// All blocks, for [`super::Kept::parse`].
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.link();
        let layout = self.cache.layout;
        let mut all = Vec::new();
        put_bytes(&mut all, format!("{layout:?}").as_bytes());
        put_bytes(&mut all, &self.memory.code[stubs::LEN as usize..]);
        let stubs: Vec<u8> = self.memory.stubs.into_iter().rev().flatten().collect();
        put_bytes(&mut all, &stubs);
        self.cache.records.encode(layout.cache, &mut all);
        put(&mut all, self.groups.iter().map(Group::encoded));
        put(&mut all, self.ends.into_iter().map(u32::to_le_bytes));
        put_bytes(&mut all, &self.bytes);
        all
    }
}
