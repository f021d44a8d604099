//! The native runner against things a case may do to it.

use super::*;
use crate::forms;
use crate::generate::Generator;
use crate::layout::{CODE, DATA, RODATA, STACK};
use crate::state::{Patch, State};
use x86::{Fault, reg, vector};

fn case(code: &[u8]) -> Case {
    let mut state = State::default();
    state.gpr[reg::RSP] = STACK.base + 0x800;
    Case { state, code: code.to_vec(), background: 0, patches: vec![] }
}

fn run(case: &Case) -> Outcome {
    NativeRunner::new().unwrap().run(case).unwrap()
}

#[test]
fn loads_and_saves_every_register() {
    [64, 32].into_iter().for_each(loads_and_saves);
}

fn loads_and_saves(bits: u32) {
    let mut generator = Generator::new(11, bits, &forms::tested(bits));
    let mut runner = NativeRunner::new().unwrap();
    for number in 0..200 {
        let Case { mut state, .. } = generator.case(number);
        state.rip = CODE.base;
        state.rflags &= !(flags::AC | flags::TF);
        let empty = Case { state: state.clone(), code: vec![], background: 0, patches: vec![] };
        let outcome = runner.run(&empty).unwrap();
        assert_eq!(outcome.stop, Stop::Fault(Fault::gp(0)));
        assert_eq!(outcome.state, state);
        assert_eq!(outcome.changes, []);
    }
}

#[test]
fn stores_are_changes() {
    // mov [rax], ecx ; mov [rax + 0x2000], ecx
    let mut case = case(&[0x89, 0x08, 0x89, 0x88, 0, 0x20, 0, 0]);
    case.state.gpr[reg::RAX] = DATA.base + 6;
    case.state.gpr[reg::RCX] = 0x1122_3344;
    let outcome = run(&case);
    let bytes = vec![0x44, 0x33, 0x22, 0x11];
    assert_eq!(outcome.changes, [Patch { address: DATA.base + 6, bytes }]);
    assert_eq!(outcome.stop, Stop::Fault(Fault::page(RODATA.base + 6, 7)), "rodata is read-only");
    assert_eq!(outcome.state.rip, CODE.base + 2);
}

#[test]
fn faults_tell_what_happened() {
    // div cl
    assert_eq!(run(&case(&[0xf6, 0xf1])).stop, Stop::Fault(Fault::new(vector::DE)));
    // jmp to data
    let mut jump = case(&[0xff, 0xe0]);
    jump.state.gpr[reg::RAX] = DATA.base;
    let outcome = run(&jump);
    assert_eq!(outcome.stop, Stop::Fault(Fault::page(DATA.base, 0x15)));
    assert_eq!(outcome.state.rip, DATA.base);
}

#[test]
fn survives_what_it_must_not_allow() {
    let mut runner = NativeRunner::new().unwrap();
    // Kill the process, itself, by every entry into the kernel.
    for code in [&[0x0f, 0x05][..], &[0xcd, 0x80]] {
        let mut exit = case(code);
        exit.state.gpr[reg::RAX] = 231;
        assert_eq!(runner.run(&exit).unwrap().stop, Stop::Syscall);
    }
    let endless = case(&[0xeb, 0xfe]);
    assert_eq!(runner.run(&endless).unwrap().stop, Stop::Timeout);
    // Stack pointer nowhere, alignment checks on, null stack segment.
    let mut wild = case(&[0x8e, 0xd8, 0x0f, 0x0b]);
    wild.state.gpr[reg::RSP] = 3;
    wild.state.rflags |= flags::AC;
    assert_eq!(runner.run(&wild).unwrap().stop, Stop::Fault(Fault::ud()));
    let fine = runner.run(&case(&[0x90])).unwrap();
    assert_eq!(fine.state.rip, CODE.base + 1);
}

#[test]
fn is_deterministic() {
    let mut generator = Generator::new(5, 64, &forms::tested(64));
    let mut one = NativeRunner::new().unwrap();
    let mut two = NativeRunner::new().unwrap();
    let mut ends = 0;
    for number in 0..5000 {
        let case = generator.case(number);
        let outcome = one.run(&case).unwrap();
        ends += u32::from(outcome.state.rip == case.end());
        assert_eq!(outcome, two.run(&case).unwrap(), "case {number}");
        assert_ne!(outcome.stop, Stop::Timeout, "case {number}: {case:x?}");
    }
    assert!(ends > 2500, "only {ends} of 5000 cases ran to their end");
}
