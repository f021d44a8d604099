//! Probe 2: a guest's `syscall` caught by a seccomp trap or by syscall user dispatch, and the ways
//! back into the guest that do not call the host.

use crate::guest::{self, Regs, TEXT};
use crate::host::{self, Handler};
use crate::measure::price;
use crate::report::{law, row};

crate::code!(
    calls,
    "2: mov eax, 39",
    "syscall",
    "dec rbx",
    "jnz 2b",
    "mov eax, 0xdead",
    "syscall",
    "ud2"
);

crate::code!(
    calls_with_vectors,
    "vpternlogd zmm0, zmm0, zmm0, 0xff",
    "vpternlogd zmm17, zmm17, zmm17, 0xff",
    "kxnorq k1, k1, k1",
    "2: mov eax, 39",
    "syscall",
    "dec rbx",
    "jnz 2b",
    "mov eax, 0xdead",
    "syscall",
    "ud2"
);

macro_rules! trapping {
    ($name:ident, $($line:literal),+) => {
        crate::code!($name, "2:", $($line),+, "dec rbx", "jnz 2b", "mov eax, 0xdead", "syscall");
    };
}
crate::code!(one_call, "mov eax, 39", "syscall", "ud2");
trapping!(page_fault, "mov eax, [rsi]");
trapping!(general_protection, "cli", "nop");
trapping!(undefined, "ud2");
trapping!(breakpoint, "int3", "nop", "nop");
trapping!(zero_divide, "xor ecx, ecx", "div ecx");
trapping!(software_interrupt, "int 0x2e");

const LOOPS: u64 = 500;
const WAYS: &[(&str, Handler)] = &[
    ("sigreturn", guest::h_sigreturn),
    ("GPRs, popfq, jmp rcx", guest::h_sysret),
    ("GPRs, iretq", guest::h_iret),
    ("xrstor all, popfq, jmp rcx", guest::h_xrstor_sysret),
    ("xrstor x87+SSE, popfq, jmp rcx", guest::h_xrstor_legacy_sysret),
    ("xrstor used, popfq, jmp rcx", guest::h_xrstor_used_sysret),
    ("xrstor used, iretq", guest::h_xrstor_used_iret),
    ("xrstor used, popfq, jmp through memory", guest::h_xrstor_used_jump),
    ("wrpkru, xrstor used, wrpkru, popfq, jmp rcx", guest::h_keys_xrstor_sysret),
    ("wrpkru, xrstor all + PKRU, popfq, jmp rcx", guest::h_keys_xrstor_pkru_sysret),
];

/// Prices every way back under both traps, with clean and dirty vector registers.
pub fn run() {
    for (catcher, arm) in [
        ("user dispatch", dispatch as fn()),
        ("seccomp trap", || host::trap_calls_from(TEXT, TEXT + 4096)),
    ] {
        for (state, code) in [("clean", calls()), ("zmm dirty", calls_with_vectors())] {
            let status = host::in_child(|| {
                guest::prepare_stacks();
                host::install_code(TEXT, code);
                arm();
                for (way, handler) in WAYS {
                    guest::catch_all(*handler);
                    let cost = price(41, LOOPS, || guest::enter(&Regs::at_text(LOOPS)));
                    row(format!("{catcher}, {state}: {way}"), cost);
                }
            });
            assert_eq!(status, 0, "{catcher} {state}");
        }
    }
    assert_eq!(host::in_child(inheritance), 0, "inheritance");
    assert_eq!(host::in_child(exceptions), 0, "exceptions");
}

/// What a fork of a wedge keeps. The guest's one call is SIGSYS if caught, and SIGILL if it ran.
fn inheritance() {
    guest::prepare_stacks();
    host::install_code(TEXT, one_call());
    guest::catch_all(guest::h_leave);
    let child_sees = |name: &str, signal: i32| {
        host::in_child(|| {
            guest::enter(&Regs::at_text(0));
            law(name, guest::last_exit().signal == signal);
        });
    };
    dispatch();
    child_sees("user dispatch is not inherited by fork", libc::SIGILL);
    host::trap_calls_from(TEXT, TEXT + 4096);
    child_sees("a seccomp filter is", libc::SIGSYS);
}

/// Exceptions, each skipped by the handler: which trap is cheap on this host.
fn exceptions() {
    host::trap_calls_from(TEXT, TEXT + host::PAGE);
    guest::prepare_stacks();
    let kinds: &[(&str, &[u8])] = &[
        ("#PF, read of an unmapped page", page_fault()),
        ("#GP, cli", general_protection()),
        ("#UD, ud2", undefined()),
        ("#BP, int3", breakpoint()),
        ("#DE, div", zero_divide()),
        ("#GP, int 0x2e", software_interrupt()),
    ];
    for (name, code) in kinds {
        host::install_code(TEXT, code);
        for (way, handler) in [
            ("sigreturn", guest::h_skip2_sigreturn as Handler),
            ("xrstor used, jmp through memory", guest::h_skip2_xrstor_used_jump),
        ] {
            guest::catch_all(handler);
            row(format!("{name}: {way}"), price(41, LOOPS, || guest::enter(&Regs::at_text(LOOPS))));
        }
    }
}

/// Everything but the page of guest code may call the host.
fn dispatch() {
    host::dispatch_calls_outside(TEXT + 4096, usize::MAX - TEXT - 4096);
}
