//! Running code on any registers: into it by the return from a signal handler that never was called, out of it
//! by the signal that it raises.

use core::arch::{asm, global_asm};

use crate::{
    sys::{self, ARCH_PRCTL, RT_SIGACTION, RT_SIGPROCMASK, SIGALTSTACK, sys},
    trace::{digest, note},
};

/// As the kernel lays it out (struct ucontext with struct sigcontext).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Context {
    pub flags: u64,
    pub link: u64,
    pub stack: [u64; 3],
    /// r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp.
    pub registers: [u64; 16],
    pub rip: u64,
    pub eflags: u64,
    pub cs: u16,
    pub gs: u16,
    pub fs: u16,
    pub ss: u16,
    pub error: u64,
    pub trap: u64,
    pub old_mask: u64,
    pub cr2: u64,
    pub fpu: u64,
    pub reserved: [u64; 8],
    pub mask: u64,
}

pub const RDI: usize = 8;
pub const RSI: usize = 9;
pub const RBP: usize = 10;
pub const RBX: usize = 11;
pub const RDX: usize = 12;
pub const RAX: usize = 13;
pub const RCX: usize = 14;
pub const RSP: usize = 15;
/// Where in [`Context::registers`] the register of a number in instructions is.
pub const ORDER: [usize; 16] = [RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, 0, 1, 2, 3, 4, 5, 6, 7];

/// The XSAVE area without what AVX does not have.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub struct Fpu {
    pub bytes: [u8; FPU_LEN + 64],
}

pub const FPU_LEN: usize = 832;
/// Bytes of it that x87 and SSE have.
pub const LEGACY_FPU: usize = 416;

impl Fpu {
    /// Registers as they are after a reset, to the kernel's liking.
    pub const fn new() -> Self {
        let mut bytes = [0; FPU_LEN + 64];
        bytes[0] = 0x7f;
        bytes[1] = 3;
        bytes[24] = 0x80;
        bytes[25] = 0x1f;
        bytes[512] = 7;
        // What says that it is an XSAVE area, of this size.
        let words: [(usize, u32); 5] = [
            (464, 0x4650_5853),
            (468, FPU_LEN as u32 + 4),
            (472, 7),
            (480, FPU_LEN as u32),
            (FPU_LEN, 0x4650_5845),
        ];
        let mut i = 0;
        while i < words.len() {
            let (at, value) = words[i];
            let value = value.to_le_bytes();
            let mut j = 0;
            while j < 4 {
                bytes[at + j] = value[j];
                j += 1;
            }
            i += 1;
        }
        Self { bytes }
    }

    /// Without what differs from CPU to CPU, and with parts that are in their first state written out.
    pub fn settle(&mut self) {
        let fresh = Self::new();
        let parts = [(0, 24), (32, 160), (160, 416), (576, 832)];
        for (bit, ranges) in [(1, &[parts[0], parts[1]][..]), (2, &parts[2..3]), (4, &parts[3..4])]
        {
            if self.bytes[512] & bit == 0 {
                ranges.iter().for_each(|&(start, end)| {
                    self.bytes[start..end].copy_from_slice(&fresh.bytes[start..end])
                });
            }
        }
        // The pointers of the last x87 instruction, the mask of MXCSR, and what is the kernel's.
        self.bytes[6..24].fill(0);
        self.bytes[28..32].fill(0);
        // Ten of sixteen bytes are an x87 register.
        (0..8).for_each(|i| self.bytes[32 + i * 16 + 10..48 + i * 16].fill(0));
        self.bytes[416..576].fill(0);
        self.bytes[FPU_LEN..].fill(0);
    }
}

/// Registers to run code on.
#[derive(Clone, Copy)]
pub struct State {
    pub context: Context,
    pub fpu: Fpu,
    pub fs_base: u64,
    pub gs_base: u64,
    /// DS, ES, FS and GS.
    pub data: u16,
}

/// RFLAGS that arithmetic changes.
pub const STATUS: u64 = 0x8d5;
pub const CODE64: u16 = 0x33;
pub const CODE32: u16 = 0x23;
pub const DATA: u16 = 0x2b;
const FIXED_FLAGS: u64 = 0x202;

impl State {
    /// Zeros, and code to run.
    pub fn at(rip: u64) -> Self {
        // SAFETY: all of it are numbers.
        let mut context: Context = unsafe { core::mem::zeroed() };
        // UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS.
        context.flags = 7;
        context.rip = rip;
        context.eflags = FIXED_FLAGS;
        (context.cs, context.ss) = (CODE64, DATA);
        Self { context, fpu: Fpu::new(), fs_base: 0, gs_base: 0, data: 0 }
    }

    pub fn set(&mut self, register: usize, value: u64) {
        self.context.registers[register] = value;
    }
}

/// What a signal brought.
#[derive(Clone, Copy)]
pub struct Stop {
    pub signal: i32,
    pub code: i32,
    pub address: u64,
    pub context: Context,
    pub fpu: Fpu,
    pub fs_base: u64,
    pub gs_base: u64,
}

#[repr(C)]
struct Frame {
    context: Context,
    info: [u64; 16],
}

/// What a handler does with a signal: true if the code is to go on.
pub type Hook = fn(&mut Stop) -> bool;

const STACK_LEN: usize = 0x1_0000;
#[repr(C, align(4096))]
struct Stack([u8; STACK_LEN]);

static mut ALTERNATE: Stack = Stack([0; STACK_LEN]);
static mut FRAME: Frame = Frame { context: unsafe { core::mem::zeroed() }, info: [0; 16] };
static mut FPU: Fpu = Fpu::new();
static mut STOP: Stop = unsafe { core::mem::zeroed() };
static mut HOOK: Option<Hook> = None;
/// Code runs that [`run`] has entered.
static mut INSIDE: bool = false;

unsafe extern "C" {
    fn chance_enter(frame: u64);
    fn chance_leave() -> !;
    fn chance_handler();
    fn chance_restorer();
}

global_asm!(
    ".globl chance_enter, chance_leave, chance_handler, chance_restorer",
    ".lcomm chance_saved, 8",
    "chance_enter:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov [chance_saved], rsp",
    "mov rsp, rdi",
    "mov eax, 15",
    "syscall",
    "ud2",
    "chance_leave:",
    "mov rsp, [chance_saved]",
    "fninit",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    // A signal handler may find any of these flags set by the code it interrupts.
    "chance_handler:",
    "pushfq",
    "and qword ptr [rsp], ~0x44400",
    "popfq",
    "jmp {handle}",
    "chance_restorer:",
    "mov eax, 15",
    "syscall",
    handle = sym handle,
);

fn base(code: usize) -> u64 {
    let mut value = 0_u64;
    sys!(ARCH_PRCTL, code, &raw mut value);
    value
}

const SET_GS: usize = 0x1001;
const SET_FS: usize = 0x1002;
const GET_FS: usize = 0x1003;
const GET_GS: usize = 0x1004;

extern "C" fn handle(signal: i32, info: *const i32, context: *mut Context) {
    // SAFETY: the kernel gives a handler its information and context; nothing but this handler uses the
    // statics while the code runs.
    unsafe {
        let mut stop = Stop {
            signal,
            code: *info.add(2),
            address: info.cast::<u64>().add(2).read(),
            context: *context,
            fpu: Fpu::new(),
            fs_base: base(GET_FS),
            gs_base: base(GET_GS),
        };
        let fpu = (*context).fpu as *const u8;
        if !fpu.is_null() {
            core::ptr::copy_nonoverlapping(fpu, (&raw mut stop.fpu).cast(), FPU_LEN);
        }
        let goes_on = HOOK.is_some_and(|hook| hook(&mut stop));
        if !INSIDE && stop.is_fault() {
            note!("a fault of this program's own: ");
            stop.note(Open::default());
            sys::exit(102);
        }
        if goes_on || !INSIDE {
            let mut changed = stop.context;
            changed.fpu = (*context).fpu;
            *context = changed;
            return;
        }
        STOP = stop;
        chance_leave()
    }
}

/// Catches a signal with the handler that [`run`] needs.
pub fn catch(signal: usize, flags: u64) -> isize {
    let mask = 0_u64;
    catch_masked(signal, flags, mask)
}

/// As [`catch`], with signals that wait meanwhile.
pub fn catch_masked(signal: usize, flags: u64, mask: u64) -> isize {
    const ONSTACK: u64 = 0x0800_0000;
    const SIGINFO: u64 = 4;
    const RESTORER: u64 = 0x0400_0000;
    let handler: unsafe extern "C" fn() = chance_handler;
    let restorer: unsafe extern "C" fn() = chance_restorer;
    let action = [
        handler as usize as u64,
        flags | ONSTACK | SIGINFO | RESTORER,
        restorer as usize as u64,
        mask,
    ];
    sys!(RT_SIGACTION, signal, action.as_ptr(), 0, 8)
}

const NODEFER: u64 = 0x4000_0000;
/// Signals that code raises.
pub const FAULTS: [usize; 6] = [4, 5, 7, 8, 11, 31];

/// The handler's stack, and handlers for what code raises.
pub fn set_up() {
    sys!(SIGALTSTACK, alternate().as_ptr(), 0);
    FAULTS.iter().for_each(|&signal| {
        catch(signal, NODEFER);
    });
}

/// The handler's stack, as sigaltstack takes it.
pub fn alternate() -> [u64; 3] {
    [(&raw mut ALTERNATE) as u64, 0, STACK_LEN as u64]
}

/// What becomes of signals that arrive while [`run`] is not at work.
pub fn watch(hook: Hook) {
    // SAFETY: one thread at a time runs code this way.
    unsafe { HOOK = Some(hook) }
}

/// Runs code on these registers until a signal that `hook` does not send it back from. The hook ends with it: one that
/// changes what it returns to must not meet a signal of a later step.
pub fn run(state: &State, hook: Option<Hook>) -> Stop {
    // SAFETY: one thread at a time runs code this way, and what the code does to this program's memory is
    // its author's affair.
    unsafe {
        HOOK = hook;
        INSIDE = true;
        FPU = state.fpu;
        let frame = &mut *(&raw mut FRAME);
        frame.context = state.context;
        frame.context.stack = alternate();
        if frame.context.fpu == 0 {
            frame.context.fpu = (&raw mut FPU) as u64;
        }
        let State { data, fs_base, gs_base, .. } = *state;
        asm!("mov ds, {0:e}", "mov es, {0:e}", "mov fs, {0:e}", "mov gs, {0:e}", in(reg) u32::from(data));
        asm!("wrfsbase {}", "wrgsbase {}", in(reg) fs_base, in(reg) gs_base);
        chance_enter((&raw mut FRAME) as u64);
        INSIDE = false;
        HOOK = None;
        reset();
        *(&raw const STOP)
    }
}

/// Segments and signal mask, as they were at first.
fn reset() {
    let mask = 0_u64;
    // SAFETY: null selectors in segments that this program does not use.
    unsafe {
        asm!("mov ds, {0:e}", "mov es, {0:e}", "mov fs, {0:e}", "mov gs, {0:e}", in(reg) 0);
        asm!("vzeroall", "ldmxcsr [{}]", in(reg) &0x1f80_u32, out("xmm0") _, out("xmm1") _, out("xmm2") _,
            out("xmm3") _, out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _,
            out("xmm10") _, out("xmm11") _, out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _);
    }
    sys!(ARCH_PRCTL, SET_FS, 0);
    sys!(ARCH_PRCTL, SET_GS, 0);
    sys!(RT_SIGPROCMASK, 2, &raw const mask, 0, 8);
}

/// What of an outcome the architecture leaves open.
#[derive(Clone, Copy, Default)]
pub struct Open {
    pub flags: u64,
    /// Upper halves of general registers, by their number in instructions.
    pub upper_halves: u16,
    /// Where the x87 stack begins, and so which of its registers is which.
    pub x87: bool,
}

impl Stop {
    /// Whether the CPU raised it, rather than somebody.
    pub fn is_fault(&self) -> bool {
        FAULTS.contains(&(self.signal as usize)) && self.code > 0
    }

    /// Notes all that a program can see of it.
    pub fn note(&mut self, open: Open) {
        self.note_signal();
        let c = &self.context;
        note!(" rip={:x} fl={:x}", c.rip, c.eflags & !open.flags);
        note!(
            " cs={:x} ss={:x} fs={:x}:{:x} gs={:x}:{:x}",
            c.cs,
            c.ss,
            c.fs,
            self.fs_base,
            c.gs,
            self.gs_base
        );
        for (number, &at) in ORDER.iter().enumerate() {
            let mask = if open.upper_halves >> number & 1 != 0 { 0xffff_ffff } else { u64::MAX };
            note!(" {:x}", c.registers[at] & mask);
        }
        self.fpu.settle();
        let word = |at: usize| u16::from_le_bytes([self.fpu.bytes[at], self.fpu.bytes[at + 1]]);
        if open.x87 {
            let vectors = digest(&self.fpu.bytes[160..]);
            note!(" control {:x} {:x} vectors={:x}\n", word(0), word(24), vectors);
            return;
        }
        note!(" control {:x} {:x} {:x} {:x}", word(0), word(2), word(4), word(24));
        note!(" fpu={:x}\n", digest(&self.fpu.bytes[32..]));
    }

    /// Notes which signal it is.
    pub fn note_signal(&self) {
        note!("signal {} code {}", self.signal, self.code);
        if self.is_fault() {
            let c = &self.context;
            note!(" addr={:x} err={:x} trap={}", self.address, c.error, c.trap);
            if c.trap == 14 {
                note!(" cr2={:x}", c.cr2);
            }
        }
    }
}
