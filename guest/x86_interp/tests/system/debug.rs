//! Breakpoints and single step.

use crate::lab::*;
use iced_x86::code_asm::*;
use x86::{Activity, control::cr4, flags, reg, vector};
use x86_interp::{Exit, GuestRam};

const BS: u64 = 1 << 14;
const BD: u64 = 1 << 13;
const DR6: u64 = 0xffff_0ff0;
const DR7: u64 = 0x400;

/// DR7 with breakpoint 0 enabled: R/W and LEN fields.
fn enabled(condition: u64, length: u64) -> u64 {
    DR7 | 2 | condition << 16 | length << 18
}

fn watching(lab: &mut Lab, address: u64, control: u64) {
    lab.v().dr[0] = address;
    lab.v().dr[7] = control;
    lab.cpu.state_changed();
}

#[test]
fn popf_traps_after_the_next_instruction() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        a.push(0x102)?;
        a.popfq()?;
        a.inc(rbx)?;
        a.inc(rbx)
    });
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!(lab.gpr(reg::RBX), 1);
    assert_eq!(lab.frame().rip, KERNEL + 5 + 1 + 3);
    assert_eq!(lab.frame().rflags, flags::FIXED | flags::TF, "a trap: RF stays clear");
    assert_eq!(lab.v().dr[6], DR6 | BS);
}

#[test]
fn software_interrupts_swallow_the_step() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.int(0x40));
    lab.v().rflags |= flags::TF;
    assert_eq!(lab.lands(), 0x40);
    assert_eq!(lab.v().dr[6], DR6);
    assert_ne!(lab.frame().rflags & flags::TF, 0);
}

#[test]
fn a_faulting_instruction_is_not_stepped() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.ud2());
    lab.v().rflags |= flags::TF;
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.v().dr[6], DR6);
}

#[test]
fn a_load_of_ss_is_stepped_with_its_successor() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        a.mov(ss, eax)?;
        a.inc(rbx)?;
        a.inc(rbx)
    });
    lab.v().gpr[reg::RAX] = 0x10;
    lab.v().rflags |= flags::TF;
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!(lab.gpr(reg::RBX), 1);
}

#[test]
fn string_iterations_are_stepped_one_by_one() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.rep().stosb());
    lab.v().gpr[reg::RCX] = 3;
    lab.v().gpr[reg::RDI] = PAGE;
    lab.v().rflags |= flags::TF;
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!((lab.gpr(reg::RCX), lab.frame().rip), (2, KERNEL));
    assert_ne!(lab.frame().rflags & flags::RF, 0, "more iterations follow");
}

/// As on Intel's CPUs: the last iteration writes them.
#[test]
fn a_step_of_a_comparison_keeps_the_flags() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.repe().cmpsb());
    lab.v().gpr[reg::RCX] = 3;
    (lab.v().gpr[reg::RSI], lab.v().gpr[reg::RDI]) = (PAGE, PAGE);
    lab.v().rflags |= flags::TF;
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!((lab.gpr(reg::RCX), lab.frame().rip), (2, KERNEL));
    assert_eq!(lab.frame().rflags & flags::ZF, 0, "equal bytes, and more to compare");
}

/// Where the TLB has the pages, many iterations are done at once: not while single-stepping.
#[test]
fn string_iterations_in_known_pages_are_stepped_one_by_one() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        a.lodsb()?;
        a.stosb()?;
        a.push(0x102)?;
        a.popfq()?;
        a.rep().movsb()
    });
    lab.v().gpr[reg::RCX] = 3;
    lab.v().gpr[reg::RSI] = PAGE;
    lab.v().gpr[reg::RDI] = PAGE + 2048;
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!(lab.gpr(reg::RCX), 2);
}

#[test]
fn syscall_hides_the_step_and_sysret_brings_it_at_once() {
    let mut lab = Lab::new();
    let v = lab.v();
    (v.star, v.lstar, v.sfmask) = (8 << 32 | 0x18 << 48, KERNEL, flags::TF);
    lab.kernel(|a| a.inc(rbx).and_then(|()| a.sysretq()));
    lab.user(|a| a.syscall().and_then(|()| a.inc(rbx)));
    lab.v().rflags |= flags::TF;
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!((lab.gpr(reg::RBX), lab.frame().rip), (1, USER + 2));
}

#[test]
fn instruction_breakpoints_are_faults_that_rf_skips() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        a.inc(rbx)?;
        a.inc(rbx)?;
        a.inc(rbx)
    });
    watching(&mut lab, KERNEL + 3, enabled(0, 0));
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!((lab.gpr(reg::RBX), lab.frame().rip), (1, KERNEL + 3));
    assert_eq!((lab.v().dr[6], lab.frame().rflags & flags::RF), (DR6 | 1, 0));
    // The handler sets RF in the frame and returns: the instruction runs, RF is gone.
    lab.code(64, HANDLERS + 16, |a| a.bts(qword_ptr(rsp + 16), 16).and_then(|()| a.iretq()));
    lab.v().rip = HANDLERS + 16;
    lab.v().activity = Activity::Running;
    lab.finishes();
    assert_eq!((lab.gpr(reg::RBX), lab.v().rflags & flags::RF), (3, 0));
}

#[test]
fn no_breakpoint_behind_a_load_of_ss() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.mov(ss, eax).and_then(|()| a.inc(rbx)));
    lab.v().gpr[reg::RAX] = 0x10;
    watching(&mut lab, KERNEL + 2, enabled(0, 0));
    lab.finishes();
    assert_eq!(lab.gpr(reg::RBX), 1);
}

#[test]
fn int1_takes_a_waiting_breakpoint_along_and_int3_does_not() {
    // Behind INT3 the trap interrupts the handler of INT3 before its first instruction.
    for (byte, interrupted) in [(0xf1, KERNEL + 8), (0xcc, HANDLERS + 3 * 16)] {
        let mut lab = Lab::new();
        lab.sys.ram.store16(PAGE, 0x10);
        lab.kernel(|a| a.mov(ss, word_ptr(PAGE)).and_then(|()| a.db(&[byte])));
        watching(&mut lab, PAGE, enabled(3, 1));
        assert_eq!(lab.lands(), vector::DB);
        assert_eq!((lab.v().dr[6], lab.frame().rip), (DR6 | 1, interrupted));
        assert_eq!(lab.gpr(reg::RSP) < KERNEL_STACK - 48, byte == 0xcc, "two frames");
    }
}

#[test]
fn a_step_over_hlt_resumes() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.nop());
    lab.v().rip = KERNEL + 1;
    lab.v().rflags |= flags::TF;
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!(lab.frame().rip, KERNEL + 2);
}

#[test]
fn data_breakpoints_trap_behind_the_access() {
    for (condition, length, address, offset, hits) in [
        (1, 3, PAGE + 4, 4, true),
        (1, 3, PAGE + 4, 7, true),
        (1, 3, PAGE + 4, 8, false),
        (1, 3, PAGE + 4, 0, false),
        (1, 2, PAGE + 8, 15, true),
        (1, 0, PAGE + 4, 5, false),
        (3, 1, PAGE + 4, 5, true),
    ] {
        let mut lab = Lab::new();
        lab.kernel(|a| {
            a.mov(byte_ptr(rdi), al)?; // warms the TLB of the page
            a.mov(byte_ptr(rdi + offset), al)?;
            a.inc(rbx)
        });
        lab.v().gpr[reg::RDI] = PAGE;
        if offset != 0 {
            watching(&mut lab, address, enabled(condition, length));
        }
        lab.run();
        assert_eq!(lab.gpr(reg::RBX) == 0, hits, "{condition} {length} {offset}");
        assert_eq!(lab.v().dr[6] & 1, u64::from(hits));
        if hits {
            assert_eq!(lab.frame().rip, KERNEL + 2 + 3);
        }
    }
}

#[test]
fn write_breakpoints_ignore_reads_and_see_read_modify_write() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.mov(ecx, dword_ptr(PAGE)).and_then(|()| a.inc(dword_ptr(PAGE))));
    watching(&mut lab, PAGE, enabled(1, 3));
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!(lab.sys.ram.load32(PAGE), 1);
    let mut lab = Lab::new();
    lab.kernel(|a| a.mov(ecx, dword_ptr(PAGE)).and_then(|()| a.inc(rbx)));
    watching(&mut lab, PAGE, enabled(3, 3));
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!(lab.gpr(reg::RBX), 0);
}

#[test]
fn a_breakpoint_on_the_load_of_ss_waits() {
    let mut lab = Lab::new();
    lab.sys.ram.store16(PAGE, 0x10);
    lab.kernel(|a| {
        a.mov(ss, word_ptr(PAGE))?;
        a.inc(rbx)?;
        a.inc(rbx)
    });
    watching(&mut lab, PAGE, enabled(3, 1));
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!(lab.gpr(reg::RBX), 1);
}

#[test]
fn port_breakpoints_need_debug_extensions() {
    for (extensions, hits) in [(0, false), (cr4::DE, true)] {
        let mut lab = Lab::new();
        lab.v().cr4 |= extensions;
        lab.kernel(|a| a.out(0x80, al).and_then(|()| a.inc(rbx)));
        watching(&mut lab, 0x80, enabled(2, 0));
        lab.run();
        assert_eq!(lab.gpr(reg::RBX) == 0, hits);
    }
}

#[test]
fn general_detect_guards_the_registers() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.mov(rax, dr0));
    lab.v().dr[7] |= BD;
    assert_eq!(lab.lands(), vector::DB);
    assert_eq!(lab.v().dr[6], DR6 | BD);
    assert_eq!(lab.v().dr[7], DR7, "the handler may touch them");
    assert_eq!(lab.frame().rip, KERNEL);
}

#[test]
fn debug_registers_have_fixed_bits() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        a.xor(eax, eax)?;
        a.mov(dr6, rax)?;
        a.mov(dr7, rax)?;
        a.mov(rbx, dr6)?;
        a.mov(rcx, dr7)?;
        a.db(&[0x0f, 0x21, 0xe2]) // MOV RDX, DR4
    });
    lab.finishes();
    assert_eq!((lab.gpr(reg::RBX), lab.gpr(reg::RCX), lab.gpr(reg::RDX)), (DR6, DR7, DR6));
    let mut lab = Lab::new();
    lab.v().cr4 |= cr4::DE;
    lab.kernel(|a| a.db(&[0x0f, 0x21, 0xe2]));
    assert_eq!(lab.lands(), vector::UD);
    let mut lab = Lab::new();
    lab.v().gpr[reg::RAX] = 1 << 32;
    lab.kernel(|a| a.mov(dr7, rax));
    lab.faults(vector::GP, 0);
}

#[test]
fn iret_into_a_step_executes_one_instruction() {
    let mut lab = Lab::new();
    lab.user(|a| a.inc(rbx).and_then(|()| a.inc(rbx)));
    let frame = [USER, USER_CS.into(), flags::FIXED | flags::TF, USER_STACK, USER_SS.into()];
    for (n, word) in frame.into_iter().enumerate() {
        lab.sys.ram.store64(KERNEL_STACK - 40 + 8 * n as u64, word);
    }
    let mut kernel = Lab::new();
    std::mem::swap(&mut lab.sys, &mut kernel.sys);
    kernel.kernel(|a| a.iretq());
    kernel.v().gpr[reg::RSP] = KERNEL_STACK - 40;
    assert_eq!(kernel.lands(), vector::DB);
    assert_eq!((kernel.gpr(reg::RBX), kernel.frame().rip), (1, USER + 3));
    assert_eq!(kernel.run(), Exit::Halted);
}
