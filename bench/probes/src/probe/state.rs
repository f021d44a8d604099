//! Probe 2, correctness: a system call answered without sigreturn loses no register, flag or vector.
//!
//! The guest loads a full image of patterns, makes one call that a handler resumes, and leaves by a
//! second call whose frame (written by the host kernel, not by us) is compared with the patterns.

use crate::guest::{self, Exit, Regs, TEXT};
use crate::host::{self, Handler};
use crate::report::{fact, law};
use std::arch::x86_64::__cpuid_count;

crate::code!(
    patterned,
    "mov eax, 0xe7",
    "xor edx, edx",
    "xrstor64 [rdi]",
    "mov edx, 0xdddd",
    "popfq",
    "mov eax, 39",
    "syscall",
    "mov eax, 0xdead",
    "syscall"
);

crate::code!(all_flags, "pushfq", "or dword ptr [rsp], 0x244500", "popfq", "syscall");
crate::code!(
    stepping,
    "pushfq",
    "or dword ptr [rsp], 0x100",
    "mov eax, 39",
    "popfq",
    "syscall",
    "nop",
    "nop",
    "ud2"
);

/// CF PF AF ZF SF DF OF, AC, ID, IF and the fixed bit.
const FLAGS: u64 = 0x24_0ed7;
const IMAGE: usize = 0x4200_0000;

/// Checks each way back, and that the check can fail.
pub fn run() {
    let ways: &[(&str, Handler, bool)] = &[
        ("sigreturn keeps everything", guest::h_sigreturn, true),
        ("xrstor all keeps everything", guest::h_xrstor_sysret, true),
        ("xrstor used keeps everything", guest::h_xrstor_used_sysret, true),
        ("xrstor used, jump through memory keeps everything", guest::h_xrstor_used_jump, true),
        ("xrstor used, iretq keeps everything", guest::h_xrstor_used_iret, true),
        ("wrpkru pair, xrstor used keeps everything", guest::h_keys_xrstor_sysret, true),
        ("xrstor with PKRU keeps everything", guest::h_keys_xrstor_pkru_sysret, true),
        ("without xrstor the vectors are lost (so the check can fail)", guest::h_sysret, false),
    ];
    for (name, handler, keeps) in ways {
        for catcher in [dispatch as fn(), || host::trap_calls_from(TEXT, TEXT + host::PAGE)] {
            let status = host::in_child(|| {
                let (exit, image) = round_trip(*handler, catcher);
                law(name, registers_kept(&exit) && (vectors_kept(&exit, &image) == *keeps));
            });
            assert_eq!(status, 0, "{name}");
        }
    }
    host::in_child(flags_at_entry);
    let after_nop = (TEXT + stepping().len() - 3) as u64;
    host::in_child(|| {
        law(
            "TF resumed by iretq traps after one guest instruction",
            stepped_resume(guest::h_iret) == after_nop,
        )
    });
    host::in_child(|| {
        law("TF resumed by popfq traps inside the wedge", stepped_resume(guest::h_sysret) > 1 << 32)
    });
}

/// A single-stepped system call: only IRETQ lets the next trap fall on the guest's next instruction.
fn stepped_resume(handler: Handler) -> u64 {
    guest::prepare_stacks();
    host::install_code(TEXT, stepping());
    guest::catch_all(guest::h_leave);
    host::on_signal(libc::SIGSYS, handler);
    host::trap_calls_from(TEXT, TEXT + host::PAGE);
    guest::enter(&Regs::at_text(0));
    guest::last_exit().rip()
}

/// What the host leaves of the guest's flags for the handler.
fn flags_at_entry() {
    guest::prepare_stacks();
    host::install_code(TEXT, all_flags());
    guest::catch_all(guest::h_leave);
    host::trap_calls_from(TEXT, TEXT + host::PAGE);
    guest::enter(&Regs::at_text(0));
    let flags = guest::last_exit().entry_flags;
    let named = |bit: u64| flags & bit != 0;
    fact("in the handler after DF AC NT TF ID were set", format!("{flags:#x}"));
    law(
        "DF and TF are cleared, AC and NT are still the guest's",
        [0x400, 0x100, 0x4_0000, 0x4000].map(named) == [false, false, true, true],
    );
}

fn dispatch() {
    host::dispatch_calls_outside(1 << 32, (1 << 47) - (1 << 32));
}

fn round_trip(handler: Handler, catcher: fn()) -> (Exit, Vec<u8>) {
    guest::prepare_stacks();
    host::install_code(TEXT, patterned());
    let image = patterns();
    host::map_anon(IMAGE, host::PAGE * 2, host::RW);
    // SAFETY: two pages hold the image; the flags lie where the guest's rsp points.
    unsafe {
        std::ptr::copy_nonoverlapping(image.as_ptr(), IMAGE as *mut u8, image.len());
        ((guest::STACK + 0x800) as *mut u64).write(FLAGS);
    }
    guest::catch_all(handler);
    catcher();
    guest::enter(&start());
    (guest::last_exit(), image)
}

fn start() -> Regs {
    let m = |n: u64| 0xa5a5_0000_ffff_0000 | n;
    Regs {
        rdi: IMAGE as u64,
        rsp: (guest::STACK + 0x800) as u64,
        rsi: m(1),
        rbp: m(2),
        r8: m(3),
        r9: m(4),
        r10: m(5),
        r12: m(6),
        r13: m(7),
        r14: m(8),
        r15: m(9),
        ..Regs::at_text(m(10))
    }
}

fn registers_kept(exit: &Exit) -> bool {
    let (want, end) = (start(), (TEXT + patterned().len()) as u64);
    let [
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        rdi,
        rsi,
        rbp,
        rbx,
        rdx,
        rax,
        rcx,
        rsp,
        rip,
        flags,
        ..,
    ] = exit.words;
    [r8, r9, r10, r12, r13, r14, r15]
        == [want.r8, want.r9, want.r10, want.r12, want.r13, want.r14, want.r15]
        && [rdi, rsi, rbp, rbx] == [want.rdi, want.rsi, want.rbp, want.rbx]
        && [rdx, rax, rsp] == [0xdddd, guest::EXIT, want.rsp + 8]
        && [rip, rcx] == [end, end]
        && [flags, r11] == [FLAGS, FLAGS]
}

/// An XSAVE image with a different byte everywhere: x87, SSE, AVX and AVX-512.
fn patterns() -> Vec<u8> {
    let mut image = vec![0u8; 2 * host::PAGE];
    for (at, len) in pieces() {
        for (n, byte) in image[at..at + len].iter_mut().enumerate() {
            *byte = (at + n * 7) as u8 | 1;
        }
    }
    image[0..2].copy_from_slice(&0x027fu16.to_le_bytes());
    image[4] = 0xff; // every x87 register valid
    image[24..28].copy_from_slice(&0x1fa0u32.to_le_bytes()); // MXCSR with the precision flag
    image[512] = 0xe7;
    image
}

/// The bytes of an XSAVE image that carry register contents, as (offset, length).
fn pieces() -> Vec<(usize, usize)> {
    let mut pieces: Vec<(usize, usize)> = (0..8).map(|n| (32 + 16 * n, 10)).collect();
    pieces.push((160, 256));
    for feature in [2, 5, 6, 7] {
        let facts = __cpuid_count(0xd, feature);
        pieces.push((facts.ebx as usize, facts.eax as usize));
    }
    pieces
}

fn vectors_kept(exit: &Exit, image: &[u8]) -> bool {
    let same = |at: usize| exit.xsave_word(at) as u8 == image[at];
    let control = [0, 1, 4, 24, 25];
    pieces().into_iter().all(|(at, len)| (at..at + len).all(same)) && control.into_iter().all(same)
}
