//! Probe 4: the kernel half of the guest at `host = guest + BIAS`, reached through the gs base.

use super::round_trip::BIAS;
use crate::guest::{self, EXIT, Exit, Regs, TEXT};
use crate::host;
use crate::measure::price;
use crate::report::{fact, law, row};

macro_rules! snippets {
    ($($id:ident: $($line:literal),+;)+) => {
        $(crate::code!($id, $($line),+, "mov r15, rax", "mov eax, 0xdead", "syscall");)+
    };
}

// rbx = BIAS on entry; rsi = the guest pointer under test.
snippets! {
    load: "wrgsbase rbx", "mov rax, gs:[rsi]";
    load_indexed: "wrgsbase rbx", "mov ecx, 0x1000", "mov rax, gs:[rsi+rcx*8-0x8000]";
    load_absolute: "wrgsbase rbx", "mov rax, gs:[0xffffffff81000000]";
    load_rip: "wrgsbase rbx", "mov rax, gs:[rip]";
    load_short: "wrgsbase rbx", "mov eax, gs:[esi]";
    swap_16: "wrgsbase rbx", "xor ebx, ebx", "xor ecx, ecx", "xor edx, edx", "xor eax, eax",
        "lock cmpxchg16b gs:[rsi]";
    save_vectors: "wrgsbase rbx", "xor edx, edx", "mov eax, 3", "xsave64 gs:[rsi]", "mov eax, 1";
    gather: "wrgsbase rbx", "vpcmpeqd ymm2, ymm2, ymm2", "vpxor ymm1, ymm1, ymm1",
        "vpgatherqq ymm0, gs:[rsi+ymm1], ymm2", "vmovq rax, xmm0";
    copy_in: "wrgsbase rbx", "lea rdi, [rsp-64]", "mov ecx, 1", "rep movsq es:[rdi], gs:[rsi]", "mov rax, [rsp-64]";
    push_kernel: "wrgsbase rbx", "mov rsp, rsi", "mov qword ptr gs:[rsp-8], 7", "lea rsp, [rsp-8]", "mov rax, gs:[rsp]";
    per_cpu: "lea rax, [rsi+rbx]", "wrfsbase rax", "mov rax, fs:[8]";
}

crate::code!(
    plain_loads,
    "wrgsbase rbx",
    "add rsi, rbx",
    "2: mov rax, [rsi]",
    "mov [rsi+8], rax",
    "add [rsi+16], rax",
    "dec ecx",
    "jnz 2b",
    "mov eax, 0xdead",
    "syscall"
);
crate::code!(
    biased_loads,
    "wrgsbase rbx",
    "2: mov rax, gs:[rsi]",
    "mov gs:[rsi+8], rax",
    "add gs:[rsi+16], rax",
    "dec ecx",
    "jnz 2b",
    "mov eax, 0xdead",
    "syscall"
);
crate::code!(
    plain_pushes,
    "2: push rax",
    "push rbx",
    "push r8",
    "push r9",
    "pop r9",
    "pop r8",
    "pop rbx",
    "pop rax",
    "dec ecx",
    "jnz 2b",
    "mov eax, 0xdead",
    "syscall"
);
crate::code!(
    biased_pushes,
    "wrgsbase rbx",
    "mov rsp, rsi",
    "2: mov gs:[rsp-8], rax",
    "lea rsp, [rsp-8]",
    "mov gs:[rsp-8], rbx",
    "lea rsp, [rsp-8]",
    "mov gs:[rsp-8], r8",
    "lea rsp, [rsp-8]",
    "mov gs:[rsp-8], r9",
    "lea rsp, [rsp-8]",
    "mov r9, gs:[rsp]",
    "lea rsp, [rsp+8]",
    "mov r8, gs:[rsp]",
    "lea rsp, [rsp+8]",
    "mov rbx, gs:[rsp]",
    "lea rsp, [rsp+8]",
    "mov rax, gs:[rsp]",
    "lea rsp, [rsp+8]",
    "dec ecx",
    "jnz 2b",
    "mov eax, 0xdead",
    "syscall"
);
// Neighbouring pushes gathered into one adjustment: exact state on a fault is rsp's old value.
crate::code!(
    batched_pushes,
    "wrgsbase rbx",
    "mov rsp, rsi",
    "2: mov gs:[rsp-8], rax",
    "mov gs:[rsp-16], rbx",
    "mov gs:[rsp-24], r8",
    "mov gs:[rsp-32], r9",
    "lea rsp, [rsp-32]",
    "mov r9, gs:[rsp]",
    "mov r8, gs:[rsp+8]",
    "mov rbx, gs:[rsp+16]",
    "mov rax, gs:[rsp+24]",
    "lea rsp, [rsp+32]",
    "dec ecx",
    "jnz 2b",
    "mov eax, 0xdead",
    "syscall"
);

const DIRECT: u64 = 0xffff_8880_0000_1000;
const KTEXT: u64 = 0xffff_ffff_8100_0000;
const MARK: u64 = 0x1122_3344_5566_7788;

/// Checks addressing, fault reports and collisions, then prices the prefix.
pub fn run() {
    let cases: &[fn()] = &[addressing, faults, collisions, prices];
    for case in cases {
        let status = host::in_child(|| {
            guest::prepare_stacks();
            guest::catch_all(guest::h_leave);
            let fd = host::memfd(4 * host::PAGE);
            map_guest(DIRECT, fd, 0);
            map_guest(KTEXT, fd, 0);
            // SAFETY: the first page of the memfd is mapped at both places.
            unsafe { (DIRECT.wrapping_add(BIAS) as *mut [u64; 2]).write([MARK, MARK]) };
            host::trap_calls_from(TEXT, TEXT + host::PAGE);
            case();
        });
        assert_eq!(status, 0);
    }
}

fn map_guest(guest: u64, fd: i32, offset: usize) {
    let at = guest.wrapping_add(BIAS) as usize;
    host::map(at, host::PAGE, host::RW, libc::MAP_SHARED, fd, offset);
}

fn exit_of(code: &[u8], rsi: u64) -> Exit {
    host::install_code(TEXT, code);
    guest::enter(&Regs { rsi, ..Regs::at_text(BIAS) });
    guest::last_exit()
}

fn reads(code: &[u8], rsi: u64, want: u64) -> bool {
    let exit = exit_of(code, rsi);
    (exit.signal, exit.rax(), exit.words[7]) == (libc::SIGSYS, EXIT, want)
}

fn addressing() {
    law("gs:[rsi], rsi=ffff888000001000", reads(load(), DIRECT, MARK));
    law("gs:[rsi+rcx*8-0x8000]", reads(load_indexed(), DIRECT, MARK));
    law("gs:[disp32] sign-extended reaches the top 2 GiB", reads(load_absolute(), 0, MARK));
    law("rep movs with gs on its source", reads(copy_in(), DIRECT, MARK));
    law("vpgatherqq through gs", reads(gather(), DIRECT, MARK));
    law(
        "emulated push and pop with rsp a guest kernel address",
        reads(push_kernel(), DIRECT + 0x800, 7),
    );
    law("lock cmpxchg16b through gs (not equal: loads)", reads(swap_16(), DIRECT, MARK));
    law("xsave64 through gs", reads(save_vectors(), DIRECT + 0x400, 1));
    law("fs = guest per-CPU base + BIAS", reads(per_cpu(), DIRECT, MARK));
    let rip = exit_of(load_rip(), 0);
    fact("gs:[rip+..] adds the *host* rip: cr2", format!("{:#x}", rip.cr2()));
    let short = exit_of(load_short(), DIRECT);
    fact("addr32 gs:[esi] truncates before adding the base: cr2", format!("{:#x}", short.cr2()));
}

fn faults() {
    let show = |name: &str, rsi: u64| {
        let exit = exit_of(load(), rsi);
        let what = format!(
            "trap {} err {:#x} cr2 {:#x} addr {:#x}",
            exit.trap(),
            exit.error(),
            exit.cr2(),
            exit.addr
        );
        fact(name, what);
        exit
    };
    let missing = show("unmapped guest ffffc90000000000", 0xffff_c900_0000_0000);
    law(
        "cr2 - BIAS is the guest address",
        missing.cr2().wrapping_sub(BIAS) == 0xffff_c900_0000_0000,
    );
    law(
        "rsi and rip in the frame are exact",
        (missing.words[9], missing.rip()) == (0xffff_c900_0000_0000, TEXT as u64 + 5),
    );
    show("guest ffff800000000000 (lowest kernel address)", 0xffff_8000_0000_0000);
    show("guest 0 (kernel NULL pointer)", 0);
    show("guest 00007f0000000000 (user pointer, no stac)", 0x7f00_0000_0000);
    show("guest 0000800000000000 (non-canonical)", 0x8000_0000_0000);
    show("guest ffff7fffffffff00 (non-canonical)", 0xffff_7fff_ffff_ff00);
    show("guest fffffffffffff000 (ERR_PTR page)", 0xffff_ffff_ffff_f000);
    let odd = [0x0000_8200_0000_0000u64, 0x00ff_8280_0000_1000, 0xffff_0280_0000_1000];
    let outside = |exit: Exit| exit.trap() == 13 || exit.cr2() >> 47 != 0;
    law(
        "non-canonical guest pointers never reach the window",
        odd.iter().all(|a| outside(show(&format!("guest {a:016x}"), *a))),
    );
}

/// Which of the guest's well-known regions can be mapped at their biased addresses at all.
fn collisions() {
    let regions: &[(&str, u64)] = &[
        ("LDT remap ffff880000000000", 0xffff_8800_0000_0000),
        ("direct map ffff888000000000", 0xffff_8880_0000_0000),
        ("vmalloc ffffc90000000000", 0xffff_c900_0000_0000),
        ("vmemmap ffffea0000000000", 0xffff_ea00_0000_0000),
        ("KASAN shadow ffffec0000000000", 0xffff_ec00_0000_0000),
        ("cpu_entry_area fffffe0000000000", 0xffff_fe00_0000_0000),
        ("espfix ffffff0000000000", 0xffff_ff00_0000_0000),
        ("EFI ffffffef00000000", 0xffff_ffef_0000_0000),
        ("text ffffffff80000000", 0xffff_ffff_8000_0000),
        ("modules ffffffffc0000000", 0xffff_ffff_c000_0000),
        ("fixmap ffffffffff000000", 0xffff_ffff_ff00_0000),
        ("vsyscall ffffffffff600000", 0xffff_ffff_ff60_0000),
        ("last page fffffffffffff000", 0xffff_ffff_ffff_f000),
        ("lowest ffff800000000000", 0xffff_8000_0000_0000),
    ];
    for (name, guest) in regions {
        let at = guest.wrapping_add(BIAS);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: NOREPLACE never overwrites a mapping.
        let got = unsafe { libc::mmap(at as *mut _, host::PAGE, host::RW, flags, -1, 0) };
        let verdict = if got as u64 == at { "free" } else { "REFUSED" };
        fact(format!("guest {name}"), format!("host {at:#018x} {verdict}"));
    }
}

fn prices() {
    let cases: &[(&str, &[u8], u64)] = &[
        ("load, store, add in memory: plain", plain_loads(), DIRECT),
        ("load, store, add in memory: gs-prefixed", biased_loads(), DIRECT),
        ("4 pushes and 4 pops: native", plain_pushes(), DIRECT + 0x800),
        ("4 pushes and 4 pops: translated one by one", biased_pushes(), DIRECT + 0x800),
        ("4 pushes and 4 pops: translated, rsp moved once", batched_pushes(), DIRECT + 0x800),
    ];
    for (name, code, rsi) in cases {
        host::install_code(TEXT, code);
        let start = Regs { rcx: 20_000, rsi: *rsi, ..Regs::at_text(BIAS) };
        row(*name, price(21, 20_000, || guest::enter(&start)));
    }
}
