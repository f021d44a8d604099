//! Random cases.
//!
//! A case is one to eight instructions. Each is made by `encode`, then `steer` chooses registers,
//! displacements and memory so that it does something worth comparing. A register that an earlier
//! instruction uses as an address keeps its initial value, one that an earlier instruction writes
//! is not relied on; so what steering decides still holds when the instruction runs.

pub mod encode;
mod selector;
mod start;
mod steer;
mod target;

use iced_x86::{Code, InstructionInfoFactory};

use crate::background;
use crate::forms;
use crate::layout::CODE;
use crate::random::Random;
use crate::state::{Case, Patch, State};
use encode::{Draft, Place};

/// Most instructions in a case.
const MAX_INSTRUCTIONS: u64 = 8;
/// Drafts of one form tried until one can be steered.
const TRIES: usize = 24;

/// A source of random cases: an endless list, of which each can be made without the ones before.
pub struct Generator {
    seed: u64,
    bits: u32,
    random: Random,
    all: Vec<Code>,
    /// The ones that work on general registers: few forms, much of what programs do.
    general: Vec<Code>,
    info: InstructionInfoFactory,
}

impl Generator {
    /// Cases of `seed` in code of `bits` 64 or 32, made from `forms`, which must not be empty.
    pub fn new(seed: u64, bits: u32, forms: &[Code]) -> Self {
        let general: Vec<Code> = forms.iter().copied().filter(|&f| !forms::is_vector(f)).collect();
        Self {
            seed,
            bits,
            random: Random::new(seed),
            all: forms.to_vec(),
            general: if general.is_empty() { forms.to_vec() } else { general },
            info: InstructionInfoFactory::new(),
        }
    }

    /// Case `number` of the list. Even ones are sequences, odd ones go through the forms one by
    /// one. (A form that cannot be made gives an empty case.)
    pub fn case(&mut self, number: u64) -> Case {
        self.random = Random::new(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let rip = target::start(&mut self.random);
        let mut sequence = Sequence::new(&mut self.random, self.bits, rip);
        if number.is_multiple_of(2) {
            self.fill(&mut sequence);
        } else {
            let form = self.all[(number / 2 % self.all.len() as u64) as usize];
            sequence.push(&mut self.random, &mut self.info, form);
        }
        sequence.finish(&mut self.random)
    }

    fn fill(&mut self, sequence: &mut Sequence) {
        let count =
            if self.random.chance(30) { 1 } else { 1 + self.random.below(MAX_INSTRUCTIONS) };
        for _ in 0..count {
            let forms = if self.random.chance(40) { &self.general } else { &self.all };
            let form = self.random.pick(forms);
            if self.random.chance(6) {
                sequence.push_mutant(&mut self.random, &mut self.info, form);
                continue;
            }
            sequence.push(&mut self.random, &mut self.info, form);
        }
    }
}

/// A case being made.
struct Sequence {
    state: State,
    patches: Vec<Patch>,
    code: Vec<u8>,
    /// Offsets of the instructions in `code`.
    starts: Vec<usize>,
    /// Displacements of relative branches: offset in `code`, size, and the branch's number.
    branches: Vec<(usize, usize, usize)>,
    /// General registers used as addresses: their initial value is settled. A bit each.
    pinned: u16,
    /// General registers written so far.
    dirty: u16,
    /// Vector registers written so far.
    dirty_vectors: u16,
}

impl Sequence {
    fn new(random: &mut Random, bits: u32, rip: u64) -> Self {
        Self {
            state: start::state(random, bits, rip),
            patches: Vec::new(),
            code: Vec::new(),
            starts: Vec::new(),
            branches: Vec::new(),
            pinned: 1 << x86::reg::RSP,
            dirty: 0,
            dirty_vectors: 0,
        }
    }

    fn ip(&self) -> u64 {
        self.state.rip.wrapping_add(self.code.len() as u64)
    }

    fn place(&self) -> Place {
        Place { ip: self.ip(), bits: self.state.bits() }
    }

    /// Adds an instruction of the form; false if none came up.
    fn push(&mut self, random: &mut Random, info: &mut InstructionInfoFactory, form: Code) -> bool {
        for _ in 0..TRIES {
            let Some(mut draft) = Draft::random(random, form, self.place()) else { return false };
            let undo = (self.state.clone(), self.patches.len(), self.pinned);
            if steer::steer(self, random, info, &mut draft) {
                self.commit(info, &draft);
                return true;
            }
            self.restore(undo);
        }
        false
    }

    /// Adds something near an instruction of the form, if it may be tested.
    fn push_mutant(&mut self, random: &mut Random, info: &mut InstructionInfoFactory, form: Code) {
        let Some(mut draft) = Draft::mutant(random, form, self.place()) else { return };
        if draft.insn.is_invalid() {
            if self.ip() + 15 > CODE.end() {
                // Whether the CPU misses the rest of it first.
                return;
            }
            self.starts.push(self.code.len());
            self.code.extend(&draft.bytes);
            return;
        }
        let undo = (self.state.clone(), self.patches.len(), self.pinned);
        if steer::steer(self, random, info, &mut draft) {
            self.commit(info, &draft);
        } else {
            self.restore(undo);
        }
    }

    fn restore(&mut self, (state, patches, pinned): (State, usize, u16)) {
        self.state = state;
        self.patches.truncate(patches);
        self.pinned = pinned;
    }

    fn commit(&mut self, info: &mut InstructionInfoFactory, draft: &Draft) {
        if steer::is_relative_branch(&draft.insn) {
            let at = self.code.len() + draft.offsets.immediate_offset();
            self.branches.push((at, draft.offsets.immediate_size(), self.starts.len()));
        }
        steer::note_writes(self, info, &draft.insn);
        self.starts.push(self.code.len());
        self.code.extend(&draft.bytes);
    }

    /// Points the branches forward and adds the rest of memory.
    fn finish(mut self, random: &mut Random) -> Case {
        self.starts.push(self.code.len());
        for &(at, size, branch) in &self.branches {
            let later = &self.starts[branch + 1..];
            let distance = random.pick(later) - (at + size);
            self.code[at..at + size].copy_from_slice(&distance.to_le_bytes()[..size]);
        }
        let background = random.byte() % background::COUNT;
        Case { state: self.state, code: self.code, background, patches: self.patches }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_means_its_cases() {
        let forms = forms::tested(64);
        let mut one = Generator::new(7, 64, &forms);
        let mut two = Generator::new(7, 64, &forms);
        (0..100).for_each(|i| assert_eq!(one.case(i), two.case(i)));
        let again = one.case(3);
        assert_eq!(again, two.case(3), "whatever was made before");
        assert_ne!(again, Generator::new(8, 64, &forms).case(3));
    }
}
