//! CPUID faults in the monitor's thread as it does in bodies, processes of guest code.
//!
//! The host keeps in an MSR whether CPUID faults, and writes it whenever it switches between who wants
//! that and who does not. On a host that is itself a virtual machine each write is an exit: taking turns
//! with one and back took 15.6 us, and 2.3 us with both alike. So the thread that takes turns has
//! CPUID fault, too, and answers itself: rare, as the guest's CPUID is answered from a model.
// UNSAFETY: a signal handler that reads the code and writes the registers of what it interrupted.
#![allow(unsafe_code)]

use std::{arch::x86_64::__cpuid_count, mem::zeroed, ptr, sync::OnceLock};

pub(crate) const ARCH_SET_CPUID: i32 = 0x1012;
const CPUID: [u8; 2] = [0x0f, 0xa2];
/// General protection.
const GP: i64 = 13;

/// What SIGSEGV did before; `None` if the host let nothing be changed.
static BEFORE: OnceLock<Option<libc::sigaction>> = OnceLock::new();

/// Has CPUID fault in this thread if it does in bodies.
pub(crate) fn fault_as_in_bodies() {
    if crate::facts::facts().cpuid_faults && BEFORE.get_or_init(answer_faults).is_some() {
        faults(true);
    }
}

/// Has CPUID fault in this thread, or not.
fn faults(yes: bool) {
    // SAFETY: concerns this thread's CPUID only; there is a handler.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_CPUID, i32::from(!yes)) };
}

/// Installs the handler; what was there before.
fn answer_faults() -> Option<libc::sigaction> {
    // SAFETY: all-zero is a valid action; the handler does what handlers may do.
    unsafe {
        let (mut action, mut before): (libc::sigaction, libc::sigaction) = (zeroed(), zeroed());
        action.sa_sigaction = on_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        let done = libc::sigaction(libc::SIGSEGV, &raw const action, &raw mut before) == 0;
        done.then_some(before)
    }
}

/// Answers CPUID; any other fault is repeated with what handled it before.
extern "C" fn on_fault(_: i32, _: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the host passes the context of what it has interrupted; where a general protection fault
    // was raised, RIP points at an instruction that could be fetched.
    unsafe {
        let registers = &mut (*context).uc_mcontext.gregs;
        let rip = registers[libc::REG_RIP as usize];
        let protection = registers[libc::REG_TRAPNO as usize] == GP;
        if protection && ptr::read_unaligned(rip as *const [u8; 2]) == CPUID {
            answer(registers);
        } else if let Some(Some(before)) = BEFORE.get() {
            libc::sigaction(libc::SIGSEGV, before, ptr::null_mut());
        } else {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
        }
    }
}

/// Does what CPUID would have done.
fn answer(registers: &mut [i64]) {
    let [rax, rcx] = [libc::REG_RAX, libc::REG_RCX].map(|at| registers[at as usize] as u32);
    faults(false);
    let leaf = __cpuid_count(rax, rcx);
    faults(true);
    let values = [
        (libc::REG_RAX, leaf.eax),
        (libc::REG_RBX, leaf.ebx),
        (libc::REG_RCX, leaf.ecx),
        (libc::REG_RDX, leaf.edx),
    ];
    for (at, value) in values {
        registers[at as usize] = value.into();
    }
    registers[libc::REG_RIP as usize] += CPUID.len() as i64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_the_same() {
        let ask = || {
            [(0, 0), (7, 0), (0x8000_0002, 0), (0x8000_0004, 0)].map(|(leaf, sub)| {
                let found = __cpuid_count(leaf, sub);
                [found.eax, found.ebx, found.ecx, found.edx]
            })
        };
        let expected = ask();
        let faulting = std::thread::spawn(move || {
            fault_as_in_bodies();
            ask()
        });
        assert_eq!(faulting.join().expect("it goes on"), expected);
    }
}
