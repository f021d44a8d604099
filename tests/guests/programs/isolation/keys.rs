//! Attempts to execute WRPKRU, or XRSTOR of the keys, where nobody looks for them: inside other instructions, across
//! pages, in pages that were harmless when they were first executed.
//!
//! The guest's CPU has no protection keys: WRPKRU is undefined, and an area with a component that XCR0 does not have is a
//! general-protection fault. Who gets past that reads the kernel's memory, which is told, too.

use wedge_abi::{MAX_SITES, RAM, STUB_LEN, STUBS};
use crate::{
    End::{Killed, Signal},
    ILL, Needs, Outcome, SEGV, asm,
    load, mmap, wedge_calls,
};
use core::{ffi::c_void, hint};
use std::{
    fs::File,
    io::Write,
    os::fd::{AsRawFd, FromRawFd},
    ptr,
};

unsafe extern "C" {
    fn mprotect(at: *mut c_void, len: usize, protection: i32) -> i32;
    fn memfd_create(name: *const i8, flags: u32) -> i32;
    fn pread(fd: i32, to: *mut c_void, len: usize, offset: i64) -> isize;
    fn pwrite(fd: i32, from: *const c_void, len: usize, offset: i64) -> isize;
}

const PAGE: usize = 4096;
const READ: i32 = 1;
const WRITE: i32 = 2;
const EXECUTE: i32 = 4;
const SHARED: i32 = 1;
const PRIVATE: i32 = 2;
const ANONYMOUS: i32 = 0x20;
const FIXED: i32 = 0x10;
const RET: u8 = 0xc3;
/// WRPKRU, XRSTOR [RDI] and XRSTOR64 [RDI], each with a RET.
const WRPKRU: &[u8] = &[0x0f, 0x01, 0xef, RET];
const XRSTOR: &[u8] = &[0x0f, 0xae, 0x2f, RET];
const XRSTOR64: &[u8] = &[0x48, 0x0f, 0xae, 0x2f, RET];
/// How each must end.
const WAYS: [(&str, &[u8], i32); 3] =
    [("wrpkru", WRPKRU, ILL), ("xrstor", XRSTOR, SEGV), ("xrstor64", XRSTOR64, SEGV)];
/// An address that is WRPKRU and RET.
const TELLING: usize = 0x1000_c3ef_010f;
/// Often enough for a system call to be patched.
const OFTEN: u32 = 200;

/// An XSAVE area that has nothing but protection keys, all of them open.
#[repr(C, align(64))]
struct Area([u8; 4096]);

/// Calls such code with the registers that make it open all keys, and then reads guest RAM, the kernel's included, where the wedge
/// has it. True if that went well.
fn open_by(at: usize, code: &[u8]) -> bool {
    let mut area = Area([0; 4096]);
    area.0[513] = 2; // component 9
    // SAFETY: the attempt; whatever it does, it does to this process.
    unsafe {
        asm!("call {}", in(reg) at, in("rdi") &raw const area, inlateout("rax") keys_mask(code) => _,
            inlateout("rcx") 0 => _, inlateout("rdx") 0 => _, lateout("r11") _);
    }
    load(RAM as u64 + 0x10_0000)
}

/// What RAX must be: XRSTOR's mask, or the keys that are to be shut.
fn keys_mask(code: &[u8]) -> u64 {
    if code.contains(&0xae) { 0x200 } else { 0 }
}

fn map(len: usize, protection: i32, flags: i32, fd: i32) -> usize {
    // SAFETY: the kernel chooses where.
    unsafe { mmap(ptr::null_mut(), len, protection, flags, fd, 0) as usize }
}

fn protect(at: usize, len: usize, protection: i32) {
    // SAFETY: memory of this program's own choice.
    unsafe { mprotect(at as *mut c_void, len, protection) };
}

fn put(at: usize, bytes: &[u8]) {
    // SAFETY: memory that was mapped for it.
    bytes
        .iter()
        .enumerate()
        .for_each(|(n, byte)| unsafe { ptr::write_volatile((at + n) as *mut u8, *byte) });
}

fn call(at: usize) {
    // SAFETY: a RET is there.
    unsafe { asm!("call {}", in(reg) at, clobber_abi("C")) };
}

/// Inside the immediate operand of an instruction.
fn inside(code: &[u8]) -> bool {
    let at = map(PAGE, READ | WRITE, PRIVATE | ANONYMOUS, -1);
    put(at + 0x100, &[0x48, 0xb8]); // movabs rax, imm64
    put(at + 0x102, code);
    put(at + 0x10a, &[RET]);
    protect(at, PAGE, READ | EXECUTE);
    call(at + 0x100);
    open_by(at + 0x102, code)
}

/// Across the border of two pages, of which one or the other is executed first, or none; so many bytes before it.
fn across(code: &[u8], before: usize, first: Option<usize>) -> bool {
    let at = map(2 * PAGE, READ | WRITE, PRIVATE | ANONYMOUS, -1);
    [0x10, PAGE + 0x10].iter().for_each(|ret| put(at + ret, &[RET]));
    put(at + PAGE - before, code);
    protect(at, 2 * PAGE, READ | EXECUTE);
    first.into_iter().for_each(|page| call(at + page * PAGE + 0x10));
    open_by(at + PAGE - before, code)
}

/// Written after the page has been executed, which may be written all the time, by this program or for it.
fn later(code: &[u8], write: impl FnOnce(usize, &[u8])) -> bool {
    let at = map(PAGE, READ | WRITE | EXECUTE, PRIVATE | ANONYMOUS, -1);
    put(at + 0x200, &[RET]);
    call(at + 0x200);
    write(at + 0x200, code);
    open_by(at + 0x200, code)
}

/// Written by code in the same page, just before it gets there.
fn by_itself(code: &[u8]) -> bool {
    let at = map(PAGE, READ | WRITE | EXECUTE, PRIVATE | ANONYMOUS, -1);
    // mov rsi, imm64; mov [rip], rsi: over what follows
    put(at, &[0x48, 0xbe]);
    put(at + 2, code);
    put(at + 10, &[0x48, 0x89, 0x35, 0, 0, 0, 0]);
    put(at + 17, &[RET; 8]);
    open_by(at, code)
}

fn memory_file() -> File {
    // SAFETY: a fresh descriptor.
    unsafe { File::from_raw_fd(memfd_create(c"code".as_ptr().cast(), 0)) }
}

/// Written by another mapping of the page.
fn elsewhere(code: &[u8]) -> bool {
    let file = memory_file();
    (&file).write_all(&[RET; PAGE]).expect("there is memory");
    let [writes, runs] =
        [WRITE | READ, EXECUTE | READ].map(|rights| map(PAGE, rights, SHARED, file.as_raw_fd()));
    call(runs + 0x300);
    put(writes + 0x300, code);
    open_by(runs + 0x300, code)
}

/// Written by the kernel into a file that is mapped.
fn in_a_file(code: &[u8], flags: i32) -> bool {
    let file = memory_file();
    (&file).write_all(&[RET; PAGE]).expect("there is memory");
    let runs = map(PAGE, EXECUTE | READ, flags, file.as_raw_fd());
    call(runs + 0x400);
    // SAFETY: bytes of ours.
    unsafe { pwrite(file.as_raw_fd(), code.as_ptr().cast(), code.len(), 0x400) };
    open_by(runs + 0x400, code)
}

/// Written by the kernel, from a file.
fn read_from_a_file(at: usize, code: &[u8]) {
    let file = memory_file();
    (&file).write_all(code).expect("there is memory");
    // SAFETY: the page is mapped for it.
    unsafe { pread(file.as_raw_fd(), at as *mut c_void, code.len(), 0) };
}

/// In the stub of a patched system call, which has the address behind the call as an operand.
fn in_a_stub() -> bool {
    let getpid = [0xb8, 39, 0, 0, 0, 0x0f, 0x05, RET]; // mov eax, 39; syscall; ret
    let page = TELLING & !(PAGE - 1);
    // SAFETY: nothing is there.
    unsafe { mmap(page as *mut u8, PAGE, READ | WRITE, PRIVATE | ANONYMOUS | FIXED, -1, 0) };
    put(TELLING - 7, &getpid);
    protect(page, PAGE, READ | EXECUTE);
    (0..OFTEN).for_each(|_| call(TELLING - 7));
    // SAFETY: the stubs are open to programs.
    let stubs = unsafe { core::slice::from_raw_parts(STUBS as *const u8, MAX_SITES * STUB_LEN) };
    // Whole, the bytes must not be in this code: its page would be interpreted.
    let [first, others @ ..] = *hint::black_box(&[0x0f, 0x01, 0xef, RET]);
    let found = stubs.windows(4).position(|bytes| bytes[0] == first && bytes[1..] == others);
    if let Some(at) = found {
        return open_by(STUBS + at, WRPKRU);
    }
    // SAFETY: there is none: as WRPKRU would end.
    unsafe { asm!("ud2") };
    true
}

pub fn attempts(o: &mut Outcome) {
    for (name, code, signal) in WAYS {
        let mut attempt = |how: &str, attempt: &dyn Fn() -> bool| {
            o.attempt(&format!("{name} {how}"), Needs::Nothing, Signal(signal), attempt)
        };
        attempt("inside an instruction", &|| inside(code));
        for before in 1..code.len() - 1 {
            attempt(&format!("{before} before a border"), &|| across(code, before, None));
            attempt(&format!("{before} before a border, first page first"), &|| {
                across(code, before, Some(0))
            });
            attempt(&format!("{before} before a border, second page first"), &|| {
                across(code, before, Some(1))
            });
        }
        attempt("written later", &|| later(code, put));
        attempt("written later by the kernel", &|| later(code, read_from_a_file));
        attempt("written by itself", &|| by_itself(code));
        attempt("written elsewhere", &|| elsewhere(code));
        attempt("written to a shared file", &|| in_a_file(code, SHARED));
        attempt("written to a private file", &|| in_a_file(code, PRIVATE));
    }
    if !wedge_calls().is_empty() {
        // Where the program is translated with look-ups, it has no stubs to read: SIGSEGV, not SIGILL.
        o.attempt("wrpkru in a stub", Needs::Nothing, Killed, in_a_stub);
    }
}
