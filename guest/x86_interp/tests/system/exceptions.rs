//! Exceptions and interrupts in long mode: frames, stacks, error codes, double and triple faults.

use crate::lab::*;
use iced_x86::code_asm::*;
use x86::{Activity, control::cr4, flags, reg, seg, vector};
use x86_interp::{Exit, GuestRam, pending};

/// IDT error code of a vector.
fn idt(vector: u8) -> u64 {
    u64::from(vector) << 3 | 2
}

#[test]
fn fault_at_the_same_level_keeps_the_stack_and_sets_rf() {
    let mut lab = Lab::new();
    lab.v().gpr[reg::RSP] = KERNEL_STACK - 4;
    lab.kernel(|a| a.ud2());
    assert_eq!(lab.lands(), vector::UD);
    let rflags = flags::FIXED | flags::RF;
    let expected = Frame { rip: KERNEL, cs: 8, rflags, rsp: KERNEL_STACK - 4, ss: 0x10 };
    assert_eq!(lab.frame(), expected);
    assert_eq!(lab.gpr(reg::RSP), KERNEL_STACK - 16 - 40, "aligned down to 16 first");
    assert_eq!(lab.v().rflags, flags::FIXED);
    assert_eq!(lab.v().seg[seg::SS].selector, 0x10);
}

#[test]
fn fault_from_user_mode_switches_to_rsp0() {
    let mut lab = Lab::new();
    lab.user(|a| a.ud2());
    lab.v().rflags |= flags::IF | flags::CF;
    assert_eq!(lab.lands(), vector::UD);
    let rflags = flags::FIXED | flags::RF | flags::IF | flags::CF;
    let expected = Frame { rip: USER, cs: 0x2b, rflags, rsp: USER_STACK, ss: 0x23 };
    assert_eq!(lab.frame(), expected);
    assert_eq!(lab.gpr(reg::RSP), RSP0 - 40);
    assert_eq!((lab.v().cpl(), lab.v().seg[seg::SS].selector), (0, 0));
    assert_eq!(lab.v().rflags, flags::FIXED | flags::CF);
}

#[test]
fn ist_is_taken_at_any_level() {
    for user in [false, true] {
        let mut lab = Lab::new();
        lab.gate(vector::UD, INTERRUPT_GATE, 1);
        if user {
            lab.user(|a| a.ud2());
        } else {
            lab.kernel(|a| a.ud2());
        }
        assert_eq!(lab.lands(), vector::UD);
        assert_eq!(lab.gpr(reg::RSP), IST1 - 40);
        assert_eq!(lab.v().seg[seg::SS].selector, if user { 0 } else { 0x10 });
    }
}

#[test]
fn trap_gates_keep_interrupts_on() {
    let mut lab = Lab::new();
    lab.gate(vector::UD, TRAP_GATE, 0);
    lab.kernel(|a| a.ud2());
    lab.v().rflags |= flags::IF | flags::TF | flags::NT;
    // With TF set the first instruction is stepped; its own fault comes first.
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.v().rflags, flags::FIXED | flags::IF);
}

#[test]
fn software_interrupts_need_the_gates_dpl() {
    let mut lab = Lab::new();
    lab.user(|a| a.int(0x40));
    lab.faults(vector::GP, idt(0x40));
    let mut lab = Lab::new();
    lab.gate(0x40, INTERRUPT_GATE | DPL3, 0);
    lab.user(|a| a.int(0x40));
    assert_eq!(lab.lands(), 0x40);
    assert_eq!(lab.frame().rip, USER + 2, "behind the instruction");
    assert_eq!(lab.frame().rflags & flags::RF, 0);
    let mut lab = Lab::new();
    lab.user(|a| a.int3());
    lab.faults(vector::GP, idt(3));
    let mut lab = Lab::new();
    lab.user(|a| a.int1());
    assert_eq!(lab.lands(), vector::DB, "INT1 asks nobody");
    assert_eq!(lab.frame().rip, USER + 1);
}

#[test]
fn absent_and_wrong_gates() {
    let mut lab = Lab::new();
    lab.gate(0x40, INTERRUPT_GATE & !(0x8000 << 32), 0);
    lab.kernel(|a| a.int(0x40));
    lab.faults(vector::NP, idt(0x40));
    let mut lab = Lab::new();
    lab.gate(0x40, 0x8500 << 32, 0);
    lab.kernel(|a| a.int(0x40));
    lab.faults(vector::GP, idt(0x40));
    let mut lab = Lab::new();
    lab.v().idtr.limit = 0x20f;
    lab.kernel(|a| a.int(0x21));
    lab.faults(vector::GP, idt(0x21));
    let mut lab = Lab::new();
    lab.v().idtr.limit = 0x20f;
    lab.kernel(|a| a.nop());
    lab.cpu.interrupt(&mut lab.sys, 0x21);
    lab.faults(vector::GP, idt(0x21) | 1);
}

#[test]
fn gate_to_32_bit_code_or_nowhere() {
    for (selector, code) in [(KERNEL_CS32, 0x40), (0x10, 0x10), (0, 0), (0x1000, 0x1000)] {
        let mut lab = Lab::new();
        lab.sys.ram.store64(IDT + 0x400, gate(selector, HANDLERS, INTERRUPT_GATE));
        lab.kernel(|a| a.int(0x40));
        lab.faults(vector::GP, code);
    }
}

#[test]
fn double_fault_and_triple_fault() {
    let mut lab = Lab::new();
    lab.gate(vector::GP, INTERRUPT_GATE & !(0x8000 << 32), 0);
    lab.kernel(|a| a.int(0x40).and_then(|()| a.nop()));
    lab.gate(0x40, 0x8500 << 32, 0);
    lab.faults(vector::DF, 0);
    assert_eq!(lab.coded_frame().1.rip, KERNEL);

    lab = Lab::new();
    lab.gate(vector::GP, 0, 0);
    lab.gate(vector::DF, 0, 0);
    lab.kernel(|a| a.mov(rax, 1u64 << 63).and_then(|()| a.mov(rax, qword_ptr(rax))));
    assert_eq!(lab.run(), Exit::Shutdown);
    assert_eq!(lab.v().activity, Activity::Shutdown);
    assert_eq!(lab.v().rip, KERNEL + 10);
}

#[test]
fn page_fault_on_the_stack_becomes_a_double_fault() {
    let mut lab = Lab::new();
    lab.gate(vector::DF, INTERRUPT_GATE, 1);
    lab.page(PAGE, 0);
    lab.kernel(|a| a.mov(rax, qword_ptr(PAGE + 0x1000)));
    lab.page(PAGE + 0x1000, 0);
    lab.v().gpr[reg::RSP] = PAGE + 0x800;
    lab.faults(vector::DF, 0);
    assert!((PAGE..PAGE + 0x800).contains(&lab.v().cr2), "the second fault's address");
    assert_eq!(lab.coded_frame().1.rsp, PAGE + 0x800);
}

#[test]
fn benign_first_faults_are_followed_by_the_second() {
    let mut lab = Lab::new();
    lab.gate(vector::PF, INTERRUPT_GATE, 1);
    lab.page(PAGE, 0);
    lab.kernel(|a| a.ud2());
    lab.v().gpr[reg::RSP] = PAGE + 0x800;
    lab.faults(vector::PF, 2);
    assert_eq!(lab.coded_frame().1.rip, KERNEL);
}

#[test]
fn non_canonical_stack_is_a_stack_fault() {
    let mut lab = Lab::new();
    lab.gate(vector::SS, INTERRUPT_GATE, 1);
    lab.v().gpr[reg::RSP] = 1 << 63 | 0x1000;
    lab.kernel(|a| a.ud2());
    lab.faults(vector::SS, 1);
    let mut lab = Lab::new();
    lab.gate(vector::SS, INTERRUPT_GATE, 1);
    lab.v().gpr[reg::RSP] = 1 << 63 | 0x1000;
    lab.kernel(|a| a.push(rax));
    lab.faults(vector::SS, 0);
}

#[test]
fn interrupts_wait_for_if_and_the_shadow_of_sti() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        a.nop()?;
        a.sti()?;
        a.inc(rbx)?;
        a.inc(rbx)
    });
    lab.sys.pending = pending::INTERRUPT;
    assert_eq!(lab.run(), Exit::InterruptWindow);
    assert_eq!(lab.gpr(reg::RBX), 1, "one instruction after STI");
    lab.cpu.interrupt(&mut lab.sys, 0x33);
    lab.sys.pending = 0;
    assert_eq!(lab.lands(), 0x33);
    assert_eq!(lab.frame().rip, KERNEL + 1 + 1 + 3);
    assert_ne!(lab.frame().rflags & flags::IF, 0);
}

#[test]
fn sti_with_if_set_has_no_shadow() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.sti().and_then(|()| a.inc(rbx)));
    lab.v().rflags |= flags::IF;
    lab.cpu.run(&mut lab.sys, 1);
    lab.sys.pending = pending::INTERRUPT;
    assert_eq!(lab.run(), Exit::InterruptWindow);
    assert_eq!(lab.gpr(reg::RBX), 0);
}

#[test]
fn a_load_of_ss_holds_interrupts_off() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        a.mov(ss, eax)?;
        a.inc(rbx)?;
        a.inc(rbx)
    });
    lab.v().gpr[reg::RAX] = 0x10;
    lab.v().rflags |= flags::IF;
    lab.cpu.run(&mut lab.sys, 1);
    lab.sys.pending = pending::INTERRUPT | pending::NMI;
    assert_eq!(lab.run(), Exit::NmiWindow);
    assert_eq!(lab.gpr(reg::RBX), 1);
}

#[test]
fn halt_wakes_up_behind_itself() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.sti().and_then(|()| a.hlt()));
    assert_eq!(lab.run(), Exit::Halted);
    lab.sys.pending = pending::INTERRUPT;
    assert_eq!(lab.run(), Exit::InterruptWindow);
    lab.sys.pending = 0;
    lab.cpu.interrupt(&mut lab.sys, 0x20);
    assert_eq!(lab.v().activity, Activity::Running);
    assert_eq!(lab.lands(), 0x20);
    assert_eq!(lab.frame().rip, KERNEL + 2);
}

#[test]
fn nmis_wait_for_iret() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.nop());
    lab.sys.pending = pending::NMI;
    assert_eq!(lab.run(), Exit::NmiWindow);
    lab.cpu.nmi(&mut lab.sys);
    lab.code(64, HANDLERS + 32, |a| a.iretq());
    let before = lab.gpr(reg::RSP);
    assert_eq!(lab.run(), Exit::NmiWindow, "the second NMI, after IRET");
    assert_eq!((lab.v().rip, before), (KERNEL, KERNEL_STACK - 40));
}

#[test]
fn a_machine_check_comes_at_any_moment() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.hlt());
    lab.v().cr4 |= cr4::MCE;
    assert_eq!(lab.run(), Exit::Halted);
    lab.cpu.machine_check(&mut lab.sys, false);
    assert_eq!(lab.lands(), vector::MC);
    assert_eq!((lab.frame().rip, lab.cpu.counters.exceptions[18]), (KERNEL + 1, 1));
    lab.cpu.machine_check(&mut lab.sys, true);
    assert_eq!(lab.run(), Exit::Shutdown, "the last one has not ended");
}

#[test]
fn a_machine_check_that_is_off_ends_the_cpu() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.nop());
    lab.cpu.machine_check(&mut lab.sys, false);
    assert_eq!(lab.run(), Exit::Shutdown);
}

#[test]
fn an_interrupt_between_string_iterations_resumes_there() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.rep().stosb());
    lab.v().rflags |= flags::IF;
    lab.v().gpr[reg::RDI] = PAGE;
    lab.v().gpr[reg::RCX] = 0x3000;
    lab.cpu.run(&mut lab.sys, 1);
    lab.sys.pending = pending::INTERRUPT;
    assert_eq!(lab.run(), Exit::InterruptWindow);
    let done = 0x3000 - lab.gpr(reg::RCX);
    assert!(done > 0 && done < 0x3000);
    assert_eq!((lab.v().rip, lab.gpr(reg::RDI)), (KERNEL, PAGE + done));
    lab.sys.pending = 0;
    lab.cpu.interrupt(&mut lab.sys, 0x20);
    assert_ne!(lab.frame().rflags & flags::RF, 0);
    lab.code(64, HANDLERS + 0x200, |a| a.iretq());
    lab.finishes();
    assert_eq!((lab.gpr(reg::RCX), lab.gpr(reg::RDI)), (0, PAGE + 0x3000));
}
