//! Kicks at any moment, each with an interrupt: what a guest computes does not depend on them.
//!
//! A program and its kernel do what finds guest code in unusual states: calls, string instructions, data below the
//! stack pointer, flags, segment bases, x87 and vector registers, system calls. Another thread kicks as often as it can, and
//! the guest ends as it does on the interpreter, which nobody disturbs.

use crate::{
    Fast, Modes, User,
    test_machine::{MODES, STRICT, board, kernel_state, map},
};
use bus::Kicker;
use engine::{Engine, Interpreter, VcpuRequests};
use iced_x86::{IcedError, code_asm::*};
use jit::stubs::LEN;
use ram::Ram;
use std::{
    env, fs,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use wedge_abi::{CACHE, KICK, USER_CACHE};
use x86::{
    Segment, TableRegister, Vcpu, flags, fpu::FpuState, paging::US, reg, seg, segment::attr,
};
use x86_interp::{Exit, GuestRam, pending};

mod step_tests;

const PAGE: u64 = 4096;
/// GVA of the kernel's code, and its place in RAM. So for the others.
const CODE: (u64, u64) = (0xffff_ffff_8100_0000, 0x4_0000);
/// The kernel's data.
const DATA: (u64, u64) = (0xffff_ffff_8200_0000, 0x5_0000);
const STACK: (u64, u64) = (0xffff_ffff_8200_1000, 0x5_1000);
const PROGRAM: (u64, u64) = (0x5555_0000_0000, 0x6_0000);
/// The program's data, whose middle is the top of its stack.
const HEAP: (u64, u64) = (0x7fff_0000_0000, 0x7_0000);
const STACK_TOP: u64 = STACK.0 + PAGE;
/// Offsets in the kernel's data: interrupts taken, and what the kernel computes, with its length.
const TAKEN: u64 = 0x10;
const WORK: u64 = 0x20;
const WORK_LEN: usize = 0x100;
const IDT: u64 = 0x400;
const GDT: u64 = 0x800;
const TSS: u64 = 0x900;
/// The interrupt.
const VECTOR: u8 = 0x20;
/// The kernel's code segment; the others lie as Linux has them.
const KERNEL_CS: u16 = 0x10;
/// Times the program does everything.
const ROUNDS: u32 = 1000;
/// The system call that ends it.
const STOP: u32 = 1;
/// RET's only byte, and what is behind a routine's last.
const RET: u8 = 0xc3;
const PADDING: u8 = 0xcc;
/// Kicks come after up to so many nanoseconds.
const PAUSE: u64 = 60_000;
/// Interrupts that a test waits for.
const ENOUGH: u64 = 1000;

/// Everything once a round, and a system call.
fn program() -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let (mut round, mut function) = (a.create_label(), a.create_label());
    a.set_label(&mut round)?;
    a.call(function)?;
    a.lea(rax, qword_ptr(function))?;
    a.call(rax)?;
    a.mov(ecx, 24)?;
    a.mov(rsi, r13)?;
    a.lea(rdi, qword_ptr(r13 + 0x100))?;
    a.rep().movsb()?;
    a.mov(ecx, 6)?;
    a.mov(rax, r12)?;
    a.rep().stosq()?;
    a.std()?;
    a.lea(rsi, qword_ptr(r13 + 0x80))?;
    a.lodsb()?;
    a.cld()?;
    a.mov(qword_ptr(rsp - 64), r12)?;
    a.add(r12, qword_ptr(0x10).fs())?;
    a.add(r12, qword_ptr(rsp - 64))?;
    a.pushfq()?;
    a.pop(rdx)?;
    a.xor(r14, rdx)?;
    a.fadd(qword_ptr(r13 + 8))?;
    a.paddq(xmm0, xmm1)?;
    a.vpaddq(ymm2, ymm2, ymm3)?;
    a.rol(r12, 7)?;
    a.lock().xadd(qword_ptr(r13 + 0x300), r12)?;
    a.mov(rdi, r12)?;
    a.mov(eax, 7)?;
    a.syscall()?;
    a.add(r12, rax)?;
    a.dec(ebx)?;
    a.jne(round)?;
    a.mov(eax, STOP)?;
    a.syscall()?;
    a.set_label(&mut function)?;
    a.push(rbp)?;
    a.mov(rbp, rsp)?;
    a.add(qword_ptr(r13 + 0x308), rax)?;
    a.push(qword_ptr(r13 + 0x308))?;
    a.pop(r15)?;
    a.leave()?;
    a.ret()?;
    a.assemble(PROGRAM.0)
}

/// The kernel: its entry for system calls, and behind it the handler of the interrupt, whose GVA comes second.
fn kernel() -> Result<(Vec<u8>, u64), IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let (mut stop, mut function) = (a.create_label(), a.create_label());
    a.swapgs()?;
    a.mov(qword_ptr(8).gs(), rsp)?;
    a.mov(rsp, qword_ptr(0).gs())?;
    a.push(rcx)?;
    a.push(r11)?;
    a.sti()?;
    a.cmp(eax, STOP)?;
    a.je(stop)?;
    a.push(rdi)?;
    a.pushfq()?;
    a.cli()?;
    a.popfq()?;
    a.call(function)?;
    // The program's data is mapped anew.
    a.invlpg(byte_ptr(r13))?;
    a.mov(ecx, 8)?;
    a.mov(rsi, DATA.0 + WORK)?;
    a.lea(rdi, qword_ptr(rsi + 0x80))?;
    a.rep().movsq()?;
    a.pop(rdi)?;
    a.cli()?;
    a.pop(r11)?;
    a.pop(rcx)?;
    a.mov(rsp, qword_ptr(8).gs())?;
    a.swapgs()?;
    a.sysretq()?;
    a.set_label(&mut function)?;
    a.stac()?;
    a.mov(rax, qword_ptr(r13 + 0x300))?;
    a.clac()?;
    a.mov(rdx, DATA.0 + WORK)?;
    a.add(qword_ptr(rdx), rdi)?;
    a.add(rax, qword_ptr(rdx))?;
    a.ret()?;
    a.set_label(&mut stop)?;
    a.cli()?;
    a.hlt()?;
    let mut all = a.assemble(CODE.0)?;
    let handler = CODE.0 + all.len() as u64;
    all.extend(interrupt_handler(handler)?);
    Ok((all, handler))
}

fn interrupt_handler(at: u64) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    a.push(rax)?;
    a.mov(rax, DATA.0 + TAKEN)?;
    a.inc(qword_ptr(rax))?;
    a.pop(rax)?;
    a.iretq()?;
    a.assemble(at)
}

fn memory() -> Ram {
    let ram = Ram::new(2 << 20).expect("memory");
    map(&ram, &[(CODE, 0), (DATA, 0), (STACK, 0), (PROGRAM, US), (HEAP, US)]);
    let (code, handler) = kernel().expect("encodable");
    ram.write(CODE.1, &code);
    ram.write(PROGRAM.1, &program().expect("encodable"));
    for at in (0..PAGE).step_by(8) {
        ram.store64(HEAP.1 + at, at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 4);
    }
    ram.store64(DATA.1, STACK_TOP);
    for (slot, descriptor) in [
        (u64::from(KERNEL_CS), 0x00af_9a00_0000_ffff),
        (u64::from(KERNEL_CS) + 8, 0x00cf_9200_0000_ffff),
        (0x28, 0x00cf_f200_0000_ffff),
        (0x30, 0x00af_fa00_0000_ffffu64),
    ] {
        ram.store64(DATA.1 + GDT + slot, descriptor);
    }
    ram.store64(DATA.1 + TSS + 4, STACK_TOP);
    let gate = DATA.1 + IDT + u64::from(VECTOR) * 16;
    let low = handler & 0xffff | u64::from(KERNEL_CS) << 16 | 0x8e << 40;
    ram.store64(gate, low | (handler >> 16 & 0xffff) << 48);
    ram.store64(gate + 8, handler >> 32);
    ram
}

/// The program, at its start.
fn state() -> Vcpu {
    let mut v = kernel_state(PROGRAM.0, HEAP.0 + PAGE / 2);
    v.rflags = flags::FIXED | flags::IF;
    (v.seg[seg::CS].selector, v.seg[seg::SS].selector) = (0x33, 0x2b);
    for segment in [seg::CS, seg::SS] {
        v.seg[segment].attr |= 3 << attr::DPL_SHIFT;
    }
    v.seg[seg::FS].base = HEAP.0;
    v.kernel_gs_base = DATA.0;
    (v.gpr[reg::RBX], v.gpr[13]) = (ROUNDS.into(), HEAP.0);
    v.lstar = CODE.0;
    v.star = 0x23 << 48 | u64::from(KERNEL_CS) << 32;
    v.sfmask = flags::IF | flags::DF | flags::TF | flags::AC | flags::NT;
    v.gdtr = TableRegister { base: DATA.0 + GDT, limit: 0x3f, ..Default::default() };
    v.idtr = TableRegister { base: DATA.0 + IDT, limit: 0x20f, ..Default::default() };
    let busy = attr::P | 0xb;
    v.tr = Segment { selector: 0x40, attr: busy, limit: 0x67, base: DATA.0 + TSS };
    for (n, byte) in v.fpu.xmm.iter_mut().chain(&mut v.fpu.ymm_high).flatten().enumerate() {
        *byte = n as u8;
    }
    v
}

/// The guest on the fast engine, with one vCPU.
fn machine(start: Vcpu, modes: Modes, requests: &Arc<VcpuRequests>) -> Fast {
    let board = board(memory(), Arc::clone(requests));
    let owners = (&crate::Machine::new(1), &crate::Placement::default());
    Fast::new(start, board, requests, modes, owners).expect("an engine")
}

/// How the guest ends.
#[derive(Debug, PartialEq)]
struct Ending {
    gpr: [u64; 16],
    rip: u64,
    rflags: u64,
    bases: [u64; 3],
    fpu: FpuState,
    heap: Vec<u8>,
    work: Vec<u8>,
}

impl Ending {
    fn of(engine: &dyn Engine) -> Self {
        let (v, ram) = (engine.vcpu(), engine.ram());
        let (mut heap, mut work) = (vec![0; PAGE as usize], vec![0; WORK_LEN]);
        ram.read(HEAP.1, &mut heap);
        ram.read(DATA.1 + WORK, &mut work);
        // What the last x87 instruction was shows to programs on some CPUs only.
        let fpu = FpuState { fop: 0, fip: 0, fdp: 0, ..v.fpu };
        let bases = [v.seg[seg::FS].base, v.seg[seg::GS].base, v.kernel_gs_base];
        Self { gpr: v.gpr, rip: v.rip, rflags: v.rflags, bases, fpu, heap, work }
    }
}

/// Runs the guest to its end, each kick being an interrupt.
fn run(engine: &mut dyn Engine, requests: &VcpuRequests) -> Ending {
    loop {
        if let Some(ending) = attend(engine, requests) {
            return ending;
        }
    }
}

/// Runs the guest until it needs something.
fn attend(engine: &mut dyn Engine, requests: &VcpuRequests) -> Option<Ending> {
    match engine.run(u64::MAX) {
        Exit::Requested => {
            requests.take_kick();
            requests.set_interrupts(pending::INTERRUPT);
        }
        Exit::InterruptWindow => {
            requests.set_interrupts(0);
            engine.interrupt(VECTOR);
        }
        Exit::Halted => return Some(Ending::of(engine)),
        exit => {
            let failure = engine.failure();
            panic!("{exit:?} at {:#x}: {failure:?}", engine.vcpu().rip);
        }
    }
    None
}

/// Ends the storm, whatever becomes of the test.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Kicks until it is over. Whoever sleeps in between gets the CPU at once, be it the guest's, wherever that is.
fn kick(requests: &VcpuRequests, over: &AtomicBool) {
    let mut random = 1u64;
    while !over.load(Ordering::Relaxed) {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        thread::sleep(Duration::from_nanos((random >> 33) % PAUSE));
        if requests.waiting() == 0 {
            requests.kick();
        }
    }
}

/// Makes leaving translated code slow, so that many kicks find it there: the RET at the end comes after a loop.
fn slow_down(fast: &mut Fast) {
    let areas = [Arc::clone(fast.pages.kernel()), Arc::clone(fast.pages.user())];
    for (cache, area) in [CACHE, USER_CACHE].map(|cache| cache as u64).into_iter().zip(areas) {
        let used = |pc: &u64| fast.code.is_exit(*pc) && fast.pages.code_byte(*pc) != PADDING;
        let Some(last) = (cache..cache + LEN).rev().find(used) else { continue };
        assert_eq!(fast.pages.code_byte(last), RET);
        // push rcx; mov ecx, 50_000; loop; pop rcx; ret
        let slow = [0x51, 0xb9, 0x50, 0xc3, 0, 0, 0xe2, 0xfe, 0x59, RET];
        area.write(last - cache, &slow);
    }
}

/// The guest in a storm of kicks: how it ends, and how many interrupts it has taken.
fn in_a_storm(start: &Vcpu, modes: Modes, slow: bool) -> (Ending, u64) {
    let (requests, over) = (Arc::new(VcpuRequests::default()), AtomicBool::new(false));
    let mut fast = machine(start.clone(), modes, &requests);
    if slow {
        slow_down(&mut fast);
    }
    thread::scope(|scope| {
        let _over = Over(&over);
        scope.spawn(|| kick(&requests, &over));
        let ending = run(&mut fast, &requests);
        (ending, fast.ram().load64(DATA.1 + TAKEN))
    })
}

fn ends_as_ever(user: User, kernel_translated: bool) {
    ends_as_ever_with(Modes { user, kernel_translated, ..MODES });
}

fn ends_as_ever_with(modes: Modes) {
    let (start, requests) = (state(), Arc::new(VcpuRequests::default()));
    let board = board(memory(), Arc::clone(&requests));
    let undisturbed = run(&mut Interpreter::new(start.clone(), board), &requests);
    for slow in [false, true] {
        let mut taken = 0;
        while taken < ENOUGH {
            let (ending, interrupts) = in_a_storm(&start, modes, slow);
            assert_eq!(ending, undisturbed, "after {interrupts} interrupts");
            taken += interrupts;
        }
    }
}

/// A strict machine, which nobody kicks.
fn in_peace() -> Ending {
    let requests = Arc::new(VcpuRequests::default());
    let mut fast = machine(state(), STRICT, &requests);
    run(&mut fast, &requests)
}

#[test]
fn programs_in_processes_of_their_own_end_as_ever() {
    let requests = Arc::new(VcpuRequests::default());
    let board = board(memory(), Arc::clone(&requests));
    assert_eq!(in_peace(), run(&mut Interpreter::new(state(), board), &requests));
}

/// A process of guest code sets its signals and then its filter. On a busy host a kick comes in between, and must not
/// lead past the filter: strace has one come with each signal that is set.
#[test]
fn kicks_of_a_process_that_is_not_set_up_lead_nowhere() {
    // Whoever sets no handler for the signal ignores it.
    let mut strace = Command::new("env");
    strace.arg(format!("--ignore-signal={KICK}"));
    strace.args(["strace", "--follow-forks", "--output=/dev/null", "--trace=rt_sigaction"]);
    strace.arg(format!("--inject=rt_sigaction:signal={KICK}"));
    strace.arg(env::current_exe().expect("this program")).arg("--exact");
    strace.arg("kick_tests::programs_in_processes_of_their_own_end_as_ever");
    let output = strace.output().expect("env, of coreutils");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{output:?}");
}

/// How often the guest's processes have gone to sleep.
fn sleeps(fast: &Fast) -> u64 {
    // Long enough for whoever has been woken to sleep again.
    thread::sleep(Duration::from_millis(50));
    let count = |pid: i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it is there");
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.and_then(|count| count.trim().parse::<u64>().ok()).expect("a number")
    };
    fast.slots.processes().into_iter().map(count).sum()
}

/// The monitor looks before it gives the next turn: nobody has to be woken, and to give up that turn.
#[test]
fn a_kick_while_the_monitor_has_the_turn_wakes_nobody() {
    let requests = Arc::new(VcpuRequests::default());
    let mut fast = machine(state(), MODES, &requests);
    run(&mut fast, &requests);
    let before = sleeps(&fast);
    assert!(before > 0, "it has run");
    requests.kick();
    assert_eq!(sleeps(&fast), before);
    assert_eq!(fast.run(u64::MAX), Exit::Requested, "it is not lost");
}

#[test]
fn kicks_change_nothing_of_what_is_run_directly() {
    ends_as_ever(User::Direct, true);
}

#[test]
fn kicks_change_nothing_of_programs_in_processes_of_their_own() {
    ends_as_ever_with(STRICT);
}

#[test]
fn kicks_change_nothing_of_translated_programs() {
    ends_as_ever(User::Translated, true);
}

#[test]
fn kicks_change_nothing_of_programs_under_an_interpreted_kernel() {
    ends_as_ever(User::Direct, false);
}

#[test]
fn kicks_change_nothing_of_a_kernel_under_interpreted_programs() {
    ends_as_ever(User::Interpreted, true);
}
