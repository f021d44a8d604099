//! Direct jumps between blocks.
//!
//! A jump is in one list at any time: of those that lead to a block, or of those that wait for one at a
//! guest address. So the lists run through the jumps themselves, and linking allocates nothing. A dropped
//! block's jumps stay in their lists, and are passed over, until everything is dropped.

use super::{Cache, CodeMemory, Key, Number, Variant, block_records::NONE};
use std::mem::replace;

impl Cache {
    /// Points the jumps that wait for a block at it, and its own at others.
    pub(super) fn join(&mut self, memory: &mut impl CodeMemory, number: Number) {
        let key = self.records.key(number);
        let any = (key.1 != Variant::ANY).then_some((key.0, Variant::ANY));
        for key in std::iter::once(key).chain(any) {
            let mut next = self.waiting_for(key, number);
            while next != NONE {
                let jump = next;
                next = self.records.jumps[jump as usize].next;
                self.connect(memory, jump, number);
            }
        }
        for jump in self.records.jumps_of(number) {
            let at = &mut self.records.jumps[jump as usize];
            if replace(&mut at.kept, false) {
                self.counters.linked += 1;
                continue;
            }
            let key = at.key();
            match self.number(key).filter(|to| self.trials.over(*to)) {
                Some(to) => self.connect(memory, jump, to),
                None => self.wait(jump),
            }
        }
    }

    /// Takes the list of the jumps that wait for a key, if the key leads to this block: the first of them.
    fn waiting_for(&mut self, key: Key, number: Number) -> Number {
        let leads = self.number(key) == Some(number);
        leads.then(|| self.waiting.remove(&key)).flatten().unwrap_or(NONE)
    }

    /// Takes back the jumps to a block that is dropped.
    pub(super) fn part(&mut self, memory: &mut impl CodeMemory, number: Number) {
        let mut next = replace(self.records.incoming(number), NONE);
        while next != NONE {
            let jump = next;
            let at = &self.records.jumps[jump as usize];
            next = at.next;
            if self.records.is_live(at.from) {
                self.point_back(memory, jump);
                self.wait(jump);
            }
        }
    }

    /// Points a jump at a block, unless its own is dropped. One that must not have such bytes waits for the next block
    /// for its target.
    fn connect(&mut self, memory: &mut impl CodeMemory, jump: Number, to: Number) {
        let at = &self.records.jumps[jump as usize];
        if self.records.is_live(at.from) {
            let site = self.records.host(at.from) + at.site();
            if !self.point(memory, site, self.records.entry(jump, to)) {
                return self.wait(jump);
            }
            let first = replace(self.records.incoming(to), jump);
            self.records.jumps[jump as usize].next = first;
            self.counters.linked += 1;
        }
    }

    /// Points a jump at the block for its target as soon as there is one.
    fn wait(&mut self, jump: Number) {
        let at = &mut self.records.jumps[jump as usize];
        at.next = self.waiting.insert(at.key(), jump).unwrap_or(NONE);
    }

    /// Where a block's direct jumps lead.
    pub fn targets(&self, host: u64) -> Vec<(u64, Variant)> {
        let jumps = self.records.live_at(host).map(|number| self.records.jumps_of(number));
        jumps.unwrap_or_default().map(|jump| self.records.jumps[jump as usize].key()).collect()
    }
}
