//! A 32-bit kernel and its program, which go to each other in all the ways there are. Wedges lead them, and what comes of it is what the
//! interpreter makes of the same code.

use crate::{
    Fast, Machine, Modes, Options, Placement,
    test_machine::{self, narrow_code, narrow_kernel_state},
};
use engine::{Engine, VcpuRequests};
use iced_x86::{IcedError, code_asm::*};
use ram::Ram;
use std::sync::Arc;
use wedge_abi::Counters;
use x86::{
    Segment, Vcpu,
    paging::{A, D, G, P, RW, US},
    reg,
    segment::{attr, kind},
};
use x86_interp::{Exit, GuestRam};

const PAGE: u64 = 4096;
/// GVA and place in RAM: the kernel's code, its stack and its tables, and the page tables of its last GiB.
const CODE: (u64, u64) = (0xc100_0000, 0x4_0000);
const STACK: (u64, u64) = (0xc100_1000, 0x5_0000);
const TABLES: (u64, u64) = (0xc100_2000, 0x6_0000);
/// What the kernel's CPU has of its own. The first word counts the rounds that are left.
const OWN: (u64, u64) = (0xc100_3000, 0x7_0000);
/// The page table of the program's.
const ENTRIES: (u64, u64) = (0xc100_4000, 0x8_0000);
/// The program: code, stack, what its thread has of its own, and a page that the kernel maps when it is missed.
const PROGRAM: (u64, u64) = (0x0804_8000, 0x9_0000);
const USER_STACK: (u64, u64) = (0x0805_0000, 0xa_0000);
const THREAD: (u64, u64) = (0x0805_1000, 0xb_0000);
const MISSED: (u64, u64) = (0x0805_2000, 0xc_0000);
const ROOT: u64 = 0x1000;
const DIRECTORY: u64 = 0x2000;
const KERNEL_ENTRIES: u64 = 0x3000;
const USER_DIRECTORY: u64 = 0x5000;
const KERNEL_PAGE: u64 = P | RW | A | D | G;
const USER_PAGE: u64 = P | RW | US | A | D;
const ROUNDS: u32 = 40;

/// Selectors. SYSENTER and SYSEXIT want the first four in this order.
const KERNEL_CS: u16 = 0x08;
const KERNEL_DS: u16 = 0x10;
const USER_CS: u16 = 0x1b;
const USER_DS: u16 = 0x23;
const TSS: u16 = 0x28;
const CPU_OWN: u16 = 0x30;
const THREAD_OWN: u16 = 0x3b;
/// A segment that does not reach everywhere.
const SHORT: u16 = 0x43;
/// A segment in the kernel's memory that a program may load.
const SHARED: u16 = 0x4b;
/// Places in the page of tables.
const GDT: u64 = 0;
const TSS_AT: u64 = 0x100;
const IDT: u64 = 0x200;
const SYSTEM_CALL: u64 = 0x80;

const FLAT_CODE: u64 = 0x00cf_9b00_0000_ffff;
const FLAT_DATA: u64 = 0x00cf_9300_0000_ffff;
const OF_PROGRAMS: u64 = 3 << 45;

type Assembles = fn(&mut CodeAssembler) -> Result<(), IcedError>;

fn based(base: u64) -> u64 {
    (base & 0xff_ffff) << 16 | (base >> 24) << 56
}

fn gate(handler: u64, kind: u64) -> u64 {
    handler & 0xffff | u64::from(KERNEL_CS) << 16 | kind << 40 | (handler >> 16) << 48
}

/// NOPs at the beginning of each entry to the kernel, for other instructions.
const ROOM: usize = 7;

/// What a kernel does first when it has been entered, and last before it returns.
fn save(a: &mut CodeAssembler) -> Result<(), IcedError> {
    (0..ROOM).try_for_each(|_| a.nop())?;
    a.push(fs)?;
    a.push(es)?;
    a.push(ds)?;
    a.push(eax)?;
    a.mov(eax, u32::from(USER_DS))?;
    a.mov(ds, eax)?;
    a.mov(es, eax)?;
    a.mov(eax, u32::from(CPU_OWN))?;
    a.mov(fs, eax)?;
    a.inc(dword_ptr(8).fs())
}

fn restore(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.pop(eax)?;
    a.pop(ds)?;
    a.pop(es)?;
    a.pop(fs)
}

/// Offsets in [`CODE`] of the code that the kernel is entered at.
const ON_FAULT: u64 = 0x200;
const ON_CALL: u64 = 0x400;
const ON_SYSENTER: u64 = 0x600;
/// Offset in [`PROGRAM`] of the code behind its SYSENTER.
const BEHIND: u64 = 0x300;

/// GVA of the selector that the program is to have in FS.
const FS_AT: u64 = OWN.0 + 0x20;
/// GVA of the bits of the TSS's stack selector that the kernel changes near the end.
const LATE_AT: u64 = OWN.0 + 0x28;

/// Goes to the program.
fn start(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(eax, u32::from(THREAD_OWN))?;
    a.mov(gs, eax)?;
    a.mov(fs, dword_ptr(FS_AT))?;
    a.mov(eax, u32::from(USER_DS))?;
    a.mov(ds, eax)?;
    a.mov(es, eax)?;
    a.push(i32::from(USER_DS))?;
    a.push((USER_STACK.0 + PAGE) as i32)?;
    a.push(0x202)?;
    a.push(i32::from(USER_CS))?;
    a.push(PROGRAM.0 as i32)?;
    a.iretd()
}

/// Maps the page that is missed.
fn on_fault(a: &mut CodeAssembler) -> Result<(), IcedError> {
    save(a)?;
    a.mov(eax, cr2)?;
    a.add(dword_ptr(OWN.0 + 0x10), eax)?;
    a.mov(eax, dword_ptr(esp + 16))?; // the error code
    a.add(dword_ptr(OWN.0 + 0x14), eax)?;
    a.mov(dword_ptr(missed()), (MISSED.1 | USER_PAGE) as u32)?;
    restore(a)?;
    a.add(esp, 4)?;
    a.iretd()
}

/// GVA of the entry of the page that is missed.
fn missed() -> u64 {
    ENTRIES.0 + (MISSED.0 >> 12 & 0x1ff) * 8
}

/// Takes the page away again, and halts once there have been enough rounds.
fn on_call(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut on = a.create_label();
    save(a)?;
    a.mov(dword_ptr(missed()), 0)?;
    a.invlpg(byte_ptr(MISSED.0))?;
    let mut late = a.create_label();
    a.dec(dword_ptr(0).fs())?;
    a.cmp(dword_ptr(0).fs(), 5)?;
    a.jne(late)?;
    a.mov(eax, dword_ptr(LATE_AT))?;
    a.xor(dword_ptr(TABLES.0 + TSS_AT + 8), eax)?;
    a.set_label(&mut late)?;
    a.cmp(dword_ptr(0).fs(), 0)?;
    a.jne(on)?;
    a.hlt()?;
    a.set_label(&mut on)?;
    restore(a)?;
    a.iretd()
}

fn on_sysenter(a: &mut CodeAssembler) -> Result<(), IcedError> {
    save(a)?;
    a.add(dword_ptr(OWN.0 + 0x18), ebp)?;
    a.mov(ebx, dword_ptr(esp + 12))?;
    a.mov(fs, bx)?;
    restore(a)?;
    a.sti()?;
    a.sysexit()
}

/// Asks the kernel for something in all ways, and notes what it sees of itself.
fn program(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(dword_ptr(MISSED.0 + 0x20), esp)?;
    a.mov(eax, dword_ptr(4).gs())?;
    a.add(dword_ptr(MISSED.0 + 0x24), eax)?;
    a.mov(eax, fs)?;
    a.mov(dword_ptr(MISSED.0 + 0x28), eax)?;
    a.mov(eax, ds)?;
    a.mov(dword_ptr(MISSED.0 + 0x2c), eax)?;
    a.pushfd()?;
    a.pop(dword_ptr(MISSED.0 + 0x30))?;
    a.mov(ecx, esp)?;
    a.mov(ebp, 3)?;
    a.mov(edx, (PROGRAM.0 + BEHIND) as u32)?;
    a.stc()?;
    a.sysenter()
}

fn behind(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.adc(dword_ptr(THREAD.0 + 8), 0)?;
    a.int(SYSTEM_CALL as u32)?;
    a.jmp(PROGRAM.0)
}

/// RAM with all of that.
fn ram() -> Ram {
    let ram = Ram::new(2 << 20).expect("memory");
    ram.store64(ROOT, USER_DIRECTORY | P);
    ram.store64(ROOT + 3 * 8, DIRECTORY | P);
    ram.store64(DIRECTORY + (CODE.0 >> 21 & 0x1ff) * 8, KERNEL_ENTRIES | P | RW);
    ram.store64(USER_DIRECTORY + (PROGRAM.0 >> 21 & 0x1ff) * 8, ENTRIES.1 | P | RW | US);
    for (gva, gpa) in [CODE, STACK, TABLES, OWN, ENTRIES] {
        ram.store64(KERNEL_ENTRIES + (gva >> 12 & 0x1ff) * 8, gpa | KERNEL_PAGE);
    }
    for (gva, gpa) in [PROGRAM, USER_STACK, THREAD] {
        ram.store64(ENTRIES.1 + (gva >> 12 & 0x1ff) * 8, gpa | USER_PAGE);
    }
    let segments = [
        (KERNEL_CS, FLAT_CODE),
        (KERNEL_DS, FLAT_DATA),
        (USER_CS, FLAT_CODE | OF_PROGRAMS),
        (USER_DS, FLAT_DATA | OF_PROGRAMS),
        (CPU_OWN, FLAT_DATA | based(OWN.0)),
        (THREAD_OWN, FLAT_DATA | OF_PROGRAMS | based(THREAD.0)),
        (SHORT, FLAT_DATA & !0xf0 | OF_PROGRAMS),
        (SHARED, FLAT_DATA | OF_PROGRAMS | based(OWN.0 + PAGE / 2)),
    ];
    for (selector, descriptor) in segments {
        ram.store64(TABLES.1 + GDT + u64::from(selector & !7), descriptor);
    }
    ram.store64(TABLES.1 + TSS_AT + 4, (STACK.0 + PAGE) | u64::from(KERNEL_DS) << 32);
    for (vector, handler, kind) in [(14, ON_FAULT, 0x8e), (SYSTEM_CALL, ON_CALL, 0xee)] {
        set_gate(&ram, vector, gate(CODE.0 + handler, kind));
    }
    let parts: [(u64, Assembles); 4] =
        [(0, start), (ON_FAULT, on_fault), (ON_CALL, on_call), (ON_SYSENTER, on_sysenter)];
    for (at, part) in parts {
        ram.write(CODE.1 + at, &narrow_code(CODE.0 + at, part));
    }
    ram.write(PROGRAM.1, &narrow_code(PROGRAM.0, program));
    ram.write(PROGRAM.1 + BEHIND, &narrow_code(PROGRAM.0 + BEHIND, behind));
    ram.store64(OWN.1, ROUNDS.into());
    ram.store64(THREAD.1 + 4, 7);
    ram
}

fn state() -> Vcpu {
    let mut v = narrow_kernel_state(CODE.0, ROOT, [KERNEL_CS, KERNEL_DS]);
    (v.sysenter_cs, v.sysenter_esp) = (KERNEL_CS.into(), STACK.0 + PAGE / 2);
    v.sysenter_eip = CODE.0 + ON_SYSENTER;
    (v.gdtr.base, v.gdtr.limit) = (TABLES.0 + GDT, 0xff);
    (v.idtr.base, v.idtr.limit) = (TABLES.0 + IDT, 0x81 * 8 - 1);
    v.tr = Segment {
        selector: TSS,
        attr: attr::P | u16::from(kind::TSS_BUSY),
        limit: 0x67,
        base: TABLES.0 + TSS_AT,
    };
    v.gpr[reg::RSP] = STACK.0 + PAGE / 4;
    v
}

/// A machine with this RAM that has run to its end, and the end.
fn ran(ram: &Ram, start: Vcpu, interpreted: bool) -> (Fast, Exit) {
    let requests = Arc::new(VcpuRequests::default());
    let board = test_machine::board(ram.clone(), Arc::clone(&requests));
    let options = Options { interpret_narrow_guests: interpreted, ..test_machine::OPTIONS };
    let modes = Modes { options, ..test_machine::MODES };
    let machine = (&Machine::new(1), &Placement::default());
    let mut fast = Fast::new(start, board, &requests, modes, machine).expect("an engine");
    let exit = fast.run(u64::MAX);
    assert_eq!(fast.failure(), None);
    (fast, exit)
}

/// What a guest can see of its CPU: a translation does not keep whether a segment has been accessed.
fn visible(fast: &Fast) -> Vcpu {
    let mut v = fast.vcpu().clone();
    v.seg.iter_mut().for_each(|segment| segment.attr |= attr::ACCESSED);
    v
}

/// Runs it both ways to this end; the counters of the wedge.
fn agrees(end: Exit, change: impl Fn(&Ram, &mut Vcpu)) -> Counters {
    let [first, second] = [false, true].map(|interprets| {
        let (ram, mut v) = (ram(), state());
        change(&ram, &mut v);
        (ran(&ram, v, interprets), ram)
    });
    let ((mut translated, exit), first) = first;
    let ((interpreted, wanted), second) = second;
    assert_eq!([exit, wanted], [end; 2]);
    assert_eq!(visible(&translated), visible(&interpreted));
    for (gva, gpa) in [STACK, TABLES, OWN, ENTRIES, USER_STACK, THREAD, MISSED] {
        for at in (0..PAGE).step_by(8) {
            let [first, second] = [&first, &second].map(|ram| ram.load64(gpa + at));
            assert_eq!(first, second, "at {:#x}", gva + at);
        }
    }
    translated.pages.vcpu_page().counters
}

#[test]
fn a_program_and_its_kernel_go_to_each_other_as_they_do_on_a_cpu() {
    let counters = agrees(Exit::Halted, |_, _| {});
    let most = u64::from(ROUNDS) / 2;
    assert!(counters.faults > most, "{} faults", counters.faults);
    assert!(counters.system_calls > most, "{} calls", counters.system_calls);
    assert!(counters.returns > 2 * most, "{} returns", counters.returns);
    assert!(counters.segments > 12 * most, "{} loads", counters.segments);
}

/// Changes the descriptor of a selector.
fn redescribe(ram: &Ram, selector: u16, change: impl Fn(u64) -> u64) {
    let at = TABLES.1 + GDT + u64::from(selector & !7);
    ram.store64(at, change(ram.load64(at)));
}

/// Whatever a wedge may not do is the monitor's, and what comes of it is the same.
#[test]
fn what_is_not_ordinary_is_as_on_a_cpu_too() {
    const ACCESSED: u64 = 1 << 40;
    const READ_ONLY: u64 = 1 << 41;
    // A load of a segment that was never used writes to its descriptor.
    for selector in [USER_DS, CPU_OWN, THREAD_OWN, USER_CS] {
        agrees(Exit::Halted, |ram, _| redescribe(ram, selector, |word| word & !ACCESSED));
    }
    // The thread's memory ends, cannot be written, or is all there is.
    agrees(Exit::Halted, |ram, _| redescribe(ram, THREAD_OWN, |word| word & !0xf0_0000_0000_00f0));
    agrees(Exit::Halted, |ram, _| redescribe(ram, THREAD_OWN, |word| word & !READ_ONLY));
    // The program has a segment in FS, too: its own data, its thread's, or a short one.
    for selector in [USER_DS, THREAD_OWN, SHORT] {
        agrees(Exit::Halted, |ram, _| ram.store64(OWN.1 + FS_AT - OWN.0, selector.into()));
    }
    // The kernel leaves its own segment in FS: the CPU clears it.
    agrees(Exit::Halted, |ram, _| replace(ram, ON_CALL, [0x0f, 0xa1], [0x5b, 0x90]));
    // INT 0x80 goes through a trap gate, or may not.
    let call = |kind: u64| {
        move |ram: &Ram, _: &mut Vcpu| set_gate(ram, SYSTEM_CALL, gate(CODE.0 + ON_CALL, kind))
    };
    agrees(Exit::Halted, call(0xef));
    agrees(Exit::Shutdown, call(0x8e));
    agrees(Exit::Shutdown, call(0x6e));
    // There is no SYSENTER.
    agrees(Exit::Shutdown, |_, v| v.sysenter_cs = 0);
    // The kernel's stack is of another level, or of no segment.
    for change in [KERNEL_DS ^ USER_DS, KERNEL_DS ^ CPU_OWN, KERNEL_DS, KERNEL_DS ^ 0x50] {
        agrees(Exit::Shutdown, |ram, _| ram.store64(OWN.1 + LATE_AT - OWN.0, change.into()));
    }
    // The kernel uses the program's FS before its own.
    agrees(Exit::Halted, |ram, _| {
        ram.store64(OWN.1 + FS_AT - OWN.0, SHARED.into());
        for entry in [ON_FAULT, ON_CALL, ON_SYSENTER] {
            replace(ram, entry, [0x90; ROOM], [0x64, 0xff, 0x05, 0x10, 0, 0, 0]); // inc fs:[10h]
        }
    });
    // Flags of the program's that translated code does not have: it may not do so for long.
    agrees(Exit::Halted, |ram, _| replace(ram, 0, [0x68, 0x02, 0x02], [0x68, 0x02, 0x42]));
}

fn set_gate(ram: &Ram, vector: u64, gate: u64) {
    ram.store64(TABLES.1 + IDT + vector * 8, gate);
}

/// Puts other bytes in the place of the first such bytes of the kernel's code from an offset on.
fn replace<const N: usize>(ram: &Ram, from: u64, old: [u8; N], new: [u8; N]) {
    let mut code = [0; 0x200];
    ram.read(CODE.1 + from, &mut code);
    let at = code.windows(N).position(|bytes| bytes == old).expect("they are there");
    ram.write(CODE.1 + from + at as u64, &new);
}
