//! The last instructions before guest code.
//!
//! Each gate starts by looking whether a kick has arrived and returns if so. A kick that arrives
//! later, up to the gate's end, finds the interrupted PC in the gate and nothing of the guest's state
//! changed yet: the handler then gives the gate up ([`in_gate`]).

use core::{arch::naked_asm, mem::offset_of};
use wedge_abi::{VcpuPage, mode};
use x86::narrow::{USER_CS_32, USER_DS};

/// PKRU while user code runs: every key but 0 is closed; what the host gives a handler, too.
const PKRU_USER: u32 = 0x5555_5554;

/// A function that enters user code with the registers of the vCPU page. The function returns only if a kick came before
/// user code ran.
pub type Gate = extern "C" fn();

/// Selects the gate for 32-bit (`narrow`) or 64-bit user code, which closes the protection keys if the host has `keys`.
#[inline(always)]
pub fn gate(narrow: bool, keys: bool) -> Gate {
    match (narrow, keys) {
        (false, true) => enter_user,
        (false, false) => enter_user_without_keys,
        (true, true) => enter_narrow,
        (true, false) => enter_narrow_without_keys,
    }
}

macro_rules! to_user {
    ($name:ident, $end:literal, $($close:literal),*) => {
        /// Enters user code with the vCPU page's registers; returns only if a kick came first.
        ///
        /// The first half runs with the keys open and copies what the second half needs to the gate
        /// page, which user code may read.
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(
                "lea rdx, [rip + vcpu_page]",
                "cmp qword ptr [rdx + {kicked}], 0",
                "jne 9f",
                "mov r15, rdx",
                "mov qword ptr [r15 + {mode}], {user}",
                "inc qword ptr [r15 + {entries}]",
                "lea r14, [rip + gate_page]",
                "mov rbx, [r15 + {rflags}]",
                "mov [r14], rbx",
                "mov rbx, [r15 + {gpr} + 0]",
                "mov [r14 + 8], rbx",
                "mov rbx, [r15 + {gpr} + 8]",
                "mov [r14 + 16], rbx",
                "mov rbx, [r15 + {gpr} + 16]",
                "mov [r14 + 24], rbx",
                "mov rbx, [r15 + {gpr} + 32]",
                "mov [r14 + 32], rbx",
                "mov rbx, [r15 + {rip}]",
                "mov [r14 + 40], rbx",
                "mov rbx, [r15 + {gpr} + 24]",
                "mov rbp, [r15 + {gpr} + 40]",
                "mov rsi, [r15 + {gpr} + 48]",
                "mov rdi, [r15 + {gpr} + 56]",
                "mov r8, [r15 + {gpr} + 64]",
                "mov r9, [r15 + {gpr} + 72]",
                "mov r10, [r15 + {gpr} + 80]",
                "mov r11, [r15 + {gpr} + 88]",
                "mov r12, [r15 + {gpr} + 96]",
                "mov r13, [r15 + {gpr} + 104]",
                "mov r14, [r15 + {gpr} + 112]",
                "mov r15, [r15 + {gpr} + 120]",
                $($close,)*
                "lea rsp, [rip + gate_page]",
                "mov rax, [rip + gate_page + 8]",
                "mov rcx, [rip + gate_page + 16]",
                "mov rdx, [rip + gate_page + 24]",
                "popfq",
                "mov rsp, [rip + gate_page + 32]",
                concat!(".globl ", $end), concat!($end, ":"),
                "jmp [rip + gate_page + 40]",
                "8: ud2",
                "9: ret",
                kicked = const offset_of!(VcpuPage, run.kicked),
                mode = const offset_of!(VcpuPage, run.mode),
                user = const mode::USER,
                entries = const offset_of!(VcpuPage, counters.user_entries),
                gpr = const offset_of!(VcpuPage, regs.gpr),
                rip = const offset_of!(VcpuPage, run.user_rip),
                rflags = const offset_of!(VcpuPage, regs.rflags))
        }
    };
}

to_user!(
    enter_user,
    "enter_user_end",
    "mov eax, 0x55555554",
    "xor ecx, ecx",
    "xor edx, edx",
    "wrpkru",
    // Whoever jumped to the WRPKRU with another value ends here.
    "cmp eax, 0x55555554",
    "jne 8f"
);
to_user!(enter_user_without_keys, "enter_user_without_keys_end", "nop");

macro_rules! to_narrow {
    ($name:ident, $end:literal, $($close:literal),*) => {
        /// Enters 32-bit user code in the same way. What user code may write to the gate page before the
        /// IRET it could have set in its registers.
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(
                "lea rdx, [rip + vcpu_page]",
                "cmp qword ptr [rdx + {kicked}], 0",
                "jne 9f",
                "mov r15, rdx",
                "mov qword ptr [r15 + {mode}], {user}",
                "inc qword ptr [r15 + {entries}]",
                "lea r14, [rip + gate_page]",
                "mov rbx, [r15 + {gpr} + 0]",
                "mov [r14 + 8], rbx",
                "mov rbx, [r15 + {gpr} + 8]",
                "mov [r14 + 16], rbx",
                "mov rbx, [r15 + {gpr} + 16]",
                "mov [r14 + 24], rbx",
                "mov rbx, [r15 + {rip}]",
                "mov [r14 + 128], rbx",
                "mov qword ptr [r14 + 136], {cs}",
                "mov rbx, [r15 + {rflags}]",
                "mov [r14 + 144], rbx",
                "mov rbx, [r15 + {gpr} + 32]",
                "mov [r14 + 152], rbx",
                "mov qword ptr [r14 + 160], {ss}",
                "mov rbx, [r15 + {gpr} + 24]",
                "mov rbp, [r15 + {gpr} + 40]",
                "mov rsi, [r15 + {gpr} + 48]",
                "mov rdi, [r15 + {gpr} + 56]",
                "mov r8, [r15 + {gpr} + 64]",
                "mov r9, [r15 + {gpr} + 72]",
                "mov r10, [r15 + {gpr} + 80]",
                "mov r11, [r15 + {gpr} + 88]",
                "mov r12, [r15 + {gpr} + 96]",
                "mov r13, [r15 + {gpr} + 104]",
                "mov r14, [r15 + {gpr} + 112]",
                "mov r15, [r15 + {gpr} + 120]",
                $($close,)*
                "lea rsp, [rip + gate_page + 128]",
                "mov rax, [rip + gate_page + 8]",
                "mov rcx, [rip + gate_page + 16]",
                "mov rdx, [rip + gate_page + 24]",
                concat!(".globl ", $end), concat!($end, ":"),
                "iretq",
                "8: ud2",
                "9: ret",
                kicked = const offset_of!(VcpuPage, run.kicked),
                mode = const offset_of!(VcpuPage, run.mode),
                user = const mode::USER,
                entries = const offset_of!(VcpuPage, counters.user_entries),
                gpr = const offset_of!(VcpuPage, regs.gpr),
                rip = const offset_of!(VcpuPage, run.user_rip),
                cs = const USER_CS_32,
                ss = const USER_DS,
                rflags = const offset_of!(VcpuPage, regs.rflags))
        }
    };
}

to_narrow!(
    enter_narrow,
    "enter_narrow_end",
    "mov eax, 0x55555554",
    "xor ecx, ecx",
    "xor edx, edx",
    "wrpkru",
    "cmp eax, 0x55555554",
    "jne 8f"
);
to_narrow!(enter_narrow_without_keys, "enter_narrow_without_keys_end", "nop");

const _: () = assert!(PKRU_USER == 0x5555_5554);

/// Runs translated code from the block at `BlockState::jump` to its exit; zero if a kick came first.
#[unsafe(naked)]
pub extern "C" fn enter_block() -> u64 {
    naked_asm!(
        "lea rdx, [rip + vcpu_page]",
        "cmp qword ptr [rdx + {kicked}], 0",
        "jne 9f",
        "mov qword ptr [rdx + {mode}], {kernel}",
        "lea rax, [rip + code_cache]",
        ".globl enter_block_end", "enter_block_end:",
        "call rax",
        "lea rdx, [rip + vcpu_page]",
        "mov qword ptr [rdx + {mode}], {wedge}",
        "mov eax, 1",
        "ret",
        "9: xor eax, eax",
        "ret",
        kicked = const offset_of!(VcpuPage, run.kicked),
        mode = const offset_of!(VcpuPage, run.mode),
        kernel = const mode::KERNEL,
        wedge = const mode::WEDGE)
}

/// Goes on in the middle of translated code, with host registers, to its exit; zero if a kick came
/// first. Leaves the stack as the routine that enters translated code does.
#[unsafe(naked)]
pub extern "C" fn resume_raw() -> u64 {
    naked_asm!(
        "lea rdx, [rip + vcpu_page]",
        "cmp qword ptr [rdx + {kicked}], 0",
        "jne 9f",
        "mov qword ptr [rdx + {mode}], {kernel}",
        "lea rax, [rip + 8f]",
        "push rax",
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdx + {host_rsp}], rsp",
        "push 0x2b",
        "push qword ptr [rdx + {gpr} + 32]",
        "push qword ptr [rdx + {flags}]",
        "push 0x33",
        "push qword ptr [rdx + {pc}]",
        "mov rax, [rdx + {gpr} + 0]",
        "mov rcx, [rdx + {gpr} + 8]",
        "mov rbx, [rdx + {gpr} + 24]",
        "mov rbp, [rdx + {gpr} + 40]",
        "mov rsi, [rdx + {gpr} + 48]",
        "mov rdi, [rdx + {gpr} + 56]",
        "mov r8, [rdx + {gpr} + 64]",
        "mov r9, [rdx + {gpr} + 72]",
        "mov r10, [rdx + {gpr} + 80]",
        "mov r11, [rdx + {gpr} + 88]",
        "mov r12, [rdx + {gpr} + 96]",
        "mov r13, [rdx + {gpr} + 104]",
        "mov r14, [rdx + {gpr} + 112]",
        "mov r15, [rdx + {gpr} + 120]",
        "mov rdx, [rdx + {gpr} + 16]",
        ".globl resume_raw_end", "resume_raw_end:",
        "iretq",
        "8: lea rdx, [rip + vcpu_page]",
        "mov qword ptr [rdx + {mode}], {wedge}",
        "mov eax, 1",
        "ret",
        "9: xor eax, eax",
        "ret",
        kicked = const offset_of!(VcpuPage, run.kicked),
        mode = const offset_of!(VcpuPage, run.mode),
        kernel = const mode::KERNEL,
        wedge = const mode::WEDGE,
        host_rsp = const offset_of!(VcpuPage, block.host_rsp),
        flags = const offset_of!(VcpuPage, block.host_flags),
        gpr = const offset_of!(VcpuPage, regs.gpr),
        pc = const offset_of!(VcpuPage, exit.pc))
}

macro_rules! end_of {
    ($name:ident, $label:literal) => {
        #[unsafe(naked)]
        extern "C" fn $name() -> u64 {
            naked_asm!(concat!("lea rax, [rip + ", $label, "]"), "ret")
        }
    };
}
end_of!(user_end, "enter_user_end");
end_of!(user_without_keys_end, "enter_user_without_keys_end");
end_of!(narrow_end, "enter_narrow_end");
end_of!(narrow_without_keys_end, "enter_narrow_without_keys_end");
end_of!(block_end, "enter_block_end");
end_of!(raw_end, "resume_raw_end");

/// The PC lies in a gate, its last instruction included.
pub fn in_gate(pc: u64) -> bool {
    let within = |start: *const (), end: u64| pc >= start as u64 && pc <= end;
    within(enter_user as *const (), user_end())
        || within(enter_user_without_keys as *const (), user_without_keys_end())
        || within(enter_narrow as *const (), narrow_end())
        || within(enter_narrow_without_keys as *const (), narrow_without_keys_end())
        || within(enter_block as *const (), block_end())
        || within(resume_raw as *const (), raw_end())
}
