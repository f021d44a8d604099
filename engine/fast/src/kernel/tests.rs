//! Guest code that jumps to where none is, and guest code that is stopped in the middle of an instruction.

use crate::{
    Fast, Modes, Scattered, User, state,
    test_machine::{MODES, board, kernel_state, map},
};
use bus::Kicker;
use contract::Reached;
use engine::{Engine, VcpuRequests};
use iced_x86::code_asm::*;
use jit::Level;
use ram::Ram;
use std::{fs, sync::Arc, thread, time::Duration};
use wedge::{MapCommand, Owner, Rights};
use wedge_abi::{KICK, WedgeExit};
use x86::{
    Activity, Vcpu,
    control::cr4,
    flags,
    paging::{A, ADDRESS, D, G, P, PS, RW, US},
    reg, seg,
    segment::attr,
};
use x86_interp::{Exit, GuestRam, Probes};

const PAGE: u64 = 4096;
/// GVA of the kernel's code, and its place in RAM. So for the others.
const CODE: (u64, u64) = (0xffff_ffff_8100_0000, 0x4_0000);
/// The middle is the top of the kernel's stack.
const DATA: (u64, u64) = (0xffff_ffff_8200_0000, 0x5_0000);
/// So here; not mapped together with it.
const OTHER: (u64, u64) = (0xffff_ffff_8300_0000, 0x7_0000);
const PROGRAM: (u64, u64) = (0x5555_0000_0000, 0x6_0000);
/// CR3: translations may stay.
const KEEP: u64 = 1 << 63;

fn machine(vcpu: Vcpu, user: User, kernel: &[u8], program: &[u8]) -> Fast {
    attending(Arc::default(), vcpu, user, kernel, program)
}

fn attending(
    requests: Arc<VcpuRequests>,
    vcpu: Vcpu,
    user: User,
    kernel: &[u8],
    program: &[u8],
) -> Fast {
    let ram = Ram::new(2 << 20).expect("memory");
    map(&ram, &[(CODE, G), (DATA, G), (OTHER, G), (PROGRAM, US)]);
    ram.write(CODE.1, kernel);
    ram.write(PROGRAM.1, program);
    started(ram, requests, vcpu, user)
}

fn started(ram: Ram, requests: Arc<VcpuRequests>, vcpu: Vcpu, user: User) -> Fast {
    let modes = Modes { user, ..MODES };
    Fast::new(
        vcpu,
        board(ram, Arc::clone(&requests)),
        &requests,
        modes,
        (&crate::Machine::new(1), &crate::Placement::default()),
    )
    .expect("an engine")
}

fn in_kernel() -> Vcpu {
    kernel_state(CODE.0, DATA.0 + PAGE / 2)
}

fn in_program() -> Vcpu {
    let mut v = Vcpu { rip: PROGRAM.0, rflags: flags::FIXED | flags::IF, ..in_kernel() };
    for segment in [seg::CS, seg::SS] {
        v.seg[segment].attr |= 3 << attr::DPL_SHIFT;
    }
    v
}

/// Nobody takes the guest's exception, which is what ends it: the engine has not failed.
fn ends_with_a_fault_at(fast: &mut Fast, rip: u64) {
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Shutdown, None));
    assert_eq!(fast.vcpu().rip, rip);
}

/// An empty slot of the tables that jumps search is no block for address zero.
#[test]
fn a_jump_to_zero_faults_there() {
    let jump = [0x31, 0xc0, 0xff, 0xe0]; // xor eax, eax; jmp rax
    ends_with_a_fault_at(&mut machine(in_kernel(), User::Direct, &jump, &[]), 0);
    ends_with_a_fault_at(&mut machine(in_program(), User::Translated, &[], &jump), 0);
    ends_with_a_fault_at(&mut machine(in_program(), User::Direct, &[], &jump), 0);
}

/// A kernel may keep the time-stamp counter from its programs (PR_SET_TSC).
#[test]
fn a_program_that_may_not_read_the_counter_faults() {
    let mut v = in_program();
    v.cr4 |= cr4::TSD;
    for user in [User::Direct, User::Translated, User::Interpreted] {
        let rdtsc = [0x90, 0x0f, 0x31];
        ends_with_a_fault_at(&mut machine(v.clone(), user, &[], &rdtsc), PROGRAM.0 + 1);
    }
}

/// A program on two pages, each of whose accesses is looked up: inc ebx; jmp to the second page, and there inc ebx; inc ebx; ud2.
fn translated_program() -> Fast {
    let ram = Ram::new(2 << 20).expect("memory");
    let second = (PROGRAM.0 + PAGE, PROGRAM.1 + PAGE);
    map(&ram, &[(CODE, G), (DATA, G), (PROGRAM, US), (second, US)]);
    ram.write(PROGRAM.1, &[0xff, 0xc3, 0xe9, 0xf9, 0x0f, 0, 0]);
    ram.write(second.1, &[0xff, 0xc3, 0xff, 0xc3, 0x0f, 0x0b]);
    let mut fast = started(ram, Arc::default(), in_program(), User::Direct);
    fast.modes.options.scattered = Scattered::Always;
    ends_with_a_fault_at(&mut fast, second.0 + 4);
    let translated = fast.code.with(Level::User, |code| code.cache.counters.translated);
    assert!(translated.is_some_and(|blocks| blocks != 0), "{translated:?}");
    fast.cpu.vcpu = in_program();
    fast.cpu.state_changed();
    fast
}

/// What the CPU notes of an x87 instruction that has raised an exception is a host's address in a translation for a place.
#[test]
fn the_last_x87_instruction_of_a_program_is_where_the_program_is() {
    // fldcw [rip + 9]; fld1; fldz; fdivp; fwait; ud2; the control word, with division by zero unmasked
    let code = [0xd9, 0x2d, 9, 0, 0, 0, 0xd9, 0xe8, 0xd9, 0xee, 0xde, 0xf9, 0x9b, 0x0f, 0x0b];
    let program = [&code[..], &[0x7b, 0x03]].concat();
    let mut fast = machine(in_program(), User::Direct, &[], &program);
    fast.modes.options.scattered = Scattered::Always;
    ends_with_a_fault_at(&mut fast, PROGRAM.0 + 12);
    assert_eq!(fast.vcpu().fpu.fip, PROGRAM.0 + 10);
}

/// Translations for places do not know of addresses: a program with breakpoints runs directly.
#[test]
fn programs_that_have_been_translated_stop_at_breakpoints() {
    let mut fast = translated_program();
    let breakpoint = PROGRAM.0 + PAGE + 2;
    fast.set_probes(&Probes { breakpoints: [breakpoint].into(), ..Probes::default() });
    let exit = fast.run(u64::MAX);
    assert_eq!((exit, fast.vcpu().rip), (Exit::Probe(Reached::Breakpoint), breakpoint));
    assert_eq!(fast.vcpu().gpr[reg::RBX], 2);
}

/// Hosts map nothing at the lowest addresses, and guests do: what a program has there is interpreted, code and data.
#[test]
fn a_program_has_the_lowest_pages() {
    const LOW: (u64, u64) = (0, 0x8_0000);
    const LAST: u64 = 0xf000;
    let ram = Ram::new(2 << 20).expect("memory");
    map(&ram, &[(CODE, G), (DATA, G), (PROGRAM, US), (LOW, US), ((LAST, LOW.1 + PAGE), US)]);
    ram.write(PROGRAM.1, &[0x8b, 0x04, 0x25, 0x10, 0xf0, 0, 0, 0xff, 0xe0]); // mov eax, [LAST + 10h]; jmp rax
    ram.write(LOW.1 + PAGE + 0x10, &0x20u32.to_le_bytes());
    ram.write(LOW.1 + 0x20, &[0xff, 0xc3, 0x0f, 0x0b]); // inc ebx; ud2
    let mut fast = started(ram, Arc::default(), in_program(), User::Direct);
    ends_with_a_fault_at(&mut fast, 0x22);
    assert_eq!(fast.vcpu().gpr[reg::RBX], 1);
}

/// Maps the first page of RAM.
fn read_only(start: u64) -> MapCommand {
    let (rights, owner) = (Rights::READ, Owner::User);
    MapCommand::Map { start, len: PAGE, offset: 0, rights, owner }
}

/// An instruction for which the host refuses a mapping, however often, is carried out all the same.
#[test]
fn what_the_host_does_not_map_is_interpreted() {
    let program = [0xff, 0xc3, 0xff, 0xc3, 0x0f, 0x0b]; // inc ebx; inc ebx; ud2
    let mut fast = machine(in_program(), User::Direct, &[], &program);
    for done in 1..=2 {
        fast.synchronize().expect("a wedge");
        let refused = read_only(0);
        fast.slots.current().expect("a slot").wedge_mut().order(refused).expect("a process");
        fast.guest_code().expect("a process");
        fast.guest_code().expect("a process");
        assert_eq!(fast.vcpu().gpr[reg::RBX], done);
    }
}

/// The wedge answers an INVLPG by changing what is mapped; the interpreter's own translation goes all the same.
#[test]
fn a_page_made_read_only_is_so_when_interpreted() {
    const HEAP: (u64, u64) = (0x7fff_0000_0000, 0x7_0000);
    const TABLE: u64 = 0xffff_ffff_8400_0000;
    const NX: u64 = 1 << 63;
    let ram = Ram::new(2 << 20).expect("memory");
    let entries = |table: u64| ((TABLE, table), G);
    map(&ram, &[(CODE, G), (DATA, G), (PROGRAM, US), (HEAP, US | NX), entries(0)]);
    let next = |table: u64, shift: u32| ram.load64(table + (HEAP.0 >> shift & 0x1ff) * 8) & ADDRESS;
    let mut v = in_program();
    let table = next(next(next(v.cr3, 39), 30), 21);
    map(&ram, &[(CODE, G), (DATA, G), (PROGRAM, US), (HEAP, US | NX), entries(table)]);
    // mov [rdi], rsi; invlpg [rax]; hlt
    ram.write(CODE.1, &[0x48, 0x89, 0x37, 0x0f, 0x01, 0x38, 0xf4]);
    // mov [rax], ecx; mov edx, [rax]; syscall
    ram.write(PROGRAM.1, &[0x89, 0x08, 0x8b, 0x10, 0x0f, 0x05]);
    (v.lstar, v.star) = (CODE.0, 0x10 << 32);
    v.gpr[reg::RAX] = HEAP.0;
    v.gpr[reg::RDI] = TABLE + (HEAP.0 >> 12 & 0x1ff) * 8;
    v.gpr[reg::RSI] = HEAP.1 | P | US | A | D | NX;
    let mut fast = started(ram.clone(), Arc::default(), v.clone(), User::Direct);
    v.gpr[reg::RCX] = 1;
    for done in [true, false] {
        // The first time the kernel's code is translated.
        fast.cpu.vcpu = v.clone();
        fast.cpu.came_back();
        ram.store64(table + (HEAP.0 >> 12 & 0x1ff) * 8, HEAP.1 | P | RW | US | NX);
        fast.interpret();
        assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
        assert_eq!(fast.pages.vcpu_page().counters.invalidations == 0, done);
    }
    fast.cpu.vcpu = v;
    fast.cpu.came_back();
    fast.cpu.vcpu.gpr[reg::RCX] = 2;
    fast.interpret();
    assert_eq!(ram.load64(HEAP.1), 1, "the page is read-only");
}

/// The kernel's translations are not for programs.
#[test]
fn a_program_s_jump_into_the_kernel_faults_there() {
    let kernel = [0xff, 0xc3, 0xf4]; // inc ebx; hlt
    let program = [0x48, 0xc7, 0xc0, 0, 0, 0, 0x81, 0xff, 0xe0]; // mov rax, CODE; jmp rax
    let mut fast = machine(in_kernel(), User::Translated, &kernel, &program);
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
    fast.cpu.vcpu = in_program();
    fast.cpu.state_changed();
    ends_with_a_fault_at(&mut fast, CODE.0);
    assert_eq!(fast.vcpu().gpr[reg::RBX], 0);
}

/// A kick has come in the first instruction of the block at RIP, behind its first host instruction of so many bytes.
fn kicked_in_the_middle(fast: &mut Fast, bytes: u64) {
    fast.synchronize().expect("a wedge");
    let host = fast.block_at_rip(Level::Kernel).expect("a wedge").expect("a block");
    assert!(fast.position(host + bytes).is_some_and(|at| !at.exact()));
    let base = fast.pages.base();
    let page = fast.pages.vcpu_page();
    state::load(&fast.cpu.vcpu, base, page);
    page.block.spill[0] = page.regs.gpr[reg::RAX];
    (page.exit.pc, page.exit.signal) = (host + bytes, KICK as u64);
}

/// A kick in the middle of a PUSHFQ whose stack is not mapped yet; the wedge can map it.
fn kicked_in_a_push() -> Fast {
    let (requests, push) = (Arc::new(VcpuRequests::default()), [0x9c, 0xf4]); // pushfq; hlt
    let v = kernel_state(CODE.0, OTHER.0 + PAGE / 2);
    let mut fast = attending(Arc::clone(&requests), v, User::Direct, &push, &[]);
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
    fast.cpu.vcpu = in_kernel();
    fast.cpu.state_changed();
    requests.kick();
    kicked_in_the_middle(&mut fast, 7); // RAX has been put aside
    fast
}

/// The wedge maps what a single step has missed, and the step is still the only one.
#[test]
fn a_step_over_a_page_fault_is_one_step() {
    let mut fast = kicked_in_a_push();
    let mapped = fast.pages.vcpu_page().counters.mapped;
    fast.kernel_exit(WedgeExit::KernelSignal).expect("the wedge lives");
    assert!(fast.pages.vcpu_page().counters.mapped > mapped, "by the wedge");
    assert_eq!(fast.vcpu().rip, CODE.0 + 1);
}

/// What is run to its exit goes no further, not in another wedge either.
#[test]
fn a_switch_of_spaces_that_is_run_to_its_exit_goes_no_further() {
    // mov cr3, rax; mov cr3, rbx; mov cr3, rax; mov cr3, rbx; hlt
    let kernel = [0x0f, 0x22, 0xd8, 0x0f, 0x22, 0xdb, 0x0f, 0x22, 0xd8, 0x0f, 0x22, 0xdb, 0xf4];
    let mut v = in_kernel();
    v.cr4 |= cr4::PCIDE;
    let root = v.cr3;
    v.cr3 = root | 1;
    (v.gpr[reg::RAX], v.gpr[reg::RBX]) = (KEEP | root | 2, KEEP | root | 1);
    let mut fast = machine(v, User::Direct, &kernel, &[]);
    for _ in 0..2 {
        assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
        (fast.cpu.vcpu.rip, fast.cpu.vcpu.activity) = (CODE.0, Activity::Running);
    }
    assert_eq!(fast.pages.vcpu_page().counters.hand_overs, 4, "both spaces have wedges");
    kicked_in_the_middle(&mut fast, 7); // the operand has been stored
    fast.pages.vcpu_page().exit.operand = fast.cpu.vcpu.gpr[reg::RAX];
    fast.kernel_exit(WedgeExit::KernelSignal).expect("the wedge lives");
    assert_eq!((fast.vcpu().rip, fast.vcpu().cr3), (CODE.0 + 3, root | 2));
}

/// Orders that could not be carried out before a step are given up, as they are elsewhere.
#[test]
fn a_step_survives_orders_that_fail() {
    let mut fast = kicked_in_a_push();
    let unaligned = read_only(PROGRAM.0 + 1);
    fast.slots
        .current()
        .and_then(|space| space.wedge_mut().order(unaligned))
        .expect("the wedge lives");
    fast.kernel_exit(WedgeExit::KernelSignal).expect("the wedge lives");
    assert_eq!(fast.vcpu().rip, CODE.0 + 1);
}

/// Stores of a kernel's to a page of its own in the user's half, where each faults, as Linux has them when it clears
/// the text of a program of BPF.
#[test]
fn stores_in_a_space_apart_are_interpreted_in_one_go() {
    // again: mov [rdi], rax; add rdi, 8; dec ecx; jne again; hlt
    let fill = [0x48, 0x89, 0x07, 0x48, 0x83, 0xc7, 0x08, 0xff, 0xc9, 0x75, 0xf5, 0xf4];
    let ram = Ram::new(2 << 20).expect("memory");
    map(&ram, &[(CODE, G), (DATA, G), (PROGRAM, 0)]);
    ram.write(CODE.1, &fill);
    let mut v = in_kernel();
    (v.gpr[reg::RAX], v.gpr[reg::RDI], v.gpr[reg::RCX]) = (u64::MAX / 5, PROGRAM.0, PAGE / 8);
    let mut fast = started(ram.clone(), Arc::default(), v, User::Direct);
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
    let mut read = vec![0; PAGE as usize];
    ram.read(PROGRAM.1, &mut read);
    assert!(read.iter().all(|byte| *byte == 0x33), "all of it is filled");
    let signals = fast.statistics.exits[WedgeExit::KernelSignal.number()];
    assert!(signals <= 2, "{signals} signals");
}

/// The direct map, in large pages that are one run of RAM.
const DIRECT: u64 = 0xffff_8880_0000_0000;
const DIRECT_LEN: u64 = 64 << 20;

/// Its page tables, in RAM that tests leave alone.
fn map_direct(ram: &Ram, root: u64) {
    const LARGE: u64 = 2 << 20;
    let (upper, lower) = (0x3_0000, 0x3_1000);
    let top = root + (DIRECT >> 39 & 0x1ff) * 8;
    ram.store64(top, upper | P | RW);
    ram.store64(upper + (DIRECT >> 30 & 0x1ff) * 8, lower | P | RW);
    for n in 0..DIRECT_LEN / LARGE {
        ram.store64(lower + n * 8, (n * LARGE) | P | RW | A | D | PS | G);
    }
}

/// A copy between large pages far from each other needs both mapped at once: whatever is mapped around one
/// leaves the other where it is.
#[test]
fn a_copy_between_large_pages_ends() {
    // again: rep movsb; sub rsi, rdx; sub rdi, rdx; mov ecx, edx; xchg rdi, rsi; dec ebx; jne again; hlt
    let copy = [
        0xf3, 0xa4, 0x48, 0x29, 0xd6, 0x48, 0x29, 0xd7, 0x89, 0xd1, 0x48, 0x87, 0xf7, 0xff, 0xcb,
        0x75, 0xef, 0xf4,
    ];
    let ram = Ram::new(DIRECT_LEN + (2 << 20)).expect("memory");
    let mut v = in_kernel();
    v.cr4 |= cr4::PGE;
    map(&ram, &[(CODE, G), (DATA, G)]);
    map_direct(&ram, v.cr3);
    ram.write(CODE.1, &copy);
    for (register, value) in [(reg::RCX, 16), (reg::RDX, 16), (reg::RBX, 100)] {
        v.gpr[register] = value;
    }
    (v.gpr[reg::RSI], v.gpr[reg::RDI]) = (DIRECT + (10 << 20), DIRECT + (50 << 20));
    let requests = Arc::new(VcpuRequests::default());
    let mut fast = started(ram, Arc::clone(&requests), v, User::Direct);
    thread::spawn(move || {
        thread::sleep(Duration::from_secs(10));
        requests.kick();
    });
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None), "within ten seconds");
    assert!(fast.statistics.mapped <= 4, "{} faults", fast.statistics.mapped);
}

/// What a process holds of the host's once guest code runs in it, whoever started it.
#[test]
fn a_wedge_has_no_rights_no_descriptor_but_ram_s_and_limits() {
    let mut fast = machine(in_kernel(), User::Direct, &[0xf4], &[]); // hlt
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
    let pid = fast.slots.processes()[0];
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).expect("it lives");
    let (status, limits) = (read("status"), read("limits"));
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert!(status.contains(&format!("{set}:\t0000000000000000\n")), "{set}: {status}");
    }
    assert!(status.contains("NoNewPrivs:\t1\n") && status.contains("Seccomp:\t2\n"), "{status}");
    let (mib, gib) = (1_u64 << 20, 1_u64 << 30);
    let ram = 2 * mib;
    for (limit, most) in [
        ("Max data size", 64 * mib),
        ("Max address space", 4 * ram + 32 * gib),
        ("Max processes", 0),
        ("Max file size", 0),
        ("Max core file size", 0),
        ("Max locked memory", 0),
        ("Max msgqueue size", 0),
        ("Max open files", 1),
    ] {
        let line = limits.lines().find_map(|line| line.strip_prefix(limit)).expect("listed");
        let words: Vec<_> = line.split_whitespace().take(2).collect();
        assert_eq!(words, [most.to_string(), most.to_string()], "{limit}");
    }
    assert_eq!(read("oom_score_adj"), "1000\n", "the first that the host kills");
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).expect("listed").count();
    assert_eq!(descriptors, 1, "guest RAM");
}

/// A kernel that writes instructions into a page that it executes in between.
#[test]
fn what_follows_a_write_to_code_is_interpreted_with_it() {
    const TIMES: u32 = 100;
    let mut a = CodeAssembler::new(64).expect("64 bits");
    let mut again = a.create_label();
    let code = (|| {
        a.mov(ebx, TIMES)?;
        a.mov(rdi, OTHER.0)?;
        a.lea(rax, qword_ptr(rdi + 0x100))?;
        a.set_label(&mut again)?;
        a.call(rax)?;
        a.mov(dword_ptr(rdi), ebx)?;
        a.nop()?;
        a.mov(dword_ptr(rdi + 4), ebx)?;
        a.dec(ebx)?;
        a.jne(again)?;
        a.hlt()?;
        a.assemble(CODE.0)
    })();
    let mut fast = machine(in_kernel(), User::Direct, &code.expect("encodable"), &[]);
    fast.ram().write(OTHER.1 + 0x100, &[0xc3]); // ret
    assert_eq!(fast.run(u64::MAX), Exit::Halted);
    assert_eq!(fast.ram().load64(OTHER.1), 1 << 32 | 1, "the last two stores");
    let faults = fast.statistics.exits[WedgeExit::KernelSignal.number()];
    assert!(faults < u64::from(TIMES) / 2, "{faults} faults");
}

/// The handler of #UD begins with no instruction either, so no instruction is ever completed.
#[test]
fn faults_without_an_end_end_what_is_interpreted_in_one_go() {
    const INVALID_OPCODE: u64 = 6;
    let mut v = in_kernel();
    (v.idtr.base, v.idtr.limit) = (OTHER.0, 0x7ff);
    (v.gdtr.base, v.gdtr.limit) = (OTHER.0 + 0x800, 0xf);
    let gate = 8 << 16 | 0x8e << 40;
    let mut fast = machine(v, User::Direct, &[0x0f, 0x0b], &[]);
    let low = CODE.0 & 0xffff | (CODE.0 >> 16 & 0xffff) << 48;
    fast.ram().store64(OTHER.1 + INVALID_OPCODE * 16, gate | low);
    fast.ram().store64(OTHER.1 + INVALID_OPCODE * 16 + 8, CODE.0 >> 32);
    fast.ram().store64(OTHER.1 + 0x808, 0x00af_9b00_0000_ffff); // 64-bit code
    assert!(!fast.interpret_while(10, |_| true), "nothing else ends it");
    let stack = DATA.0 + PAGE / 2 - fast.vcpu().gpr[reg::RSP];
    assert_eq!((fast.vcpu().rip, stack), (CODE.0, 40 + 9 * 48), "ten faults");
}

/// Linux finds its first CPU's variables so, before it has memory for those of all CPUs.
#[test]
fn variables_are_found_by_a_base_of_zero() {
    const TIMES: u64 = 100;
    let mut a = CodeAssembler::new(64).expect("64 bits");
    let mut again = a.create_label();
    let code = (|| {
        a.mov(ecx, TIMES as u32)?;
        a.set_label(&mut again)?;
        a.swapgs()?;
        a.inc(dword_ptr(OTHER.0).gs())?;
        a.swapgs()?;
        a.call(rax)?;
        a.dec(ecx)?;
        a.jne(again)?;
        a.hlt()?;
        a.assemble(CODE.0)
    })();
    let code = code.expect("encodable");
    let mut v = in_kernel();
    v.gpr[reg::RAX] = CODE.0 + PAGE / 2;
    v.seg[seg::GS].base = PROGRAM.0;
    v.rflags |= flags::IF; // each access that faults is interpreted alone
    let mut fast = machine(v, User::Direct, &code, &[]);
    fast.ram().write(CODE.1 + PAGE / 2, &[0xc3]); // ret
    assert_eq!(fast.run(u64::MAX), Exit::Halted);
    assert_eq!(fast.ram().load64(OTHER.1), TIMES);
    let faults = fast.statistics.exits[WedgeExit::KernelSignal.number()];
    assert!(faults < 3, "{faults} faults");
}
