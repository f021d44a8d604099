//! The process of user code, where that has one of its own: it holds the program's pages and nothing of the
//! kernel's.
//!
//! **Everything here but [`start`] and [`side`] is out of use in it, and user code can jump to any of it.**
//! What the process may ask of the host is the filter's to say, with a secret: to map, to unmap, to protect.
//! That secret is in no memory that this process has. The wedge tells it with the turn, as the value that
//! [`HAND_OVER`] returns; it is in registers while [`Journal`] is carried out, which user code cannot write,
//! and no longer. A signal in between is the one way for it into memory: the handler wipes it before anything
//! else.
//!
//! The parts of [`side`], in order of address. What a signal has interrupted is told by them:
//! - `user_patched`, where patched system calls arrive; `user_signal`, where signals do: a kick there changes
//!   nothing, for the way leads to the wedge anyway;
//! - `user_back`, which leads back to what such a kick has interrupted. Another kick has it begun anew;
//! - `user_again` and `user_call`, which hand over, and do it again if a signal came first. The host may have
//!   dropped the wedge's answer to that signal, so a kick there is noted;
//! - `user_told`: the registers hold the secret, and no order has been carried out. A kick has this part begun anew;
//! - `user_resumed`: the orders are carried out. A kick has the present order begun anew, which does no harm. The orders
//!   before it are not begun anew: a page that one of them protects may be unmapped by now;
//! - `user_carried_out`: the secret is gone. A kick is noted, and the way to user code goes on;
//! - `user_gate`: the last steps to user code, which a kick gives up;
//! - the ends of those;
//! - `user_failed`: an order could not be carried out. A kick has this begun anew.
//!
//! **A signal that finds no room for its frame ends the process, and RSP is user code's.** So the host must
//! never think that the stack of signals is in use already: each signal takes it away from the process
//! (SS_AUTODISARM), and blocks all signals. The handler thus is never interrupted. When it has read its
//! frame, and goes on to one of the places above, it has both back ([`prepared`]) by two calls that user code
//! can make too, since they can do nothing else.

use crate::{
    die, filter, here,
    setup::{Action, SIGNAL_FLAGS, SIGNALS},
    signal::RESTORER,
};
use core::{
    arch::{asm, naked_asm},
    mem::offset_of,
};
use wedge_abi::{
    ALT_STACK, ALT_STACK_LEN, HAND_OVER, JOURNAL, JOURNAL_POKE, Journal, KICK, RAM_FD, SITES,
    SITES_LEN, SYSCALL_USER_DISPATCH, TOP, USER_PAGE, UserPage, WINDOW, WINDOW_END, event,
};

/// SA_RESTART: a hand-over that a signal interrupts begins again.
const RESTART: u64 = 0x1000_0000;
const SIGBUS: u32 = 7;
const SIGSEGV: u32 = 11;
/// The CPU's number of the exception.
const GENERAL_PROTECTION: u32 = 13;

/// The first instruction of the process.
#[unsafe(naked)]
#[unsafe(link_section = ".text.user")]
pub extern "C" fn start() -> ! {
    naked_asm!("lea rsp, [rip + alt_stack]", "add rsp, {len}", "xor ebp, ebp", "call {main}",
        // The secret has been on the stack.
        "lea rdi, [rip + alt_stack]", "mov ecx, {len} / 8", "xor eax, eax", "rep stosq",
        "lea rax, [rip + {side}]", // which is so part of the image
        "jmp user_again",
        len = const ALT_STACK_LEN, main = sym main, side = sym side)
}

/// Makes the process what it is. The stack is that of its signals, which come later.
#[unsafe(link_section = ".text.user")]
extern "C" fn main() {
    // SAFETY: mapped before this began; nobody else uses it yet.
    let page = unsafe { &mut *(here(USER_PAGE) as *mut UserPage) };
    let [secret, blob_end, dispatch] = page.start;
    // A kick in here would lead to the wedge, and past the filter. It waits for the first hand-over.
    let all = u64::MAX;
    // SAFETY: reads the mask.
    unsafe { call([filter::SIGPROCMASK, filter::SETMASK, &raw const all as u64, 0, 8, 0]) };
    alone();
    signals();
    admit(secret, blob_end, dispatch);
    for word in &mut page.start {
        // SAFETY: a reference.
        unsafe { core::ptr::write_volatile(word, 0) };
    }
    // What the guest does not know of is in its initial state from here on.
    // SAFETY: an area of zeros is in order.
    unsafe {
        asm!("xrstor64 [{}]", "cmp qword ptr [rip + user_page], 0", in(reg) &raw const page.vectors, in("eax") 0xe7, in("edx") 0);
    }
}

/// A host call of user code's process, before it has guest code: its number and arguments.
///
/// # Safety
/// The arguments are what the call asks for, and nothing that is used is unmapped.
#[inline(always)]
unsafe fn call([nr, a, b, c, d, e]: [u64; 6]) -> i64 {
    let result;
    // SAFETY: as asked of the caller.
    unsafe {
        asm!("syscall", inlateout("rax") nr => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") 0, lateout("rcx") _, lateout("r11") _);
    }
    result
}

#[inline(always)]
fn alone() {
    // SAFETY: FS is not used here, and neither are the list and the address of which the host is to forget.
    unsafe {
        call([crate::host::ARCH_PRCTL, 0x1002, 0, 0, 0, 0]); // ARCH_SET_FS
        call([crate::host::ARCH_PRCTL, 0x1012, 0, 0, 0, 0]); // ARCH_SET_CPUID
        call([crate::host::SET_ROBUST_LIST, 0, 24, 0, 0, 0]);
        call([crate::host::SET_TID_ADDRESS, 0, 0, 0, 0, 0]);
    }
    let [window, window_end] = [WINDOW, WINDOW_END].map(here);
    for (from, to) in [(0, SITES), (SITES + SITES_LEN, window), (window_end, TOP)] {
        // SAFETY: all that is used here lies in the window and at the sites.
        if unsafe { call([crate::host::MUNMAP, from as u64, (to - from) as u64, 0, 0, 0]) } != 0 {
            die();
        }
    }
}

#[inline(always)]
fn signals() {
    let stack = (here(JOURNAL) + offset_of!(Journal, signal_stack)) as u64;
    // SAFETY: reads the description of a stack that is mapped for good.
    unsafe { call([crate::host::SIGALTSTACK, stack, 0, 0, 0, 0]) };
    let action = Action {
        handler: user_signal(),
        flags: SIGNAL_FLAGS | RESTART,
        restorer: RESTORER,
        mask: u64::MAX,
    };
    for signal in SIGNALS {
        // SAFETY: the handler is made for these signals.
        unsafe { call([crate::host::SIGACTION, signal, &raw const action as u64, 0, 8, 0]) };
    }
}

/// The second filter: what a wedge may, with a secret of its own. The first has the wedge hear of hand-overs.
#[inline(always)]
fn admit(secret: u64, blob_end: u64, dispatch: u64) {
    // SAFETY: the far end of the stack, which is zeroed and not in use.
    let program = unsafe { &mut *(here(ALT_STACK) as *mut filter::Program) };
    filter::write_for_user(program, secret, blob_end);
    let fprog = [program.len() as u64, program.as_ptr() as u64];
    let window = here(WINDOW) as u64;
    let dispatch_order =
        [crate::host::PRCTL, SYSCALL_USER_DISPATCH, 1, window, blob_end - window, 0];
    let admit_order = [crate::host::SECCOMP, 1, 4, fprog.as_ptr() as u64, 0, 0];
    // SAFETY: calls from here stay allowed; the program is in order, and is read while it is there.
    let refused = unsafe { dispatch != 0 && call(dispatch_order) != 0 || call(admit_order) != 0 };
    if refused {
        die();
    }
    for op in program {
        // SAFETY: a reference. The secret is in it.
        unsafe { core::ptr::write_volatile(&raw mut op.k, 0) };
    }
}

macro_rules! address_of {
    ($name:ident) => {
        #[unsafe(naked)]
        pub extern "C" fn $name() -> u64 {
            naked_asm!(concat!("lea rax, [rip + ", stringify!($name), "_at]"), "ret")
        }
    };
}
address_of!(user_patched);
address_of!(user_signal);
address_of!(user_told);

/// The signal's frame is wiped, for it is the program's registers and the process may be another's next. The next signal finds its
/// stack, and may come.
macro_rules! prepared {
    () => {
        concat!(
            "mov rdi, rsp\n",
            "mov ecx, esp\n",
            "neg ecx\n",
            "and ecx, {alt_stack_len} - 1\n", // to its end, for it is aligned to its size
            "shr ecx, 3\n",
            "xor eax, eax\n",
            "rep stosq\n",
            "lea rdi, [rip + journal_page + {signal_stack}]\n",
            "xor esi, esi\n",
            "mov eax, {SIGALTSTACK}\n",
            "syscall\n",
            "mov edi, {SETMASK}\n",
            "lea rsi, [rip + journal_page + {mask}]\n",
            "xor edx, edx\n",
            "mov r10d, 8\n",
            "mov eax, {SIGPROCMASK}\n",
            "syscall"
        )
    };
}

/// All of it that runs after the start.
///
/// Where there are protection keys no process has this side, but programs can jump to it: behind each XRSTOR,
/// which could open keys, is an access to a page that is not there then, and the signal closes them.
#[unsafe(naked)]
#[unsafe(link_section = ".text.user")]
pub extern "C" fn side() -> ! {
    naked_asm!(
        // EAX is the number of a system call, RCX the address behind it.
        ".globl user_patched_at", "user_patched_at:",
        "mov [rip + user_page + {gpr} + 32], rsp",
        "lea rsp, [rip + user_page + {stack}]",
        "pushfq",
        "pop r11",
        "push 0x202",
        "popfq",
        "mov [rip + user_page + {gpr}], rax",
        "mov [rip + user_page + {gpr} + 16], rdx",
        "mov [rip + user_page + {gpr} + 24], rbx",
        "mov [rip + user_page + {gpr} + 40], rbp",
        "mov [rip + user_page + {gpr} + 48], rsi",
        "mov [rip + user_page + {gpr} + 56], rdi",
        "mov [rip + user_page + {gpr} + 64], r8",
        "mov [rip + user_page + {gpr} + 72], r9",
        "mov [rip + user_page + {gpr} + 80], r10",
        "mov [rip + user_page + {gpr} + 96], r12",
        "mov [rip + user_page + {gpr} + 104], r13",
        "mov [rip + user_page + {gpr} + 112], r14",
        "mov [rip + user_page + {gpr} + 120], r15",
        "mov [rip + user_page + {rflags}], r11",
        "mov [rip + user_page + {rip}], rcx",
        "mov qword ptr [rip + user_page + {event}], {CALL}",
        "mov eax, 7",
        "xor edx, edx",
        "xsave64 [rip + user_page + {vectors}]",
        "20:", // the segments
        "rdfsbase rax", "mov [rip + user_page + {fs_base}], rax",
        "rdgsbase rax", "mov [rip + user_page + {gs_base}], rax",
        "mov eax, ds", "mov [rip + user_page + {selectors}], rax",
        "mov eax, es", "mov [rip + user_page + {selectors} + 8], rax",
        "mov eax, fs", "mov [rip + user_page + {selectors} + 16], rax",
        "mov eax, gs", "mov [rip + user_page + {selectors} + 24], rax",
        "jmp user_call",

        // RDI is a signal, RSI its information, RDX the context.
        ".globl user_signal_at", "user_signal_at:",
        "push 0x202",
        "popfq",
        "mov rbx, rdx",
        "mov r12d, edi",
        "mov r13, rsi",
        "mov rcx, [rbx + 168]", // RIP
        "lea rax, [rip + user_patched_at]", "cmp rcx, rax", "jb 25f",
        "lea rax, [rip + user_end]", "cmp rcx, rax", "jae 25f",
        "lea rax, [rip + user_back]", "cmp rcx, rax", "jb 23f",
        "lea rax, [rip + user_again]", "cmp rcx, rax", "jb 24f",
        "lea rax, [rip + user_told_at]", "cmp rcx, rax", "jb 27f",
        "lea rax, [rip + user_gate]", "cmp rcx, rax", "jb 21f",
        "lea rax, [rip + user_failed]", "cmp rcx, rax", "jae 26f",
        "lea rax, [rip + user_gate_end]", "cmp rcx, rax", "ja 23f",
        "cmp r12d, {KICK}", "je user_gave_up",
        "jmp 25f",

        "21:", // orders
        "lea rax, [rip + user_told_at]", "cmp rcx, rax",
        "mov r15, [rbx + 96]",
        "cmove r15, [rbx + 144]",
        "mov r10, [rbx + 80]", "mov r11, [rbx + 88]", // R13 and R14
        "lea rdi, [rbx + 40]", "mov ecx, 16", "xor eax, eax", "rep stosq",
        "cmp r12d, {KICK}", "jne 22f",
        "mov qword ptr [rip + user_page + {kicked}], 1",
        // With the first instruction there the secret is gone, and no order can be carried out again.
        "mov rcx, [rbx + 168]", "lea rax, [rip + user_carried_out]", "cmp rcx, rax", "ja user_prepared_after",
        "mov r13, r10", "mov r14, r11",
        "lea rax, [rip + user_resumed]", "cmp rcx, rax", "jae user_resumed",
        "jmp user_prepared",
        "22:", // bytes that cannot be written, or user code that has jumped here: to it there is nothing
        "xor r15d, r15d", "xor r8d, r8d", "xor r9d, r9d",
        "cmp r12d, {SIGBUS}", "je user_failed_by_signal",
        "cmp r12d, {SIGSEGV}", "je user_failed_by_signal",
        "mov r12d, {SIGSEGV}",
        "mov qword ptr [rbx + 200], {GENERAL_PROTECTION}",
        "jmp 25f",

        "23:", // on the way to the wedge
        "cmp r12d, {KICK}", "jne 25f",
        "lea rsi, [rbx + 40]", "lea rdi, [rip + user_page + {interrupted}]", "mov ecx, 23", "rep movsq",
        "mov rsi, [rbx + 224]", "lea rdi, [rip + user_page + {interrupted_vectors}]", "mov ecx, 104", "rep movsq",
        "mov rax, [rbx + 168]", "mov [rip + user_page + {back}], rax",
        "mov qword ptr [rip + user_page + {back} + 8], 0x33",
        "mov rax, [rbx + 176]", "mov [rip + user_page + {back} + 16], rax",
        "mov rax, [rbx + 160]", "mov [rip + user_page + {back} + 24], rax",
        "mov qword ptr [rip + user_page + {back} + 32], 0x2b",
        "jmp user_back",

        "24:", // on the way back
        "cmp r12d, {KICK}", "je user_back",

        "27:", // at the call, whose answer the host may have dropped
        "mov qword ptr [rip + user_page + {kicked}], 1",
        "jmp user_again",

        "26:", // an order could not be carried out, and the secret may be in registers
        "cmp r12d, {KICK}", "jne 25f",
        "lea rdi, [rbx + 40]", "mov ecx, 16", "xor eax, eax", "rep stosq",
        "xor r15d, r15d", "xor r8d, r8d", "xor r9d, r9d",
        "jmp user_failed_by_signal",

        "25:", // user code's own
        "lea rsi, [rbx + 40]", "lea rdi, [rip + user_page + {context}]", "mov ecx, 23", "rep movsq",
        "mov rsi, r13", "lea rdi, [rip + user_page + {info}]", "mov ecx, 4", "rep movsq",
        "mov rsi, [rbx + 224]", "lea rdi, [rip + user_page + {vectors}]", "mov ecx, 104", "rep movsq",
        "mov eax, r12d", "mov [rip + user_page + {signal}], rax",
        "mov qword ptr [rip + user_page + {event}], {SIGNAL}",
        prepared!(),
        "jmp 20b",

        ".globl user_back", "user_back:",
        prepared!(),
        "mov eax, 7", "xor edx, edx",
        "xrstor64 [rip + user_page + {interrupted_vectors}]",
        "cmp qword ptr [rip + user_page], 0", // see `side`
        "mov r8, [rip + user_page + {interrupted}]",
        "mov r9, [rip + user_page + {interrupted} + 8]",
        "mov r10, [rip + user_page + {interrupted} + 16]",
        "mov r11, [rip + user_page + {interrupted} + 24]",
        "mov r12, [rip + user_page + {interrupted} + 32]",
        "mov r13, [rip + user_page + {interrupted} + 40]",
        "mov r14, [rip + user_page + {interrupted} + 48]",
        "mov r15, [rip + user_page + {interrupted} + 56]",
        "mov rdi, [rip + user_page + {interrupted} + 64]",
        "mov rsi, [rip + user_page + {interrupted} + 72]",
        "mov rbp, [rip + user_page + {interrupted} + 80]",
        "mov rbx, [rip + user_page + {interrupted} + 88]",
        "mov rdx, [rip + user_page + {interrupted} + 96]",
        "mov rax, [rip + user_page + {interrupted} + 104]",
        "mov rcx, [rip + user_page + {interrupted} + 112]",
        "lea rsp, [rip + user_page + {back}]",
        "iretq",

        ".globl user_again", "user_again:",
        prepared!(),
        ".globl user_call", "user_call:",
        // Not the stack of signals: the next one is to begin at its top.
        "lea rsp, [rip + user_page + {stack}]",
        "mov eax, {HAND_OVER}",
        "syscall",
        ".globl user_told_at", "user_told_at:",
        "mov r15, rax",
        "jmp user_orders",
        ".globl user_prepared", "user_prepared:",
        prepared!(),
        ".globl user_orders", "user_orders:",
        "lea r14, [rip + journal_page + {orders}]", // the next order
        "imul r13, [rip + journal_page + {count}], {order}",
        "add r13, r14", // behind the last one
        "jmp 30f",
        ".globl user_resumed", "user_resumed:",
        prepared!(),
        "30:",
        "cmp r14, r13", "je user_carried_out",
        "mov rax, [r14]", "mov rdi, [r14 + 8]", "mov rsi, [r14 + 16]", "mov rdx, [r14 + 24]", "mov r10, [r14 + 32]",
        "cmp rax, {POKE}", "je 33f",
        "cmp rax, {MMAP}", "je 31f",
        "mov r9, r15", "xor r8d, r8d",
        "jmp 32f",
        "31:",
        "mov r9, r15", "shl r9, 32", "or rdx, r9",
        "mov r8, r15", "shr r8, 32", "shl r8, 32", "or r8, {RAM_FD}",
        "mov r9, [r14 + 40]",
        "32:",
        "syscall",
        "cmp rax, -4096", "ja user_failed",
        "jmp 34f",
        "33:",
        "mov [rdi], dl", "shr rdx, 8", "inc rdi", "dec rsi", "jnz 33b",
        "34:",
        "add r14, {order}", "jmp 30b",
        ".globl user_carried_out", "user_carried_out:",
        "xor r15d, r15d",
        "jmp 35f",
        ".globl user_prepared_after", "user_prepared_after:",
        prepared!(),
        "35:",
        "xor r8d, r8d", "xor r9d, r9d", "xor edx, edx",
        "cmp qword ptr [rip + journal_page + {enter}], 0", "je user_done",

        ".globl user_gate", "user_gate:",
        "cmp qword ptr [rip + user_page + {kicked}], 0", "jne user_kicked",
        "mov eax, ds", "cmp eax, [rip + user_page + {selectors}]", "jne 40f",
        "mov eax, es", "cmp eax, [rip + user_page + {selectors} + 8]", "jne 40f",
        "mov eax, fs", "cmp eax, [rip + user_page + {selectors} + 16]", "jne 40f",
        "mov eax, gs", "cmp eax, [rip + user_page + {selectors} + 24]", "je 41f",
        "40:",
        "mov ds, [rip + user_page + {selectors}]",
        "mov es, [rip + user_page + {selectors} + 8]",
        "mov fs, [rip + user_page + {selectors} + 16]",
        "mov gs, [rip + user_page + {selectors} + 24]",
        "41:",
        "mov rax, [rip + user_page + {fs_base}]", "wrfsbase rax",
        "mov rax, [rip + user_page + {gs_base}]", "wrgsbase rax",
        "mov eax, 7", "xor edx, edx",
        "xrstor64 [rip + user_page + {vectors}]",
        "cmp qword ptr [rip + user_page], 0", // see `side`
        "mov rbx, [rip + user_page + {gpr} + 24]",
        "mov rbp, [rip + user_page + {gpr} + 40]",
        "mov rsi, [rip + user_page + {gpr} + 48]",
        "mov rdi, [rip + user_page + {gpr} + 56]",
        "mov r8, [rip + user_page + {gpr} + 64]",
        "mov r9, [rip + user_page + {gpr} + 72]",
        "mov r10, [rip + user_page + {gpr} + 80]",
        "mov r11, [rip + user_page + {gpr} + 88]",
        "mov r12, [rip + user_page + {gpr} + 96]",
        "mov r13, [rip + user_page + {gpr} + 104]",
        "mov r14, [rip + user_page + {gpr} + 112]",
        "mov r15, [rip + user_page + {gpr} + 120]",
        "mov rdx, [rip + user_page + {gpr} + 16]",
        "mov rcx, [rip + user_page + {gpr} + 8]",
        "mov rax, [rip + user_page + {gpr}]",
        "lea rsp, [rip + user_page + {rflags}]",
        "popfq",
        "mov rsp, [rip + user_page + {gpr} + 32]",
        ".globl user_gate_end", "user_gate_end:",
        "jmp [rip + user_page + {rip}]",

        ".globl user_gave_up", "user_gave_up:",
        prepared!(),
        "jmp user_kicked",
        ".globl user_failed_by_signal", "user_failed_by_signal:",
        prepared!(),
        "jmp user_failed",
        ".globl user_done", "user_done:",
        "mov qword ptr [rip + user_page + {event}], {DONE}",
        "jmp user_call",
        ".globl user_kicked", "user_kicked:",
        "mov qword ptr [rip + user_page + {event}], {KICKED}",
        "jmp user_call",
        ".globl user_failed", "user_failed:",
        "xor r15d, r15d", "xor r8d, r8d", "xor r9d, r9d", "xor edx, edx",
        "mov qword ptr [rip + user_page + {event}], {FAILED}",
        "jmp user_call",
        ".globl user_end", "user_end:",
        gpr = const offset_of!(UserPage, gpr),
        rip = const offset_of!(UserPage, rip),
        rflags = const offset_of!(UserPage, rflags),
        fs_base = const offset_of!(UserPage, fs_base),
        gs_base = const offset_of!(UserPage, gs_base),
        selectors = const offset_of!(UserPage, selectors),
        event = const offset_of!(UserPage, event),
        kicked = const offset_of!(UserPage, kicked),
        signal = const offset_of!(UserPage, signal),
        info = const offset_of!(UserPage, info),
        context = const offset_of!(UserPage, context),
        stack = const offset_of!(UserPage, stack) + 64,
        vectors = const offset_of!(UserPage, vectors),
        interrupted = const offset_of!(UserPage, interrupted),
        back = const offset_of!(UserPage, back),
        interrupted_vectors = const offset_of!(UserPage, interrupted_vectors),
        signal_stack = const offset_of!(Journal, signal_stack),
        mask = const offset_of!(Journal, mask),
        alt_stack_len = const ALT_STACK_LEN,
        SIGALTSTACK = const crate::host::SIGALTSTACK,
        SIGPROCMASK = const filter::SIGPROCMASK,
        SETMASK = const filter::SETMASK,
        enter = const offset_of!(Journal, enter),
        count = const offset_of!(Journal, count),
        orders = const offset_of!(Journal, orders),
        order = const size_of::<[u64; 6]>(),
        HAND_OVER = const HAND_OVER,
        POKE = const JOURNAL_POKE,
        MMAP = const filter::MMAP,
        RAM_FD = const RAM_FD,
        KICK = const KICK,
        SIGBUS = const SIGBUS,
        SIGSEGV = const SIGSEGV,
        GENERAL_PROTECTION = const GENERAL_PROTECTION,
        CALL = const event::CALL,
        SIGNAL = const event::SIGNAL,
        DONE = const event::DONE,
        KICKED = const event::KICKED,
        FAILED = const event::FAILED)
}
