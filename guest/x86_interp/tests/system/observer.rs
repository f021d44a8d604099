//! Which code the interpreter leaves to an observer that runs it by other means.

use crate::lab::{Lab, PML4, USER};
use iced_x86::code_asm::*;
use x86::{flags, reg};
use x86_interp::{Exit, GuestRam, Leave};

/// Where the upper half begins, and with it another view of the lab's memory.
const UPPER: u64 = 0xffff_8000_0000_0000;
const USER_END: u64 = 1 << 47;
const BUDGET: u64 = 100;

/// User code in the upper half that counts up RAX and goes on in the lower half, where it does so again.
fn lab(user: Option<u64>) -> Lab {
    let mut lab = Lab::new();
    let lower = lab.sys.ram.load64(PML4);
    lab.sys.ram.store64(PML4 + 256 * 8, lower);
    lab.cpu.observe(Leave { user, ..Leave::default() });
    lab.user(|a| {
        a.inc(rax)?;
        a.jmp(rcx)
    });
    let v = lab.v();
    (v.rip, v.gpr[reg::RAX], v.gpr[reg::RCX]) = (UPPER + USER, 0, USER);
    lab
}

/// A hypervisor's guest has its kernel there, in ring 3, and no engine but this one takes it: to come back at
/// each instruction would be its end.
#[test]
fn user_code_above_the_bound_runs_here() {
    let mut lab = lab(Some(USER_END));
    assert_eq!(lab.cpu.run(&mut lab.sys, BUDGET), Exit::Leave);
    assert_eq!((lab.v().rip, lab.v().gpr[reg::RAX]), (USER, 1));
    assert_eq!(lab.cpu.run(&mut lab.sys, BUDGET), Exit::Leave);
    assert_eq!(lab.v().gpr[reg::RAX], 1, "what is below is left to the observer");
}

#[test]
fn without_a_bound_all_user_code_runs_here() {
    let mut lab = lab(None);
    assert_eq!(lab.cpu.run(&mut lab.sys, BUDGET), Exit::Budget);
    assert!(lab.v().gpr[reg::RAX] > 1);
}

/// RF suppresses breakpoints at one instruction, and the IRET of each exception handler sets it. Code is interpreted for
/// RF only if there are breakpoints.
#[test]
fn the_resume_flag_alone_keeps_no_code_here() {
    const EXECUTION_OF_DR0: u64 = 0x402;
    let mut lab = Lab::new();
    lab.cpu.observe(Leave { kernel: Some(0), ..Leave::default() });
    lab.kernel(|a| a.nop());
    lab.v().rflags |= flags::RF;
    assert!(lab.cpu.leaves_to_observer());
    lab.v().dr[7] = EXECUTION_OF_DR0;
    lab.cpu.state_changed();
    assert!(!lab.cpu.leaves_to_observer());
}

/// A guest that flushes and flushes in code that is never left, and pages that are code and are written, again and again.
#[test]
fn what_is_recorded_does_not_grow_for_ever() {
    const LONG: usize = 2000;
    let mut lab = Lab::new();
    lab.cpu.observe(Leave::default());
    lab.kernel(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.invlpg(ptr(rax))?;
        a.jmp(again)
    });
    for _ in 0..20 {
        assert_eq!(lab.cpu.run(&mut lab.sys, 1_000_000), Exit::Budget);
        let record = lab.cpu.take_record(&mut lab.sys);
        assert!((1..LONG).contains(&record.flushes.len()), "{}", record.flushes.len());
    }
}
