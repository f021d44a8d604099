//! Blocks on trial: nothing leads to them but the monitor, and they lead to nothing but it.
//!
//! Whoever wants to see what a single block does has it run alone. A block becomes one like any
//! other when it has made as many runs as were asked for.

use super::{Cache, CodeMemory, Number};
use crate::{JumpLookup, block::Block, stubs::Stubs};
use rustc_hash::FxHashMap;

/// So many runs never end.
pub const ALWAYS: u32 = u32::MAX;

/// Blocks on trial.
#[derive(Default)]
pub(super) struct Trials {
    /// Runs that new blocks are to make alone.
    runs: u32,
    /// Runs that blocks are to make yet, and what they look up when they have.
    open: FxHashMap<Number, (u32, Vec<JumpLookup>)>,
}

impl Trials {
    /// Puts a new block on trial, if there are trials.
    pub fn begin(&mut self, number: Number, lookups: Vec<JumpLookup>) -> bool {
        let runs = self.runs;
        if runs > 0 {
            self.open.insert(number, (runs, lookups));
        }
        runs > 0
    }

    /// New blocks are put on trial.
    pub fn are_made(&self) -> bool {
        self.runs > 0
    }

    /// The block is not on trial.
    pub fn over(&self, number: Number) -> bool {
        self.open.is_empty() || !self.open.contains_key(&number)
    }

    /// There are no blocks any more.
    pub fn forget(&mut self) {
        self.open.clear();
    }

    /// A block has run alone; what it looks up if that was the last time.
    fn ran(&mut self, number: Number) -> Option<Vec<JumpLookup>> {
        let (runs, _) = self.open.get_mut(&number).filter(|(runs, _)| *runs != ALWAYS)?;
        *runs -= 1;
        if *runs > 0 {
            return None;
        }
        self.open.remove(&number).map(|(_, lookups)| lookups)
    }
}

impl Cache {
    /// Blocks made from now on run alone so many times ([`ALWAYS`]: each time).
    pub fn try_new_blocks(&mut self, runs: u32) {
        self.trials.runs = runs;
    }

    /// The block at an HVA is on trial.
    pub fn on_trial(&self, host: u64) -> bool {
        self.records.live_at(host).is_some_and(|number| !self.trials.over(number))
    }

    /// The block at an HVA, which is on trial, has run alone.
    pub fn ran_alone(&mut self, memory: &mut impl CodeMemory, host: u64) {
        let Some(number) = self.records.live_at(host) else { return };
        let Some(lookups) = self.trials.ran(number) else { return };
        let first = self.records.host(number);
        for lookup in lookups {
            let site = first + u64::from(lookup.displacement);
            self.point(memory, site, lookup.routine);
        }
        self.integrate(memory, number);
    }

    /// While there are trials a new block looks nothing up.
    pub(super) fn isolate(&self, block: &mut Block) {
        if !self.trials.are_made() {
            return;
        }
        let alone = Stubs::of(&self.layout).alone;
        for lookup in &block.lookups {
            let at = lookup.displacement as usize;
            let distance = alone.wrapping_sub(block.host + at as u64 + 4) as i32;
            block.code[at..at + 4].copy_from_slice(&distance.to_le_bytes());
        }
    }
}
