//! What the code here works on, and who has it when.
//!
//! Guest code stops, and until it goes on this crate takes a chain of steps: [`go_on`] is the loop that takes them. Each
//! step gets a new [`Context`] and says what comes next ([`Next`]). Guest code is entered, and the turn is given away, by the
//! loop and between two steps. So no step has a reference to a shared page while somebody else may use that.

use crate::{
    filter::SIGALTSTACK,
    gates::{Gate, enter_block, resume_raw},
    here,
    host::Secret,
    run,
    strict::UserSide,
    turns,
};
use core::{arch::asm, sync::atomic::AtomicU64};
use wedge_abi::{
    ALT_STACK_LEN, MONITOR, Reason, SHARED, SIGNAL_STACK_FLAGS, Shared, VCPU_PAGE, VcpuPage, go,
};

/// What the code here works on.
#[derive(Debug)]
pub struct Context<'a> {
    /// The vCPU, which the wedges that run it and the monitor hand to each other.
    pub vcpu: &'a mut VcpuPage,
    /// What this wedge and the monitor tell each other.
    pub shared: &'a mut Shared,
    /// What the wedge shares with the process of user code, if user code has a process of its own.
    pub(crate) user: UserSide,
}

impl<'a> Context<'a> {
    /// The context of a model of the process ([`crate::model`]).
    #[cfg(not(freestanding))]
    pub fn of(vcpu: &'a mut VcpuPage, shared: &'a mut Shared) -> Self {
        Self { vcpu, shared, user: UserSide::NONE }
    }

    /// The context of this process.
    ///
    /// # Safety
    /// This side has the turn, and no other context is used any more.
    pub(crate) unsafe fn enter() -> Self {
        // SAFETY: the monitor mapped the pages before this process began; of those that share them only who has the turn
        // uses them, but for what is atomic.
        unsafe { Self { vcpu: &mut *vcpu(), shared: &mut *shared(), user: UserSide::here() } }
    }

    /// What the wedge's host calls carry.
    pub(crate) fn secret(&self) -> Secret {
        Secret::of(self.shared)
    }
}

/// Not zero if a kick has come. The handler of a kick's signal writes this at any time, whoever has a context.
pub(crate) fn kicked() -> &'static AtomicU64 {
    // SAFETY: aligned, and mapped for good; what runs beside the handler reads the word by this or by assembly.
    unsafe { AtomicU64::from_ptr(&raw mut (*vcpu()).run.kicked) }
}

/// Where the page of the vCPU is.
pub(crate) fn vcpu() -> *mut VcpuPage {
    here(VCPU_PAGE) as *mut VcpuPage
}

/// Where the pages are that this process shares with the monitor.
pub(crate) fn shared() -> *mut Shared {
    here(SHARED) as *mut Shared
}

/// What follows a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Next {
    /// Guest code, as `RunControl::go` says.
    Run,
    /// User code, by this gate.
    User(Gate),
    /// Translated code; how.
    Block(u64),
    /// The monitor, which is told why.
    Exit(Reason),
    /// The monitor or another wedge has the turn until it comes back.
    HandOver(usize),
}

/// A step: what guest code has stopped for.
pub(crate) type Step = fn(&mut Context<'_>) -> Next;

/// Takes a step and those that follow the step, on an empty stack; what came before was the handler of a signal.
///
/// The signal took its stack away from the process (SS_AUTODISARM). So the host gets it back first, while RSP is there
/// still: a signal before the call goes on below RSP, and one behind it begins at the stack's end again. Nothing that is
/// there is needed by then.
pub(crate) fn restart(first: Step) -> ! {
    // SAFETY: nothing on either stack is needed any more, and the call reads what has just been pushed.
    unsafe {
        asm!("lea rax, [rip + alt_stack]", "mov ecx, {flags}", "push {len}", "push rcx", "push rax",
            "mov rdi, rsp", "xor esi, esi", "lea r9, [rip + shared_page]", "mov r9, [r9]", "mov eax, {sigaltstack}",
            "syscall", "test eax, eax", "jnz 9f",
            "lea rsp, [rip + stack_top]", "xor ebp, ebp", "mov rdi, r12", "call {stay}", "9: ud2",
            flags = const SIGNAL_STACK_FLAGS, len = const ALT_STACK_LEN, sigaltstack = const SIGALTSTACK,
            stay = sym stay, in("r12") first, options(noreturn))
    }
}

#[expect(improper_ctypes_definitions, reason = "only assembly of this crate is between the two")]
/// Takes a step and those that follow the step.
extern "C" fn stay(first: Step) -> ! {
    go_on(step(first))
}

/// Does what comes next, and what follows that.
pub(crate) fn go_on(mut next: Next) -> ! {
    loop {
        next = match next {
            Next::Run => step(run::begin),
            Next::User(gate) => {
                gate();
                Next::Exit(Reason::Kicked) // which came first: else user code would have come back by a signal
            }
            Next::Block(how) => match if how == go::BLOCK { enter_block() } else { resume_raw() } {
                0 => Next::Exit(Reason::Kicked),
                _ => step(|cx| run::end(cx, how)),
            },
            Next::Exit(reason) => step(|cx| {
                cx.vcpu.exit.reason = reason as u64;
                // The monitor looks at everything a kick can be about.
                cx.vcpu.run.kicked = 0;
                Next::HandOver(MONITOR)
            }),
            Next::HandOver(to) => {
                turns::hand_over(to);
                Next::Run
            }
        }
    }
}

/// Takes one step.
#[inline(always)]
pub(crate) fn step(take: impl FnOnce(&mut Context<'_>) -> Next) -> Next {
    // SAFETY: who comes here has the turn, and what guest code was entered from uses its own no more. The loop above has
    // none between two steps.
    take(&mut unsafe { Context::enter() })
}
