//! Programs by chance: `chance PROGRAMS CASES [trace]` runs each line of the file PROGRAMS in a process of
//! its own and prints, for each, a digest of what every step of it has seen, or with `trace` all of it.
//!
//! A line is a name, the places (page addresses) that the program uses, and its steps: kind and number.
//! It has no C library, so that nothing but its own image is in its address space, at fixed addresses, and
//! nothing it sees depends on where or when it runs. `docs/chance.md` says how to use it.

#![no_std]
#![no_main]

mod asm;
mod cpu;
mod random;
mod steps;
mod sys;
mod trace;
mod world;

use core::{arch::global_asm, panic::PanicInfo};

use sys::*;
use trace::note;
use world::World;

global_asm!(
    ".globl _start",
    "_start:",
    // All registers are zero at a program's start but RSP.
    "or rbx, rax",
    "or rbx, rcx",
    "or rbx, rdx",
    "or rbx, rsi",
    "or rbx, rdi",
    "or rbx, rbp",
    "or rbx, r8",
    "or rbx, r9",
    "or rbx, r10",
    "or rbx, r11",
    "or rbx, r12",
    "or rbx, r13",
    "or rbx, r14",
    "or rbx, r15",
    "mov rsi, rbx",
    "mov rdi, rsp",
    "lea rsp, [{stack} + {len}]",
    "and rsp, -16",
    "call {main}",
    "ud2",
    stack = sym STACK,
    len = const STACK_LEN,
    main = sym main,
);

const STACK_LEN: usize = 0x4_0000;
static mut STACK: [u8; STACK_LEN] = [0; STACK_LEN];
/// Seconds a program may take; the reference interpreter needs some, and so does any engine on a host with much to do.
const PATIENCE: u64 = 200;
const MOST_STEPS: usize = 64;

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    note!("panic: {info}\n");
    exit(101)
}

/// Linked, never called.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

unsafe extern "C" fn main(stack: *const *const u8, registers: u64) -> ! {
    // SAFETY: the kernel has put a count and that many strings there.
    let (count, words) = unsafe { (stack.cast::<usize>().read(), stack.add(1)) };
    // SAFETY: as above; each ends with a zero.
    let word = |at: usize| unsafe { core::ffi::CStr::from_ptr((*words.add(at)).cast()) }.to_bytes();
    trace::set_up();
    if count >= 2 && word(1) == b"echo" {
        steps::echo(words, count, registers);
        exit(0);
    }
    if count < 3 {
        print(2, b"chance PROGRAMS CASES [trace]\n");
        exit(2);
    }
    let (programs, cases) = (file(word(1)), file(word(2)));
    let all = count > 3;
    let mask = 1_u64 << 16;
    sys!(RT_SIGPROCMASK, 0, &raw const mask, 0, 8);
    for line in programs.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        program(core::str::from_utf8(line).unwrap_or(""), cases, all);
    }
    exit(0)
}

/// A file's content, mapped behind this program's image.
fn file(path: &[u8]) -> &'static [u8] {
    let descriptor = sys!(OPEN, path.as_ptr(), 0);
    let len = sys!(8, descriptor, 0, 2);
    if descriptor < 0 || len < 0 {
        print(2, b"chance: cannot open a file\n");
        exit(2);
    }
    let at = NEXT_FILE
        .fetch_add((len as u64).next_multiple_of(4096), core::sync::atomic::Ordering::SeqCst);
    let mapped = sys!(MMAP, at, len.max(1), PROT_READ, MAP_PRIVATE | MAP_FIXED, descriptor, 0);
    if mapped < 0 {
        print(2, b"chance: cannot map a file\n");
        exit(2);
    }
    sys!(CLOSE, descriptor);
    // SAFETY: mapped for as long as this program runs.
    unsafe { core::slice::from_raw_parts(mapped as *const u8, len as usize) }
}

/// Where files are mapped: above all of the image, below what programs use.
static NEXT_FILE: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0x100_0000);

/// Where each step's text begins.
#[repr(C, align(4096))]
struct Starts([usize; 512]);
static mut STARTS: Starts = Starts([0; 512]);

fn starts() -> *mut usize {
    (&raw mut STARTS).cast()
}

/// Runs a program in a process of its own, and prints what it has seen.
fn program(line: &str, cases: &'static [u8], all: bool) {
    trace::clear();
    sys!(MMAP, starts(), 4096, 3, MAP_SHARED | MAP_FIXED | MAP_ANONYMOUS, usize::MAX, 0);
    let child = sys!(FORK);
    if child == 0 {
        let none = 0_u64;
        sys!(109, 0, 0);
        sys!(157, 1, 9);
        sys!(RT_SIGPROCMASK, 2, &raw const none, 0, 8);
        run(line, cases);
        exit(0);
    }
    let (mut status, late) = (0_u32, wait(child));
    if late {
        sys!(KILL, -child, 9);
        sys!(KILL, child, 9);
    }
    sys!(WAIT4, child, &raw mut status, 0, 0);
    // Whatever it has left behind.
    sys!(KILL, -child, 9);
    report(line, status, late, all);
}

/// Waits for a child's end; true if it does not come.
fn wait(child: isize) -> bool {
    let (set, mut info) = (1_u64 << 16, [0_u32; 32]);
    for _ in 0..PATIENCE {
        let second = [1_u64, 0];
        let mut state = [0_u32; 32];
        // WEXITED, WNOHANG, WNOWAIT.
        sys!(247, 1, child, state.as_mut_ptr(), 0x0100_0005, 0);
        if state[0] != 0 {
            return false;
        }
        sys!(RT_SIGTIMEDWAIT, &raw const set, info.as_mut_ptr(), second.as_ptr(), 8);
    }
    true
}

fn hexadecimal(word: &str) -> u64 {
    u64::from_str_radix(word, 16).unwrap_or(0)
}

fn steps_of(line: &str) -> impl Iterator<Item = (&str, u64)> {
    let words = line.split(' ').skip(5);
    words.filter_map(|word| word.split_once(':')).map(|(kind, number)| (kind, hexadecimal(number)))
}

/// Runs the steps.
fn run(line: &str, cases: &'static [u8]) {
    clear_addresses();
    let limit = [0_u64; 2];
    sys!(SETRLIMIT, 4, limit.as_ptr());
    let mut places = [0; 4];
    line.split(' ').skip(1).zip(&mut places).for_each(|(word, place)| *place = hexadecimal(word));
    let world = World::new(places, cases);
    cpu::set_up();
    for (at, (kind, number)) in steps_of(line).take(MOST_STEPS).enumerate() {
        // SAFETY: the array has room for that many.
        unsafe { starts().add(at).write_volatile(trace::text().len() + 1) };
        match steps::find(kind) {
            Some(step) => step(&mut random::Random::new(number), &world),
            None => note!("there is no step {kind}\n"),
        }
    }
}

/// Unmaps all that is not this program's own: stack, vDSO, heap.
fn clear_addresses() {
    let end = NEXT_FILE.load(core::sync::atomic::Ordering::SeqCst);
    sys!(MUNMAP, end, 0x7fff_ffff_f000 - end);
    sys!(MUNMAP, 0x1_0000, 0x80_0000 - 0x1_0000);
}

/// Prints a line of digests, or all that has been seen.
fn report(line: &str, status: u32, late: bool, all: bool) {
    let text = trace::text();
    let count = steps_of(line).count().min(MOST_STEPS);
    // SAFETY: the array has room for that many.
    let start = |at: usize| unsafe { starts().add(at).read_volatile() };
    let begun = (0..count).take_while(|&at| start(at) != 0).count();
    let end = |at: usize| if at + 1 < begun { start(at + 1).wrapping_sub(1) } else { text.len() };
    // A program that goes astray may have written here, too.
    let piece = |at: usize| text.get(start(at) - 1..end(at)).unwrap_or(b"?");
    let mut words = line.split(' ');
    let name = words.next().unwrap_or("");
    let mut out = Output::new();
    out.add(name);
    for (at, (kind, number)) in steps_of(line).take(begun).enumerate() {
        out.add(if all { "\n@ " } else { " " });
        out.add(kind);
        if all {
            out.number(":", number);
            out.add("\n");
            out.flush();
            print(1, piece(at));
        } else {
            out.number("=", trace::digest(piece(at)) as u32 as u64);
        }
    }
    out.add(if late { " LATE" } else { " end" });
    out.number("=", status.into());
    out.add("\n");
    out.flush();
}

/// A line being made.
struct Output {
    bytes: [u8; 4096],
    len: usize,
}

impl Output {
    fn new() -> Self {
        Self { bytes: [0; 4096], len: 0 }
    }

    fn add(&mut self, text: &str) {
        let text = text.as_bytes();
        self.bytes[self.len..self.len + text.len()].copy_from_slice(text);
        self.len += text.len();
    }

    fn number(&mut self, before: &str, number: u64) {
        use core::fmt::Write;
        let _ = write!(self, "{before}{number:x}");
    }

    fn flush(&mut self) {
        print(1, &self.bytes[..self.len]);
        self.len = 0;
    }
}

impl core::fmt::Write for Output {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        self.add(text);
        Ok(())
    }
}
