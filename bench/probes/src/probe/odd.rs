//! Probe 8: every odd way out of user mode, and whether the frame still tells the guest's exact state.
//!
//! One line each: signal.code, trap number, error code, cr2, and how rip, rsp, rcx, r11 and the flags
//! in the frame differ from what they were before the instruction. Run with the seccomp trap armed
//! for 32-bit calls and the whole low 4 GiB, and, where it differs, with user dispatch.

use crate::guest::{self, EXIT, Exit, Regs, STACK, TEXT};
use crate::host;
use crate::report::fact;

/// A snippet: its name and bytes; rcx, r11, rdx hold marks when it starts.
type Snippet = (&'static str, fn() -> &'static [u8]);

macro_rules! snippets {
    ($($id:ident: $name:literal, $($line:literal),+;)+) => {
        $(crate::code!($id, $($line),+, "mov eax, 0xdead", "syscall", "hlt");)+
        const SNIPPETS: &[Snippet] = &[$(($name, $id)),+];
    };
}

snippets! {
    plain: "syscall, eax=39", "mov eax, 39", "syscall";
    flagged: "syscall with DF, AC, CF set", "pushfq", "or dword ptr [rsp], 0x40401", "popfq",
        "mov eax, 39", "syscall";
    nested_task: "syscall with NT set", "pushfq", "or dword ptr [rsp], 0x4000", "popfq",
        "mov eax, 39", "syscall";
    stepped_call: "syscall with TF set (popfq sets it)", "pushfq", "or dword ptr [rsp], 0x100",
        "mov eax, 39", "popfq", "syscall";
    stepped: "popfq with TF, then nop", "pushfq", "or dword ptr [rsp], 0x100", "popfq", "nop", "nop";
    shadow: "mov ss, then syscall", "mov ecx, ss", "mov eax, 39", "mov ss, ecx", "syscall";
    shadow_stepped: "TF on, mov ss, then syscall", "mov ecx, ss", "pushfq",
        "or dword ptr [rsp], 0x100", "mov eax, 39", "popfq", "mov ss, ecx", "syscall";
    shadow_int3: "mov ss, then int3", "mov ecx, ss", "mov ss, ecx", "int3";
    bad_number: "syscall, eax=-1", "mov eax, -1", "syscall";
    x32: "syscall, x32 number", "mov eax, 0x40000027", "syscall";
    int80: "int 0x80", "mov eax, 20", "int 0x80";
    int80_high: "int 0x80 with a high rax", "mov rax, 0x1234567800000014", "int 0x80";
    sysenter: "sysenter, 64-bit code, ebp=0", "xor ebp, ebp", "sysenter";
    sysenter_stack: "sysenter, 64-bit code, ebp=stack", "lea ebp, [rsp-64]", "sysenter";
    int3: "int3", "int3";
    int3_long: "cd 03", ".byte 0xcd, 3";
    icebp: "int1 (icebp)", ".byte 0xf1";
    into: "into (0xce)", ".byte 0xce";
    int_n: "int 0x2e", "int 0x2e";
    int_db: "int 1 (cd 01)", ".byte 0xcd, 1";
    int_of: "int 4", ".byte 0xcd, 4";
    ud2: "ud2", "ud2";
    hlt: "hlt", "hlt";
    cli: "cli", "cli";
    port: "in al, dx", "in al, dx";
    cr3: "mov rax, cr3", "mov rax, cr3";
    dr7: "mov rax, dr7", "mov rax, dr7";
    rdmsr: "rdmsr", "rdmsr";
    swapgs: "swapgs", "swapgs";
    sysret: "sysretq", "sysretq";
    invlpg: "invlpg", "invlpg [rax]";
    xsetbv: "xsetbv", "xsetbv";
    clui: "clui (user interrupts)", ".byte 0xf3, 0x0f, 0x01, 0xee";
    uiret: "uiret", ".byte 0xf3, 0x0f, 0x01, 0xec";
    senduipi: "senduipi rax", ".byte 0xf3, 0x0f, 0xc7, 0xf0";
    umonitor: "umonitor rax", ".byte 0xf3, 0x0f, 0xae, 0xf0";
    vmcall: "vmcall", "vmcall";
    vmfunc: "vmfunc", "xor eax, eax", "vmfunc";
    divide: "div by zero", "xor ecx, ecx", "div ecx";
    null_read: "read at 0x10", "mov rax, [0x10]";
    upper_read: "read at ffff888000001000", "mov rax, 0xffff888000001000", "mov rax, [rax]";
    upper_write: "write at ffff888000001000", "mov rax, 0xffff888000001000", "mov [rax], rax";
    hole_read: "read at 0000800000000000", "mov rax, 0x800000000000", "mov rax, [rax]";
    hole_stack: "push with non-canonical rsp", "mov rsp, 0x800000000000", "push rax";
    upper_stack: "push with rsp=ffffc90000001000", "mov rsp, 0xffffc90000001000", "push rax";
    deep_stack: "push with rsp in the canonical hole", "mov rsp, 0x900000000000", "push rax";
    lock_register: "lock on a register operand", ".byte 0xf0, 0x01, 0xc0";
    far_jump: "jmp far through memory to 0x33", "lea rax, [rip+2f]", "mov [rsp-16], eax",
        "mov word ptr [rsp-12], 0x33", "jmp fword ptr [rsp-16]", "2:";
    hole_jump: "jmp to 0000800000000000", "mov rax, 0x800000000000", "jmp rax";
    upper_jump: "jmp to ffffffff81000000", "mov rax, 0xffffffff81000000", "jmp rax";
    vsys_read: "read the vsyscall page", "mov rax, [0xffffffffff600000]";
    vsys_call: "call vsyscall gettimeofday", "xor edi, edi", "xor esi, esi",
        "mov rax, 0xffffffffff600000", "call rax";
    vsys_time: "call vsyscall time", "xor edi, edi", "mov rax, 0xffffffffff600400", "call rax";
    vsys_odd: "call into the vsyscall page's middle", "mov rax, 0xffffffffff600010", "call rax";
    align: "misaligned read with AC set", "pushfq", "or dword ptr [rsp], 0x40000", "popfq",
        "mov rax, [rsp-63]";
    mmx_div: "x87 exception, unmasked divide", "push 0x37b", "fldcw [rsp]", "fldz", "fld1", "fdiv st(0), st(1)",
        "fwait";
    sse_div: "SSE exception, unmasked divide", "push 0x1d80", "ldmxcsr [rsp]", "xorps xmm0, xmm0",
        "push 0x3f800000", "movss xmm1, [rsp]", "divss xmm1, xmm0";
    iret: "iretq to the next instruction", "mov eax, ss", "push rax", "lea rcx, [rsp+8]", "push rcx",
        "pushfq", "mov eax, cs", "push rax", "lea rax, [rip+2f]", "push rax", "iretq", "2:";
    iret_bad: "iretq to a kernel selector", "push 0x18", "push rsp", "pushfq", "push 0x10",
        "lea rax, [rip+2f]", "push rax", "iretq", "2:";
    iret_hole: "iretq to a non-canonical rip", "push 0x2b", "push rsp", "pushfq", "push 0x33",
        "mov rax, 0x800000000000", "push rax", "iretq";
    far_32: "far return to 32-bit code, int 0x80 there", "push 0x23", "lea rax, [rip+2f]", "push rax",
        "retfq", "2: mov eax, 20", "int 0x80";
    far_32_call: "far return to 32-bit code, syscall there", "push 0x23", "lea rax, [rip+2f]",
        "push rax", "retfq", "2: mov eax, 20", "syscall";
    far_32_enter: "far return to 32-bit code, sysenter there", "lea ebp, [rsp-64]", "push 0x23",
        "lea rax, [rip+2f]", "push rax", "retfq", "2: mov eax, 20", "sysenter";
    far_32_ud: "far return to 32-bit code, ud2 there", "push 0x23", "lea rax, [rip+2f]", "push rax",
        "retfq", "2: ud2";
    far_bad: "far return to selector 0x1b", "push 0x1b", "lea rax, [rip+2f]", "push rax", "retfq", "2:";
    load_fs: "mov fs, 0x2b (base becomes 0), fs:[0]", "mov eax, 0x2b", "mov fs, eax",
        "mov rax, fs:[0]";
    load_ldt: "mov fs, 7 (LDT)", "mov eax, 7", "mov fs, eax";
    load_tls: "mov fs, 0x63 (empty GDT TLS)", "mov eax, 0x63", "mov fs, eax";
    load_es: "mov es, 0x2b; mov ds, 0", "mov eax, 0x2b", "mov es, eax", "xor eax, eax", "mov ds, eax",
        "mov rax, [rsp-8]";
    load_ss: "mov ss, 0x18 (kernel data)", "mov eax, 0x18", "mov ss, eax";
    lldt: "lldt ax", "lldt ax";
    wrpkru: "wrpkru closing key 0, then a load", "xor ecx, ecx", "xor edx, edx", "mov eax, 3", "wrpkru",
        "mov rax, [rsp-8]";
}

/// Runs every snippet in a child of its own.
pub fn run() {
    try_one("mov fs, 7 after the wedge's own modify_ldt", load_ldt(), || {
        own_descriptor();
        filter();
    });
    for (name, code) in SNIPPETS {
        for (catcher, arm) in [("", filter as fn()), ("SUD: ", dispatch)] {
            let calls = ["syscall", "sysenter", "int 0x80"].iter().any(|w| name.contains(w));
            if catcher.is_empty() || calls {
                try_one(&format!("{catcher}{name}"), code(), arm);
            }
        }
    }
}

/// Entry 0 of the LDT: a data segment with base 0x1000.
fn own_descriptor() {
    let descriptor = [0u32, 0x1000, 0xfffff, 0x51]; // 32-bit, limit in pages, useable
    // SAFETY: the kernel copies the descriptor.
    host::must("modify_ldt", unsafe {
        libc::syscall(libc::SYS_modify_ldt, 0x11, descriptor.as_ptr(), 16)
    });
}

fn filter() {
    host::trap_all_guest_calls();
}

fn dispatch() {
    host::dispatch_calls_outside(1 << 32, (1 << 47) - (1 << 32));
}

fn try_one(name: &str, code: &'static [u8], arm: fn()) {
    let status = host::in_child(|| {
        guest::prepare_stacks();
        host::install_code(TEXT, code);
        guest::catch_all(guest::h_leave);
        arm();
        // SAFETY: arms a timer against a guest that loops.
        unsafe { libc::alarm(2) };
        let start = Regs { rcx: 0xcccc, r11: 0xbbbb, rdx: 0xdddd, ..Regs::at_text(0) };
        guest::enter(&start);
        fact(name, describe(&guest::last_exit(), code));
    });
    if status != 0 {
        fact(name, format!("DIES with wait status {status:#x}"));
    }
}

/// One line about a frame.
fn describe(exit: &Exit, code: &[u8]) -> String {
    if exit.signal == libc::SIGSYS && exit.rax() == EXIT {
        return "runs natively, no exit".into();
    }
    let signal = match exit.signal {
        libc::SIGSYS => "SYS",
        libc::SIGSEGV => "SEGV",
        libc::SIGBUS => "BUS",
        libc::SIGILL => "ILL",
        libc::SIGTRAP => "TRAP",
        libc::SIGFPE => "FPE",
        _ => "?",
    };
    let tail = code.len() as i64 - 8; // mov eax, imm32; syscall; hlt
    let at = exit.rip().wrapping_sub(TEXT as u64) as i64;
    let rip = match at {
        _ if at == tail => "next".into(),
        0..=200 => format!("next-{}", tail - at),
        _ => format!("{:#x}", exit.rip()),
    };
    let rsp = exit.rsp().wrapping_sub((STACK + host::PAGE) as u64) as i64;
    format!(
        "{signal}.{} trap {} err {:#x} cr2 {:#x} rip {rip} rsp {rsp:+#x} rax {:#x} rcx {:#x} r11 {:#x} fl {:#x} sel {:#x}",
        exit.code,
        exit.trap(),
        exit.error(),
        exit.cr2(),
        exit.rax(),
        exit.rcx(),
        exit.words[3],
        exit.flags(),
        exit.selectors(),
    )
}
