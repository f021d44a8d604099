//! Host calls. The filter lets them pass only from here and only with the secret.

pub use crate::filter::{
    FUTEX, IOCTL, MAP_EMPTY, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, MPROTECT, MUNMAP,
    PKEY_MPROTECT, SIGRETURN,
};
use crate::{die, filter::MMAP, model::model, strict};
use core::arch::{asm, naked_asm};
use frame::{JOURNAL_POKE, RAM_FD, Shared, VcpuPage, Vectors};

pub const SIGACTION: u64 = 13;
pub use crate::filter::SIGALTSTACK;
pub const PRCTL: u64 = 157;
pub const ARCH_PRCTL: u64 = 158;
pub const SET_TID_ADDRESS: u64 = 218;
pub const SET_ROBUST_LIST: u64 = 273;
pub const EXIT_GROUP: u64 = 231;
pub const SECCOMP: u64 = 317;

/// Every call but mmap. The sixth argument is always the secret, the fifth of none is anything.
///
/// # Safety
/// The call does to this process what the caller means, and nothing to memory that this code relies on.
#[inline(never)]
pub unsafe extern "C" fn call(secret: u64, nr: u64, a: u64, b: u64, c: u64, d: u64) -> i64 {
    if let Some(model) = model() {
        return (model.call)(nr, a, b, c, d, 0);
    }
    let result;
    // SAFETY: as asked of the caller.
    unsafe {
        asm!("syscall", inlateout("rax") nr => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") 0, in("r9") secret, lateout("rcx") _, lateout("r11") _);
    }
    result
}

/// A call that changes what is mapped. The process of user code is to do the same, if there is one.
///
/// # Safety
/// There is nothing but guest memory in the range, or nothing that is in use.
pub unsafe fn change(s: &mut Shared, nr: u64, at: u64, len: u64, rights: u64, key: u64) -> i64 {
    // SAFETY: as asked of the caller.
    let result = unsafe { call(s.setup.secret, nr, at, len, rights, key) };
    if result == 0 && matches!(nr, MPROTECT | MUNMAP) {
        strict::have_done(s, [nr, at, len, rights, 0, 0]);
    }
    result
}

/// Maps guest RAM, or memory without content; in the process of user code as well, if that is the user's.
///
/// # Safety
/// There is nothing but guest memory in the range.
pub unsafe fn map(
    s: &mut Shared,
    at: u64,
    len: u64,
    prot: u64,
    flags: u64,
    offset: u64,
) -> i64 {
    // SAFETY: as asked of the caller.
    let result = unsafe { map_here(s.setup.secret, at, len, prot, flags, offset) };
    if result >= 0 {
        strict::have_mapped(s, [MMAP, at, len, prot & 0xffff_ffff, flags, offset]);
    }
    result
}

/// The secret rides in the halves of `fd` and `prot` the host ignores.
///
/// # Safety
/// As for [`map`].
#[inline(never)]
unsafe extern "C" fn map_here(
    secret: u64,
    at: u64,
    len: u64,
    prot: u64,
    flags: u64,
    offset: u64,
) -> i64 {
    if let Some(model) = model() {
        return (model.map)(at, len, prot, flags, offset);
    }
    let result;
    let fd = RAM_FD | secret & !0xffff_ffff;
    let prot = prot & 0xffff_ffff | secret << 32;
    // SAFETY: as asked of the caller.
    unsafe {
        asm!("syscall", inlateout("rax") MMAP => result, in("rdi") at, in("rsi") len, in("rdx") prot,
            in("r10") flags, in("r8") fd, in("r9") offset, lateout("rcx") _, lateout("r11") _);
    }
    result
}

/// Loads x87, SSE and AVX state from an XSAVE area that is in order.
pub fn load_vectors(secret: u64, area: *const u8) {
    if !load_vectors_careful(secret, area as u64, 7) {
        die();
    }
}

/// Loads components of an XSAVE area; false if the area is missing or bad.
pub fn load_vectors_careful(secret: u64, area: u64, components: u64) -> bool {
    load_components(area, secret, components) != 0
}

/// Puts all vector state but the protection keys into what an area without it says: its initial state.
pub fn reset_vectors(secret: u64, area: &Vectors) {
    let area = area.0.as_ptr();
    // SAFETY: an area of zeroes is in order; as for `load_components`.
    unsafe {
        asm!("xrstor64 [rdi]", "lea rax, [rip + shared_page]", "cmp rsi, [rax]", "je 2f", "ud2", "2:",
            in("rdi") area, in("rsi") secret, inlateout("eax") 0xe7 => _, in("edx") 0);
    }
}

/// XRSTOR can load the protection-key register too, so guest code that jumps to it could open all
/// keys: what only legitimate callers know is asked for right behind it.
#[unsafe(naked)]
extern "C" fn load_components(area: u64, secret: u64, components: u64) -> u64 {
    naked_asm!(
        "mov eax, edx",
        "and eax, 7",
        "xor edx, edx",
        ".globl careful_xrstor",
        "careful_xrstor:",
        "xrstor64 [rdi]",
        "lea rax, [rip + shared_page]",
        "cmp rsi, [rax]",
        "jne 9f",
        "mov eax, 1",
        "ret",
        "9: ud2"
    )
}

/// PC of an instruction whose fault is a failure of [`load_vectors_careful`].
#[unsafe(naked)]
pub extern "C" fn careful_xrstor() -> u64 {
    naked_asm!("lea rax, [rip + careful_xrstor]", "ret")
}

/// Stores x87, SSE and AVX state.
pub fn store_vectors(area: &mut Vectors) {
    // SAFETY: the area is large enough and aligned.
    unsafe { asm!("xsave64 [{}]", in(reg) area.0.as_mut_ptr(), in("eax") 7, in("edx") 0) };
}

/// Sets the FS and GS bases guest code runs with.
pub fn set_bases(fs: u64, gs: u64) {
    if !canonical(fs) || !canonical(gs) {
        die();
    }
    // SAFETY: the wedge itself uses neither.
    unsafe { asm!("wrfsbase {}", "wrgsbase {}", in(reg) fs, in(reg) gs) };
}

/// Takes the segment bases and selectors that user code may have changed.
pub fn save_segments(f: &mut VcpuPage) {
    // SAFETY: reads registers.
    unsafe {
        asm!("rdfsbase {}", out(reg) f.regs.fs_base);
        asm!("rdgsbase {}", out(reg) f.regs.gs_base);
        asm!("mov {0:e}, ds", "mov {1:e}, es", "mov {2:e}, fs", "mov {3:e}, gs",
            out(reg) f.regs.ds, out(reg) f.regs.es, out(reg) f.regs.fs, out(reg) f.regs.gs);
    }
}

/// Loads the data segment selectors user code runs with, where they differ. The monitor sees to it
/// that they are some the host has; the bases of FS and GS are lost.
pub fn set_selectors(f: &VcpuPage) {
    let (ds, es, fs, gs): (u64, u64, u64, u64);
    // SAFETY: reads four registers.
    unsafe {
        asm!("mov {0:e}, ds", "mov {1:e}, es", "mov {2:e}, fs", "mov {3:e}, gs",
            out(reg) ds, out(reg) es, out(reg) fs, out(reg) gs);
    }
    if (ds, es, fs, gs) == (f.regs.ds, f.regs.es, f.regs.fs, f.regs.gs) {
        return;
    }
    // SAFETY: in 64-bit mode DS and ES mean nothing, and the wedge uses neither FS nor GS.
    unsafe {
        asm!("mov ds, {0:e}", "mov es, {1:e}", "mov fs, {2:e}", "mov gs, {3:e}",
            in(reg) f.regs.ds, in(reg) f.regs.es, in(reg) f.regs.fs, in(reg) f.regs.gs);
    }
}

fn canonical(address: u64) -> bool {
    ((address as i64) << 16 >> 16) as u64 == address
}

/// Reads a word of the user's memory, if it is mapped.
pub fn user_word(address: u64) -> Option<u64> {
    if let Some(model) = model() {
        return (model.user_word)(address);
    }
    let mut value = 0;
    let known = address >> 47 == 0 && crate::assist::load_careful(address, &mut value) != 0;
    known.then_some(value)
}

/// Where the bytes of a page that is mapped at an HVA can be read.
pub fn shown(page: u64) -> u64 {
    if let Some(model) = model() {
        return (model.shown)(page);
    }
    page
}

/// Writes bytes into a private copy that has just been mapped.
///
/// # Safety
/// The bytes are guest memory.
pub unsafe fn poke(s: &mut Shared, address: u64, len: u64, bytes: u64) -> i64 {
    if let Some(model) = model() {
        return (model.poke)(address, len, bytes);
    }
    for n in 0..len.min(8) {
        // SAFETY: as asked of the caller; if it is not mapped, this process ends.
        unsafe { *((address + n) as *mut u8) = (bytes >> (n * 8)) as u8 };
    }
    strict::have_done(s, [JOURNAL_POKE, address, len.min(8), bytes, 0, 0]);
    0
}
