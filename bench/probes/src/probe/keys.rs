//! Probe 3: protection keys and signals. What PKRU a handler starts with, where the frame may lie,
//! and what the keys do and do not stop.

use crate::guest::{self, EXIT, Exit, Regs, TEXT};
use crate::host;
use crate::report::{fact, law};
use std::arch::x86_64::__cpuid_count;

crate::code!(
    denied_call,
    "mov eax, 0x5555555c",
    "xor ecx, ecx",
    "xor edx, edx",
    "wrpkru",
    "mov eax, 39",
    "syscall"
);
crate::code!(
    denied_read,
    "mov eax, 0x5555555c",
    "xor ecx, ecx",
    "xor edx, edx",
    "wrpkru",
    "mov rax, [rsi]"
);
crate::code!(
    denied_jump,
    "mov eax, 0x5555555c",
    "xor ecx, ecx",
    "xor edx, edx",
    "wrpkru",
    "jmp rsi"
);
crate::code!(
    closed_zero,
    "mov eax, 0xffffffff",
    "xor ecx, ecx",
    "xor edx, edx",
    "wrpkru",
    "mov rax, [rsp-8]"
);
crate::code!(leave_now, "mov eax, 0xdead", "syscall");
crate::code!(read_it, "mov rax, [rsi]");

/// PKRU with everything but key 0 closed in both ways: `DENY` plus write-disable of key 1.
const DENIED: u64 = 0x5555_555c;
const SECRET: usize = 0x4300_0000;

/// Checks the laws the separation of guest kernel and guest user rests on.
pub fn run() {
    let cases: &[fn()] = &[call, key_1_stack, read, jump, all_closed, execute_only];
    for case in cases {
        let status = host::in_child(|| {
            guest::prepare_stacks();
            guest::catch_all(guest::h_leave);
            case();
        });
        if status != 0 {
            law("a keys case ends well", false);
        }
    }
}

fn exit_of(code: &[u8]) -> Exit {
    host::install_code(TEXT, code);
    host::trap_calls_from(TEXT, TEXT + host::PAGE);
    guest::enter(&Regs { rsi: SECRET as u64, ..Regs::at_text(0) });
    guest::last_exit()
}

fn saved_keys(exit: &Exit) -> u64 {
    let offset = __cpuid_count(0xd, 9).ebx as usize;
    exit.xsave_word(offset) & 0xffff_ffff
}

fn call() {
    host::key_alloc();
    let exit = exit_of(denied_call());
    fact("PKRU at handler entry", format!("{:#x}", exit.keys));
    law("the frame holds the interrupted PKRU", saved_keys(&exit) == DENIED);
    law("with its XSTATE_BV bit", exit.xsave_word(512) >> 9 & 1 == 1);
}

fn key_1_stack() {
    let key = host::key_alloc();
    host::protect_key(guest::ALT_STACK, guest::ALT_STACK_LEN, host::RW, key);
    let exit = exit_of(denied_call());
    law(
        "a frame is delivered on a key-1 stack the guest cannot reach (Linux 6.12)",
        exit.signal == libc::SIGSYS,
    );
    law("its handler starts without access to that stack", exit.keys >> (2 * key) & 1 == 1);
}

fn read() {
    let key = host::key_alloc();
    host::map_anon(SECRET, host::PAGE, host::RW);
    host::protect_key(SECRET, host::PAGE, host::RW, key);
    let exit = exit_of(denied_read());
    let absent = (exit.code, exit.error() & 0x21) == (4, 0);
    law("denied key, page not present yet: SEGV_PKUERR, error code without P and PK", absent);
    // SAFETY: the page was mapped writable just above, and h_leave opened the keys.
    unsafe { (SECRET as *mut u64).write_volatile(1) };
    guest::enter(&Regs { rsi: SECRET as u64, ..Regs::at_text(0) });
    let exit = guest::last_exit();
    let present = (exit.code, exit.error() & 0x21) == (4, 0x21);
    law("denied key, page present: SEGV_PKUERR, error code with P and PK", present);
}

fn jump() {
    let key = host::key_alloc();
    host::install_code(SECRET, leave_now());
    host::protect_key(SECRET, host::PAGE, libc::PROT_READ | libc::PROT_EXEC, key);
    host::install_code(TEXT, denied_jump());
    host::trap_calls_from(TEXT, SECRET + host::PAGE);
    guest::enter(&Regs { rsi: SECRET as u64, ..Regs::at_text(0) });
    let exit = guest::last_exit();
    law("keys do not stop instruction fetch", (exit.signal, exit.rax()) == (libc::SIGSYS, EXIT));
}

fn all_closed() {
    host::key_alloc();
    let exit = exit_of(closed_zero());
    law("a guest that closes every key, key 0 too, is still caught", exit.signal == libc::SIGSEGV);
    law("and its PKRU is in the frame", saved_keys(&exit) == 0xffff_ffff);
}

fn execute_only() {
    host::install_code(SECRET, leave_now());
    host::protect(SECRET, host::PAGE, libc::PROT_EXEC);
    let exit = exit_of(read_it());
    law(
        "mprotect(PROT_EXEC) makes execute-only: a read is SEGV_PKUERR",
        (exit.signal, exit.code) == (libc::SIGSEGV, 4),
    );
    let open: u64;
    // SAFETY: RDPKRU reads a register.
    unsafe { std::arch::asm!("rdpkru", out("eax") open, in("ecx") 0, out("edx") _) };
    fact(
        "PKRU of this thread once execute-only is in use",
        format!("{open:#x} (h_leave opened all)"),
    );
}
