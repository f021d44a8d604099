//! What wedges do by themselves for 32-bit kernels: they drop translations of kernel pages, and carry out IRETD.

use crate::{
    Fast, Machine, Placement,
    test_machine::{MODES, board},
};
use engine::{Engine, VcpuRequests};
use iced_x86::{IcedError, code_asm::*};
use ram::Ram;
use std::sync::Arc;
use x86::{
    Activity, Segment, Vcpu,
    control::{cr0, cr4, efer},
    fpu::xstate,
    paging::{A, D, G, P, PS, RW},
    reg, seg,
    segment::attr,
};
use x86_interp::{Exit, GuestRam};

const PAGE: u64 = 4096;
const LARGE: u64 = 1 << 21;
/// GVA of the kernel's code, and its place in RAM. So for the others.
const CODE: (u64, u64) = (0xc100_0000, 0x4_0000);
/// The stack, from its middle down, and the descriptor table.
const DATA: (u64, u64) = (0xc100_1000, 0x5_0000);
/// The page directory of the last GiB.
const TABLES: (u64, u64) = (0xc100_2000, 0x3000);
/// The page table of [`WINDOW`].
const WINDOW_TABLE: (u64, u64) = (0xc100_3000, 0x4000);
/// GVA of a page, or of a large page, that the code maps to another frame.
const WINDOW: u64 = 0xff80_0000;
/// The frames that [`WINDOW`] is mapped to in turns.
const FRAMES: [u64; 2] = [0x7_0000, 0x8_0000];
const ROOT: u64 = 0x1000;
const SELECTOR: u16 = 8;
const ACCESSED: u64 = P | RW | A | D | G;

/// A machine at this code, which is to be run from its beginning.
fn machine(ram: &Ram, code: &[u8]) -> Fast {
    let [directory, low] = [TABLES.1, 0x5000];
    ram.store64(ROOT + 3 * 8, directory | P);
    ram.store64(directory + (CODE.0 >> 21 & 0x1ff) * 8, low | P | RW);
    ram.store64(directory + (WINDOW >> 21 & 0x1ff) * 8, WINDOW_TABLE.1 | P | RW);
    for (gva, gpa) in [CODE, DATA, TABLES, WINDOW_TABLE] {
        ram.store64(low + (gva >> 12 & 0x1ff) * 8, gpa | ACCESSED);
    }
    ram.store64(DATA.1 + u64::from(SELECTOR), 0x00cf_9b00_0000_ffff);
    ram.write(CODE.1, code);
    let requests = Arc::new(VcpuRequests::default());
    let board = board(ram.clone(), Arc::clone(&requests));
    let machine = (&Machine::new(1), &Placement::default());
    Fast::new(state(), board, &requests, MODES, machine).expect("an engine")
}

fn state() -> Vcpu {
    let flat = |attr: u16| Segment { selector: SELECTOR, attr, limit: u32::MAX, base: 0 };
    let data = attr::P | attr::S | attr::G | attr::DB | attr::RW;
    let mut seg = [flat(data); 6];
    seg[seg::CS] = flat(data | attr::CODE);
    let mut v = Vcpu {
        rip: CODE.0,
        cr0: cr0::PE | cr0::MP | cr0::ET | cr0::NE | cr0::WP | cr0::PG,
        cr3: ROOT,
        cr4: cr4::PAE | cr4::PGE | cr4::OSFXSR,
        efer: efer::NXE,
        xcr0: xstate::SUPPORTED,
        seg,
        ..Vcpu::default()
    };
    (v.gdtr.base, v.gdtr.limit) = (DATA.0, 0xff);
    v.gpr[reg::RSP] = DATA.0 + PAGE / 2;
    v
}

/// Runs the code from its beginning to its HLT. `registers`: ESI, EDI and EBX.
fn run(fast: &mut Fast, registers: [u64; 3]) {
    begin(fast, registers);
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
}

fn begin(fast: &mut Fast, [from, to, value]: [u64; 3]) {
    let v = &mut fast.cpu.vcpu;
    (v.rip, v.activity, v.gpr[reg::RSP]) = (CODE.0, Activity::Running, DATA.0 + PAGE / 2);
    (v.gpr[reg::RSI], v.gpr[reg::RDI], v.gpr[reg::RBX]) = (from, to, value);
    fast.cpu.came_back();
}

fn assembled(emit: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    let mut a = CodeAssembler::new(32).expect("32 bits");
    emit(&mut a).expect("encodable");
    a.assemble(CODE.0).expect("encodable")
}

/// What the code sees through the window before and after it has another frame there.
fn seen(fast: &Fast) -> [u64; 2] {
    [reg::RAX, reg::RDX].map(|register| fast.vcpu().gpr[register])
}

/// The entry of the window's page, as a GVA and as a place in RAM.
fn entry() -> [u64; 2] {
    [WINDOW_TABLE.0, WINDOW_TABLE.1].map(|table| table + (WINDOW >> 12 & 0x1ff) * 8)
}

/// RAM whose frames of the window hold 1 and 2.
fn ram(len: u64) -> Ram {
    let ram = Ram::new(len).expect("memory");
    FRAMES.iter().zip(1..).for_each(|(frame, content)| ram.store64(*frame, content));
    ram
}

/// The code reads the window, gives it another frame, drops the translation and reads again.
fn changing() -> Vec<u8> {
    assembled(|a| {
        a.mov(eax, dword_ptr(esi))?;
        a.mov(dword_ptr(edi), ebx)?;
        a.invlpg(byte_ptr(esi))?;
        a.mov(edx, dword_ptr(esi))?;
        a.hlt()
    })
}

/// The wedge drops a kernel page by itself, once the code behind the INVLPG is translated. The interpreter's translation goes as well.
#[test]
fn a_wedge_drops_a_page_of_a_kernel_s() {
    let ram = ram(LARGE);
    let mut fast = machine(&ram, &changing());
    let [gva, place] = entry();
    for round in 0..6 {
        let [from, to] = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        ram.store64(place, FRAMES[from] | ACCESSED);
        // The interpreter loads a translation: MOV EAX, [ESI].
        begin(&mut fast, [WINDOW, gva, 0]);
        fast.interpret();
        run(&mut fast, [WINDOW, gva, FRAMES[to] | ACCESSED]);
        assert_eq!(seen(&fast), [from as u64 + 1, to as u64 + 1], "round {round}");
        begin(&mut fast, [WINDOW, gva, 0]);
        fast.interpret();
        assert_eq!(fast.vcpu().gpr[reg::RAX], to as u64 + 1, "interpreted, round {round}");
    }
    assert!(fast.pages.vcpu_page().counters.invalidations >= 4);
}

/// The code reads two pages of a large one, gives that another frame, drops the translation of the first and reads the second.
fn changing_beside() -> Vec<u8> {
    let beside = (FRAMES[1] - FRAMES[0]) as i32;
    assembled(|a| {
        a.mov(eax, dword_ptr(esi))?;
        a.mov(eax, dword_ptr(esi + beside))?;
        a.mov(dword_ptr(edi), ebx)?;
        a.invlpg(byte_ptr(esi))?;
        a.mov(edx, dword_ptr(esi + beside))?;
        a.hlt()
    })
}

/// INVLPG drops all of a large page, even if only single pages of the large page are mapped. They are of the second frame, which reaches
/// beyond RAM.
#[test]
fn a_large_page_is_dropped_as_a_whole() {
    let ram = ram(LARGE + LARGE / 2);
    ram.store64(LARGE + FRAMES[1], 4);
    let mut fast = machine(&ram, &changing_beside());
    let slot = (WINDOW >> 21 & 0x1ff) * 8;
    ram.store64(TABLES.1 + slot, PS | ACCESSED);
    for round in 0..6 {
        let (to, wanted) = if round % 2 == 0 { (LARGE, [2, 4]) } else { (0, [4, 2]) };
        run(&mut fast, [WINDOW + FRAMES[0], TABLES.0 + slot, to | PS | ACCESSED]);
        assert_eq!(seen(&fast), wanted, "round {round}");
    }
}

/// After INVLPG of a page, code that was translated from the page's old frame does not run.
#[test]
fn code_goes_with_its_page() {
    let ram = ram(LARGE);
    for (frame, content) in FRAMES.iter().zip(1..) {
        ram.write(*frame, &[0xb8, content, 0, 0, 0, 0xc3]); // mov eax, content; ret
    }
    let code = assembled(|a| {
        a.call(esi)?;
        a.mov(ecx, eax)?;
        a.mov(dword_ptr(edi), ebx)?;
        a.invlpg(byte_ptr(esi))?;
        a.call(esi)?;
        a.mov(edx, eax)?;
        a.mov(eax, ecx)?;
        a.hlt()
    });
    let mut fast = machine(&ram, &code);
    let [gva, place] = entry();
    ram.store64(place, FRAMES[0] | ACCESSED);
    for round in 0..8 {
        let [from, to] = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        run(&mut fast, [WINDOW, gva, FRAMES[to] | ACCESSED]);
        assert_eq!(seen(&fast), [from as u64 + 1, to as u64 + 1], "round {round}");
    }
}

/// IRETD from the kernel to the kernel restores the flags and the stack pointer. The wedge carries out the instruction, once the code
/// behind is translated.
#[test]
fn a_kernel_returns_to_itself() {
    let code = assembled(|a| {
        a.stc()?;
        a.pushfd()?;
        a.clc()?;
        a.push(i32::from(SELECTOR))?;
        a.push((CODE.0 as u32 + 13) as i32)?; // behind UD2
        a.iretd()?;
        a.ud2()?;
        a.setc(al)?;
        a.movzx(eax, al)?;
        a.mov(edx, esp)?;
        a.hlt()
    });
    let ram = ram(LARGE);
    let mut fast = machine(&ram, &code);
    for round in 0..4 {
        run(&mut fast, [0; 3]);
        assert_eq!(seen(&fast), [1, DATA.0 + PAGE / 2], "round {round}");
    }
    assert!(fast.pages.vcpu_page().counters.kernel_returns >= 2);
}
