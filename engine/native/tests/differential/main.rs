//! Every instruction the unit accepts, against the CPU itself.
//!
//! The oracle loads the complete register file, executes the original bytes with their original
//! memory operand and *unmasked* exceptions, catches SIGFPE, and saves everything. It shares
//! nothing with the stubs: no choice of registers, no rewriting, no masking.

mod generate;
mod interpreter;
mod modes;
mod oracle;

use std::collections::BTreeMap;

use generate::{Case, Random};
use iced_x86::{Code, CpuidFeature, EncodingKind, Mnemonic};
use interpreter::InterpreterSide;
use native::HostVectorUnit;
use oracle::{INSTRUCTION_ADDRESS, MEMORY, MEMORY_ADDRESS, Oracle, Outcome};
use x86::{flags, fpu::FpuState, vector};
use x86_interp::{VectorOperands, VectorUnit, rflags};

host::choose!(host_linux::Linux);

/// Cases per instruction and kind of operand.
const ROUNDS: usize = 60;

/// How many cases of an instruction differ, and the first of them.
type Failures = BTreeMap<String, (usize, String)>;

#[test]
fn vector_instructions_agree_with_the_cpu() {
    let mut unit = HostVectorUnit::new().unwrap();
    let mut interpreter = InterpreterSide::new();
    let oracle = Oracle::new();
    let mut random = Random::new(0x1234_5678_9abc_def1);
    let mut failures = Failures::new();
    let (mut codes, mut unit_cases, mut interpreter_cases) = (0, 0, 0);
    for code in Code::values().filter(|code| is_vector(*code)) {
        let before = interpreter_cases;
        for _ in 0..ROUNDS {
            let Some(case) = generate::case(code, &mut random) else { break };
            let expected = oracle.run(&case.bytes, &case.before);
            let found = interpreter.run(&case.bytes, &case.before);
            interpreter_cases += 1;
            note(&mut failures, "interpreter", &case, expected.clone(), found);
            if let Some(found) = run_unit(&mut unit, &case, &expected) {
                unit_cases += 1;
                note(&mut failures, "unit", &case, expected, found);
            }
        }
        codes += usize::from(interpreter_cases != before);
    }
    println!(
        "{codes} instructions, {interpreter_cases} cases in the interpreter, {unit_cases} in the \
         unit alone, {} routines",
        unit.routines()
    );
    for (what, (count, first)) in &failures {
        println!("{what}: {count} of {ROUNDS}: {first}");
    }
    assert!(failures.is_empty(), "{} differ", failures.len());
    assert!(codes > 1000, "only {codes} instructions");
}

/// Instructions that the guest CPU has.
fn is_vector(code: Code) -> bool {
    use CpuidFeature as F;
    let known = |feature: &F| {
        matches!(
            feature,
            F::FPU
                | F::FPU287
                | F::FPU387
                | F::CMOV
                | F::MMX
                | F::FXSR
                | F::SSE
                | F::SSE2
                | F::SSE3
                | F::SSSE3
                | F::SSE4_1
                | F::SSE4_2
                | F::AES
                | F::PCLMULQDQ
                | F::SHA
                | F::AVX
                | F::AVX2
                | F::FMA
                | F::F16C
                | F::GFNI
                | F::VAES
                | F::VPCLMULQDQ
                | F::BMI1
                | F::BMI2
                | F::ADX
                | F::XSAVE
                | F::XSAVEOPT
                | F::X64
        )
    };
    let features = code.cpuid_features();
    let integer = features.iter().all(|f| matches!(f, F::X64 | F::CMOV));
    let tzcnt = features.contains(&F::BMI1) && code.op_code().encoding() == EncodingKind::Legacy;
    features.iter().all(known) && !integer && !tzcnt && !is_left_out(code)
}

/// The oracle cannot run these.
fn is_left_out(code: Code) -> bool {
    use Mnemonic as M;
    // Real CPUs go by the host's XCR0; non-temporal and waiting instructions have nothing to see.
    matches!(code.mnemonic(), M::Xgetbv | M::Xsetbv)
}

/// The unit on its own. `None` if it does not execute the instruction, or if that never got so
/// far.
fn run_unit(unit: &mut HostVectorUnit, case: &Case, expected: &Outcome) -> Option<Outcome> {
    let code = unit.prepare(&case.insn, &case.bytes).ok()?;
    let address = case.memory_address();
    if matches!(expected.fault, vector::GP | vector::PF | vector::SS) {
        return None;
    }
    let before = &case.before;
    let mut fpu = before.fpu;
    let mut operands = VectorOperands {
        memory: [0; 64],
        gpr: before.gpr,
        rflags: before.rflags,
        rip: INSTRUCTION_ADDRESS,
        address,
    };
    let offset = (address - MEMORY_ADDRESS) as usize;
    let len = (MEMORY - offset).min(64);
    operands.memory[..len].copy_from_slice(&before.memory[offset..offset + len]);
    let result = unit.run(code, &case.insn, &mut fpu, &mut operands);
    let mut memory = before.memory;
    memory[offset..offset + len].copy_from_slice(&operands.memory[..len]);
    let fault = result.err().map_or(0, |fault| fault.vector);
    let (gpr, rflags) = (operands.gpr, operands.rflags);
    Some(Outcome { fpu, gpr, memory, rflags, fault, fault_address: 0 })
}

fn note(
    failures: &mut Failures,
    who: &str,
    case: &Case,
    mut expected: Outcome,
    mut found: Outcome,
) {
    tidy(case, &mut expected, &mut found);
    if expected != found {
        let name = format!("{:?} ({who})", case.insn.code());
        let entry = failures.entry(name).or_insert((0, String::new()));
        entry.0 += 1;
        if entry.0 == 1 {
            entry.1 = difference(case, &expected, &found);
        }
    }
}

/// Clears what is not part of the comparison: reserved bytes, and what differs between CPU models
/// or is known to differ.
fn tidy(case: &Case, expected: &mut Outcome, found: &mut Outcome) {
    if is_fault_order_free(case, expected, found) {
        *found = expected.clone();
    }
    if is_amd() {
        forgive_amd(case, expected, found);
    }
    for outcome in [expected, found] {
        // Which byte of a page faults first is the CPU's affair.
        outcome.fault_address &= !0xfff;
        outcome.rflags &= flags::STATUS;
        let fpu = &mut outcome.fpu;
        fpu.mxcsr_mask = 0;
        fpu.pad1 = [0; 96];
        fpu.xstate_bv = 7;
        // FXRSTOR64 does not load all of it.
        fpu.fip &= (1 << 56) - 1;
        for st in &mut fpu.st {
            st[10..].fill(0);
        }
    }
}

fn is_amd() -> bool {
    let leaf = std::arch::x86_64::__cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
}

/// What AMD's CPUs do otherwise, while the guest's is Intel's: they keep the pointers to the last x87
/// instruction only while an exception is pending (APM vol. 2, 11.4.4), their mask of MXCSR has a
/// bit more, and flags that BMI leaves undefined differ.
fn forgive_amd(case: &Case, expected: &mut Outcome, found: &mut Outcome) {
    if is_amds_fault(case, expected, found) {
        *found = expected.clone();
    }
    for outcome in [expected, found] {
        (outcome.fpu.fop, outcome.fpu.fip, outcome.fpu.fdp) = (0, 0, 0);
        outcome.rflags &= !undefined_flags(case);
        if stores_fpu_state(case.insn.mnemonic()) {
            let start = case.memory_address();
            let into = |i: usize| (MEMORY_ADDRESS + i as u64).wrapping_sub(start);
            let own = outcome.memory.iter_mut().enumerate();
            own.filter(|(i, _)| matches!(into(*i), 6..24 | 28..32)).for_each(|(_, byte)| *byte = 0);
        }
    }
}

/// Exceptions that come in another order, leave another mask, or do not come.
fn is_amds_fault(case: &Case, expected: &Outcome, found: &Outcome) -> bool {
    use Mnemonic as M;
    let index = case.insn.memory_index();
    let gather = index.is_xmm() || index.is_ymm();
    match case.insn.mnemonic() {
        // The operand is looked at even if an unmasked exception keeps it from being written.
        M::Fst | M::Fstp | M::Fist | M::Fistp | M::Fisttp | M::Fbstp => {
            expected.fault == vector::PF
        }
        // They need no alignment.
        M::Sha1msg1 | M::Sha1msg2 | M::Sha1nexte | M::Sha1rnds4 => found.fault == vector::GP,
        M::Sha256msg1 | M::Sha256msg2 | M::Sha256rnds2 => found.fault == vector::GP,
        _ => gather && expected.fault == vector::PF && found.fault == vector::PF,
    }
}

fn stores_fpu_state(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    let fxsave = matches!(mnemonic, M::Fxsave | M::Fxsave64);
    fxsave || matches!(mnemonic, M::Xsave | M::Xsave64 | M::Xsaveopt | M::Xsaveopt64)
}

/// Flags the instruction leaves undefined, as in RFLAGS.
fn undefined_flags(case: &Case) -> u64 {
    rflags(case.insn.rflags_undefined()) & (flags::AF | flags::PF | flags::SF | flags::OF)
}

/// Cases in which the CPU and we differ in which of several faults comes first, or how much is done
/// before one; each is left open by the manual.
fn is_fault_order_free(case: &Case, expected: &Outcome, found: &Outcome) -> bool {
    use Mnemonic as M;
    let name = case.insn.mnemonic();
    let both_fault = expected.fault == vector::PF && found.fault == vector::PF;
    let uses_mmx = (0..case.insn.op_count()).any(|i| case.insn.op_register(i).is_mm());
    let in_pieces = matches!(
        name,
        M::Fstp
            | M::Fbstp
            | M::Fnsave
            | M::Fnstenv
            | M::Fxsave
            | M::Fxsave64
            | M::Xsave
            | M::Xsave64
            | M::Xsaveopt
            | M::Xsaveopt64
            | M::Xrstor
            | M::Xrstor64
    );
    match name {
        // Flags are set already.
        M::Vcvtps2ph => expected.fault == vector::PF,
        // Bytes that are not selected may fault.
        M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu => expected.fault == vector::PF,
        // MMX state is entered before the fault.
        _ if uses_mmx => both_fault,
        _ => in_pieces && both_fault,
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
    let hex = |x: u64| format!("{x:x}");
    line("address".into(), String::new(), hex(expected.fault_address), hex(found.fault_address));
    let bytes = |x: &[u8]| format!("{x:02x?}");
    for at in (0..MEMORY).step_by(16) {
        let part = |memory: &[u8; MEMORY]| bytes(&memory[at..at + 16]);
        line(
            format!("memory+{at}"),
            part(&before.memory),
            part(&expected.memory),
            part(&found.memory),
        );
    }
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
