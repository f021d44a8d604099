//! The CPU, one instruction at a time, with its whole register file under control.
#![allow(unsafe_code)]
// UNSAFETY: running arbitrary instructions needs generated code, raw memory and a signal handler.

use core::{mem::offset_of, ptr};
use iced_x86::code_asm::*;
use x86::fpu::FpuState;

/// Bytes of the memory an instruction may use; it is at the end of a page, the next is not mapped.
pub const MEMORY: usize = 1024;

/// What an instruction starts from.
#[derive(Clone)]
pub struct State {
    pub fpu: FpuState,
    pub gpr: [u64; 16],
    pub memory: [u8; MEMORY],
    pub rflags: u64,
}

/// What it ends in.
#[derive(Clone, PartialEq)]
pub struct Outcome {
    pub fpu: FpuState,
    pub gpr: [u64; 16],
    pub memory: [u8; MEMORY],
    pub rflags: u64,
    /// Vector of the exception it raised, or zero.
    pub fault: u8,
    /// For a page fault, its address; else zero.
    pub fault_address: u64,
}

/// Code and data in one mapping, so that data can be reached without any register.
#[repr(C, align(4096))]
struct Arena {
    code: [u8; 4096],
    fpu: FpuState,
    gpr: [u64; 16],
    rflags: u64,
    host_rsp: u64,
    stack: [u64; 32],
    stack_end: u64,
    fault: u64,
    fault_address: u64,
    room: [u8; 4096 - 832 - 8 * 16 - 8 * 37 - MEMORY],
    memory: [u8; MEMORY],
}

const _: () = assert!(size_of::<Arena>() == 8192);
const _: () = assert!(offset_of!(Arena, memory) == 8192 - MEMORY);

/// Where the arena is: below 2 GB, for absolute addressing.
pub const ARENA_ADDRESS: u64 = 0x4000_0000;
/// Bytes of the arena.
pub const ARENA_SIZE: u64 = size_of::<Arena>() as u64;
/// Where the memory is that instructions may use.
pub const MEMORY_ADDRESS: u64 = ARENA_ADDRESS + offset_of!(Arena, memory) as u64;
/// Where the instruction is.
pub const INSTRUCTION_ADDRESS: u64 = ARENA_ADDRESS + INSTRUCTION as u64;

/// Offset in the code page of the tested instruction.
const INSTRUCTION: usize = 1024;
/// Longest instruction.
const MAX: usize = 15;

/// There can be one.
pub struct Oracle {
    arena: *mut Arena,
}

impl Oracle {
    pub fn new() -> Self {
        let arena = map_arena();
        let oracle = Self { arena };
        oracle.assemble(0, &oracle.enter());
        oracle.assemble(INSTRUCTION + MAX, &oracle.leave());
        install_handler();
        oracle
    }

    pub fn run(&self, bytes: &[u8], state: &State) -> Outcome {
        let mut code = [0x90; MAX];
        code[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: the arena is mapped, the generated code keeps the System V convention and
        // returns, whether by running through or by way of the signal handler.
        unsafe {
            let arena = &mut *self.arena;
            arena.code[INSTRUCTION..INSTRUCTION + MAX].copy_from_slice(&code);
            arena.fpu = state.fpu;
            arena.memory = state.memory;
            arena.gpr = state.gpr;
            arena.rflags = state.rflags;
            arena.fault = 0;
            arena.fault_address = 0;
            let enter: extern "sysv64" fn() = core::mem::transmute(self.arena);
            enter();
            let arena = &*self.arena;
            Outcome {
                fpu: arena.fpu,
                gpr: arena.gpr,
                memory: arena.memory,
                rflags: arena.rflags,
                fault: arena.fault as u8,
                fault_address: arena.fault_address,
            }
        }
    }

    fn assemble(
        &self,
        at: usize,
        build: &dyn Fn(&mut CodeAssembler) -> Result<(), iced_x86::IcedError>,
    ) {
        let mut asm = CodeAssembler::new(64).unwrap();
        build(&mut asm).unwrap();
        let code = asm.assemble(self.arena as u64 + at as u64).unwrap();
        let limit = if at < INSTRUCTION { INSTRUCTION } else { 4096 };
        assert!(at + code.len() <= limit);
        // SAFETY: inside the code page, checked above.
        unsafe { (&mut (*self.arena).code)[at..at + code.len()].copy_from_slice(&code) };
    }

    /// An absolute operand at `offset` of the arena.
    fn at(&self, offset: usize) -> AsmMemoryOperand {
        ptr(self.arena as u64 + offset as u64)
    }

    fn enter(&self) -> impl Fn(&mut CodeAssembler) -> Result<(), iced_x86::IcedError> {
        move |a| {
            for r in [rbx, rbp, r12, r13, r14, r15] {
                a.push(r)?;
            }
            a.mov(self.at(offset_of!(Arena, host_rsp)), rsp)?;
            a.mov(eax, 7)?;
            a.xor(edx, edx)?;
            a.xrstor64(self.at(offset_of!(Arena, fpu)))?;
            a.lea(rsp, self.at(offset_of!(Arena, stack_end)))?;
            a.push(qword_ptr(self.at(offset_of!(Arena, rflags))))?;
            a.popfq()?;
            for (i, r) in GENERAL.into_iter().enumerate() {
                a.mov(r, self.at(offset_of!(Arena, gpr) + 8 * i))?;
            }
            a.jmp(INSTRUCTION_ADDRESS)
        }
    }

    fn leave(&self) -> impl Fn(&mut CodeAssembler) -> Result<(), iced_x86::IcedError> {
        move |a| {
            for (i, r) in GENERAL.into_iter().enumerate() {
                a.mov(self.at(offset_of!(Arena, gpr) + 8 * i), r)?;
            }
            a.lea(rsp, self.at(offset_of!(Arena, stack_end)))?;
            a.pushfq()?;
            a.pop(qword_ptr(self.at(offset_of!(Arena, rflags))))?;
            a.mov(eax, 7)?;
            a.xor(edx, edx)?;
            a.xsave64(self.at(offset_of!(Arena, fpu)))?;
            a.fninit()?;
            a.mov(dword_ptr(rsp - 8), 0x1f80)?;
            a.ldmxcsr(dword_ptr(rsp - 8))?;
            a.vzeroupper()?;
            a.mov(rsp, self.at(offset_of!(Arena, host_rsp)))?;
            for r in [r15, r14, r13, r12, rbp, rbx] {
                a.pop(r)?;
            }
            a.ret()
        }
    }
}

const GENERAL: [AsmRegister64; 16] =
    [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15];

fn map_arena() -> *mut Arena {
    let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let address = ptr::without_provenance_mut(ARENA_ADDRESS as usize);
    // SAFETY: the mapping replaces none; it is never unmapped.
    let base = unsafe { libc::mmap(address, size_of::<Arena>(), protection, flags, -1, 0) };
    assert_eq!(base, address, "one oracle at a time");
    base.cast()
}

/// Exceptions arrive on a stack of their own: the tested instruction's RSP is anything.
fn install_handler() {
    let stack = Box::leak(vec![0_u8; 1 << 16].into_boxed_slice());
    let stack =
        libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: stack.len() };
    // SAFETY: the stack lives forever and the handler only touches the arena and its context.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        assert_eq!(libc::sigaltstack(&stack, ptr::null_mut()), 0);
        for signal in [libc::SIGFPE, libc::SIGSEGV, libc::SIGBUS, libc::SIGILL] {
            assert_eq!(libc::sigaction(signal, &action, ptr::null_mut()), 0);
        }
    }
}

extern "C" fn handler(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid context; handlers are installed after the arena is mapped.
    unsafe {
        let context = &mut *context.cast::<libc::ucontext_t>();
        let registers = &mut context.uc_mcontext.gregs;
        let arena: *mut Arena = ptr::with_exposed_provenance_mut(ARENA_ADDRESS as usize);
        if registers[libc::REG_RIP as usize] as u64 != INSTRUCTION_ADDRESS {
            libc::abort();
        }
        let trap = registers[libc::REG_TRAPNO as usize] as u64;
        (*arena).fault = trap;
        if trap == 14 {
            (*arena).fault_address = (*info).si_addr() as u64;
        }
        registers[libc::REG_RIP as usize] = (INSTRUCTION_ADDRESS + MAX as u64) as i64;
    }
}
