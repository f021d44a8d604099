//! 32-bit user code: how it is entered, how its calls and its thread-local segments are had, and the price of
//! each.

use crate::guest::{self, Exit, Regs, STACK, TEXT};
use crate::host::{self, PAGE, RW};
use crate::measure::price;
use crate::report::{fact, law, row};

/// The selector of the first thread-local segment, and its entry of the host's GDT.
const TLS: u64 = 0x63;
const ENTRY: u32 = 12;
/// Two places with different words.
const HERE: usize = 0x4200_0000;
const THERE: usize = 0x4300_0000;
/// What is told of a segment.
const AREA: usize = 0x4400_0000;
/// Where the vDSO is put: its addresses are small numbers for 32-bit code.
const VDSO: usize = 5 << 32;
const LOOPS: u64 = 500;

/// 64-bit code that goes over to 32-bit code behind it by IRETQ.
macro_rules! narrow {
    ($name:ident, $($line:literal),+) => {
        crate::code!($name,
            "mov eax, esp", "push 0x2b", "push rax", "pushfq", "push 0x23", "lea rax, [rip+2f]", "push rax",
            "iretq", ".code32", "2:", $($line,)+ "mov eax, 0xdead", "int 0x80", ".code64");
    };
}
narrow!(interrupts, "mov eax, 20", "3: int 0x80", "dec ebx", "jnz 3b");
narrow!(
    enters,
    "call 4f",
    "4: pop esi",
    "add esi, 16",
    "push ebp",
    "mov ebp, esp",
    "mov eax, 20",
    "3: sysenter",
    "nop",
    "nop",
    "nop",
    "dec ebx",
    "jnz 3b"
);
narrow!(enters_once, "mov ebp, esp", "push 0x1234", "mov ebp, esp", "mov eax, 20", "sysenter");
narrow!(enters_without_stack, "mov ebp, 0x100", "mov eax, 20", "sysenter");
narrow!(calls32, "mov eax, 20", "syscall");
narrow!(loads_segment, "mov eax, 0x63", "mov gs, eax", "mov ecx, gs:[0]", "mov edx, gs");
narrow!(
    reads32,
    "3: mov ecx, gs:[0]",
    "cmp ecx, esi",
    "jne 4f",
    "dec ebx",
    "jnz 3b",
    "4: mov edx, gs"
);
narrow!(loops32, "3: dec ebx", "jnz 3b");

/// All of it.
pub fn run() {
    crate::measure::ticks_per_ns(); // by the vDSO, which is about to go
    for (name, code) in [
        ("SYSENTER", enters_once as fn() -> &'static [u8]),
        ("SYSENTER without a stack", enters_without_stack),
        ("SYSCALL", calls32),
    ] {
        apart(|| {
            let exit = once(code(), &Regs::at_text(0));
            fact(name, described(&exit));
        });
    }
    apart(sysenter_laws);
    apart(segment_laws);
    apart(|| {
        priced("int 0x80, iretq to 32-bit code", interrupts(), guest::h_iret32);
        priced("SYSENTER, iretq to 32-bit code", enters(), guest::h_iret32_to_esi);
    });
    host::map_anon(AREA, PAGE, RW);
    let cost = price(41, LOOPS, || (0..LOOPS).for_each(|n| set_area(HERE as u32 + n as u32)));
    row("set_thread_area", cost);
}

fn apart(body: impl FnOnce()) {
    assert_eq!(host::in_child(body), 0);
}

fn armed(code: &[u8]) {
    guest::prepare_stacks();
    move_vdso();
    host::install_code(TEXT, code);
    host::trap_all_guest_calls();
}

fn once(code: &[u8], regs: &Regs) -> Exit {
    armed(code);
    guest::catch_all(guest::h_leave);
    guest::enter(regs);
    guest::last_exit()
}

fn priced(name: &str, code: &'static [u8], handler: host::Handler) {
    apart(|| {
        armed(code);
        guest::catch_all(handler);
        row(name, price(41, LOOPS, || guest::enter(&Regs::at_text(LOOPS))));
    });
}

fn described(exit: &Exit) -> String {
    format!(
        "signal {} code {} trap {} rip {:#x} rsp {:#x} rbp {:#x} rax {:#x} selectors {:#x} address {:#x}",
        exit.signal,
        exit.code,
        exit.trap(),
        exit.rip(),
        exit.rsp(),
        exit.words[10],
        exit.rax(),
        exit.selectors(),
        exit.addr
    )
}

/// Moves the vDSO, and with it where the host has SYSENTER go on.
fn move_vdso() {
    // SAFETY: nobody uses it from here on.
    unsafe {
        let vdso = libc::getauxval(libc::AT_SYSINFO_EHDR) as usize;
        let moved = (1..16).any(|pages| {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let len = pages * PAGE;
            libc::mremap(vdso as *mut _, len, len, flags, VDSO) == VDSO as *mut _
        });
        assert!(moved, "the vDSO cannot be moved");
        libc::munmap(VDSO as *mut _, 16 * PAGE);
    }
}

fn sysenter_laws() {
    let exit = once(enters_once(), &Regs::at_text(0));
    let stack = (STACK + PAGE - 48) as u64;
    law(
        "SYSENTER: SIGSYS in 32-bit code",
        exit.signal == libc::SIGSYS && exit.selectors() & 0xffff == 0x23,
    );
    law("it is at the vDSO, though that is gone", exit.rip() >> 32 == VDSO as u64 >> 32);
    law("RSP holds EBP", exit.rsp() & !0xfff == stack & !0xfff);
    law("RBP holds the word there", exit.words[10] == 0x1234);
}

/// 64-bit programs have this call by INT 0x80 only, so what it is told lies where such a call can point to.
fn set_area(base: u32) {
    const SET_THREAD_AREA: u64 = 243;
    let result: u64;
    // SAFETY: mapped for this; the host reads it. 32-bit, limit in pages, usable.
    unsafe {
        (AREA as *mut [u32; 4]).write([ENTRY, base, 0xfffff, 0x51]);
        std::arch::asm!("xchg rbx, {0}", "int 0x80", "xchg rbx, {0}", inout(reg) AREA => _,
            inlateout("rax") SET_THREAD_AREA => result, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    assert_eq!(result, 0, "set_thread_area");
}

fn segment_laws() {
    for (at, word) in [(HERE, 0x1111_u32), (THERE, 0x2222)] {
        host::map_anon(at, PAGE, RW);
        // SAFETY: just mapped.
        unsafe { (at as *mut u32).write(word) };
    }
    host::map_anon(AREA, PAGE, RW);
    set_area(HERE as u32);
    let exit = once(loads_segment(), &Regs::at_text(0));
    law(
        "32-bit code loads a segment of set_thread_area",
        exit.rcx() == 0x1111 && exit.words[12] == TLS,
    );
    host::install_code(TEXT, reads32());
    apart(|| {
        // Somebody else on this CPU, so that the host switches.
        // SAFETY: a child that spins and ends with its parent.
        unsafe {
            if libc::fork() == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                loop {
                    std::hint::spin_loop();
                }
            }
            std::arch::asm!("mov gs, {0:e}", "wrgsbase {1}", in(reg) TLS, in(reg) THERE);
        }
        let start = crate::measure::tsc();
        guest::enter(&Regs { rsi: 0x2222, ..Regs::at_text(1_000_000_000) });
        let exit = guest::last_exit();
        let time = (crate::measure::tsc() - start) as f64 / crate::measure::ticks_per_ns() / 1e6;
        let kept = exit.words[11] == 0 && exit.words[12] == TLS;
        law(format!("a base of WRGSBASE holds in 32-bit code ({time:.0} ms)"), kept);
    });
    host::install_code(TEXT, loops32());
    let cost = price(11, 1_000_000, || guest::enter(&Regs::at_text(1_000_000)));
    row("a loop of two instructions in 32-bit code, each", cost);
}
