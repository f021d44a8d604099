//! Probe 7: which instructions answer guest user code with the host's truth, and CPUID faulting.

use crate::guest::{self, Regs, TEXT};
use crate::host;
use crate::measure::price;
use crate::report::{fact, law, row};

macro_rules! leaks {
    ($($id:ident: $name:literal, $($line:literal),+;)+) => {
        $(crate::code!($id, $($line),+, "mov r15, rax", "mov eax, 0xdead", "syscall");)+
        const LEAKS: &[(&str, fn() -> &'static [u8])] = &[$(($name, $id)),+];
    };
}

// The answer is left in rax (and, for two-register answers, rdx).
leaks! {
    sgdt: "sgdt base", "sgdt [rsp-16]", "mov rax, [rsp-14]";
    sidt: "sidt base", "sidt [rsp-16]", "mov rax, [rsp-14]";
    sldt: "sldt", "sldt eax";
    str_: "str", "str eax";
    smsw: "smsw", "smsw eax";
    rdpid: "rdpid (host CPU number | node << 12)", "rdpid rax";
    rdtscp: "rdtscp aux", "rdtscp", "mov rax, rcx";
    lsl_cpu: "lsl of selector 0x7b (what vgetcpu reads)", "mov ecx, 0x7b", "lsl eax, ecx";
    lar_tss: "lar of selector 0x40 (TSS)", "mov ecx, 0x40", "lar eax, ecx";
    lar_data: "lar of selector 0x2b", "mov ecx, 0x2b", "lar eax, ecx";
    verw: "verw of selector 0x2b sets ZF", "mov ecx, 0x2b", "verw cx", "setz al", "movzx eax, al";
    xgetbv0: "xgetbv 0 (XCR0)", "xor ecx, ecx", "xgetbv", "shl rdx, 32", "or rax, rdx";
    xgetbv1: "xgetbv 1 (XINUSE)", "mov ecx, 1", "xgetbv", "shl rdx, 32", "or rax, rdx";
    rdpkru: "rdpkru", "xor ecx, ecx", "rdpkru";
    rdpmc: "rdpmc", "xor ecx, ecx", "rdpmc";
    rdfsbase: "rdfsbase", "rdfsbase rax";
    cs: "mov eax, cs", "mov eax, cs";
    ss: "mov eax, ss", "mov eax, ss";
    ds: "mov eax, ds", "mov eax, ds";
    pushf: "pushfq (IF, IOPL)", "pushfq", "pop rax";
    rdrand: "rdrand CF", "rdrand rax", "setc al", "movzx eax, al";
    rdsspq: "rdsspq (0 = no shadow stack)", "xor eax, eax", "rdsspq rax";
    xend: "xtest (TSX)", "xtest", "setnz al", "movzx eax, al";
    cpuid: "cpuid leaf 0x40000000 ebx", "mov eax, 0x40000000", "cpuid", "mov eax, ebx";
}

crate::code!(
    cpuid_loop,
    "2: xor eax, eax",
    "push rbx",
    "cpuid",
    "pop rbx",
    "dec rbx",
    "jnz 2b",
    "mov eax, 0xdead",
    "syscall"
);
crate::code!(rdtsc_loop, "2: rdtsc", "dec rbx", "jnz 2b", "mov eax, 0xdead", "syscall");
crate::code!(
    split_loop,
    "lea rcx, [rsp-66]",
    "and rcx, -64",
    "2: lock inc dword ptr [rcx-2]",
    "dec rbx",
    "jnz 2b",
    "mov eax, 0xdead",
    "syscall"
);

/// Prints each answer, then what trapping CPUID costs.
pub fn run() {
    for (name, code) in LEAKS {
        let status = host::in_child(|| {
            guest_with(code());
            guest::enter(&Regs::at_text(1));
            let exit = guest::last_exit();
            if exit.signal == libc::SIGSYS {
                fact(name, format!("{:#x}", exit.words[7]));
            } else {
                fact(
                    name,
                    format!("signal {} trap {} err {:#x}", exit.signal, exit.trap(), exit.error()),
                );
            }
        });
        assert_eq!(status, 0, "{name}");
    }
    host::in_child(cpuid_faulting);
    host::in_child(|| loop_cost("rdtsc, native", rdtsc_loop(), 1000));
    host::in_child(|| loop_cost("lock inc across a cache line (split lock)", split_loop(), 20));
}

fn guest_with(code: &[u8]) {
    guest::prepare_stacks();
    host::install_code(TEXT, code);
    guest::catch_all(guest::h_leave);
    host::trap_calls_from(TEXT, TEXT + host::PAGE);
}

fn loop_cost(name: &str, code: &[u8], loops: u64) {
    guest_with(code);
    row(name, price(21, loops, || guest::enter(&Regs::at_text(loops))));
}

/// CPUID faulting: the signal says #GP, and how long the skip takes by each way back.
fn cpuid_faulting() {
    loop_cost("cpuid, native (an exit to the outer hypervisor here)", cpuid_loop(), 200);
    let set_cpuid = 0x1012; // ARCH_SET_CPUID
    // SAFETY: from here on CPUID raises #GP in this process.
    let result = unsafe { libc::syscall(libc::SYS_arch_prctl, set_cpuid, 0) };
    law("arch_prctl(ARCH_SET_CPUID, 0) is accepted", result == 0);
    guest::enter(&Regs::at_text(1));
    let exit = guest::last_exit();
    law(
        "cpuid raises SIGSEGV, trap 13, rip at the instruction",
        (exit.signal, exit.trap(), exit.rip()) == (libc::SIGSEGV, 13, TEXT as u64 + 3),
    );
    host::in_child(|| {
        guest::enter(&Regs::at_text(1));
        law("a forked child inherits it", guest::last_exit().trap() == 13);
    });
    guest::catch_all(guest::h_skip2_xrstor_used_jump);
    row(
        "cpuid fault, skipped without sigreturn",
        price(21, 200, || guest::enter(&Regs::at_text(200))),
    );
    guest::catch_all(guest::h_skip2_sigreturn);
    row("cpuid fault, skipped by sigreturn", price(21, 200, || guest::enter(&Regs::at_text(200))));
}
