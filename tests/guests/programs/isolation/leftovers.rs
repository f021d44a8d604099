//! What a program leaves in the engine's pages: a process of the host's that has run one runs another next.
//!
//! Who holds the pattern and who looks for it are both children by the bare system call, and neither writes to memory: a fault
//! of the looker's own would write over what is there.

use wedge_abi::{ALT_STACK, ALT_STACK_LEN, USER_PAGE, UserPage};
use crate::{Fine, LONG, Needs, Outcome, asm, mmap, waitpid};
use core::{mem::offset_of, ptr};

/// Programs that hold it and programs that look, in turns.
const TURNS: usize = 40;
/// System calls of one that is to be interrupted on its way into the engine.
const CALLS: usize = 50_000;
/// What is held and looked for, inverted: so it is in registers alone.
const INVERTED: u64 = !0x5ec2_e7c0_de5e_c2e7;
/// How a child ends that has found it.
const FOUND: i32 = 1 << 8;

/// Starts a child that has the pattern in registers while it takes a page fault, some interrupts and `calls` system calls. Returns
/// whether the child then finds the pattern in the `len` bytes at `at`.
fn is_left(at: usize, len: usize, calls: usize) -> bool {
    // SAFETY: the kernel chooses where: private, anonymous.
    let fresh = unsafe { mmap(ptr::null_mut(), 4096, 3, 0x22, -1, 0) };
    let child: i32;
    // SAFETY: the child writes to the page, reads, and ends, by a signal where it may not read.
    unsafe {
        asm!("mov eax, 57", "syscall", "test eax, eax", "jnz 4f",
            "not r12", "mov r13, r12", "mov r14, r12", "mov r15, r12", "movq xmm8, r12", "movq xmm9, r12",
            "mov byte ptr [rdi], 1", "mov ecx, 3000000", "2: dec ecx", "jnz 2b",
            "2: mov eax, 39", "syscall", "dec r9", "jnz 2b", "xor edi, edi",
            "2: cmp [rsi], r12", "je 3f", "add rsi, 8", "cmp rsi, rdx", "jb 2b", "jmp 5f",
            "3: mov edi, 1", "5: mov eax, 60", "syscall", "4:",
            in("rdi") fresh, in("rsi") at, in("rdx") at + len, in("r12") INVERTED, in("r9") calls,
            lateout("eax") child, out("rcx") _, out("r11") _);
    }
    waits(child) == FOUND
}

/// Whether a new child finds the pattern in the `len` bytes at `at`.
fn is_found(at: usize, len: usize) -> bool {
    let child: i32;
    // SAFETY: as for the other child.
    unsafe {
        asm!("mov eax, 57", "syscall", "test eax, eax", "jnz 4f", "xor edi, edi",
            "2: mov rax, [rsi]", "not rax", "cmp rax, r8", "je 3f", "add rsi, 8", "cmp rsi, rdx", "jb 2b", "jmp 5f",
            "3: mov edi, 1", "5: mov eax, 60", "syscall", "4:",
            in("rsi") at, in("rdx") at + len, in("r8") INVERTED, lateout("eax") child, out("rcx") _, out("r11") _,
            out("rdi") _);
    }
    waits(child) == FOUND
}

fn waits(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: a child of ours.
    unsafe { waitpid(child, &mut status, 0) };
    status
}

pub fn attempts(o: &mut Outcome) {
    const CONTEXT: usize = offset_of!(UserPage, context);
    const INTERRUPTED: usize = offset_of!(UserPage, interrupted);
    // An interrupt finds a program on its way into the engine once in some thousand calls.
    let own = [
        ("signal stack", ALT_STACK, ALT_STACK_LEN, TURNS, 1),
        ("user page by a signal", USER_PAGE + CONTEXT, offset_of!(UserPage, stack) - CONTEXT, TURNS, 1),
        ("user page by an interrupt", USER_PAGE + INTERRUPTED, offset_of!(UserPage, shares) - INTERRUPTED, 5, CALLS),
    ];
    o.patience = 20 * LONG;
    for (place, at, len, turns, calls) in own {
        o.attempt(&format!("registers left in the {place}"), Needs::Wedge, Fine, || {
            !(0..turns).any(|_| is_left(at, len, calls))
        });
    }
    let places = [("signal stack", ALT_STACK, ALT_STACK_LEN), ("user page", USER_PAGE, size_of::<UserPage>())];
    for (place, at, len) in places {
        o.attempt(&format!("another program's registers in the {place}"), Needs::Wedge, Fine, || {
            (0..TURNS).all(|_| {
                is_left(at, 8, 1);
                !is_found(at, len)
            })
        });
    }
    o.patience = LONG;
}
