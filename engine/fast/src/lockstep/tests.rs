//! A kernel and a program of a few instructions, compared.

use super::*;
use crate::{
    Fast, Modes, Options, User,
    test_machine::{MODES, OPTIONS, board, kernel_state, map},
};
use engine::{Engine, VcpuRequests};
use std::sync::Arc;
use x86::{flags, paging::US, seg, segment::attr};
use x86_interp::{Exit, pending};

/// GVA of the code, and its place in RAM.
const CODE: (u64, u64) = (0xffff_ffff_8100_0000, 0x4_0000);
/// GVA of the data, whose middle is the top of the stack, and its place in RAM.
const DATA: (u64, u64) = (0xffff_ffff_8200_0000, 0x5_0000);
/// GVA of the program, and its place in RAM.
const PROGRAM: (u64, u64) = (0x5555_0000_0000, 0x6_0000);
/// GVA of the program's data, whose middle is the top of the stack, and its place in RAM.
const HEAP: (u64, u64) = (0x7fff_0000_0000, 0x7_0000);
/// Bytes before the loop.
const HEAD: usize = 5;

/// Counts down from 100, stores, calls, halts.
const KERNEL: &[u8] = &[
    0xb9, 0x64, 0, 0, 0, // mov ecx, 100
    0x48, 0x01, 0xc8, // add rax, rcx
    0x9c, // pushfq
    0x5a, // pop rdx
    0x48, 0xc7, 0x04, 0x25, 0x10, 0, 0, 0x82, 5, 0, 0, 0, // mov qword [DATA + 16], 5
    0xff, 0xc9, // dec ecx
    0x75, 0xeb, // jnz to add
    0xe8, 1, 0, 0, 0,    // call
    0xf4, // hlt
    0x0f, 0x31, // rdtsc
    0x31, 0xd2, // xor edx, edx
    0xc3, // ret
];

/// Reads relative to RIP and to FS, calls, writes its own code, and does what it may not.
const USER: &[u8] = &[
    0xb9, 0x0a, 0, 0, 0, // mov ecx, 10
    0x48, 0x03, 0x05, 0xf4, 0xff, 0xff, 0xff, // add rax, [rip - 12], the start
    0x64, 0x48, 0x03, 0x04, 0x25, 0x10, 0, 0, 0, // add rax, fs:[16]
    0xe8, 0x11, 0, 0, 0, // call
    0xff, 0xc9, // dec ecx
    0x75, 0xe7, // jnz to the first add
    0xc6, 0x05, 0x08, 0, 0, 0, 0x07, // mov byte [rip + 8], 7, into what is called
    0xe8, 0x01, 0, 0, 0,    // call
    0xf4, // hlt
    0x55, // push rbp
    0xb2, 0x05, // mov dl, 5
    0x50, // push rax
    0x9c, // pushfq
    0x5b, 0x5b, 0x5d, // pop rbx, rbx, rbp
    0xff, 0x25, 0x01, 0, 0, 0,    // jmp [rip + 1]
    0xc3, // ret
    0x39, 0, 0, 0, 0x55, 0x55, 0, 0, // its address
];

/// Offset of its RET.
const RETURN: u64 = 57;

/// RAM with the kernel, the program and their page tables.
fn memory() -> Ram {
    let ram = Ram::new(2 << 20).expect("memory");
    map(&ram, &[(CODE, 0), (DATA, 0), (PROGRAM, US), (HEAP, US)]);
    ram.write(CODE.1, KERNEL);
    ram.write(PROGRAM.1, USER);
    ram
}

fn state() -> Vcpu {
    kernel_state(CODE.0, DATA.0 + PAGE / 2)
}

/// The state of the program.
fn user_state() -> Vcpu {
    let mut v = Vcpu { rip: PROGRAM.0, rflags: flags::FIXED | flags::IF, ..state() };
    v.gpr[x86::reg::RSP] = HEAP.0 + PAGE / 2;
    for segment in [seg::CS, seg::SS] {
        v.seg[segment].attr |= 3 << attr::DPL_SHIFT;
    }
    v.seg[seg::FS].base = HEAP.0;
    v
}

fn machine(lock_step: LockStep) -> Fast {
    running(state(), User::Direct, lock_step)
}

fn running(vcpu: Vcpu, user: User, lock_step: LockStep) -> Fast {
    attending(vcpu, user, lock_step, VcpuRequests::default())
}

fn attending(vcpu: Vcpu, user: User, lock_step: LockStep, requests: VcpuRequests) -> Fast {
    let options = Options { lock_step: Some(lock_step), ..OPTIONS };
    let modes = Modes { user, options, ..MODES };
    let board = board(memory(), Arc::new(requests));
    Fast::new(
        vcpu,
        board,
        &VcpuRequests::default(),
        modes,
        (&crate::Machine::new(1), &crate::Placement::default()),
    )
    .expect("an engine")
}

/// Counters by name.
fn count(fast: &mut Fast, name: &str) -> u64 {
    let found = fast.details().into_iter().find(|(row, _)| row == name);
    found.unwrap_or_else(|| panic!("no counter {name}")).1
}

#[test]
fn right_translations_differ_nowhere() {
    let mut fast = machine(LockStep { runs: None, ..LockStep::default() });
    let exit = fast.run(u64::MAX);
    assert_eq!((exit, fast.failure()), (Exit::Halted, None));
    assert_eq!(fast.ram().load64(DATA.1 + 16), 5);
    // The head with the first round, and the others; the return is behind RDTSC.
    assert_eq!(count(&mut fast, "blocks compared"), 100);
    assert_eq!(count(&mut fast, "instructions compared"), 100 * 6 + 1 + 1);
    assert_eq!(count(&mut fast, "not compared: time or chance"), 1);
}

#[test]
fn what_has_been_compared_often_enough_runs_as_ever() {
    let mut fast = machine(LockStep { runs: Some(3), ..LockStep::default() });
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
    assert_eq!(count(&mut fast, "blocks compared"), 1 + 3);
}

#[test]
fn user_code_is_translated_and_compared() {
    let lock_step = LockStep { runs: None, ..LockStep::default() };
    let mut fast = running(user_state(), User::Translated, lock_step);
    // It may not halt, and nobody takes the exception.
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Shutdown, None));
    let v = fast.vcpu();
    assert_eq!((v.rip, v.gpr[x86::reg::RCX]), (PROGRAM.0 + 42, 0));
    assert_eq!(v.gpr[x86::reg::RDX] & 0xff, 7, "the code as it is now");
    assert_eq!(v.gpr[x86::reg::RSP], HEAP.0 + PAGE / 2);
    // Each round has a block to the call, the called one, its RET, and one behind it.
    assert!(count(&mut fast, "blocks compared") >= 40);
}

/// A RET to what is no address faults where it is.
#[test]
fn a_jump_to_nowhere_faults_at_the_jump() {
    let mut vcpu = user_state();
    vcpu.rip = PROGRAM.0 + RETURN;
    let lock_step = LockStep { runs: None, ..LockStep::default() };
    let mut fast = running(vcpu, User::Translated, lock_step);
    fast.ram().store64(HEAP.1 + PAGE / 2, 1 << 62);
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Shutdown, None));
    let v = fast.vcpu();
    assert_eq!((v.rip, v.gpr[x86::reg::RSP]), (PROGRAM.0 + RETURN, HEAP.0 + PAGE / 2));
}

/// And so does a CALL, which has stored its return address by then, as on the CPU.
#[test]
fn a_call_to_nowhere_leaves_the_stack_pointer() {
    let mut vcpu = user_state();
    vcpu.gpr[x86::reg::RAX] = 1 << 62;
    let mut fast = running(vcpu, User::Translated, LockStep::default());
    fast.ram().write(PROGRAM.1, &[0xff, 0xd0]); // call rax
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Shutdown, None));
    let v = fast.vcpu();
    assert_eq!((v.rip, v.gpr[x86::reg::RSP]), (PROGRAM.0, HEAP.0 + PAGE / 2));
    assert_eq!(fast.ram().load64(HEAP.1 + PAGE / 2 - 8), PROGRAM.0 + 2);
}

/// An STI that is interpreted shields what follows it, too.
#[test]
fn an_interrupt_waits_for_what_follows_sti() {
    let requests = VcpuRequests::default();
    requests.set_interrupts(pending::INTERRUPT);
    let mut fast = attending(state(), User::Direct, LockStep::default(), requests);
    fast.ram().write(CODE.1, &[0xac, 0xfb, 0xac, 0x90, 0xf4]); // lodsb; sti; lodsb; nop; hlt
    fast.cpu.vcpu.gpr[x86::reg::RSI] = DATA.0;
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::InterruptWindow, None));
    assert_eq!(fast.vcpu().rip, CODE.0 + 3);
}

/// The CPU notes the host's address of an x87 instruction that has raised an exception.
#[test]
fn the_last_x87_instruction_is_the_guests() {
    // fldcw [rip + 7]; fld1; fldz; fdivp; hlt; the control word, with division by zero unmasked
    let code = [0xd9, 0x2d, 7, 0, 0, 0, 0xd9, 0xe8, 0xd9, 0xee, 0xde, 0xf9, 0xf4, 0x7b, 0x03];
    let mut fast = running(user_state(), User::Translated, LockStep::default());
    fast.ram().write(PROGRAM.1, &code);
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Shutdown, None));
    assert_eq!(fast.vcpu().fpu.fip, PROGRAM.0 + 10);
}

/// A page that gets a breakpoint.
#[test]
fn user_code_goes_with_its_page() {
    let mut fast = running(user_state(), User::Translated, LockStep::default());
    fast.run(u64::MAX);
    let known = |fast: &mut Fast| {
        let find = |code: &mut Code| code.cache.find(PROGRAM.0 + 42, false).is_some();
        fast.code.with(Level::User, find).expect("translated")
    };
    assert!(known(&mut fast));
    fast.code.with(Level::User, |code| code.forget_page(PROGRAM.0 + 7));
    assert!(!known(&mut fast));
}

#[test]
fn comparing_starts_when_it_is_to() {
    let mut fast = machine(LockStep { from: 1_000_000, ..LockStep::default() });
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
    assert_eq!(count(&mut fast, "blocks compared"), 0);
}

/// Runs the kernel with a byte of its first block's translation changed; what is said.
fn spoiled(find: &[u8], into: usize, by: u8) -> String {
    spoiled_and_run(LockStep::default(), 1, (find, into, by))
}

/// The same so often: it says nothing before.
fn spoiled_and_run(lock_step: LockStep, times: u32, change: (&[u8], usize, u8)) -> String {
    let mut fast = machine(lock_step);
    fast.start_comparing();
    let host = fast.block_at_rip(Level::Kernel).expect("a wedge").expect("a block");
    let code: Vec<u8> = (0..200).map(|n| fast.pages.code_byte(host + n)).collect();
    let (find, into, by) = change;
    let at = code.windows(find.len()).position(|part| part == find).expect("is copied");
    fast.pages.kernel().write(host - wedge_abi::CACHE as u64 + (at + into) as u64, &[by]);
    for _ in 1..times {
        assert_eq!(fast.run(u64::MAX), Exit::Halted);
        fast.set_vcpu(state());
    }
    assert_eq!(fast.run(u64::MAX), Exit::Failed);
    fast.failure().expect("a difference").what
}

#[test]
fn a_wrong_register_is_found() {
    let report = spoiled(&KERNEL[..HEAD], 1, 0x65);
    let line = report.lines().find(|line| line.contains("rcx")).expect("named");
    assert!(line.ends_with('*'), "{report}");
    assert!(line.contains("64") && line.contains("63"), "{report}");
    for part in ["guest code:", "host code:", "ffffffff81000000 b964000000", "dec ecx"] {
        assert!(report.contains(part), "no {part} in\n{report}");
    }
}

#[test]
fn a_wrong_write_is_found() {
    let report = spoiled(&[0x82, 5, 0, 0, 0], 1, 7);
    let line = report.lines().find(|line| line.contains("ram 0x50010")).expect("named");
    assert!(line.contains("0007") && line.contains("0005"), "{report}");
}

/// Another vCPU might have written there. It is not it each time.
#[test]
fn a_wrong_write_is_found_among_other_vcpus() {
    let among_others = LockStep { among_others: true, ..LockStep::default() };
    let change = (&[0x82, 5, 0, 0, 0][..], 1, 7);
    let report = spoiled_and_run(among_others, super::DOUBTS, change);
    assert!(report.contains("ram 0x50010"), "{report}");
}

#[test]
fn a_wrong_jump_is_found() {
    let report = spoiled(&[0xff, 0xc9, 0x0f, 0x85], 3, 0x84); // je
    assert!(report.contains("differs where it has come to"), "{report}");
}

#[test]
fn options() {
    let parse = |text: &str| text.parse::<LockStep>();
    assert_eq!(parse(""), Ok(LockStep::default()));
    let all = LockStep { runs: None, from: 7, every: Some(9), cpu: 1, among_others: false };
    assert_eq!(parse("runs=all,from=7,every=9,cpu=1"), Ok(all));
    assert_eq!(parse("runs=9").map(|options| options.runs), Ok(Some(9)));
    for wrong in ["runs", "runs=0", "from=x", "for=1", "cpu", "cpu=-1"] {
        assert!(parse(wrong).is_err(), "{wrong}");
    }
}
