//! Direct jumps between blocks.
//!
//! A jump is in one list at any time: of those that lead to a block, or of those that wait for one at a
//! guest address. So the lists run through the jumps themselves, and linking allocates nothing. A dropped
//! block's jumps stay in their lists, and are passed over, until everything is dropped.

use super::{Cache, CodeMemory, Key, Number};
use crate::Link;

/// A direct jump of a block.
#[derive(Clone, Copy)]
pub(super) struct Jump {
    /// Its block.
    from: Number,
    link: Link,
    /// The next one in the list it is in.
    next: Option<Number>,
}

impl Cache {
    /// Enters the jumps of the block that is entered next.
    pub(super) fn enter_jumps(&mut self, links: &[Link]) -> std::ops::Range<Number> {
        let (first, from) = (self.jumps.len() as Number, self.blocks.len() as Number);
        self.jumps.extend(links.iter().map(|link| Jump { from, link: *link, next: None }));
        first..self.jumps.len() as Number
    }

    /// Points the jumps that wait for a block at it, and its own at others.
    pub(super) fn join(&mut self, memory: &mut impl CodeMemory, number: Number) {
        let block = &self.blocks[number as usize];
        let (key, own) = (block.key, block.jumps.clone());
        let mut next = self.waiting.remove(&key);
        while let Some(jump) = next {
            next = self.jumps[jump as usize].next;
            self.connect(memory, jump, number);
        }
        for jump in own {
            let link = self.jumps[jump as usize].link;
            match self.number(link.target, link.alignment).filter(|to| self.is_open(*to)) {
                Some(to) => self.connect(memory, jump, to),
                None => self.wait(jump),
            }
        }
    }

    /// Takes back the jumps to a block that is dropped.
    pub(super) fn part(&mut self, memory: &mut impl CodeMemory, number: Number) {
        let mut next = self.blocks[number as usize].incoming.take();
        while let Some(jump) = next {
            let Jump { from, link, next: following } = self.jumps[jump as usize];
            next = following;
            let block = &self.blocks[from as usize];
            if block.live {
                let (site, stub) = (u64::from(link.displacement), u64::from(link.stub));
                self.point(memory, block.host + site, block.host + stub);
                self.wait(jump);
            }
        }
    }

    /// Points a jump at a block, unless its own is dropped.
    fn connect(&mut self, memory: &mut impl CodeMemory, jump: Number, to: Number) {
        let Jump { from, link, .. } = self.jumps[jump as usize];
        let block = &self.blocks[from as usize];
        if block.live {
            let site = block.host + u64::from(link.displacement);
            self.point(memory, site, self.blocks[to as usize].host);
            let first = self.blocks[to as usize].incoming.replace(jump);
            self.jumps[jump as usize].next = first;
            self.counters.linked += 1;
        }
    }

    /// Points a jump at the block for its target as soon as there is one.
    fn wait(&mut self, jump: Number) {
        let link = self.jumps[jump as usize].link;
        let key: Key = (link.target, link.alignment);
        let first = self.waiting.insert(key, jump);
        self.jumps[jump as usize].next = first;
    }

    /// Where a block's direct jumps lead.
    pub fn targets(&self, host: u64) -> Vec<(u64, bool)> {
        let jumps = self.block_at(host).map(|block| block.jumps.clone()).unwrap_or_default();
        let links = jumps.map(|jump| self.jumps[jump as usize].link);
        links.map(|link| (link.target, link.alignment)).collect()
    }

    /// What is likely to be asked for after a block: where its jumps lead, and where its call returns to.
    pub fn ahead(&self, host: u64) -> Vec<(u64, bool)> {
        let returns = self.block_at(host).and_then(|block| block.returns);
        self.targets(host).into_iter().chain(returns).collect()
    }
}
