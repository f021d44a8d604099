//! Changes of code segment and privilege level in long mode: SYSCALL, SYSENTER, IRET, far
//! transfers, segment loads.

use crate::lab::*;
use iced_x86::code_asm::*;
use x86::{
    Segment,
    control::{cr4, efer},
    flags, reg, seg,
    segment::attr,
    vector,
};
use x86_interp::GuestRam;

const STAR: u64 = (KERNEL_CS as u64) << 32 | 0x18 << 48;

/// A lab whose system calls go to `KERNEL`.
fn with_syscall() -> Lab {
    let mut lab = Lab::new();
    let v = lab.v();
    (v.star, v.lstar, v.sfmask) = (STAR, KERNEL, flags::IF | flags::TF | flags::DF);
    lab
}

#[test]
fn system_call_round_trip() {
    let mut lab = with_syscall();
    lab.kernel(|a| {
        a.mov(rbx, rcx)?;
        a.mov(rbp, r11)?;
        a.pushfq()?;
        a.pop(rsi)?;
        a.mov(edi, cs)?;
        a.mov(r8d, ss)?;
        a.sysretq()
    });
    lab.user(|a| {
        a.syscall()?;
        a.mov(r9d, cs)?;
        a.mov(r10d, ss)?;
        a.pushfq()?;
        a.pop(r12)?;
        a.int3()
    });
    // The kernel uses the user's stack here: nobody switches it.
    lab.v().rflags |= flags::IF | flags::CF;
    lab.gate(3, INTERRUPT_GATE | DPL3, 0);
    assert_eq!(lab.lands(), vector::BP);
    let before = flags::FIXED | flags::IF | flags::CF;
    assert_eq!(lab.gpr(reg::RBX), USER + 2, "RCX");
    assert_eq!(lab.gpr(reg::RBP), before, "R11");
    assert_eq!(lab.gpr(reg::RSI), flags::FIXED | flags::CF, "RFLAGS in the kernel");
    assert_eq!((lab.gpr(reg::RDI), lab.gpr(8)), (8, 0x10));
    assert_eq!((lab.gpr(9), lab.gpr(10)), (USER_CS.into(), USER_SS.into()));
    assert_eq!(lab.gpr(12), before);
}

#[test]
fn syscall_is_undefined_without_sce_and_in_32_bit_code() {
    let mut lab = with_syscall();
    lab.user(|a| a.syscall());
    lab.v().efer &= !efer::SCE;
    assert_eq!(lab.lands(), vector::UD);
    let mut lab = with_syscall();
    lab.code(32, USER, |a| a.syscall());
    lab.enter(32, USER);
    assert_eq!(lab.lands(), vector::UD);
}

#[test]
fn sysret_checks_the_address_before_it_leaves() {
    let mut lab = with_syscall();
    lab.kernel(|a| a.sysretq());
    lab.v().gpr[reg::RCX] = 1 << 47;
    lab.faults(vector::GP, 0);
    assert_eq!((lab.coded_frame().1.rip, lab.coded_frame().1.cs), (KERNEL, 8));
    let mut lab = with_syscall();
    lab.user(|a| a.sysretq());
    lab.faults(vector::GP, 0);
}

#[test]
fn sysret_to_compatibility_code() {
    let mut lab = with_syscall();
    lab.kernel(|a| a.sysret());
    lab.code(32, USER, |a| a.inc(eax).and_then(|()| a.ud2()));
    lab.v().gpr[reg::RCX] = 0xffff_ffff << 32 | USER;
    lab.v().gpr[reg::RAX] = 0xffff_ffff;
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.gpr(reg::RAX), 0);
    // INC EAX is one byte (0x40) in 32-bit code.
    assert_eq!((lab.frame().rip, lab.frame().cs), (USER + 1, USER_CS32.into()));
}

#[test]
fn sysenter_and_sysexit() {
    let mut lab = Lab::new();
    let v = lab.v();
    (v.sysenter_cs, v.sysenter_esp, v.sysenter_eip) = (8, KERNEL_STACK, KERNEL);
    lab.kernel(|a| {
        a.mov(rbx, rsp)?;
        a.mov(ecx, USER_STACK as u32)?;
        a.mov(edx, USER as u32 + 0x100)?;
        a.sysexit()
    });
    lab.code(32, USER, |a| a.sysenter());
    lab.code(32, USER + 0x100, |a| a.ud2());
    lab.enter(32, USER);
    lab.v().rflags |= flags::IF;
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.gpr(reg::RBX), KERNEL_STACK);
    assert_eq!(lab.frame().rsp, USER_STACK);
    assert_eq!(lab.frame().cs, 8 + 16 + 3);
    assert_eq!(lab.frame().rflags & flags::IF, 0, "SYSENTER cleared it");
    let mut lab = Lab::new();
    lab.user(|a| a.sysenter());
    lab.faults(vector::GP, 0);
}

#[test]
fn swapgs_and_the_bases() {
    let mut lab = Lab::new();
    lab.v().cr4 |= cr4::FSGSBASE;
    lab.v().kernel_gs_base = 0x1234;
    lab.kernel(|a| {
        a.mov(rax, PAGE)?;
        a.wrgsbase(rax)?;
        a.mov(rbx, qword_ptr(8).gs())?;
        a.swapgs()?;
        a.rdgsbase(rcx)?;
        a.wrfsbase(eax)?;
        a.rdfsbase(edx)
    });
    lab.sys.ram.store64(PAGE + 8, 77);
    lab.finishes();
    assert_eq!((lab.gpr(reg::RBX), lab.gpr(reg::RCX)), (77, 0x1234));
    assert_eq!((lab.gpr(reg::RDX), lab.v().kernel_gs_base), (PAGE, PAGE));
    for (cr4_bits, base, vector) in [(0, 0, vector::UD), (cr4::FSGSBASE, 1 << 47, vector::GP)] {
        let mut lab = Lab::new();
        lab.v().cr4 |= cr4_bits;
        lab.v().gpr[reg::RAX] = base;
        lab.kernel(|a| a.wrgsbase(rax));
        assert_eq!(lab.lands(), vector);
    }
    let mut lab = Lab::new();
    lab.user(|a| a.swapgs());
    lab.faults(vector::GP, 0);
}

/// Kernel code that builds an IRETQ frame from words, last first.
fn iret_with(lab: &mut Lab, frame: [u64; 5]) {
    let at = KERNEL_STACK - 40;
    for (n, word) in frame.into_iter().enumerate() {
        lab.sys.ram.store64(at + 8 * n as u64, word);
    }
    lab.kernel(|a| a.iretq());
    lab.v().gpr[reg::RSP] = at;
}

#[test]
fn iret_to_user_code() {
    let mut lab = Lab::new();
    lab.user(|a| a.pushfq());
    let mut lab = Lab::new();
    lab.code(64, USER, |a| a.ud2());
    let rflags = flags::FIXED | flags::IF | flags::IOPL | flags::NT | flags::AC | flags::ID;
    iret_with(&mut lab, [USER, USER_CS.into(), rflags, USER_STACK - 5, USER_SS.into()]);
    lab.v().seg[seg::DS] = Segment::from_descriptor(KERNEL_SS, DATA);
    lab.v().seg[seg::FS] = Segment { base: 0x1234_5678, ..Segment::null(0, 0) };
    assert_eq!(lab.lands(), vector::UD);
    let frame = lab.frame();
    assert_eq!((frame.rip, frame.cs, frame.ss), (USER, USER_CS.into(), USER_SS.into()));
    assert_eq!((frame.rflags, frame.rsp), (rflags | flags::RF, USER_STACK - 5));
    assert!(!lab.v().seg[seg::DS].present(), "a kernel segment is taken away");
    assert_eq!(lab.v().seg[seg::FS].base, 0x1234_5678, "a null FS keeps its base");
}

#[test]
fn iret_to_compatibility_code() {
    let mut lab = Lab::new();
    lab.code(32, USER, |a| a.push(ebp).and_then(|()| a.ud2()));
    iret_with(&mut lab, [USER, USER_CS32.into(), 2, USER_STACK, USER_SS.into()]);
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!((lab.frame().rip, lab.frame().rsp), (USER + 1, USER_STACK - 4));
}

#[test]
fn iret_within_the_kernel_restores_rsp_and_takes_a_null_ss() {
    let mut lab = Lab::new();
    lab.code(64, KERNEL + 0x100, |a| a.mov(ebx, ss).and_then(|()| a.hlt()));
    iret_with(&mut lab, [KERNEL + 0x100, 8, 2, KERNEL_STACK - 0x333, 0]);
    lab.finishes();
    assert_eq!((lab.gpr(reg::RSP), lab.gpr(reg::RBX)), (KERNEL_STACK - 0x333, 0));
    assert_eq!(lab.v().cpl(), 0);
}

#[test]
fn iret_refuses() {
    let user = u64::from(USER_CS);
    for (frame, code) in [
        ([1 << 47, user, 2, USER_STACK, 0x23], 0),
        ([USER, 0, 2, USER_STACK, 0x23], 0),
        ([USER, 0x28, 2, USER_STACK, 0x23], 0x28),
        ([USER, 0x23, 2, USER_STACK, 0x23], 0x20),
        ([USER, user, 2, USER_STACK, 0], 0),
        ([USER, user, 2, USER_STACK, 0x13], 0x10),
        ([USER, 0x1003, 2, USER_STACK, 0x23], 0x1000),
    ] {
        let mut lab = Lab::new();
        iret_with(&mut lab, frame);
        lab.faults(vector::GP, code);
        assert_eq!(lab.coded_frame().1.rip, KERNEL, "{frame:x?}");
        assert_eq!(lab.coded_frame().1.rsp, KERNEL_STACK - 40, "nothing popped");
    }
    let mut lab = Lab::new();
    iret_with(&mut lab, [USER, user, 2, USER_STACK, 0x23]);
    lab.v().rflags |= flags::NT;
    lab.faults(vector::GP, 0);
}

#[test]
fn a_16_bit_stack_takes_only_sp() {
    let mut lab = Lab::new();
    lab.descriptor(SPARE, 0x0000_f300_0000_ffff);
    lab.code(32, USER, |a| a.ud2());
    let frame = [USER, USER_CS32.into(), 2, 0x1234_5678, u64::from(SPARE) | 3];
    iret_with(&mut lab, frame);
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.frame().rsp, ((KERNEL_STACK - 40) & !0xffff) | 0x5678);
}

#[test]
fn far_jumps_and_returns_between_64_and_32_bit_code() {
    let mut lab = Lab::new();
    lab.code(32, KERNEL + 0x100, |a| a.inc(ebx).and_then(|()| a.retf()));
    let pointer = PAGE;
    lab.sys.ram.store32(pointer, KERNEL as u32 + 0x100);
    lab.sys.ram.store16(pointer + 4, KERNEL_CS32);
    lab.kernel(|a| a.db(&[0xff, 0x1c, 0x25]).and_then(|()| a.dd(&[pointer as u32])));
    lab.v().gpr[reg::RBX] = u64::MAX;
    lab.finishes();
    assert_eq!(lab.gpr(reg::RBX), 0, "INC EBX ran as 32-bit code");
    assert_eq!(lab.gpr(reg::RSP), KERNEL_STACK);
    assert!(lab.v().is_64bit());
}

#[test]
fn call_gate_to_the_kernel() {
    let mut lab = Lab::new();
    lab.descriptor(SPARE, gate(KERNEL_CS, KERNEL, 0x8c00 << 32) | DPL3);
    lab.descriptor(SPARE + 8, 0);
    lab.kernel(|a| {
        a.mov(rbx, rsp).and_then(|()| a.mov(ebp, cs)).and_then(|()| a.db(&[0x48, 0xcb]))
    });
    lab.sys.ram.store32(PAGE, 0);
    lab.sys.ram.store16(PAGE + 4, SPARE | 3);
    lab.user(|a| a.db(&[0xff, 0x1c, 0x25]).and_then(|()| a.dd(&[PAGE as u32])));
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!((lab.gpr(reg::RBX), lab.gpr(reg::RBP)), (RSP0 - 32, 8));
    assert_eq!((lab.frame().rip, lab.frame().rsp), (USER + 7, USER_STACK));
    assert_eq!((lab.frame().cs, lab.frame().ss), (USER_CS.into(), USER_SS.into()));
}

#[test]
fn call_gate_dpl_counts() {
    let mut lab = Lab::new();
    lab.descriptor(SPARE, gate(KERNEL_CS, KERNEL, 0x8c00 << 32));
    lab.sys.ram.store16(PAGE + 4, SPARE | 3);
    lab.user(|a| a.db(&[0xff, 0x1c, 0x25]).and_then(|()| a.dd(&[PAGE as u32])));
    lab.faults(vector::GP, SPARE.into());
}

/// Loads a selector into a register at CPL 0 or 3 and gives the exception, if any.
fn load(user: bool, register: AsmRegisterSegment, selector: u16, raw: u64) -> Option<(u8, u64)> {
    let mut lab = Lab::new();
    lab.descriptor(SPARE, raw);
    lab.gate(0x40, INTERRUPT_GATE | DPL3, 0);
    let write = |a: &mut CodeAssembler| {
        a.mov(eax, u32::from(selector))?;
        a.mov(register, eax)?;
        a.int(0x40)
    };
    if user {
        lab.user(write)
    } else {
        lab.kernel(write)
    };
    match lab.lands() {
        0x40 => None,
        number => Some((number, lab.words(1)[0])),
    }
}

#[test]
fn data_segment_loads() {
    let spare = u64::from(SPARE);
    let gp = Some((vector::GP, spare));
    assert_eq!(load(true, ds, SPARE | 3, DATA | DPL3), None);
    assert_eq!(load(true, ds, SPARE, DATA | DPL3), None);
    assert_eq!(load(true, ds, SPARE | 3, DATA), gp);
    assert_eq!(load(false, ds, SPARE | 3, DATA), gp, "RPL counts");
    assert_eq!(load(false, ds, SPARE, CODE64), None, "readable code");
    assert_eq!(load(false, ds, SPARE, CODE64 & !(2 << 40)), gp, "execute-only code");
    assert_eq!(load(false, es, SPARE, system(9, 0, 0x67)), gp);
    assert_eq!(load(false, fs, SPARE, DATA & !(0x80 << 40)), Some((vector::NP, spare)));
    assert_eq!(load(true, gs, 3, 0), None, "null");
    assert_eq!(load(true, gs, 0x1000, 0), Some((vector::GP, 0x1000)));
    assert_eq!(load(true, gs, 7, 0), Some((vector::GP, 4)), "no LDT");
    let conforming = CODE64 | 4 << 40;
    assert_eq!(load(true, gs, SPARE | 3, conforming), None, "conforming code asks no level");
}

#[test]
fn stack_segment_loads() {
    let spare = u64::from(SPARE);
    let gp = Some((vector::GP, spare));
    assert_eq!(load(false, ss, SPARE, DATA), None);
    assert_eq!(load(false, ss, SPARE, DATA & !(2 << 40)), gp, "read-only");
    assert_eq!(load(false, ss, SPARE | 3, DATA | DPL3), gp);
    assert_eq!(load(true, ss, SPARE | 3, DATA | DPL3), None);
    assert_eq!(load(false, ss, SPARE, DATA & !(0x80 << 40)), Some((vector::SS, spare)));
    assert_eq!(load(false, ss, 0, 0), None, "null at CPL 0 in 64-bit code");
    assert_eq!(load(false, ss, 3, 0), Some((vector::GP, 0)));
    assert_eq!(load(true, ss, 3, 0), Some((vector::GP, 0)));
}

#[test]
fn a_load_sets_the_accessed_bit() {
    let mut lab = Lab::new();
    lab.descriptor(SPARE, DATA & !(1 << 40));
    lab.kernel(|a| a.mov(eax, u32::from(SPARE)).and_then(|()| a.mov(ds, eax)));
    lab.finishes();
    assert_eq!(lab.sys.ram.load64(GDT + u64::from(SPARE)), DATA);
    assert_ne!(lab.v().seg[seg::DS].attr & attr::ACCESSED, 0);
}

#[test]
fn compatibility_code_obeys_its_segments() {
    let mut lab = Lab::new();
    lab.descriptor(SPARE, 0x0040_f300_0000_0fff | PAGE << 16 & 0xff_ffff_0000);
    lab.code(32, USER, |a| {
        a.mov(eax, u32::from(SPARE) | 3)?;
        a.mov(es, eax)?;
        a.mov(ecx, dword_ptr(0xffc).es())?;
        a.mov(ecx, dword_ptr(0xffd).es())
    });
    lab.sys.ram.store32(PAGE + 0xffc, 99);
    lab.enter(32, USER);
    lab.faults(vector::GP, 0);
    assert_eq!(lab.gpr(reg::RCX), 99);
    let mut lab = Lab::new();
    lab.code(32, USER, |a| a.mov(ecx, dword_ptr(0)));
    lab.enter(32, USER);
    lab.v().seg[seg::DS] = Segment::null(0, 0);
    lab.faults(vector::GP, 0);
}
