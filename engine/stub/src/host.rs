//! Host calls. The filter lets them pass only from here and only with the secret.

pub use crate::filter::{
    FUTEX, IOCTL, MAP_EMPTY, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, MPROTECT, MUNMAP,
    PKEY_MPROTECT, SIGRETURN,
};
use crate::{context::Context, die, filter::MMAP, model::model, strict};
use core::{
    arch::{asm, naked_asm},
    sync::atomic::AtomicU32,
};
use wedge_abi::{JOURNAL_POKE, RAM_FD, Shared, VcpuPage};

pub const SIGACTION: u64 = 13;
pub use crate::filter::SIGALTSTACK;
pub const PRCTL: u64 = 157;
pub const ARCH_PRCTL: u64 = 158;
pub const SET_TID_ADDRESS: u64 = 218;
pub const SET_ROBUST_LIST: u64 = 273;
pub const EXIT_GROUP: u64 = 231;
pub const SECCOMP: u64 = 317;

const WAIT: u64 = 0;
const WAKE: u64 = 1;

/// What a host call of the wedge carries.
#[derive(Clone, Copy)]
pub struct Secret(u64);

impl Secret {
    /// Of the wedge that these pages are of.
    pub fn of(shared: &Shared) -> Self {
        Self(shared.setup.secret)
    }
}

/// A host call that is not of [`Context`]'s: its number and arguments.
///
/// # Safety
/// It maps nothing, and its arguments are in order.
#[inline(never)]
pub unsafe fn call(secret: Secret, [nr, a, b, c, d, e]: [u64; 6]) -> i64 {
    if let Some(model) = model() {
        return (model.call)(nr, a, b, c, d, e);
    }
    let result;
    // SAFETY: as asked of the caller.
    unsafe {
        asm!("syscall", inlateout("rax") nr => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") secret.0, lateout("rcx") _, lateout("r11") _);
    }
    result
}

/// Waits as long as a word is zero, or until a signal comes.
pub fn wait(secret: Secret, word: &AtomicU32) {
    // SAFETY: reads the word.
    unsafe { call(secret, [FUTEX, word.as_ptr() as u64, WAIT, 0, 0, 0]) };
}

/// Wakes who waits for a word.
pub fn wake(secret: Secret, word: &AtomicU32) {
    // SAFETY: touches nothing.
    unsafe { call(secret, [FUTEX, word.as_ptr() as u64, WAKE, 1, 0, 0]) };
}

/// Calls that change the guest's mappings. What is the user's is changed in the process of user code, too, if it has one
/// of its own.
///
/// # Safety
/// Of each: the range is the guest's, or the table's of patched calls: nothing here is there.
impl Context<'_> {
    /// Takes a range away.
    #[inline(never)]
    pub(crate) unsafe fn unmap(&mut self, at: u64, len: u64) -> i64 {
        let order = [MUNMAP, at, len, 0, 0, 0];
        // SAFETY: as asked of the caller.
        let result = unsafe { call(self.secret(), order) };
        if result == 0 {
            strict::have_done(self, order);
        }
        result
    }

    /// Gives a range other rights.
    #[inline(never)]
    pub(crate) unsafe fn protect(&mut self, at: u64, len: u64, rights: u64) -> i64 {
        let order = [MPROTECT, at, len, rights, 0, 0];
        // SAFETY: as asked of the caller.
        let result = unsafe { call(self.secret(), order) };
        if result == 0 {
            strict::have_changed(self, order);
        }
        result
    }

    /// Gives a range other rights, and has the wedge's key close it.
    pub(crate) unsafe fn protect_by_key(&mut self, at: u64, len: u64, rights: u64) -> i64 {
        // SAFETY: as asked of the caller.
        unsafe { call(self.secret(), [PKEY_MPROTECT, at, len, rights, self.shared.setup.key, 0]) }
    }

    /// Maps guest RAM, or memory without content. The secret rides in the halves of `fd` and `prot` the host
    /// ignores.
    #[inline(never)]
    pub(crate) unsafe fn map(
        &mut self,
        at: u64,
        len: u64,
        rights: u64,
        flags: u64,
        offset: u64,
    ) -> i64 {
        if let Some(model) = model() {
            return (model.map)(at, len, rights, flags, offset);
        }
        let result;
        let Secret(secret) = self.secret();
        let fd = RAM_FD | secret & !0xffff_ffff;
        let prot = rights & 0xffff_ffff | secret << 32;
        // SAFETY: as asked of the caller.
        unsafe {
            asm!("syscall", inlateout("rax") MMAP => result, in("rdi") at, in("rsi") len, in("rdx") prot,
                in("r10") flags, in("r8") fd, in("r9") offset, lateout("rcx") _, lateout("r11") _);
        }
        if result >= 0 {
            strict::have_changed(self, [MMAP, at, len, prot & 0xffff_ffff, flags, offset]);
        }
        result
    }

    /// Writes bytes into a private copy that has just been mapped.
    pub(crate) unsafe fn poke(&mut self, address: u64, len: u64, bytes: u64) -> i64 {
        if let Some(model) = model() {
            return (model.poke)(address, len, bytes);
        }
        for n in 0..len.min(8) {
            // SAFETY: as asked of the caller; if it is not mapped, this process ends.
            unsafe { *((address + n) as *mut u8) = (bytes >> (n * 8)) as u8 };
        }
        strict::have_done(self, [JOURNAL_POKE, address, len.min(8), bytes, 0, 0]);
        0
    }
}

/// Loads x87, SSE and AVX state from an XSAVE area that is in order. Ends this process if the area is not.
pub fn load_vectors(secret: Secret, area: *const u8) {
    if !load_vectors_careful(secret, area as u64, 7) {
        die();
    }
}

/// Loads components of an XSAVE area; false if the area is missing or bad.
pub fn load_vectors_careful(secret: Secret, area: u64, components: u64) -> bool {
    load_components(area, secret.0, components) != 0
}

/// Puts all vector state but the protection keys into what an area without it says: its initial state.
///
/// # Safety
/// The area is readable and in order.
pub unsafe fn reset_vectors(secret: Secret, area: *const u8) {
    // SAFETY: as asked of the caller; as for `load_components`.
    unsafe {
        asm!("xrstor64 [rdi]", "lea rax, [rip + shared_page]", "cmp rsi, [rax]", "je 2f", "ud2", "2:",
            in("rdi") area, in("rsi") secret.0, inlateout("eax") 0xe7 => _, in("edx") 0);
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
///
/// # Safety
/// The area is large enough for that, writable, and aligned to 64 bytes.
pub unsafe fn store_vectors(area: *mut u8) {
    // SAFETY: as asked of the caller.
    unsafe { asm!("xsave64 [{}]", in(reg) area, in("eax") 7, in("edx") 0) };
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
pub fn save_segments(vcpu: &mut VcpuPage) {
    // SAFETY: reads registers.
    unsafe {
        asm!("rdfsbase {}", out(reg) vcpu.regs.fs_base);
        asm!("rdgsbase {}", out(reg) vcpu.regs.gs_base);
        asm!("mov {0:e}, ds", "mov {1:e}, es", "mov {2:e}, fs", "mov {3:e}, gs",
            out(reg) vcpu.regs.ds, out(reg) vcpu.regs.es, out(reg) vcpu.regs.fs, out(reg) vcpu.regs.gs);
    }
}

/// Loads the data segment selectors user code runs with, where they differ. The monitor sees to it
/// that they are some the host has; the bases of FS and GS are lost.
pub fn set_selectors(vcpu: &VcpuPage) {
    let (ds, es, fs, gs): (u64, u64, u64, u64);
    // SAFETY: reads four registers.
    unsafe {
        asm!("mov {0:e}, ds", "mov {1:e}, es", "mov {2:e}, fs", "mov {3:e}, gs",
            out(reg) ds, out(reg) es, out(reg) fs, out(reg) gs);
    }
    if (ds, es, fs, gs) == (vcpu.regs.ds, vcpu.regs.es, vcpu.regs.fs, vcpu.regs.gs) {
        return;
    }
    // SAFETY: in 64-bit mode DS and ES mean nothing, and the wedge uses neither FS nor GS.
    unsafe {
        asm!("mov ds, {0:e}", "mov es, {1:e}", "mov fs, {2:e}", "mov gs, {3:e}",
            in(reg) vcpu.regs.ds, in(reg) vcpu.regs.es, in(reg) vcpu.regs.fs, in(reg) vcpu.regs.gs);
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
