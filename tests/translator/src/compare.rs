//! The two sides must agree.
//!
//! Translated code may fault where the interpreter does not (a kernel stack in user memory, an
//! address outside the window): the engine then has the instruction interpreted. It must be at the
//! exact start of it, and it may never succeed where the interpreter faults.

use crate::{
    case::Case,
    interp::Interpreter,
    rig::{Ending, Rig},
};
use anyhow::Result;
use x86::{flags, reg, seg};

/// Bytes of memory that differ, at the most, of one case.
const SHOWN: usize = 16;

/// Boundaries of a case that are all tried; of those behind them ever fewer.
const EACH: u64 = 100;

/// What differs, in words.
#[derive(Clone, Debug)]
pub struct Difference(pub String);

/// Runs a case on both sides.
///
/// # Errors
/// If the rig breaks down.
pub fn check(
    rig: &mut Rig,
    interpreter: &mut Interpreter,
    case: &Case,
) -> Result<Option<Difference>> {
    let translated = rig.run(case)?;
    Ok(at_its_end(interpreter, case, &translated))
}

/// Runs a case on both sides once for every boundary between its instructions, and between iterations of
/// repeated ones, with an interrupt there: the state it finds must be the interpreter's, and so must the
/// end of what goes on afterwards. The number of interrupts is added to `taken`.
///
/// # Errors
/// If the rig breaks down.
pub fn check_interrupted(
    rig: &mut Rig,
    interpreter: &mut Interpreter,
    case: &Case,
    taken: &mut u64,
) -> Result<Option<Difference>> {
    let (mut steps, mut interrupts) = (0, 0);
    while let Some(run) = rig.run_interrupted(case, steps)? {
        let middle = if case.is_settled(run.taken.rip) {
            in_the_middle(interpreter, case, &run.taken)
        } else {
            None
        };
        if let Some(Difference(text)) = middle.or_else(|| at_its_end(interpreter, case, &run.end)) {
            let place = run.taken.rip;
            return Ok(Some(Difference(format!("interrupted at {place:x}:\n{text}"))));
        }
        *taken += 1;
        interrupts += 1;
        // Instructions can be repeated thousands of times.
        let skipped = 1_u64 << u64::saturating_sub(interrupts, EACH).min(20);
        steps = run.after + skipped;
    }
    Ok(None)
}

fn in_the_middle(interpreter: &mut Interpreter, case: &Case, taken: &Ending) -> Option<Difference> {
    interpreter.load(case);
    let standing = interpreter.run_to_iteration(taken.rip, taken.gpr[reg::RCX]);
    let mut found = Vec::new();
    match standing.fault {
        _ if standing.ignored.all.is_some() => return None,
        Some(fault) => found.push(format!("only the interpreter faults: {fault:x?}")),
        None => {
            let open = if case.compares_repeatedly(taken.rip) { flags::STATUS } else { 0 };
            compare(&mut found, taken, interpreter, standing.ignored.flags | open);
        }
    }
    (!found.is_empty()).then(|| Difference(found.join("\n")))
}

fn at_its_end(
    interpreter: &mut Interpreter,
    case: &Case,
    translated: &Ending,
) -> Option<Difference> {
    interpreter.load(case);
    let standing = interpreter.run_to(translated.rip);
    if standing.ignored.all.is_some() {
        return None;
    }
    let mut found = Vec::new();
    if let (Some(fault), false) = (standing.fault, translated.fault) {
        found.push(format!("only the interpreter faults: {fault:x?}"));
    }
    compare(&mut found, translated, interpreter, standing.ignored.flags);
    // A fault in the middle of a repeated instruction leaves its RIP but not its registers alone.
    if translated.fault
        && !found.is_empty()
        && let Some(open) = interpreter.faults_next()
    {
        found.clear();
        compare(&mut found, translated, interpreter, standing.ignored.flags | open.flags);
    }
    (!found.is_empty()).then(|| Difference(found.join("\n")))
}

fn compare(found: &mut Vec<String>, translated: &Ending, interpreter: &Interpreter, ignored: u64) {
    let (v, memory) = (interpreter.vcpu(), interpreter.memory());
    if translated.window && v.interrupt_shadow {
        found.push(format!("an interrupt is taken right behind STI, at {:x}", v.rip));
    }
    let mut differ = |what: String, a: u64, b: u64| {
        if a != b {
            found.push(format!("{what}: translated {a:x}, interpreted {b:x}"));
        }
    };
    differ("rip".into(), translated.rip, v.rip);
    // The other registers are scratch to the translation of 32-bit code.
    let registers = if v.long_mode() { 16 } else { 8 };
    for (index, (a, b)) in translated.gpr.iter().zip(&v.gpr).take(registers).enumerate() {
        differ(format!("r{index}"), *a, *b);
    }
    let compared = (flags::STATUS | flags::DF | flags::IF | flags::AC | flags::ID) & !ignored;
    differ("rflags".into(), translated.rflags & compared, v.rflags & compared);
    let bases = [v.seg[seg::FS].base, v.seg[seg::GS].base, v.kernel_gs_base];
    for (name, (a, b)) in ["fs", "gs", "other gs"].iter().zip(translated.bases.iter().zip(bases)) {
        differ(format!("{name} base"), *a, b);
    }
    for (index, (a, b)) in translated.xmm.iter().zip(&v.fpu.xmm).enumerate() {
        let word = |x: &[u8; 16]| u128::from_le_bytes(*x);
        differ(format!("xmm{index}"), word(a) as u64, word(b) as u64);
        differ(format!("xmm{index} high"), (word(a) >> 64) as u64, (word(b) >> 64) as u64);
    }
    let bytes = translated.memory.iter().zip(&memory).enumerate();
    for (offset, (a, b)) in bytes.filter(|(_, (a, b))| a != b).take(SHOWN) {
        differ(format!("memory {offset:x}"), u64::from(*a), u64::from(*b));
    }
}
