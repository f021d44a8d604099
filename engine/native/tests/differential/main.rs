//! Every instruction the unit accepts, against the CPU itself.
//!
//! The oracle loads the complete register file, executes the original bytes with their original
//! memory operand and *unmasked* exceptions, catches SIGFPE, and saves everything. It shares
//! nothing with the stubs: no choice of registers, no rewriting, no masking.

mod generate;
mod oracle;

use std::collections::BTreeMap;

use generate::{Case, Random};
use iced_x86::Code;
use native::HostVectorUnit;
use oracle::{Oracle, Outcome};
use x86::{flags, fpu::FpuState, vector};
use x86_interp::{VectorOperands, VectorUnit};

/// Cases per instruction and kind of operand.
const ROUNDS: usize = 120;

#[test]
fn unit_agrees_with_the_cpu() {
    let mut unit = HostVectorUnit::new().unwrap();
    let oracle = Oracle::new();
    let mut random = Random::new(0x1234_5678_9abc_def1);
    let mut failures: BTreeMap<String, (usize, String)> = BTreeMap::new();
    let (mut codes, mut cases) = (0, 0);
    for code in Code::values() {
        let mut done = 0;
        for _ in 0..ROUNDS {
            let Some(case) = generate::case(code, &oracle, &mut random) else { break };
            let Some(result) = compare(&mut unit, &oracle, &case) else { break };
            done += 1;
            if let Err(what) = result {
                let entry = failures.entry(format!("{code:?}")).or_insert((0, what));
                entry.0 += 1;
            }
        }
        codes += usize::from(done != 0);
        cases += done;
    }
    println!("{codes} instructions, {cases} cases, {} routines", unit.routines());
    for (code, (count, what)) in &failures {
        println!("{code}: {count} of {ROUNDS}: {what}");
    }
    assert!(failures.is_empty(), "{} instructions differ", failures.len());
    assert!(codes > 1000, "only {codes} instructions accepted");
}

/// `None` if the unit does not execute the instruction.
fn compare(unit: &mut HostVectorUnit, oracle: &Oracle, case: &Case) -> Option<Result<(), String>> {
    let code = unit.prepare(&case.insn, &case.bytes).ok()?;
    let mut expected = oracle.run(&case.bytes, &case.before);

    let mut fpu = case.before.fpu;
    let before = &case.before;
    let mut operands = VectorOperands {
        memory: before.memory,
        gpr: before.gpr,
        rflags: before.rflags,
        rip: oracle.instruction_address(),
        address: oracle.memory_address(),
    };
    let result = unit.run(code, &case.insn, &mut fpu, &mut operands);
    let mut found = Outcome {
        fpu,
        gpr: operands.gpr,
        memory: operands.memory,
        rflags: operands.rflags,
        fault: result.err().map_or(0, |fault| fault.vector),
    };
    forgive_precision(&case.before.fpu, &mut expected, &mut found);
    tidy(&mut expected);
    tidy(&mut found);
    Some(if expected == found { Ok(()) } else { Err(difference(case, &expected, &found)) })
}

/// The one known difference: the precision flag of an unmasked overflow or underflow.
fn forgive_precision(before: &FpuState, expected: &mut Outcome, found: &mut Outcome) {
    const OVERFLOW_OR_UNDERFLOW: u32 = 0b11 << 3;
    const PRECISION: u32 = 1 << 5;
    let unmasked = !(before.mxcsr >> 7) & OVERFLOW_OR_UNDERFLOW;
    let raised = expected.fpu.mxcsr & unmasked;
    if expected.fault == vector::XM && found.fault == vector::XM && raised != 0 {
        expected.fpu.mxcsr |= PRECISION;
        found.fpu.mxcsr |= PRECISION;
    }
}

/// Clears what is not part of the comparison.
fn tidy(outcome: &mut Outcome) {
    outcome.rflags &= flags::STATUS;
    let fpu = &mut outcome.fpu;
    fpu.mxcsr_mask = 0;
    fpu.pad1 = [0; 96];
    fpu.xstate_bv = 7;
    for st in &mut fpu.st {
        st[10..].fill(0);
    }
}

fn difference(case: &Case, expected: &Outcome, found: &Outcome) -> String {
    let mut text = format!("{} {:02x?}", case.insn, case.bytes);
    let before = &case.before;
    text += &format!(
        "\n  before: mxcsr {:x} fcw {:x} fsw {:x} ftw {:x}",
        before.fpu.mxcsr, before.fpu.fcw, before.fpu.fsw, before.fpu.ftw
    );
    let mut line = |name: String, start: String, a: String, b: String| {
        if a != b {
            text += &format!("\n  {name}: {start}\n    cpu  {a}\n    unit {b}");
        }
    };
    line("fault".into(), String::new(), expected.fault.to_string(), found.fault.to_string());
    let bits = |x: u64| format!("{x:x}");
    line("flags".into(), bits(before.rflags), bits(expected.rflags), bits(found.rflags));
    let bytes = |x: &[u8]| format!("{x:02x?}");
    line("memory".into(), bytes(&before.memory), bytes(&expected.memory), bytes(&found.memory));
    for i in 0..16 {
        let (b, e, f) = (&before.fpu, &expected.fpu, &found.fpu);
        line(format!("gpr{i}"), bits(before.gpr[i]), bits(expected.gpr[i]), bits(found.gpr[i]));
        line(format!("xmm{i}"), bytes(&b.xmm[i]), bytes(&e.xmm[i]), bytes(&f.xmm[i]));
        let high = |x: &FpuState| bytes(&x.ymm_high[i]);
        line(format!("high{i}"), high(b), high(e), high(f));
        if i < 8 {
            line(format!("st{i}"), bytes(&b.st[i]), bytes(&e.st[i]), bytes(&f.st[i]));
        }
    }
    let control = |f: &FpuState| {
        format!(
            "mxcsr {:x} fcw {:x} fsw {:x} ftw {:x} fop {:x} fip {:x} fdp {:x}",
            f.mxcsr, f.fcw, f.fsw, f.ftw, f.fop, f.fip, f.fdp
        )
    };
    line("fpu".into(), control(&before.fpu), control(&expected.fpu), control(&found.fpu));
    text
}
