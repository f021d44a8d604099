//! What wedges do by themselves for 32-bit kernels: they drop translations of kernel pages, carry out IRETD, and find pages that are mapped
//! only for a moment.

use crate::{
    Fast, Machine, Placement,
    test_machine::{MODES, board, narrow_code, narrow_kernel_state},
};
use engine::{Engine, VcpuRequests};
use iced_x86::{IcedError, code_asm::*};
use ram::Ram;
use std::sync::Arc;
use x86::{
    Activity, Vcpu,
    paging::{A, D, G, P, PS, RW},
    reg,
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
/// A page that stays where it is.
const BUFFER: (u64, u64) = (0xc100_4000, 0x9_0000);
/// Rounds in which the window is mapped anew: after far fewer, what accesses it is looked up.
const ROUNDS: u64 = 400;
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
    for (gva, gpa) in [CODE, DATA, TABLES, WINDOW_TABLE, BUFFER] {
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
    let mut v = narrow_kernel_state(CODE.0, ROOT, [SELECTOR; 2]);
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
    narrow_code(CODE.0, emit)
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

/// Code that maps the window to each of its frames in turns, [`ROUNDS`] times, does something there, and drops the translation.
fn in_window(access: impl Fn(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    assembled(|a| rounds(a, access, |a| a.invlpg(byte_ptr(WINDOW))))
}

/// The same with another way to drop the translation.
fn rounds(
    a: &mut CodeAssembler,
    access: impl Fn(&mut CodeAssembler) -> Result<(), IcedError>,
    drop: impl Fn(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(ebp, ROUNDS as u32)?;
    a.set_label(&mut again)?;
    a.mov(dword_ptr(entry()[0]), ebx)?;
    access(a)?;
    drop(a)?;
    a.xor(ebx, (FRAMES[0] ^ FRAMES[1]) as u32)?;
    a.dec(ebp)?;
    a.jne(again)?;
    a.hlt()
}

/// How many mappings of the host's the wedge has made so far, and how many look-ups it has filled.
fn made(fast: &mut Fast) -> [u64; 2] {
    let counters = &fast.pages.vcpu_page().counters;
    [counters.mapped, counters.lookups]
}

/// What is accessed in a page that is mapped for a moment is in the page's frame of that moment.
#[test]
fn a_page_that_is_mapped_for_a_moment_is_looked_up() {
    let ram = ram(LARGE);
    let code = in_window(|a| {
        a.add(edx, dword_ptr(esi))?;
        a.inc(dword_ptr(esi + 8))?;
        a.mov(ecx, dword_ptr(esi + 12))?;
        a.mov(word_ptr(esi + 14), bp)
    });
    let mut fast = machine(&ram, &code);
    fast.cpu.vcpu.gpr[reg::RDX] = 0;
    run(&mut fast, [WINDOW, 0, FRAMES[0] | ACCESSED]);
    assert_eq!(fast.vcpu().gpr[reg::RDX], ROUNDS / 2 * 3, "1 and 2 in turns");
    let half = ROUNDS / 2;
    for (frame, last) in FRAMES.into_iter().zip([2, 1]) {
        assert_eq!(ram.load64(frame + 8), half | last << 48, "{frame:#x}");
    }
    let [mapped, lookups] = made(&mut fast);
    assert!(mapped < ROUNDS / 2 && lookups > ROUNDS / 2, "{mapped} mapped, {lookups} looked up");
}

/// With `--guest32 map` the page is mapped each time.
#[test]
fn without_look_ups_the_same_is_mapped() {
    let ram = ram(LARGE);
    let mut fast = machine(&ram, &in_window(|a| a.inc(dword_ptr(esi + 8))));
    fast.modes.options.map_fleeting = true;
    run(&mut fast, [WINDOW, 0, FRAMES[0] | ACCESSED]);
    assert_eq!(FRAMES.map(|frame| ram.load64(frame + 8)), [ROUNDS / 2; 2]);
    let [mapped, lookups] = made(&mut fast);
    assert!(mapped > ROUNDS / 2 && lookups == 0, "{mapped} mapped, {lookups} looked up");
}

/// Whole pages are cleared and copied through the window, and parts of pages.
#[test]
fn strings_find_a_page_that_is_mapped_for_a_moment() {
    let ram = ram(LARGE);
    let code = in_window(|a| {
        a.mov(eax, ebp)?;
        a.mov(edi, WINDOW as u32)?;
        a.mov(ecx, (PAGE / 4) as u32)?;
        a.rep().stosd()?;
        a.mov(esi, WINDOW as u32 + 0x100)?;
        a.lea(edi, dword_ptr(ebp * 4 + BUFFER.0 as i32))?;
        a.movsd()?;
        a.mov(edi, WINDOW as u32 + 0x200)?;
        a.mov(esi, BUFFER.0 as u32 + 4)?;
        a.mov(ecx, 7)?;
        a.rep().movsb()?;
        a.mov(edx, edi)
    });
    let mut fast = machine(&ram, &code);
    run(&mut fast, [0, 0, FRAMES[0] | ACCESSED]);
    for n in 1..=ROUNDS {
        let [low, high] = [n, n + 1].map(|n| if n > ROUNDS { 0 } else { n });
        assert_eq!(ram.load64(BUFFER.1 + n * 4), low | high << 32, "round {n}");
    }
    for (frame, last) in FRAMES.into_iter().zip([2, 1]) {
        let words = [0, 0x1f8, 0x208, 0xff8].map(|at| ram.load64(frame + at));
        assert_eq!(words, [last | last << 32; 4], "{frame:#x}");
    }
    assert_eq!(ram.load64(FRAMES[1] + 0x200) as u32, 1, "from the buffer");
    assert_eq!(fast.vcpu().gpr[reg::RDX], WINDOW + 0x207);
    let mapped = made(&mut fast)[0];
    assert!(mapped < ROUNDS / 4, "{mapped} mapped");
}

/// The frames of two pages are not side by side, whatever an instruction was translated for.
#[test]
fn an_access_to_two_pages_reaches_both() {
    let ram = ram(LARGE);
    ram.store64(FRAMES[0] + PAGE - 8, 0x1111_2222_3333_4444);
    ram.store64(FRAMES[1], 0x5555_6666_7777_8888);
    let code = in_window(|a| {
        a.mov(dword_ptr(entry()[0] + 8), ecx)?;
        a.mov(eax, dword_ptr(esi))?;
        a.mov(edi, BUFFER.0 as u32)?;
        a.push(ecx)?;
        a.push(esi)?;
        a.mov(ecx, 2)?;
        a.rep().movsd()?;
        a.pop(esi)?;
        a.pop(ecx)?;
        a.invlpg(byte_ptr(WINDOW + PAGE))
    });
    let mut fast = machine(&ram, &code);
    for from in [WINDOW, WINDOW + PAGE - 2] {
        fast.cpu.vcpu.gpr[reg::RCX] = FRAMES[1] | ACCESSED;
        // In the last round the window has its first frame.
        run(&mut fast, [from, 0, FRAMES[1] | ACCESSED]);
    }
    assert_eq!(fast.vcpu().gpr[reg::RAX], 0x8888_1111);
    assert_eq!(ram.load64(BUFFER.1), 0x6666_7777_8888_1111);
}

/// A page that has become read-only cannot be written by what has often written the page.
#[test]
fn what_is_looked_up_is_protected() {
    let ram = ram(LARGE);
    let code = in_window(|a| {
        a.mov(eax, dword_ptr(esi + 8))?;
        a.mov(dword_ptr(esi + 8), edi)
    });
    let mut fast = machine(&ram, &code);
    run(&mut fast, [WINDOW, 5, FRAMES[0] | ACCESSED]);
    assert_eq!(FRAMES.map(|frame| ram.load64(frame + 8)), [5; 2]);
    begin(&mut fast, [WINDOW, 6, FRAMES[0] | ACCESSED & !RW]);
    assert_eq!(fast.run(u64::MAX), Exit::Shutdown, "there is no handler");
    assert_eq!(FRAMES.map(|frame| ram.load64(frame + 8)), [5; 2]);
}

/// A fault behind a look-up that has missed is taken for what it is.
#[test]
fn an_access_to_nothing_faults_behind_a_look_up() {
    let ram = ram(LARGE);
    let code = in_window(|a| {
        a.mov(esi, edi)?;
        a.cmp(ebp, 1)?;
        a.cmove(esi, ecx)?;
        a.mov(al, byte_ptr(WINDOW))?;
        a.lodsd()
    });
    for (nothing, end) in
        [(WINDOW + 2 * PAGE, Exit::Shutdown), (PAGE, Exit::Shutdown), (CODE.0, Exit::Halted)]
    {
        let mut fast = machine(&ram, &code);
        fast.cpu.vcpu.gpr[reg::RCX] = nothing;
        begin(&mut fast, [0, DATA.0, FRAMES[0] | ACCESSED]);
        assert_eq!(fast.run(u64::MAX), end, "{nothing:#x}");
        assert!(made(&mut fast)[1] > ROUNDS / 2, "it was looked up");
    }
}

/// Code that is written through the window runs as it was written last.
#[test]
fn code_is_written_through_the_window() {
    let ram = ram(LARGE);
    ram.write(BUFFER.1, &[0xb8, 0, 0, 0, 0, 0xc3]); // mov eax, 0; ret
    let code = assembled(|a| {
        let (mut again, mut bad) = (a.create_label(), a.create_label());
        a.mov(ebp, ROUNDS as u32)?;
        a.set_label(&mut again)?;
        a.mov(dword_ptr(entry()[0]), ebx)?;
        for _ in 0..2 {
            a.dec(ebp)?;
            a.mov(dword_ptr(esi + 1), ebp)?;
            a.call(BUFFER.0)?;
            a.cmp(eax, ebp)?;
            a.jne(bad)?;
        }
        a.invlpg(byte_ptr(WINDOW))?;
        a.test(ebp, ebp)?;
        a.jne(again)?;
        a.hlt()?;
        a.set_label(&mut bad)?;
        a.ud2()
    });
    let mut fast = machine(&ram, &code);
    run(&mut fast, [WINDOW, 0, BUFFER.1 | ACCESSED]);
    assert_eq!(fast.vcpu().gpr[reg::RAX], 0);
}

/// Code that has looked up a page which is not global sees the page's new frame after CR3 is loaded.
#[test]
fn a_page_that_is_not_global_goes_with_its_space() {
    let ram = ram(LARGE);
    ram.write(BUFFER.1, &[0x03, 0x16, 0xc3]); // add edx, [esi]; ret
    let code = assembled(|a| {
        let mut second = a.create_label();
        a.xor(edx, edx)?;
        a.test(edi, edi)?;
        a.jne(second)?;
        rounds(a, |a| a.call(BUFFER.0), |a| a.invlpg(byte_ptr(WINDOW)))?;
        a.set_label(&mut second)?;
        let load = |a: &mut CodeAssembler| {
            a.mov(eax, cr3)?;
            a.mov(cr3, eax)
        };
        rounds(a, |a| a.call(BUFFER.0), load)
    });
    let mut fast = machine(&ram, &code);
    for (from, entry) in [(0, ACCESSED), (1, ACCESSED & !G)] {
        run(&mut fast, [WINDOW, from, FRAMES[0] | entry]);
        assert_eq!(fast.vcpu().gpr[reg::RDX], ROUNDS / 2 * 3, "1 and 2 in turns");
    }
}

/// More than is interpreted behind a call-out.
fn pass(a: &mut CodeAssembler) -> Result<(), IcedError> {
    (0..200).try_for_each(|_| a.nop())
}

/// What is dropped in one address space is dropped in the others, mapped or looked up.
#[test]
fn a_page_is_dropped_in_all_spaces() {
    const OTHER: u64 = ROOT + 0x20;
    let ram = ram(LARGE);
    let code = in_window(|a| {
        a.add(edx, dword_ptr(esi))?;
        a.mov(cr3, edi)?;
        pass(a)?;
        a.add(edx, dword_ptr(esi))?;
        a.xor(ebx, (FRAMES[0] ^ FRAMES[1]) as u32)?;
        a.mov(dword_ptr(entry()[0]), ebx)?;
        a.invlpg(byte_ptr(WINDOW))?;
        a.add(edx, dword_ptr(esi))?;
        a.mov(eax, ROOT as u32)?;
        a.mov(cr3, eax)?;
        pass(a)?;
        a.add(edx, dword_ptr(esi))
    });
    for maps in [true, false] {
        let mut fast = machine(&ram, &code);
        ram.store64(OTHER + 3 * 8, TABLES.1 | P);
        fast.modes.options.map_fleeting = maps;
        fast.cpu.vcpu.gpr[reg::RDX] = 0;
        run(&mut fast, [WINDOW, OTHER, FRAMES[0] | ACCESSED]);
        assert_eq!(fast.vcpu().gpr[reg::RDX], 6 * ROUNDS, "mapped: {maps}");
        assert_eq!(fast.slots.processes().len(), 2, "a process for each space");
        assert!(fast.pages.vcpu_page().counters.invalidations > ROUNDS, "by wedges");
    }
}
