//! Children, threads, other programs.

use core::{
    arch::global_asm,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use super::code;
use crate::{
    asm::Asm,
    cpu::{self, Open, State},
    random::Random,
    sys::{self, *},
    trace::note,
    world::{PAGE, World},
};

/// A child sees what its parent's memory was, and changes its own.
pub fn fork(random: &mut Random, world: &World) {
    let (mut inner, ends) = (Random::new(random.bits()), random.below(4));
    let child = sys!(FORK);
    if child == 0 {
        super::memory::peek(&mut inner, world);
        let steps = [super::memory::map, super::memory::copy, code::align];
        for _ in 0..inner.below(4) {
            inner.pick(&steps)(&mut inner, world);
        }
        super::memory::peek(&mut inner, world);
        finish(&mut inner, ends);
    }
    let mut status = 0_u32;
    let waited = sys!(WAIT4, child, &raw mut status, 0, 0);
    note!("child {} {status:x}\n", waited == child);
    if random.chance(50) {
        super::memory::peek(random, world);
    }
}

/// Ends a child: by a code, by a signal sent, or by what the kernel does about a fault.
fn finish(random: &mut Random, how: u64) -> ! {
    let signal = random.pick(&[2, 6, 9, 11, 15, 34]);
    let default = [0_u64; 4];
    sys!(RT_SIGACTION, signal, default.as_ptr(), 0, 8);
    sys!(RT_SIGACTION, 11, default.as_ptr(), 0, 8);
    match how {
        0 => {
            sys!(KILL, sys!(GETPID), signal);
        }
        // SAFETY: it is to fault.
        1 => unsafe { core::arch::asm!("mov byte ptr [{}], 1", in(reg) 0x10_u64) },
        _ => {}
    }
    sys::exit(random.below(256) as usize)
}

unsafe extern "C" {
    /// Clones with `flags` on `stack`, where the thread calls `function(argument)`; the last two are
    /// addresses of thread identifiers.
    fn chance_clone(
        flags: u64,
        stack: u64,
        function: extern "C" fn(u64),
        argument: u64,
        tid: *const u32,
    ) -> isize;
}

global_asm!(
    ".globl chance_clone",
    "chance_clone:",
    "mov r9, rdx",
    "mov r11, rcx",
    "push r12",
    "push r13",
    "mov r12, r9",
    "mov r13, r11",
    "mov rdx, r8",
    "mov r10, r8",
    "xor r8d, r8d",
    "mov eax, 56",
    "syscall",
    "test rax, rax",
    "jz 2f",
    "pop r13",
    "pop r12",
    "ret",
    "2: and rsp, -16",
    "mov rdi, r13",
    "call r12",
    "mov eax, 60",
    "xor edi, edi",
    "syscall",
    "ud2",
);

/// The kernel's version: what is to differ, so that a test sees differences found.
pub fn kernel(_: &mut Random, _: &World) {
    let mut names = [0_u8; 390];
    sys!(UNAME, names.as_mut_ptr());
    note!("kernel {:x}\n", crate::trace::digest(&names));
}

const THREADS: usize = 4;
const STACK: usize = 0x4000;
#[repr(C, align(4096))]
struct Stacks([[u8; STACK]; THREADS]);
static mut STACKS: Stacks = Stacks([[0; STACK]; THREADS]);
static ALIVE: [AtomicU32; THREADS] = [const { AtomicU32::new(0) }; THREADS];
static LOCK: AtomicU32 = AtomicU32::new(0);
static TURN: AtomicU32 = AtomicU32::new(0);
static COUNT: AtomicU64 = AtomicU64::new(0);
static PLACE: AtomicU64 = AtomicU64::new(0);
static LOOPS: AtomicU32 = AtomicU32::new(0);

const VM: u64 = 0x100;
const VFORK_FLAG: u64 = 0x4000;
/// VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, PARENT_SETTID, CHILD_CLEARTID.
const THREAD: u64 = VM | 0x200 | 0x400 | 0x800 | 0x1_0000 | 0x4_0000 | 0x10_0000 | 0x20_0000;

fn wait_for(word: &AtomicU32, value: u32) {
    sys!(FUTEX, word.as_ptr(), 0, value, 0);
}

fn wake(word: &AtomicU32, count: u32) {
    sys!(FUTEX, word.as_ptr(), 1, count);
}

fn lock() {
    while LOCK.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        wait_for(&LOCK, 1);
    }
}

fn unlock() {
    LOCK.store(0, Ordering::SeqCst);
    wake(&LOCK, 1);
}

/// Counts under a lock, in turns, and in a page of a place.
extern "C" fn thread(number: u64) {
    for round in 0..LOOPS.load(Ordering::SeqCst) {
        lock();
        COUNT.store(COUNT.load(Ordering::SeqCst) + number + u64::from(round), Ordering::SeqCst);
        unlock();
        let place = PLACE.load(Ordering::SeqCst) + number * 8;
        // SAFETY: the place has been mapped for the threads; each has its word.
        unsafe { (place as *mut u64).write_volatile((place as *const u64).read_volatile() + 3) };
    }
    loop {
        let turn = TURN.load(Ordering::SeqCst);
        if u64::from(turn) == number {
            break;
        }
        wait_for(&TURN, turn);
    }
    note!("thread {number} ");
    TURN.fetch_add(1, Ordering::SeqCst);
    wake(&TURN, u32::MAX >> 1);
}

fn stack_of(number: usize) -> u64 {
    (&raw mut STACKS) as u64 + ((number + 1) * STACK) as u64
}

/// Threads that wait for each other.
pub fn threads(random: &mut Random, world: &World) {
    let page = random.pick(&world.places);
    let flags = MAP_FIXED | MAP_ANONYMOUS | random.pick(&[MAP_PRIVATE, MAP_SHARED]);
    let result = sys!(MMAP, page, PAGE, 3, flags, usize::MAX, 0);
    note!("threads at {page:x} = {result:x} ");
    let count = 1 + random.below(THREADS as u64) as usize;
    PLACE.store(page, Ordering::SeqCst);
    COUNT.store(0, Ordering::SeqCst);
    TURN.store(0, Ordering::SeqCst);
    LOOPS.store(random.below(200) as u32, Ordering::SeqCst);
    for number in 0..count {
        ALIVE[number].store(1, Ordering::SeqCst);
        // SAFETY: each thread has its stack; they end before this function returns.
        unsafe {
            chance_clone(THREAD, stack_of(number), thread, number as u64, ALIVE[number].as_ptr())
        };
    }
    for alive in &ALIVE[..count] {
        loop {
            let value = alive.load(Ordering::SeqCst);
            if value == 0 {
                break;
            }
            wait_for(alive, value);
        }
    }
    // SAFETY: mapped above.
    let words = [0, 1, 2, 3].map(|at| unsafe { ((page + at * 8) as *const u64).read_volatile() });
    note!("count {} {words:?}\n", COUNT.load(Ordering::SeqCst));
}

extern "C" fn become_echo(_: u64) {
    let arguments =
        [c"/proc/self/exe".as_ptr(), c"echo".as_ptr(), c"one".as_ptr(), core::ptr::null()];
    let environment = [c"A=b".as_ptr(), core::ptr::null()];
    sys!(EXECVE, arguments[0], arguments.as_ptr(), environment.as_ptr());
    sys!(EXIT, 77);
}

extern "C" fn end_at_once(code: u64) {
    sys!(EXIT, code);
}

/// Another program in a child that shares memory until then, or none.
pub fn execve(random: &mut Random, _: &World) {
    let function = random.pick(&[become_echo as extern "C" fn(u64), become_echo, end_at_once]);
    let flags = random.pick(&[VM | VFORK_FLAG, VFORK_FLAG, 0, VM]) | 17;
    let mut pipe = [0_i32; 2];
    sys!(PIPE2, pipe.as_mut_ptr(), 0);
    // Descriptor 1 of the child is the pipe's, and of this process while it lasts.
    const DUP: usize = 32;
    const DUP2: usize = 33;
    let kept = sys!(DUP, 1);
    sys!(DUP2, pipe[1], 1);
    // SAFETY: the stack is nobody else's.
    let child = unsafe { chance_clone(flags, stack_of(0), function, 33, core::ptr::null()) };
    sys!(DUP2, kept, 1);
    sys!(CLOSE, kept);
    sys!(CLOSE, pipe[1]);
    let mut status = 0_u32;
    let waited = sys!(WAIT4, child, &raw mut status, 0, 0);
    let mut said = [0_u8; 4096];
    let len = sys!(READ, pipe[0], said.as_mut_ptr(), said.len()).max(0) as usize;
    sys!(CLOSE, pipe[0]);
    note!("execve {flags:x} {} {status:x} ", waited == child);
    note!("{}\n", core::str::from_utf8(&said[..len]).unwrap_or("?"));
}

/// What a program finds when it starts: its words, and that the rest is as it should be.
pub fn echo(words: *const *const u8, count: usize, registers: u64) {
    note!("echo {count} aligned {} registers {registers:x}", words as usize % 16);
    // SAFETY: the kernel has put them on the stack.
    unsafe {
        let last = *words.add(count - 1);
        note!(" {:?} ends {}", core::slice::from_raw_parts(last, 4), (*words.add(count)).is_null());
        let mut at = count + 1;
        while !(*words.add(at)).is_null() {
            note!(" env {:?}", core::slice::from_raw_parts(*words.add(at), 4));
            at += 1;
        }
    }
    sys::print(1, crate::trace::text());
}

/// All registers keep what they hold through the kernel, other processes, and faults.
pub fn registers(random: &mut Random, world: &World) {
    let mut asm = Asm::new();
    for _ in 0..1 + random.below(4) {
        match random.below(4) {
            // sched_yield; a call that does not exist; reading a page that is not there yet.
            0 => asm.system_call(24),
            1 => asm.system_call(1000),
            2 => asm.add(&[0x41, 0x8a, 0x07]),
            _ => asm.add(&[0x49, 0x81, 0xc7, 0, 0x10, 0, 0]),
        };
    }
    asm.add(&[0x0f, 0x0b]);
    let page = random.pick(&world.places);
    let flags = MAP_FIXED | MAP_ANONYMOUS | MAP_PRIVATE;
    sys!(MMAP, page, 8 * PAGE, 3, flags, usize::MAX, 0);
    let mut state = State::at(code::put(random, world, asm.bytes()));
    code::registers(random, world, &mut state);
    state.context.eflags &= !0x40000;
    state.set(cpu::ORDER[15], page);
    // RCX, R11 and RAX are the system call's; R11 holds flags.
    cpu::run(&state, None).note(Open::default());
}
