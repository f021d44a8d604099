//! Probe 10: what is in the signal frame and what its size costs.

use crate::guest::{self, Regs, TEXT};
use crate::host;
use crate::measure::price;
use crate::report::{fact, law, row};

macro_rules! states {
    ($($id:ident: $name:literal, $($line:literal),+;)+) => {
        $(crate::code!($id, $($line),+, "2: mov eax, 39", "syscall", "dec rbx", "jnz 2b",
            "mov eax, 0xdead", "syscall");)+
        const STATES: &[(&str, fn() -> &'static [u8])] = &[$(($name, $id)),+];
    };
}

states! {
    untouched: "no vector state", "nop";
    sse: "xmm0-15 in use", "pcmpeqd xmm0, xmm0", "movaps xmm15, xmm0";
    avx: "ymm in use", "vpcmpeqd ymm0, ymm0, ymm0";
    zmm: "zmm0 in use", "vpternlogd zmm0, zmm0, zmm0, 0xff";
    zmm_high: "zmm0, zmm17 and k1 in use", "vpternlogd zmm0, zmm0, zmm0, 0xff",
        "vpternlogd zmm17, zmm17, zmm17, 0xff", "kxnorq k1, k1, k1";
    zmm_cleared: "zmm used, then vzeroall", "vpternlogd zmm0, zmm0, zmm0, 0xff", "vzeroall";
    x87: "x87 in use", "fld1";
}

crate::code!(
    tiles,
    "sub rsp, 128",
    "mov byte ptr [rsp], 1",
    "mov word ptr [rsp+16], 64",
    "mov byte ptr [rsp+48], 16",
    "ldtilecfg [rsp]",
    "tilezero tmm0",
    "2: mov eax, 39",
    "syscall",
    "dec rbx",
    "jnz 2b",
    "mov eax, 0xdead",
    "syscall"
);

const LOOPS: u64 = 500;

/// Prices sigreturn and the fast way for each vector state, then with AMX.
pub fn run() {
    for (name, code) in STATES {
        assert_eq!(host::in_child(|| one(name, code())), 0, "{name}");
    }
    let status = host::in_child(|| {
        let request = 0x1023; // ARCH_REQ_XCOMP_PERM
        // SAFETY: asks for permission to use AMX tile data (component 18).
        let granted = unsafe { libc::syscall(libc::SYS_arch_prctl, request, 18) } == 0;
        fact("AMX permission granted on request", granted);
        if granted {
            one("AMX permitted, not used", untouched());
            host::in_child(|| one("AMX tile in use", tiles()));
        }
    });
    assert_eq!(status, 0, "AMX");
}

fn one(name: &str, code: &[u8]) {
    guest::prepare_stacks();
    host::install_code(TEXT, code);
    host::trap_calls_from(TEXT, TEXT + host::PAGE);
    guest::catch_all(guest::h_leave);
    guest::enter(&Regs::at_text(1));
    let exit = guest::last_exit();
    let top = (guest::ALT_STACK + guest::ALT_STACK_LEN) as u64;
    fact(
        format!("{name}: frame bytes, xsave bytes, XSTATE_BV"),
        format!(
            "{} {} {:#x}",
            top - exit.context + 8,
            exit.xsave_word(464) >> 32,
            exit.xsave_word(512)
        ),
    );
    if exit.signal != libc::SIGSYS {
        fact(
            "but it ends early",
            format!("signal {} trap {} rip {:#x}", exit.signal, exit.trap(), exit.rip()),
        );
        return;
    }
    law(format!("{name}: the image is 64-byte aligned"), exit.fpstate.is_multiple_of(64));
    guest::catch_all(guest::h_sigreturn);
    row(format!("{name}: sigreturn"), price(41, LOOPS, || guest::enter(&Regs::at_text(LOOPS))));
    guest::catch_all(guest::h_xrstor_used_sysret);
    row(format!("{name}: xrstor used"), price(41, LOOPS, || guest::enter(&Regs::at_text(LOOPS))));
}
