//! Blocks on trial: nothing leads to them but the monitor, and they lead to nothing but it.
//!
//! Whoever wants to see what a single block does has it run alone. A block becomes one like any
//! other when it has made as many runs as were asked for.

use super::{Cache, CodeMemory};
use crate::{block::Block, stubs::Stubs};

/// So many runs never end.
pub const ALWAYS: u32 = u32::MAX;

impl Cache {
    /// Blocks made from now on run alone so many times ([`ALWAYS`]: each time).
    pub fn try_new_blocks(&mut self, runs: u32) {
        self.trial = runs;
    }

    /// The block at an HVA is on trial.
    pub fn on_trial(&self, host: u64) -> bool {
        self.number_at(host).is_some_and(|number| !self.is_open(number))
    }

    /// The block at an HVA, which is on trial, has run alone.
    pub fn ran_alone(&mut self, memory: &mut impl CodeMemory, host: u64) {
        let Some(number) = self.number_at(host) else { return };
        let block = &mut self.blocks[number as usize];
        if block.trial == ALWAYS {
            return;
        }
        block.trial = block.trial.saturating_sub(1);
        if block.trial > 0 {
            return;
        }
        let lookups = std::mem::take(&mut block.lookups);
        let stubs = Stubs::of(&self.layout);
        for lookup in lookups {
            let site = host + u64::from(lookup.displacement);
            self.point(memory, site, stubs.indirect[usize::from(lookup.alignment)]);
        }
        self.integrate(memory, number);
    }

    /// While there are trials a new block looks nothing up.
    pub(super) fn isolate(&self, block: &mut Block) {
        if self.trial == 0 {
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
