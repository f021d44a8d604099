//! Fewer steps that still differ.

use anyhow::Result;

use super::{Place, Program, Runs};

/// Boots of a guest that a program is worth.
const MOST_ROUNDS: usize = 8;

/// The shortest program found that the host and `guest` still disagree on. Each round runs all programs with
/// one step less in one guest.
///
/// # Errors
/// They cannot be run.
pub fn shrink(runs: &Runs, program: &Program, guest: &Place) -> Result<Program> {
    let mut best = program.clone();
    for _ in 0..MOST_ROUNDS {
        let shorter = shorter(&best);
        let failing = runs.compare(&shorter, guest)?;
        let Some(next) = failing.into_iter().min_by_key(|failure| failure.program.steps.len())
        else {
            break;
        };
        best = next.program;
    }
    best.name.clone_from(&program.name);
    Ok(best)
}

/// The program with one step less, at every place, and halves of it.
fn shorter(program: &Program) -> Vec<Program> {
    let count = program.steps.len();
    let ranges = (0..count).map(|at| at..at + 1);
    let halves = [0..count / 2, count / 2..count, 0..count - 1, 1..count];
    let without = |range: std::ops::Range<usize>| {
        let mut program = program.clone();
        program.steps.drain(range.clone());
        program.name = format!("{}-{}", range.start, range.end);
        program
    };
    ranges.chain(halves).map(without).filter(|program| !program.steps.is_empty()).collect()
}
