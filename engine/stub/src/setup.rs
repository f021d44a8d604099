//! Making the process a wedge.

use crate::{
    context::{Context, Next, go_on, step},
    filter, here,
    host::{self, Secret, call, load_vectors},
    patched::{entry_with_keys, entry_without_keys},
    signal::{RESTORER, on_signal, on_signal_keys},
    user,
};
use core::arch::naked_asm;
use wedge_abi::{
    ALT_STACK, ALT_STACK_LEN, KICK, MONITOR, NEAR_END, RAM, REGIONS, SIGNAL_STACK_FLAGS, SITES,
    SITES_LEN, STACK, SYSCALL_USER_DISPATCH, TOP, USER_START, WINDOW, WINDOW_END,
};

/// First instruction of the image: change to the window's stack, forget the old one.
#[unsafe(naked)]
#[unsafe(no_mangle)]
#[unsafe(link_section = ".text.start")]
extern "C" fn wedge_start() -> ! {
    naked_asm!("jmp 2f", ".balign 16", "jmp {user}",
        "2:", "lea rsp, [rip + stack_top]", "xor ebp, ebp", "call {main}", "ud2",
        user = sym user::start, main = sym main)
}

const _: () = assert!(USER_START == 16);

extern "C" fn main() -> ! {
    go_on(step(set_up))
}

fn set_up(cx: &mut Context<'_>) -> Next {
    let secret = cx.secret();
    alone(cx, secret);
    signals(cx, secret);
    admit(cx, secret);
    let keys = cx.shared.setup.key != 0;
    let entry = if keys { entry_with_keys as *const () } else { entry_without_keys as *const () };
    cx.shared.ready.patched_entry =
        if cx.shared.setup.user_secret != 0 { user::user_patched() } else { entry as u64 };
    cx.shared.ready.done = 1;
    // What the guest does not know of is in its initial state from here on.
    // SAFETY: an area of zeros is in order.
    unsafe { host::reset_vectors(secret, cx.vcpu.vectors.0.as_ptr()) };
    load_vectors(secret, cx.vcpu.vectors.0.as_ptr());
    cx.vcpu.run.kicked = 0;
    Next::HandOver(MONITOR)
}

/// A host call of this file.
fn plain(secret: Secret, order: [u64; 6]) -> i64 {
    // SAFETY: nothing runs here yet but this code, and what it refers to lives until the call is over.
    unsafe { call(secret, order) }
}

/// Unmaps everything but the window, and clears what a thread of a C library leaves behind.
fn alone(cx: &Context<'_>, secret: Secret) {
    plain(secret, [host::ARCH_PRCTL, 0x1002, 0, 0, 0, 0]); // ARCH_SET_FS
    plain(secret, [host::ARCH_PRCTL, 0x1012, 0, 0, 0, 0]); // ARCH_SET_CPUID: CPUID faults from now on
    plain(secret, [host::SET_ROBUST_LIST, 0, 24, 0, 0, 0]);
    plain(secret, [host::SET_TID_ADDRESS, 0, 0, 0, 0, 0]);
    let [regions, near_end, window, window_end, ram] =
        [REGIONS, NEAR_END, WINDOW, WINDOW_END, RAM].map(here);
    let ram_end = ram + cx.shared.setup.ram_len as usize;
    let sites_end = SITES + SITES_LEN;
    for (from, to) in
        [(0, SITES), (sites_end, regions), (near_end, window), (window_end, ram), (ram_end, TOP)]
    {
        if plain(secret, [host::MUNMAP, from as u64, (to - from) as u64, 0, 0, 0]) != 0 {
            crate::die();
        }
    }
}

#[repr(C)]
pub struct Action {
    pub handler: u64,
    pub flags: u64,
    pub restorer: u64,
    pub mask: u64,
}

/// The signals that bring guest code back.
pub const SIGNALS: [u64; 7] = [4, 5, 7, 8, KICK as u64, 11, 31];
/// SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTORER: guest code is resumed without sigreturn, so nothing
/// may stay blocked.
pub const SIGNAL_FLAGS: u64 = 4 | 0x0800_0000 | 0x4000_0000 | 0x0400_0000;

fn signals(cx: &Context<'_>, secret: Secret) {
    let stack = [here(ALT_STACK) as u64, SIGNAL_STACK_FLAGS, ALT_STACK_LEN as u64];
    plain(secret, [host::SIGALTSTACK, stack.as_ptr() as u64, 0, 0, 0, 0]);
    let keys = cx.shared.setup.key != 0;
    let handler = if keys { on_signal_keys as *const () } else { on_signal as *const () } as u64;
    let action = Action { handler, flags: SIGNAL_FLAGS, restorer: RESTORER, mask: 0 };
    for signal in SIGNALS {
        plain(secret, [host::SIGACTION, signal, &raw const action as u64, 0, 8, 0]);
    }
}

/// Calls only from the blob, only these few, only with the secret; anything else is a SIGSYS.
fn admit(cx: &Context<'_>, secret: Secret) {
    let setup = &cx.shared.setup;
    // SAFETY: the far end of the stack, which is zeroed and not in use.
    let program = unsafe { &mut *(here(STACK) as *mut filter::Program) };
    filter::write(program, setup.secret, setup.blob_end, setup.narrow != 0);
    let fprog = [program.len() as u64, program.as_ptr() as u64];
    plain(secret, [host::PRCTL, 38, 1, 0, 0, 0]); // PR_SET_NO_NEW_PRIVS
    // All but the blob's own calls are a SIGSYS before any filter is asked.
    let window = here(WINDOW) as u64;
    if setup.user_dispatch != 0
        && plain(
            secret,
            [host::PRCTL, SYSCALL_USER_DISPATCH, 1, window, setup.blob_end - window, 0],
        ) != 0
    {
        refuse(secret);
    }
    // SECCOMP_FILTER_FLAG_SPEC_ALLOW: hosts before 5.16 switch speculation off without it.
    if plain(secret, [host::SECCOMP, 1, 4, fprog.as_ptr() as u64, 0, 0]) != 0 {
        refuse(secret);
    }
}

/// Ends: nothing may run here unadmitted. Signals are for guest code already, so that an invalid instruction
/// would be taken for one of its own, and the monitor be told that all is well.
fn refuse(secret: Secret) -> ! {
    plain(secret, [host::EXIT_GROUP, 1, 0, 0, 0, 0]);
    crate::die()
}
