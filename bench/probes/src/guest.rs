//! Probe guests: machine code installed at fixed addresses, entered with chosen registers, left by
//! a signal whose frame the probe then reads.

use crate::host::{self, Handler};
use std::{
    arch::global_asm,
    sync::atomic::{AtomicBool, Ordering},
};

// One block, because assembler macros do not outlive theirs.
global_asm!(include_str!("entry.s"), include_str!("probe/round_trip.s"));

/// Where guest user code is installed: below 4 GiB, so that 32-bit code can run there too.
pub const TEXT: usize = 0x4000_0000;
/// The guest user stack's lowest byte; it is one page, and grows down from `STACK + PAGE`.
pub const STACK: usize = 0x4100_0000;
/// The alternate signal stack.
pub const ALT_STACK: usize = 0x12_0000_0000;
/// Bytes of alternate stack: enough for a frame with AMX tiles.
pub const ALT_STACK_LEN: usize = 0x8000;
/// The eax value with which guest code asks to leave.
pub const EXIT: u64 = 0xdead;

/// Registers a guest starts with, in the order `probe_enter` loads them.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Regs {
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub rbp: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub rsp: u64,
    pub r15: u64,
    pub rip: u64,
    pub rflags: u64,
}

impl Regs {
    /// A start at [`TEXT`] with the standard stack and `rbx` as the loop count.
    pub fn at_text(rbx: u64) -> Self {
        let rsp = (STACK + host::PAGE) as u64;
        Self { rbx, rip: TEXT as u64, rsp, rflags: 0x202, ..Self::default() }
    }
}

#[unsafe(no_mangle)]
static mut PROBE_HOST_RSP: u64 = 0;
#[unsafe(no_mangle)]
static mut PROBE_HOST_FS: u64 = 0;
#[unsafe(no_mangle)]
static mut PROBE_TARGET: u64 = 0;
#[unsafe(no_mangle)]
static mut PROBE_LAST_CONTEXT: u64 = 0;
#[unsafe(no_mangle)]
static mut PROBE_LAST_SIGNAL: u64 = 0;
#[unsafe(no_mangle)]
static mut PROBE_LAST_KEYS: u64 = 0;
/// There are protection keys: a handler may ask which are open.
#[unsafe(no_mangle)]
static PROBE_HAS_KEYS: AtomicBool = AtomicBool::new(false);
#[unsafe(no_mangle)]
static mut PROBE_LAST_FLAGS: u64 = 0;
#[unsafe(no_mangle)]
static mut PROBE_LAST_INFO: u64 = 0;

unsafe extern "C" {
    fn probe_enter(regs: *const Regs);
    /// Goes home by sigreturn.
    pub fn h_sigreturn();
    /// Restores general registers and flags, jumps through rcx.
    pub fn h_sysret();
    /// Restores general registers, then IRETQ.
    pub fn h_iret();
    /// The same to 32-bit code.
    pub fn h_iret32();
    /// The same, at the address in ESI.
    pub fn h_iret32_to_esi();
    /// XRSTOR of x87, SSE, AVX and AVX-512, then as `h_sysret`.
    pub fn h_xrstor_sysret();
    /// XRSTOR of x87 and SSE only.
    pub fn h_xrstor_legacy_sysret();
    /// XRSTOR of the components that were in use.
    pub fn h_xrstor_used_sysret();
    /// The same, leaving by IRETQ.
    pub fn h_xrstor_used_iret();
    /// The same, leaving by a jump through memory, rcx and r11 exact.
    pub fn h_xrstor_used_jump();
    /// Opens the keys, XRSTOR of what was in use, closes the keys.
    pub fn h_keys_xrstor_sysret();
    /// Opens the keys; XRSTOR closes them (PKRU in its mask).
    pub fn h_keys_xrstor_pkru_sysret();
    /// Steps over a two-byte instruction by sigreturn.
    pub fn h_skip2_sigreturn();
    /// Steps over a two-byte instruction, then as `h_xrstor_used_jump`.
    pub fn h_skip2_xrstor_used_jump();
    /// Leaves the guest on any signal.
    pub fn h_leave();
}

/// Maps the guest's stack and the alternate stack.
pub fn prepare_stacks() {
    host::map_anon(STACK, host::PAGE * 2, host::RW);
    host::alt_stack(ALT_STACK, ALT_STACK_LEN);
    // The kernel writes it on the way back to user mode under the guest's PKRU, and kills the process when a key forbids that.
    // SAFETY: nothing here uses it.
    unsafe { host_linux::process::forget_rseq() };
    PROBE_HAS_KEYS.store(has_keys(), Ordering::Relaxed);
}

/// The host has turned protection keys on.
fn has_keys() -> bool {
    const OSPKE: u32 = 1 << 4;
    std::arch::x86_64::__cpuid_count(7, 0).ecx & OSPKE != 0
}

/// Sets `handler` for every signal a guest instruction can raise.
pub fn catch_all(handler: Handler) {
    for signal in
        [libc::SIGSYS, libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGTRAP, libc::SIGFPE]
    {
        host::on_signal(signal, handler);
    }
}

/// Runs guest code until a handler leaves it.
pub fn enter(regs: &Regs) {
    // SAFETY: probe_enter saves what the ABI wants saved; the handler chosen by the probe brings us
    // back through probe_home. Vector registers come back in their initial state, all volatile.
    unsafe { probe_enter(regs) }
}

/// The signal frame of the last exit: number, siginfo and machine context, read once.
#[derive(Clone, Copy, Debug)]
pub struct Exit {
    pub signal: i32,
    pub code: i32,
    pub addr: u64,
    /// The 23 words of `sigcontext`: r8-r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, flags,
    /// selectors, error code, trap number, mask, cr2.
    pub words: [u64; 23],
    pub fpstate: u64,
    /// The address of the ucontext.
    pub context: u64,
    /// PKRU when the handler started.
    pub keys: u64,
    /// RFLAGS when the handler started, arithmetic flags aside.
    pub entry_flags: u64,
}

impl Exit {
    pub fn rip(&self) -> u64 {
        self.words[16]
    }
    pub fn rsp(&self) -> u64 {
        self.words[15]
    }
    pub fn rax(&self) -> u64 {
        self.words[13]
    }
    pub fn rcx(&self) -> u64 {
        self.words[14]
    }
    pub fn flags(&self) -> u64 {
        self.words[17]
    }
    pub fn selectors(&self) -> u64 {
        self.words[18]
    }
    pub fn error(&self) -> u64 {
        self.words[19]
    }
    pub fn trap(&self) -> u64 {
        self.words[20]
    }
    pub fn cr2(&self) -> u64 {
        self.words[22]
    }
    /// Reads a little-endian word of the saved extended state.
    pub fn xsave_word(&self, offset: usize) -> u64 {
        // SAFETY: the kernel put an XSAVE image there, larger than any offset a probe asks for.
        unsafe { ((self.fpstate as usize + offset) as *const u64).read_unaligned() }
    }
}

/// Reads the frame the last exit left on the alternate stack.
pub fn last_exit() -> Exit {
    // SAFETY: probe_leave stored pointers to a frame that nothing has overwritten since.
    unsafe {
        let context = PROBE_LAST_CONTEXT;
        let info = PROBE_LAST_INFO as *const libc::siginfo_t;
        Exit {
            signal: PROBE_LAST_SIGNAL as i32,
            code: (*info).si_code,
            addr: (*info).si_addr() as u64,
            words: ((context + 40) as *const [u64; 23]).read(),
            fpstate: ((context + 224) as *const u64).read(),
            context,
            keys: PROBE_LAST_KEYS,
            entry_flags: PROBE_LAST_FLAGS & !0x8d5,
        }
    }
}

/// Declares a block of machine code as a byte slice: `code!(name, "asm", ...)`.
#[macro_export]
macro_rules! code {
    ($name:ident, $($line:expr),+ $(,)?) => {
        std::arch::global_asm!(
            ".pushsection .rodata",
            concat!(".globl probe_code_", stringify!($name)),
            concat!("probe_code_", stringify!($name), ":"),
            $($line,)+
            concat!(".globl probe_code_end_", stringify!($name)),
            concat!("probe_code_end_", stringify!($name), ":"),
            ".popsection",
        );
        fn $name() -> &'static [u8] {
            unsafe extern "C" {
                #[link_name = concat!("probe_code_", stringify!($name))]
                static START: u8;
                #[link_name = concat!("probe_code_end_", stringify!($name))]
                static END: u8;
            }
            $crate::guest::between(&raw const START, &raw const END)
        }
    };
}

/// The bytes between two labels of one assembly block.
pub fn between(start: *const u8, end: *const u8) -> &'static [u8] {
    // SAFETY: both labels delimit one block of the read-only section.
    unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) }
}
