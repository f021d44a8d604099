//! Making the process a wedge.

use crate::{
    filter, here,
    host::{self, call, change, load_vectors},
    patched::{entry_with_keys, entry_without_keys},
    signal::{RESTORER, on_signal, on_signal_keys},
    turns::{self, Turn},
    user,
};
use core::arch::naked_asm;
use frame::{
    ALT_STACK, ALT_STACK_LEN, COPIES_LEN, KICK, RAM, REGIONS, REGIONS_LEN, SITES, SITES_LEN, STACK,
    SYSCALL_USER_DISPATCH, Shared, TOP, USER_START, WINDOW, WINDOW_END,
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
    // SAFETY: this is the first that runs here, and the monitor waits until it says that it is ready.
    let turn = &mut unsafe { Turn::take_up() };
    let (f, s) = turn.pages();
    alone(s);
    signals(s);
    admit(s);
    let keys = s.setup.key != 0;
    let entry = if keys { entry_with_keys as *const () } else { entry_without_keys as *const () };
    s.ready.patched_entry =
        if s.setup.user_secret != 0 { user::user_patched() } else { entry as u64 };
    s.ready.done = 1;
    // What the guest does not know of is in its initial state from here on.
    host::reset_vectors(s.setup.secret, &f.vectors);
    load_vectors(s.setup.secret, f.vectors.0.as_ptr());
    turns::hand_over_and_run(turn)
}

/// Unmaps everything but the window, and clears what a thread of a C library leaves behind.
fn alone(s: &mut Shared) {
    let secret = s.setup.secret;
    // SAFETY: there is no C library here that would need any of these.
    unsafe {
        call(secret, host::ARCH_PRCTL, 0x1002, 0, 0, 0); // ARCH_SET_FS
        call(secret, host::ARCH_PRCTL, 0x1012, 0, 0, 0); // ARCH_SET_CPUID: CPUID faults from now on
        call(secret, host::SET_ROBUST_LIST, 0, 24, 0, 0);
        call(secret, host::SET_TID_ADDRESS, 0, 0, 0, 0);
    }
    let [regions, window, window_end, ram] = [REGIONS, WINDOW, WINDOW_END, RAM].map(here);
    let (ram_end, table_end) =
        (ram + s.setup.ram_len as usize, regions + REGIONS_LEN + COPIES_LEN);
    let sites_end = SITES + SITES_LEN;
    for (from, to) in
        [(0, SITES), (sites_end, regions), (table_end, window), (window_end, ram), (ram_end, TOP)]
    {
        let len = to - from;
        // SAFETY: what lies beside the wedge's own memory was its parent's.
        if unsafe { change(s, host::MUNMAP, from as u64, len as u64, 0, 0) } != 0 {
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

fn signals(s: &Shared) {
    let secret = s.setup.secret;
    let stack = [here(ALT_STACK) as u64, 0, ALT_STACK_LEN as u64];
    // SAFETY: a stack for signals, of which none uses it yet.
    unsafe { call(secret, host::SIGALTSTACK, stack.as_ptr() as u64, 0, 0, 0) };
    let keys = s.setup.key != 0;
    let handler = if keys { on_signal_keys as *const () } else { on_signal as *const () } as u64;
    let action = Action { handler, flags: SIGNAL_FLAGS, restorer: RESTORER, mask: 0 };
    for signal in SIGNALS {
        // SAFETY: a handler that takes whatever state it interrupts.
        unsafe { call(secret, host::SIGACTION, signal, &raw const action as u64, 0, 8) };
    }
}

/// Calls only from the blob, only these few, only with the secret; anything else is a SIGSYS.
fn admit(s: &Shared) {
    let secret = s.setup.secret;
    // SAFETY: the far end of the stack, which is zeroed and not in use.
    let program = unsafe { &mut *(here(STACK) as *mut filter::Program) };
    filter::write(program, secret, s.setup.blob_end, s.setup.narrow != 0);
    let fprog = [program.len() as u64, program.as_ptr() as u64];
    // SAFETY: gives up rights.
    unsafe { call(secret, host::PRCTL, 38, 1, 0, 0) }; // PR_SET_NO_NEW_PRIVS
    // All but the blob's own calls are a SIGSYS before any filter is asked.
    let window = here(WINDOW) as u64;
    if s.setup.user_dispatch != 0
        // SAFETY: as above.
        && unsafe {
            call(secret, host::PRCTL, SYSCALL_USER_DISPATCH, 1, window, s.setup.blob_end - window)
        } != 0
    {
        refuse(secret);
    }
    // SECCOMP_FILTER_FLAG_SPEC_ALLOW: hosts before 5.16 switch speculation off without it.
    // SAFETY: as above; the host reads the program.
    if unsafe { call(secret, host::SECCOMP, 1, 4, fprog.as_ptr() as u64, 0) } != 0 {
        refuse(secret);
    }
}

/// Ends: nothing may run here unadmitted. Signals are for guest code already, so that an invalid instruction
/// would be taken for one of its own, and the monitor be told that all is well.
fn refuse(secret: u64) -> ! {
    // SAFETY: ends the process.
    unsafe { call(secret, host::EXIT_GROUP, 1, 0, 0, 0) };
    crate::die()
}
