//! Makes a failing case small: fewer instructions, fewer registers that are not zero, less memory.
//!
//! Every step keeps addresses as they are: instructions become NOPs before they are cut off the
//! ends, so RIP-relative operands and branches keep their meaning.

use crate::field::Field;
use crate::state::{Case, State};

const NOP: u8 = 0x90;

/// The smallest case found for which `fails` still holds. `fails(case)` must hold.
pub fn shrink(case: &Case, mut fails: impl FnMut(&Case) -> bool) -> Case {
    let mut best = case.clone();
    loop {
        let before = best.clone();
        for smaller in [instructions, ends, registers, memory] {
            smaller(&mut best, &mut fails);
        }
        if best == before {
            return best;
        }
    }
}

/// Takes `smaller` if it differs from `best` and fails.
fn attempt(best: &mut Case, smaller: Case, fails: &mut dyn FnMut(&Case) -> bool) {
    if smaller != *best && fails(&smaller) {
        *best = smaller;
    }
}

fn spans(case: &Case) -> Vec<(usize, usize)> {
    let mut at = 0;
    case.instructions()
        .into_iter()
        .map(|insn| {
            at += insn.len();
            (at - insn.len(), at)
        })
        .collect()
}

fn instructions(best: &mut Case, fails: &mut dyn FnMut(&Case) -> bool) {
    for (start, end) in spans(best) {
        let mut smaller = best.clone();
        smaller.code[start..end].fill(NOP);
        attempt(best, smaller, fails);
    }
}

/// Cuts NOPs off both ends.
fn ends(best: &mut Case, fails: &mut dyn FnMut(&Case) -> bool) {
    while best.code.first() == Some(&NOP) {
        let mut smaller = best.clone();
        smaller.code.remove(0);
        smaller.state.rip += 1;
        if !fails(&smaller) {
            break;
        }
        *best = smaller;
    }
    while best.code.last() == Some(&NOP) {
        let mut smaller = best.clone();
        smaller.code.pop();
        if !fails(&smaller) {
            break;
        }
        *best = smaller;
    }
}

fn registers(best: &mut Case, fails: &mut dyn FnMut(&Case) -> bool) {
    let State { rip, selectors, .. } = best.state;
    let plain = State { rip, selectors, ..State::default() };
    attempt(
        best,
        Case { state: State { fpu: plain.fpu, ..best.state.clone() }, ..best.clone() },
        fails,
    );
    for field in Field::all().filter(|field| !matches!(field, Field::Selector(_))) {
        let mut smaller = best.clone();
        field.set(&mut smaller.state, field.get(&plain));
        attempt(best, smaller, fails);
    }
    for bit in 0..22 {
        let mut smaller = best.clone();
        smaller.state.rflags &= !(1 << bit) | plain.rflags;
        attempt(best, smaller, fails);
    }
}

fn memory(best: &mut Case, fails: &mut dyn FnMut(&Case) -> bool) {
    attempt(best, Case { background: 0, ..best.clone() }, fails);
    for i in (0..best.patches.len()).rev() {
        let mut smaller = best.clone();
        smaller.patches.remove(i);
        attempt(best, smaller, fails);
    }
    for i in 0..best.patches.len() {
        let mut smaller = best.clone();
        smaller.patches[i].bytes.fill(0);
        attempt(best, smaller, fails);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Generator, forms};
    use x86::reg;

    #[test]
    fn keeps_what_matters() {
        let mut case = Generator::new(9, 64, &forms::tested(64)).case(0);
        case.code = vec![0x90, 0x48, 0x01, 0xd8, 0xf9, 0x90];
        case.state.gpr[reg::RBX] = 77;
        let small =
            shrink(&case, |case| case.code.contains(&0xd8) && case.state.gpr[reg::RBX] == 77);
        assert_eq!(small.code, [0x48, 0x01, 0xd8]);
        let mut expected = State { rip: case.state.rip + 1, ..State::default() };
        expected.gpr[reg::RBX] = 77;
        assert_eq!(small.state, expected);
        assert!(small.patches.is_empty());
    }
}
