//! The child: enters translated code when it is told to, and says when that has ended.
// UNSAFETY: handles signals and calls generated code.
#![allow(unsafe_code)]

use std::ptr;

use jit::stubs::Stubs;
use x86::flags;

use super::shared::{CACHE_LEN, LAYOUT, NEVER, mailbox, vcpu_page};

/// PUSHFQ's only byte.
const PUSHFQ: u8 = 0x9c;

/// The child; its guest code lies at HVA `code`.
pub(super) fn serve(from: i32, to: i32, code: u64) -> ! {
    let mut byte = [0u8];
    // SAFETY: a single-threaded process that only runs what the parent put into the cache.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // Text cannot be written.
        libc::mprotect(code as *mut _, 4096, libc::PROT_READ);
        catch_signals();
        while libc::read(from, byte.as_mut_ptr().cast(), 1) == 1 {
            enter();
            libc::write(to, byte.as_ptr().cast(), 1);
        }
        libc::_exit(0)
    }
}

/// # Safety
/// In the child only.
unsafe fn catch_signals() {
    const LEN: usize = 64 << 10;
    // SAFETY: fresh memory; the handler is written for being called anywhere.
    unsafe {
        let stack = libc::mmap(
            ptr::null_mut(),
            LEN,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        let stack = libc::stack_t { ss_sp: stack, ss_flags: 0, ss_size: LEN };
        libc::sigaltstack(&raw const stack, ptr::null_mut());
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP] {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            libc::sigaction(signal, &raw const action, ptr::null_mut());
        }
    }
}

/// Runs with the guest's FS base: no thread-local storage, no calls into libc.
extern "C" fn on_signal(signal: i32, _: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel passes a valid context on the alternate stack.
    let context = unsafe { &mut *context };
    let registers = &mut context.uc_mcontext.gregs;
    if signal == libc::SIGTRAP && mailbox().steps != NEVER && steps_on(registers) {
        return;
    }
    const ORDER: [i32; 16] = [
        libc::REG_RAX,
        libc::REG_RCX,
        libc::REG_RDX,
        libc::REG_RBX,
        libc::REG_RSP,
        libc::REG_RBP,
        libc::REG_RSI,
        libc::REG_RDI,
        libc::REG_R8,
        libc::REG_R9,
        libc::REG_R10,
        libc::REG_R11,
        libc::REG_R12,
        libc::REG_R13,
        libc::REG_R14,
        libc::REG_R15,
    ];
    let page = vcpu_page();
    for (slot, index) in page.regs.gpr.iter_mut().zip(ORDER) {
        *slot = registers[index as usize] as u64;
    }
    page.block.host_flags = registers[libc::REG_EFL as usize] as u64;
    let mailbox = mailbox();
    mailbox.signal = signal as u64;
    mailbox.pc = registers[libc::REG_RIP as usize] as u64;
    registers[libc::REG_RIP as usize] = Stubs::of(&LAYOUT).leave as i64;
}

/// A host instruction has been single-stepped: true if there is another one. The wedge's part of it, and
/// the routine that leaves, are not the guest's.
fn steps_on(registers: &mut [i64]) -> bool {
    let (t, pc) = (mailbox(), registers[libc::REG_RIP as usize] as u64);
    let stubs = Stubs::of(&LAYOUT);
    if t.last != 0 && byte_at(t.last) == PUSHFQ {
        vcpu_page().block.stack[7] &= !flags::TF;
    }
    t.last = 0;
    let leaves = (stubs.exit..stubs.indirect[0]).contains(&pc);
    let flags = &mut registers[libc::REG_EFL as usize];
    if leaves || pc.wrapping_sub(LAYOUT.cache) >= CACHE_LEN {
        *flags &= !(flags::TF as i64);
        return true;
    }
    // POPFQ may have cleared it.
    *flags |= flags::TF as i64;
    if pc < stubs.exit {
        return true;
    }
    t.last = pc;
    if t.stepped >= t.steps && t.boundaries[..t.boundary_count].contains(&pc) {
        t.interrupted = 1;
        *flags &= !(flags::TF as i64);
        return false;
    }
    t.stepped += 1;
    true
}

fn byte_at(pc: u64) -> u8 {
    // SAFETY: a PC in the code cache.
    unsafe { *(pc as *const u8) }
}

/// # Safety
/// In the child only, with vCPU page and cache prepared.
unsafe fn enter() {
    let mailbox = mailbox();
    // SAFETY: `enter` keeps the callee-saved registers; vector state and the bases are saved around it here.
    unsafe {
        std::arch::asm!(
            "rdfsbase r12",
            "rdgsbase r13",
            "fxsave64 [r14 + 512]",
            "fxrstor64 [r14]",
            "call {enter}",
            "fxsave64 [r14]",
            "fxrstor64 [r14 + 512]",
            "wrfsbase r12",
            "wrgsbase r13",
            enter = in(reg) Stubs::of(&LAYOUT).enter,
            in("r14") ptr::from_mut(mailbox),
            out("r12") _,
            out("r13") _,
            clobber_abi("C"),
        );
    }
}
