//! Control registers, MSRs, flags, ports, tables: who may, what is refused, what follows.

use crate::lab::*;
use iced_x86::code_asm::*;
use x86::{
    Activity,
    control::{cr0, cr4, efer},
    flags, msr, reg, vector,
};
use x86_interp::GuestRam;

/// Writes a control register at CPL 0; true if it was taken.
fn takes(register: AsmRegisterCr, value: u64, prepare: impl FnOnce(&mut Lab)) -> bool {
    let mut lab = Lab::new();
    prepare(&mut lab);
    lab.v().gpr[reg::RAX] = value;
    lab.gate(0x40, INTERRUPT_GATE, 0);
    lab.kernel(|a| a.mov(register, rax).and_then(|()| a.int(0x40)));
    match lab.lands() {
        0x40 => true,
        vector::GP => false,
        other => panic!("exception {other}"),
    }
}

#[test]
fn cr0_refuses_the_impossible() {
    let now = cr0::PE | cr0::PG | cr0::WP | cr0::NE | cr0::ET;
    assert!(takes(cr0, now | cr0::TS, |_| {}));
    assert!(takes(cr0, now | cr0::CD, |_| {}));
    assert!(!takes(cr0, now | cr0::NW, |_| {}));
    assert!(!takes(cr0, now | 1 << 32, |_| {}));
    assert!(!takes(cr0, now & !cr0::PG, |_| {}), "PG in 64-bit code");
    assert!(!takes(cr0, cr0::PG, |_| {}));
}

#[test]
fn cr3_and_cr4_refuse_the_impossible() {
    let now = cr4::PAE | cr4::OSFXSR;
    assert!(takes(cr4, now | cr4::SMEP | cr4::SMAP | cr4::UMIP | cr4::PCIDE, |_| {}));
    assert!(!takes(cr4, now | cr4::LA57, |_| {}));
    assert!(!takes(cr4, now | cr4::VMXE, |_| {}));
    assert!(!takes(cr4, cr4::OSFXSR, |_| {}), "PAE in long mode");
    assert!(!takes(cr4, now | cr4::PCIDE, |lab| lab.v().cr3 |= 0x18));
    assert!(takes(cr3, PML4 | 5, |lab| lab.v().cr4 |= cr4::PCIDE));
    assert!(takes(cr3, PML4 | 5 | 1 << 63, |lab| lab.v().cr4 |= cr4::PCIDE));
    assert!(!takes(cr3, PML4 | 1 << 63, |_| {}));
    assert!(!takes(cr3, PML4 | 1 << 46, |_| {}));
    assert!(takes(cr8, 15, |_| {}));
    assert!(!takes(cr8, 16, |_| {}));
}

#[test]
fn a_kept_pcid_is_not_read_back() {
    let mut lab = Lab::new();
    lab.v().cr4 |= cr4::PCIDE;
    lab.v().gpr[reg::RAX] = PML4 | 7 | 1 << 63;
    lab.kernel(|a| a.mov(cr3, rax).and_then(|()| a.mov(rbx, cr3)));
    lab.finishes();
    assert_eq!(lab.gpr(reg::RBX), PML4 | 7);
}

#[test]
fn only_the_kernel_may() {
    type Write = fn(&mut CodeAssembler) -> Result<(), iced_x86::IcedError>;
    let privileged: [Write; 15] = [
        |a| a.mov(rax, cr0),
        |a| a.mov(cr3, rax),
        |a| a.mov(rax, dr7),
        |a| a.hlt(),
        |a| a.clts(),
        |a| a.lmsw(ax),
        |a| a.invlpg(byte_ptr(rax)),
        |a| a.wbinvd(),
        |a| a.rdmsr(),
        |a| a.wrmsr(),
        |a| a.lgdt(ptr(PAGE)),
        |a| a.lidt(ptr(PAGE)),
        |a| a.lldt(ax),
        |a| a.ltr(ax),
        |a| a.cli(),
    ];
    for (n, write) in privileged.into_iter().enumerate() {
        let mut lab = Lab::new();
        lab.user(write);
        lab.faults(vector::GP, 0);
        assert_eq!(lab.coded_frame().1.rip, USER, "instruction {n}");
    }
}

#[test]
fn what_is_not_advertised_is_undefined() {
    for bytes in [
        &[0x0f, 0x01, 0xc1][..], // VMCALL
        &[0x0f, 0x01, 0xd9],     // VMMCALL
        &[0x0f, 0x01, 0xc8],     // MONITOR
        &[0x0f, 0x01, 0xc9],     // MWAIT
        &[0x0f, 0xaa],           // RSM
        &[0x0f, 0x01, 0xd6],     // XTEST
        &[0x0f, 0xb9, 0xc0],     // UD1
        &[0x0f, 0xff, 0xc0],     // UD0
        &[0x0f, 0x01, 0xee],     // RDPKRU
        &[0x0f, 0x20, 0xc8],     // MOV EAX, CR1
        &[0x8e, 0xc8],           // MOV CS, EAX
    ] {
        let mut lab = Lab::new();
        lab.kernel(|a| a.db(bytes));
        assert_eq!(lab.lands(), vector::UD, "{bytes:x?}");
    }
}

#[test]
fn umip_hides_the_tables() {
    type Write = fn(&mut CodeAssembler) -> Result<(), iced_x86::IcedError>;
    let writes: [Write; 5] = [
        |a| a.sgdt(ptr(PAGE)),
        |a| a.sidt(ptr(PAGE)),
        |a| a.sldt(eax),
        |a| a.str(eax),
        |a| a.smsw(eax),
    ];
    for write in writes {
        let mut lab = Lab::new();
        lab.v().cr4 |= cr4::UMIP;
        lab.user(write);
        lab.faults(vector::GP, 0);
        let mut lab = Lab::new();
        lab.user(write);
        assert_eq!(lab.lands(), vector::UD, "the UD2 behind it");
    }
}

#[test]
fn tables_round_trip() {
    let mut lab = Lab::new();
    lab.sys.ram.store16(PAGE, 0xff);
    lab.sys.ram.store64(PAGE + 2, GDT);
    lab.kernel(|a| {
        a.lgdt(ptr(PAGE))?;
        a.sgdt(ptr(PAGE + 0x10))?;
        a.sidt(ptr(PAGE + 0x20))?;
        a.str(ebx)?;
        a.sldt(ecx)?;
        a.smsw(rdx)
    });
    lab.finishes();
    assert_eq!((lab.sys.ram.load16(PAGE + 0x10), lab.sys.ram.load64(PAGE + 0x12)), (0xff, GDT));
    assert_eq!((lab.sys.ram.load16(PAGE + 0x20), lab.sys.ram.load64(PAGE + 0x22)), (0xfff, IDT));
    assert_eq!((lab.gpr(reg::RBX), lab.gpr(reg::RCX)), (TSS_SELECTOR.into(), 0));
    assert_eq!(lab.gpr(reg::RDX), lab.v().cr0);
    let mut lab = Lab::new();
    lab.sys.ram.store64(PAGE + 2, 1 << 47);
    lab.kernel(|a| a.lidt(ptr(PAGE)));
    lab.faults(vector::GP, 0);
}

#[test]
fn ltr_wants_an_available_tss_and_marks_it() {
    let mut lab = Lab::new();
    lab.descriptor(SPARE, system(9, TSS, 0x67));
    lab.descriptor(SPARE + 8, 0xffff_8000);
    lab.kernel(|a| a.mov(eax, u32::from(SPARE)).and_then(|()| a.ltr(ax)));
    lab.finishes();
    assert_eq!(lab.v().tr.base, 0xffff_8000_0000_0000 | TSS);
    assert_eq!(lab.sys.ram.load64(GDT + u64::from(SPARE)), system(11, TSS, 0x67));
    let mut lab = Lab::new();
    lab.descriptor(SPARE, system(11, TSS, 0x67));
    lab.kernel(|a| a.mov(eax, u32::from(SPARE)).and_then(|()| a.ltr(ax)));
    lab.faults(vector::GP, SPARE.into());
}

/// WRMSR then RDMSR; the value read back, or `None` after #GP.
fn wrmsr(lab: &mut Lab, index: u32, value: u64) -> Option<u64> {
    lab.gate(0x40, INTERRUPT_GATE, 0);
    lab.kernel(|a| a.wrmsr().and_then(|()| a.rdmsr()).and_then(|()| a.int(0x40)));
    lab.v().gpr[reg::RCX] = index.into();
    lab.v().gpr[reg::RAX] = value & 0xffff_ffff;
    lab.v().gpr[reg::RDX] = value >> 32;
    match lab.lands() {
        0x40 => Some(lab.gpr(reg::RDX) << 32 | lab.gpr(reg::RAX)),
        _ => None,
    }
}

#[test]
fn msrs_store_what_they_may() {
    let high = 0xffff_8000_1234_5678;
    for (index, good, bad) in [
        (msr::LSTAR, high, Some(1 << 63)),
        (msr::KERNEL_GS_BASE, high, Some(1 << 47)),
        (msr::FS_BASE, high, Some(1 << 47)),
        (msr::SYSENTER_EIP, high, Some(1 << 47)),
        (msr::STAR, u64::MAX, None),
        (msr::SFMASK, 0x4_7700, Some(1 << 32)),
        (msr::TSC_AUX, 5, Some(1 << 32)),
        (msr::PAT, 0x0007_0406_0007_0401, Some(2)),
        (msr::SPEC_CTRL, 1, Some(1 << 2)),
        (msr::MTRR_DEF_TYPE, 0xc06, Some(0xc02)),
        (msr::MTRR_PHYSBASE0 + 3, 0x3fff_c000_0800, Some(1)),
        (msr::MTRR_FIXED[10], 0x0505_0505_0505_0505, Some(3)),
        (msr::EFER, efer::SCE | efer::LME | efer::LMA, Some(1 << 12)),
    ] {
        assert_eq!(wrmsr(&mut Lab::new(), index, good), Some(good), "{index:#x}");
        if let Some(bad) = bad {
            assert_eq!(wrmsr(&mut Lab::new(), index, bad), None, "{index:#x}");
        }
    }
    assert_eq!(wrmsr(&mut Lab::new(), msr::EFER, efer::SCE), None, "LME while paging");
    assert_eq!(wrmsr(&mut Lab::new(), 0x1234, 0), None);
}

#[test]
fn the_time_stamp_counter_can_be_set() {
    let mut lab = Lab::new();
    let read = wrmsr(&mut lab, msr::TSC, 1 << 40).expect("taken");
    assert!((1 << 40..(1 << 40) + 10).contains(&read));
    let moved = lab.v().tsc_adjust;
    lab.sys.msrs.insert(msr::TSC_DEADLINE, 0);
    assert_eq!(wrmsr(&mut lab, msr::TSC_DEADLINE, (1 << 40) + 500), Some((1 << 40) + 500));
    assert_eq!(lab.sys.msrs[&msr::TSC_DEADLINE], (1u64 << 40) + 500 - moved);
    assert_eq!(wrmsr(&mut lab, msr::TSC_DEADLINE, 0), Some(0));
}

#[test]
fn rdtsc_can_be_kept_from_users() {
    let mut lab = Lab::new();
    lab.v().cr4 |= cr4::TSD;
    lab.user(|a| a.rdtsc());
    lab.faults(vector::GP, 0);
    let mut lab = Lab::new();
    lab.v().tsc_aux = 3;
    lab.user(|a| a.rdtscp().and_then(|()| a.rdpid(rbx)));
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!((lab.gpr(reg::RCX), lab.gpr(reg::RBX)), (3, 3));
    lab.user(|a| a.rdpmc());
    lab.faults(vector::GP, 0);
}

#[test]
fn popf_respects_levels() {
    let wild = !0u64;
    let popf = |a: &mut CodeAssembler| {
        a.push(rax)?;
        a.popfq()?;
        a.ud2()
    };
    let base = flags::FIXED | flags::STATUS | flags::DF | flags::NT | flags::AC | flags::ID;
    // TF is left out: it would trap.
    for (user, iopl, expected) in [
        (true, 0, base),
        (true, flags::IOPL, base | flags::IOPL | flags::IF),
        (false, 0, base | flags::IOPL | flags::IF),
    ] {
        let mut lab = Lab::new();
        if user {
            lab.user(popf)
        } else {
            lab.kernel(popf)
        };
        lab.v().gpr[reg::RAX] = wild & !flags::TF;
        lab.v().rflags |= iopl;
        assert_eq!(lab.lands(), vector::UD);
        assert_eq!(lab.frame().rflags & !flags::RF, expected, "user {user} iopl {iopl:#x}");
    }
}

#[test]
fn sixteen_bit_popf_keeps_the_rest() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.push(0x00d7).and_then(|()| a.popf()).and_then(|()| a.ud2()));
    lab.v().rflags |= flags::AC | flags::ID;
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.frame().rflags & !flags::RF, 0x00d7 | flags::AC | flags::ID);
}

#[test]
fn cli_and_sti_follow_iopl() {
    let mut lab = Lab::new();
    lab.user(|a| a.cli().and_then(|()| a.pushfq()).and_then(|()| a.pop(rbx)));
    lab.v().rflags |= flags::IF | flags::IOPL;
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.gpr(reg::RBX) & flags::IF, 0);
    let mut lab = Lab::new();
    lab.user(|a| a.sti());
    lab.faults(vector::GP, 0);
}

/// A user program's OUT with the TSS bitmap as prepared.
fn out(port: u16, size: usize, prepare: impl FnOnce(&mut Lab)) -> bool {
    let mut lab = Lab::new();
    lab.user(|a| {
        match size {
            1 => a.out(dx, al)?,
            2 => a.out(dx, ax)?,
            _ => a.out(dx, eax)?,
        }
        a.ud2()
    });
    lab.v().gpr[reg::RDX] = port.into();
    prepare(&mut lab);
    match lab.lands() {
        vector::UD => {
            assert_eq!(lab.sys.ports, [(port, 0)]);
            true
        }
        _ => {
            assert!(lab.sys.ports.is_empty());
            false
        }
    }
}

#[test]
fn the_port_bitmap() {
    let open = |bytes: &'static [u8]| move |lab: &mut Lab| lab.sys.ram.write(TSS + 0x68, bytes);
    assert!(!out(0x20, 1, |_| {}));
    assert!(out(0x20, 1, |lab| lab.v().rflags |= flags::IOPL));
    assert!(out(9, 1, open(&[0xff, 0xfd])));
    assert!(!out(8, 1, open(&[0xff, 0xfd])));
    assert!(out(7, 2, open(&[0x7f, 0xfe])));
    assert!(!out(7, 4, open(&[0x7f, 0xfe])), "all four bits count");
    assert!(out(6, 4, open(&[0x3f, 0xfc])));
    let short = |limit: u32| {
        move |lab: &mut Lab| {
            lab.sys.ram.write(TSS + 0x68, &[0; 0x20]);
            lab.v().tr.limit = limit;
        }
    };
    assert!(out(0x10, 1, short(0x6b)));
    assert!(!out(0x10, 1, short(0x6a)), "the second byte is read too");
    assert!(!out(0x10, 1, short(0x66)), "no map base");
}

#[test]
fn in_widths_keep_or_clear_the_rest_of_rax() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        a.mov(rax, 0x1122_3344_5566_7788u64)?;
        a.in_(al, 0x80)?;
        a.mov(rbx, rax)?;
        a.in_(ax, dx)?;
        a.mov(rcx, rax)?;
        a.in_(eax, dx)
    });
    lab.finishes();
    assert_eq!(lab.gpr(reg::RBX), 0x1122_3344_5566_77ff);
    assert_eq!(lab.gpr(reg::RCX), 0x1122_3344_5566_ffff);
    assert_eq!(lab.gpr(reg::RAX), 0xffff_ffff);
}

#[test]
fn cpuid_follows_the_state() {
    for (osxsave, xcr0, size) in [(0, 1, 576), (cr4::OSXSAVE, 7, 832)] {
        let mut lab = Lab::new();
        lab.v().cr4 |= osxsave;
        lab.v().xcr0 = xcr0;
        lab.kernel(|a| {
            a.mov(eax, 1)?;
            a.cpuid()?;
            a.mov(esi, ecx)?;
            a.mov(eax, 0xd)?;
            a.xor(ecx, ecx)?;
            a.cpuid()
        });
        lab.finishes();
        assert_eq!(lab.gpr(reg::RSI) >> 27 & 1, u64::from(osxsave != 0));
        assert_eq!(lab.gpr(reg::RBX), size);
    }
}

#[test]
fn random_words_set_only_carry() {
    let mut lab = Lab::new();
    lab.kernel(|a| a.rdrand(rax).and_then(|()| a.rdseed(bx)));
    lab.v().rflags |= flags::STATUS;
    lab.v().gpr[reg::RBX] = 0xffff_0000;
    lab.finishes();
    assert_eq!((lab.gpr(reg::RAX), lab.gpr(reg::RBX)), (4, 0xffff_0004));
    assert_eq!(lab.v().rflags & flags::STATUS, flags::CF);
}

#[test]
fn selectors_can_be_examined() {
    let mut lab = Lab::new();
    lab.descriptor(SPARE, DATA & !(1 << 41) | DPL3);
    lab.user(|a| {
        for (n, selector) in [SPARE, KERNEL_SS, 0x1000, 0, TSS_SELECTOR].into_iter().enumerate() {
            a.mov(eax, u32::from(selector))?;
            a.verr(ax)?;
            a.setz(byte_ptr(PAGE + n as u64))?;
            a.verw(ax)?;
            a.setz(byte_ptr(PAGE + 8 + n as u64))?;
        }
        a.mov(eax, u32::from(SPARE) | 3)?;
        a.lar(ebx, eax)?;
        a.lsl(ecx, eax)?;
        a.mov(eax, u32::from(KERNEL_CS))?;
        a.mov(edx, 5)?;
        a.lar(edx, eax)
    });
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.sys.ram.load64(PAGE) & 0xff_ffff_ffff, 1);
    assert_eq!(lab.sys.ram.load64(PAGE + 8) & 0xff_ffff_ffff, 0);
    assert_eq!(lab.gpr(reg::RBX), 0x00cf_f100);
    assert_eq!(lab.gpr(reg::RCX), 0xffff_ffff);
    assert_eq!((lab.gpr(reg::RDX), lab.frame().rflags & flags::ZF), (5, 0));
}

#[test]
fn cr8_is_the_task_priority() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        a.mov(eax, 9)?;
        a.mov(cr8, rax)?;
        a.mov(rbx, cr8)
    });
    lab.finishes();
    assert_eq!((lab.sys.cr8, lab.gpr(reg::RBX)), (9, 9));
    assert_eq!(lab.v().activity, Activity::Halted);
}

#[test]
fn cache_line_flushes_fault_like_loads() {
    let mut lab = Lab::new();
    lab.page(PAGE, 0);
    lab.kernel(|a| a.clflush(byte_ptr(PAGE)));
    lab.faults(vector::PF, 0);
    let mut lab = Lab::new();
    lab.kernel(|a| a.clflush(byte_ptr(PAGE)).and_then(|()| a.clwb(byte_ptr(PAGE))));
    lab.finishes();
}

#[test]
fn device_stores_end_the_block() {
    let mut lab = Lab::new();
    lab.sys.ram.store64(PD + 16, 0xfee0_0083);
    lab.kernel(|a| a.mov(byte_ptr(0x40_0080), cl).and_then(|()| a.inc(rbx)));
    lab.cpu.run(&mut lab.sys, 1);
    assert_eq!(lab.sys.mmio_writes, [(0xfee0_0080, vec![0])]);
    assert_eq!(lab.gpr(reg::RBX), 0, "pending interrupts are looked at in between");
}

/// The registers of a hypercall: its number, and arguments whose upper halves 32-bit code does not have.
fn with_hypercall(lab: &mut Lab) {
    lab.sys.answer = Some(u64::MAX - 999);
    for (register, value) in [(reg::RAX, 10), (reg::RBX, 1), (reg::RCX, 2), (reg::RDX, 3)] {
        lab.v().gpr[register] = 7 << 32 | value;
    }
    lab.v().gpr[reg::RSI] = 4;
}

#[test]
fn hypercalls_of_either_maker_reach_the_machine() {
    for bytes in [[0x0f, 0x01, 0xc1], [0x0f, 0x01, 0xd9]] {
        let mut lab = Lab::new();
        with_hypercall(&mut lab);
        lab.kernel(|a| a.db(&bytes));
        lab.finishes();
        let arguments = [7 << 32 | 1, 7 << 32 | 2, 7 << 32 | 3, 4];
        assert_eq!(lab.sys.hypercalls, [(true, 7 << 32 | 10, arguments)]);
        assert_eq!(lab.gpr(reg::RAX), u64::MAX - 999);
    }
}

#[test]
fn the_machine_is_told_of_hypercalls_of_user_code() {
    let mut lab = Lab::new();
    with_hypercall(&mut lab);
    lab.user(|a| a.db(&[0x0f, 0x01, 0xc1]).and_then(|()| a.ud2()));
    assert_eq!(lab.lands(), vector::UD, "UD2");
    let told: Vec<_> = lab.sys.hypercalls.iter().map(|(kernel, ..)| *kernel).collect();
    assert_eq!(told, [false]);
}
