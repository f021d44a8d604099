//! Protected mode without long mode, real mode, virtual-8086 mode, hardware tasks, and the ways
//! between them.

use crate::{
    lab::{CODE32, CODE64, DATA, DPL3, gate, system},
    support::FakeSystem,
};
use iced_x86::{IcedError, code_asm::*};
use x86::{
    Segment, TableRegister, Vcpu,
    control::{cr0, cr4, efer},
    flags, msr, reg, seg, vector,
};
use x86_interp::{Cpu, Exit, GuestRam};

const GDT: u64 = 0x5000;
const IDT: u64 = 0x6000;
const TSS: u64 = 0x7000;
const OTHER_TSS: u64 = 0x7800;
const ESP0: u64 = 0xa000;
const STACK: u64 = 0xc000;
const USER_STACK: u64 = 0xe000;
const KERNEL: u64 = 0x1_0000;
const HANDLERS: u64 = 0x1_8000;
const USER: u64 = 0x2_0000;
const TASK: u64 = 0x3_0000;
const DATA_AT: u64 = 0x4_0000;

const KERNEL_CS: u16 = 0x08;
const KERNEL_SS: u16 = 0x10;
const USER_CS: u16 = 0x1b;
const USER_SS: u16 = 0x23;
const TSS_SELECTOR: u16 = 0x28;
const OTHER_SELECTOR: u16 = 0x30;
const LONG_CS: u16 = 0x38;
const CS16: u16 = 0x40;
const SPARE: u16 = 0x48;

/// 32-bit protected mode without paging; every handler halts.
struct Legacy {
    sys: FakeSystem,
    cpu: Cpu<FakeSystem>,
}

impl Legacy {
    fn new() -> Self {
        let sys = FakeSystem::new(1 << 20);
        let table = [
            0,
            CODE32,
            DATA,
            CODE32 | DPL3,
            DATA | DPL3,
            system(11, TSS, 0x67),
            system(9, OTHER_TSS, 0x67),
            CODE64,
            0x0000_9b00_0000_ffff,
        ];
        for (n, raw) in table.into_iter().enumerate() {
            sys.ram.store64(GDT + 8 * n as u64, raw);
        }
        for vector in 0..256 {
            let target = HANDLERS + vector * 16;
            sys.ram.store8(target, 0xf4);
            sys.ram.store64(IDT + vector * 8, gate(KERNEL_CS, target, 0x8e00 << 32));
        }
        sys.ram.store32(TSS + 4, ESP0 as u32);
        sys.ram.store16(TSS + 8, KERNEL_SS);
        sys.ram.store16(TSS + 0x66, 0x68);
        Self { sys, cpu: Cpu::new(initial()) }
    }

    fn v(&mut self) -> &mut Vcpu {
        &mut self.cpu.vcpu
    }

    fn code(
        &mut self,
        bits: u32,
        at: u64,
        write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
    ) {
        let mut a = CodeAssembler::new(bits).expect("bits");
        write(&mut a).expect("operands");
        let bytes = a.assemble(at).expect("assembles");
        self.sys.ram.write(at, &bytes);
        self.sys.ram.note_write(at, bytes.len() as u64);
    }

    fn kernel(&mut self, write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
        self.code(32, KERNEL, |a| write(a).and_then(|()| a.hlt()));
    }

    fn user(&mut self, write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
        self.code(32, USER, |a| write(a).and_then(|()| a.ud2()));
        let v = self.v();
        v.seg[seg::CS] = Segment::from_descriptor(USER_CS, CODE32 | DPL3);
        for register in [seg::SS, seg::DS, seg::ES] {
            v.seg[register] = Segment::from_descriptor(USER_SS, DATA | DPL3);
        }
        v.gpr[reg::RSP] = USER_STACK;
        v.rip = USER;
        self.cpu.state_changed();
    }

    fn run(&mut self) -> Exit {
        self.cpu.run(&mut self.sys, 10_000)
    }

    fn lands(&mut self) -> u8 {
        assert_eq!(self.run(), Exit::Halted, "at {:#x}", self.cpu.vcpu.rip);
        let rip = self.cpu.vcpu.rip - 1;
        assert_eq!(rip % 16, 0, "halted at {rip:#x}, not in a handler");
        u8::try_from(rip.wrapping_sub(HANDLERS) / 16).expect("not in a handler")
    }

    fn words(&self, count: u64) -> Vec<u32> {
        let top = self.cpu.vcpu.gpr[reg::RSP];
        (0..count).map(|n| self.sys.ram.load32(top + 4 * n)).collect()
    }

    /// Fills a TSS for a task that starts at `eip`.
    fn task(&mut self, at: u64, eip: u64, code: u16, data: u16, eflags: u64) {
        let set = |offset: u64, value: u64| self.sys.ram.store32(at + offset, value as u32);
        set(0x20, eip);
        set(0x24, eflags | flags::FIXED);
        set(0x28, 0x1111);
        set(0x38, 0xf000);
        set(0x4c, code.into());
        for offset in [0x48, 0x50, 0x54, 0x58, 0x5c] {
            set(offset, data.into());
        }
        set(0x60, 0);
        set(0x64, 0x68 << 16);
    }
}

fn initial() -> Vcpu {
    let mut v = Vcpu { rip: KERNEL, ..Vcpu::default() };
    v.cr0 |= cr0::PE | cr0::NE;
    v.seg[seg::CS] = Segment::from_descriptor(KERNEL_CS, CODE32);
    for register in [seg::SS, seg::DS, seg::ES, seg::FS, seg::GS] {
        v.seg[register] = Segment::from_descriptor(KERNEL_SS, DATA);
    }
    v.gdtr = TableRegister { base: GDT, limit: 0x7f, ..TableRegister::default() };
    v.idtr = TableRegister { base: IDT, limit: 0x7ff, ..TableRegister::default() };
    v.tr = Segment::from_descriptor(TSS_SELECTOR, system(11, TSS, 0x67));
    v.gpr[reg::RSP] = STACK;
    v
}

#[test]
fn faults_and_interrupts() {
    let mut lab = Legacy::new();
    lab.kernel(|a| a.ud2());
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.words(3), [KERNEL as u32, 8, 0x1_0002]);
    assert_eq!(lab.v().gpr[reg::RSP], STACK - 12);
    let mut lab = Legacy::new();
    lab.user(|a| a.int(0x40));
    assert_eq!(lab.lands(), vector::GP);
    let expected = [0x40 * 8 + 2, USER as u32, USER_CS.into(), 0x1_0002, USER_STACK as u32, 0x23];
    assert_eq!(lab.words(6), expected);
    assert_eq!((lab.v().gpr[reg::RSP], lab.v().cpl()), (ESP0 - 24, 0));
}

#[test]
fn sixteen_bit_gates_push_words() {
    let mut lab = Legacy::new();
    lab.sys.ram.store64(IDT + 0x40 * 8, gate(CS16, 0x100, 0x8600 << 32));
    lab.sys.ram.store8(0x100, 0xf4);
    lab.kernel(|a| a.int(0x40));
    assert_eq!(lab.run(), Exit::Halted);
    assert_eq!(lab.v().rip, 0x101);
    assert_eq!(lab.v().gpr[reg::RSP], STACK - 6);
    assert_eq!(lab.words(1)[0], 0x0008_0002);
}

#[test]
fn iret_to_user_and_back_to_the_same_level() {
    let mut lab = Legacy::new();
    lab.code(32, USER, |a| a.ud2());
    lab.kernel(|a| {
        a.push(u32::from(USER_SS) as i32)?;
        a.push(USER_STACK as i32)?;
        a.pushfd()?;
        a.push(i32::from(USER_CS))?;
        a.push(USER as i32)?;
        a.iretd()
    });
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.words(5)[0..2], [USER as u32, USER_CS.into()]);
    assert_eq!(lab.words(5)[3..], [USER_STACK as u32, USER_SS.into()]);
    assert!(!lab.v().seg[seg::DS].present());
}

#[test]
fn call_gates_copy_parameters() {
    let mut lab = Legacy::new();
    let raw = gate(KERNEL_CS, KERNEL, 0x8c02 << 32) | DPL3;
    lab.sys.ram.store64(GDT + u64::from(SPARE), raw);
    lab.code(32, KERNEL, |a| {
        a.mov(ebx, esp)?;
        a.mov(ecx, dword_ptr(esp + 8))?;
        a.mov(edx, dword_ptr(esp + 12))?;
        a.retf_1(8)
    });
    lab.user(|a| {
        a.push(0x1111)?;
        a.push(0x2222)?;
        // CALL SPARE|3:0
        a.db(&[0x9a, 0, 0, 0, 0, SPARE as u8 | 3, 0])
    });
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.v().gpr[reg::RBX], ESP0 - 24);
    assert_eq!(lab.words(4)[3], USER_STACK as u32, "the parameters are dropped on both stacks");
    assert_eq!((lab.v().gpr[reg::RCX], lab.v().gpr[reg::RDX]), (0x2222, 0x1111));
}

#[test]
fn expand_down_and_small_limits() {
    // Expand-down: valid above the limit.
    for (offset, good) in [(0x0fff, false), (0x1000, true), (0xfffc, true), (0xfffd, false)] {
        let mut lab = Legacy::new();
        lab.sys.ram.store64(GDT + u64::from(SPARE), 0x0000_9700_0000_0fff);
        lab.kernel(|a| {
            a.mov(eax, u32::from(SPARE))?;
            a.mov(ds, eax)?;
            a.mov(ebx, dword_ptr(offset))
        });
        assert_eq!(lab.run(), Exit::Halted);
        let faulted = lab.v().rip == HANDLERS + u64::from(vector::GP) * 16 + 1;
        assert_eq!(!faulted, good, "{offset:#x}");
    }
}

#[test]
fn stack_overflow_is_a_stack_fault() {
    let mut lab = Legacy::new();
    lab.sys.ram.store64(GDT + u64::from(SPARE), 0x0040_9300_0000_0fff);
    lab.sys
        .ram
        .store64(IDT + 12 * 8, gate(0, 0, 0) | u64::from(OTHER_SELECTOR) << 16 | 0x8500 << 32);
    lab.task(OTHER_TSS, HANDLERS + 12 * 16, KERNEL_CS, KERNEL_SS, 0);
    lab.kernel(|a| {
        a.mov(eax, u32::from(SPARE))?;
        a.mov(ss, eax)?;
        a.mov(esp, 0x1002)?;
        a.push(eax)
    });
    assert_eq!(lab.lands(), vector::SS);
    assert_eq!(lab.words(1)[0], 0, "the error code, on the new task's stack");
}

#[test]
fn task_gate_and_iret_back() {
    let mut lab = Legacy::new();
    lab.sys.ram.store64(IDT + 0x40 * 8, u64::from(OTHER_SELECTOR) << 16 | 0x8500 << 32);
    lab.task(OTHER_TSS, TASK, KERNEL_CS, KERNEL_SS, 0);
    lab.code(32, TASK, |a| {
        a.mov(dword_ptr(DATA_AT), eax)?;
        a.pushfd()?;
        a.pop(dword_ptr(DATA_AT + 4))?;
        a.str(cx)?;
        a.mov(word_ptr(DATA_AT + 8), cx)?;
        a.iretd()
    });
    lab.kernel(|a| {
        a.mov(ebx, 0x55)?;
        a.int(0x40)?;
        a.inc(ebx)
    });
    assert_eq!(lab.run(), Exit::Halted);
    assert_eq!((lab.v().gpr[reg::RBX], lab.v().gpr[reg::RSP]), (0x56, STACK));
    assert_eq!(lab.sys.ram.load32(DATA_AT), 0x1111);
    assert_ne!(u64::from(lab.sys.ram.load32(DATA_AT + 4)) & flags::NT, 0);
    assert_eq!(lab.sys.ram.load16(DATA_AT + 8), OTHER_SELECTOR);
    assert_eq!(lab.sys.ram.load16(OTHER_TSS), TSS_SELECTOR, "back link");
    assert_eq!(lab.v().tr.selector, TSS_SELECTOR);
    assert_eq!(lab.sys.ram.load64(GDT + 0x30), system(9, OTHER_TSS, 0x67), "not busy");
    assert_eq!(lab.v().rflags & flags::NT, 0);
    assert_ne!(lab.v().cr0 & cr0::TS, 0);
}

#[test]
fn far_jump_to_a_task_frees_the_old_one() {
    let mut lab = Legacy::new();
    lab.task(OTHER_TSS, TASK, USER_CS, USER_SS, 0);
    lab.code(32, TASK, |a| a.ud2());
    lab.kernel(|a| a.db(&[0xea, 0, 0, 0, 0, OTHER_SELECTOR as u8, 0]));
    lab.sys.ram.store32(OTHER_TSS + 4, 0xb000);
    lab.sys.ram.store16(OTHER_TSS + 8, KERNEL_SS);
    assert_eq!(lab.lands(), vector::UD);
    assert_eq!(lab.words(2), [TASK as u32, USER_CS.into()]);
    assert_eq!(lab.sys.ram.load64(GDT + 0x28), system(9, TSS, 0x67));
    assert_eq!(lab.sys.ram.load64(GDT + 0x30), system(11, OTHER_TSS, 0x67));
    assert_eq!(lab.sys.ram.load32(TSS + 0x20), KERNEL as u32 + 7, "EIP behind the jump");
}

#[test]
fn a_bad_segment_in_the_new_task_faults_there() {
    let mut lab = Legacy::new();
    lab.task(OTHER_TSS, TASK, KERNEL_CS, KERNEL_SS, 0);
    lab.sys.ram.store16(OTHER_TSS + 0x54, TSS_SELECTOR);
    lab.kernel(|a| a.db(&[0xea, 0, 0, 0, 0, OTHER_SELECTOR as u8, 0]));
    assert_eq!(lab.lands(), vector::TS);
    assert_eq!(lab.words(3), [TSS_SELECTOR.into(), TASK as u32, KERNEL_CS.into()]);
    let mut lab = Legacy::new();
    lab.sys.ram.store64(GDT + 0x30, system(9, OTHER_TSS, 0x66));
    lab.kernel(|a| a.db(&[0xea, 0, 0, 0, 0, OTHER_SELECTOR as u8, 0]));
    assert_eq!(lab.lands(), vector::TS);
    assert_eq!(lab.words(2), [OTHER_SELECTOR.into(), KERNEL as u32]);
}

#[test]
fn virtual_8086_round_trip() {
    let mut lab = Legacy::new();
    lab.code(16, 0x2_0100, |a| {
        a.mov(word_ptr(0x20), ds)?;
        a.mov(ax, 0x4000)?;
        a.mov(es, ax)?;
        a.mov(word_ptr(0).es(), 0x1234)?;
        a.int(0x40)
    });
    lab.kernel(|a| {
        for word in [0x5000, 0x4000, 0x3000, 0x2000, 0x1000, 0xfff0, 0x2_0002, 0x2000, 0x100] {
            a.push(word)?;
        }
        a.iretd()
    });
    assert_eq!(lab.lands(), vector::GP, "INT n with IOPL 0");
    let w = lab.words(10);
    assert_eq!((w[0], w[2]), (0, 0x2000));
    assert_eq!(u64::from(w[3]) & flags::VM, flags::VM);
    assert_eq!(w[4..], [0xfff0, 0x1000, 0x4000, 0x3000, 0x4000, 0x5000]);
    assert_eq!(lab.v().rflags & flags::VM, 0);
    assert!(!lab.v().seg[seg::DS].present());
    assert_eq!(lab.sys.ram.load16(0x4_0000), 0x1234);
    assert_eq!(lab.sys.ram.load16(0x3_0020), 0x3000);
}

#[test]
fn bound_and_into() {
    for (index, good) in [(4i32, false), (5, true), (9, true), (10, false), (-1, false)] {
        let mut lab = Legacy::new();
        lab.sys.ram.store32(DATA_AT, 5);
        lab.sys.ram.store32(DATA_AT + 4, 9);
        lab.kernel(|a| a.mov(eax, index).and_then(|()| a.bound(eax, ptr(DATA_AT))));
        lab.run();
        assert_eq!(lab.v().rip == HANDLERS + 5 * 16 + 1, !good, "{index}");
    }
    let mut lab = Legacy::new();
    lab.kernel(|a| {
        a.into()?;
        a.mov(al, 0x7f)?;
        a.inc(al)?;
        a.into()
    });
    assert_eq!(lab.lands(), vector::OF);
    assert_eq!(lab.words(1)[0], KERNEL as u32 + 1 + 2 + 2 + 1);
}

#[test]
fn into_long_mode_and_out_again() {
    let mut lab = Legacy::new();
    for (at, entry) in [(0x5_0000, 0x5_1003u64), (0x5_1000, 0x5_2003), (0x5_2000, 0x83)] {
        lab.sys.ram.store64(at, entry);
    }
    lab.code(64, TASK, |a| {
        a.mov(r8, 0x1234_5678_9abc_def0u64)?;
        a.mov(qword_ptr(DATA_AT), r8)?;
        a.db(&[0x68, 8, 0, 0, 0])?; // PUSH KERNEL_CS
        a.db(&[0x68, 0, 2, 3, 0])?; // PUSH TASK + 0x200
        a.db(&[0x48, 0xcb])
    });
    lab.code(32, TASK + 0x200, |a| {
        a.mov(eax, cr0)?;
        a.btr(eax, 31)?;
        a.mov(cr0, eax)?;
        a.mov(ecx, msr::EFER)?;
        a.rdmsr()?;
        a.hlt()
    });
    lab.kernel(|a| {
        a.mov(eax, cr4::PAE as u32)?;
        a.mov(cr4, eax)?;
        a.mov(eax, 0x5_0000)?;
        a.mov(cr3, eax)?;
        a.mov(ecx, msr::EFER)?;
        a.mov(eax, efer::LME as u32)?;
        a.xor(edx, edx)?;
        a.wrmsr()?;
        a.mov(eax, cr0)?;
        a.bts(eax, 31)?;
        a.mov(cr0, eax)?;
        a.db(&[0xea, 0, 0, 3, 0, LONG_CS as u8, 0])
    });
    assert_eq!(lab.run(), Exit::Halted);
    assert_eq!(lab.sys.ram.load64(DATA_AT), 0x1234_5678_9abc_def0);
    assert_eq!(lab.v().gpr[reg::RAX], efer::LME, "LMA went with paging");
    assert_eq!(lab.v().code_bits(), 32);
    assert_eq!(lab.v().rip, TASK + 0x200 + 3 + 4 + 3 + 5 + 2 + 1);
}

#[test]
fn pae_and_32_bit_paging() {
    let mut lab = Legacy::new();
    lab.sys.ram.store32(0x5_0000, 0x83); // 4 MB page
    lab.sys.ram.store32(0x5_0004, 0x5_1003);
    lab.sys.ram.store32(0x5_1000, DATA_AT as u32 | 3);
    lab.kernel(|a| {
        a.mov(eax, cr4::PSE as u32)?;
        a.mov(cr4, eax)?;
        a.mov(eax, 0x5_0000)?;
        a.mov(cr3, eax)?;
        a.mov(eax, cr0)?;
        a.bts(eax, 31)?;
        a.mov(cr0, eax)?;
        a.mov(ebx, dword_ptr(0x40_0010))?;
        a.mov(ebx, dword_ptr(0x80_0010))
    });
    lab.sys.ram.store32(DATA_AT + 0x10, 42);
    assert_eq!(lab.lands(), vector::PF);
    assert_eq!((lab.v().gpr[reg::RBX], lab.v().cr2), (42, 0x80_0010));
    // A reserved bit in a PDPTE stops the load of CR3.
    let mut lab = Legacy::new();
    lab.sys.ram.store64(0x5_0000, 0x5_1000 | 3);
    lab.kernel(|a| a.mov(eax, 0x5_0000).and_then(|()| a.mov(cr3, eax)));
    lab.v().cr4 |= cr4::PAE;
    lab.v().cr0 |= cr0::PG;
    lab.v().cr3 = 0x5_8000;
    lab.sys.ram.store64(0x5_8000, 0x5_9000 | 1);
    lab.sys.ram.store64(0x5_9000, 0x83);
    lab.cpu.state_changed();
    assert_eq!(lab.lands(), vector::GP);
}

#[test]
fn from_real_mode_to_protected_mode_and_back() {
    let mut lab = Legacy::new();
    *lab.v() = Vcpu { rip: 0x100, ..Vcpu::default() };
    let v = lab.v();
    v.seg[seg::CS] = Segment { selector: 0x2000, base: 0x2_0000, ..v.seg[seg::CS] };
    v.gpr[reg::RSP] = 0x8000;
    v.idtr.limit = 0x3ff;
    lab.sys.ram.store32(0x21 * 4, 0x3000_0010);
    lab.sys.ram.store16(0x4_0000, 0x7f);
    lab.sys.ram.store32(0x4_0002, GDT as u32);
    lab.code(16, 0x3_0010, |a| a.mov(bx, word_ptr(bp)).and_then(|()| a.iret()));
    lab.code(16, 0x2_0100, |a| {
        a.mov(ax, 0x4000)?;
        a.mov(ds, ax)?;
        a.mov(bp, 0x8000 - 6)?;
        a.int(0x21)?;
        a.lgdt(ptr(0))?;
        a.mov(eax, cr0)?;
        a.or(al, 1)?;
        a.mov(cr0, eax)?;
        a.db(&[0x66, 0xea, 0, 0, 3, 0, KERNEL_CS as u8, 0])
    });
    lab.code(32, 0x3_0000, |a| a.mov(eax, u32::from(KERNEL_SS)).and_then(|()| a.jmp(TASK + 0x100)));
    lab.code(32, TASK + 0x100, |a| {
        a.mov(ds, eax)?;
        a.mov(dword_ptr(DATA_AT + 0x10), eax)?;
        a.db(&[0xea, 0x00, 0x03, 0, 0, CS16 as u8, 0])
    });
    lab.code(16, 0x300, |a| {
        a.mov(eax, cr0)?;
        a.and(al, -2)?;
        a.mov(cr0, eax)?;
        a.db(&[0xea, 0x00, 0x02, 0x00, 0x20])
    });
    lab.code(16, 0x2_0200, |a| a.hlt());
    assert_eq!(lab.run(), Exit::Halted);
    assert_eq!((lab.v().rip, lab.v().seg[seg::CS].base), (0x201, 0x2_0000));
    assert_eq!(lab.sys.ram.load32(DATA_AT + 0x10), KERNEL_SS.into());
    assert_eq!(lab.v().gpr[reg::RBX] & 0xffff, 0x100 + 3 + 2 + 3 + 2, "IP in the frame");
    assert_eq!(lab.v().gpr[reg::RSP] & 0xffff, 0x8000);
}

#[test]
fn arpl_raises_the_requested_level() {
    let mut lab = Legacy::new();
    lab.kernel(|a| {
        a.mov(eax, 0xffff_0010u32)?;
        a.mov(ecx, 3)?;
        a.arpl(ax, cx)?;
        a.setz(bl)?;
        a.arpl(ax, cx)?;
        a.setz(bh)
    });
    assert_eq!(lab.run(), Exit::Halted);
    assert_eq!(lab.v().gpr[reg::RAX], 0xffff_0013);
    assert_eq!(lab.v().gpr[reg::RBX], 1);
}

/// As kernels have their further CPUs begin: in real mode, at a page of their choice.
#[test]
fn a_start_up_ipi_begins_in_real_mode() {
    let mut sys = FakeSystem::new(1 << 20);
    // mov ax, cs; mov ds, ax; mov bx, [100h]; hlt
    sys.ram.write(0x6000, &[0x8c, 0xc8, 0x8e, 0xd8, 0x8b, 0x1e, 0, 1, 0xf4]);
    sys.ram.store16(0x6100, 0x1234);
    let mut cpu = Cpu::new(Vcpu { rip: 0x1_0000, efer: efer::SCE, ..Vcpu::default() });
    cpu.init();
    assert_eq!(cpu.run(&mut sys, 100), Exit::Halted, "it waits");
    assert_eq!((cpu.counters.instructions, cpu.vcpu.efer), (0, 0));
    cpu.start_up(6);
    assert_eq!(cpu.run(&mut sys, 100), Exit::Halted);
    assert_eq!((cpu.vcpu.gpr[reg::RAX], cpu.vcpu.gpr[reg::RBX]), (0x600, 0x1234));
    let rip = cpu.vcpu.rip;
    cpu.start_up(7);
    assert_eq!(
        (cpu.vcpu.rip, cpu.vcpu.seg[seg::CS].base),
        (rip, 0x6000),
        "one that runs takes none"
    );
}
