//! Probe 9: the whole path of a null system call in miniature: guest user code, wedge entry, a
//! translated kernel entry on a kernel stack at its biased address, wedge exit, guest user code.

use crate::guest::{self, EXIT, Regs, TEXT};
use crate::host::{self, Handler};
use crate::measure::price;
use crate::report::{law, row};

unsafe extern "C" {
    fn h_round_keys();
    fn h_round_open();
    fn probe_patched_keys();
    fn probe_patched_open();
    fn probe_out_keys();
    fn probe_out_open();
    fn probe_out_vectors_keys();
    fn probe_out_vectors_open();
    static mut PROBE_WAY_OUT: u64;
    static mut PROBE_KERNEL_FS: u64;
    static mut PROBE_BIAS: u64;
}

crate::code!(
    trapped,
    "2: mov eax, 39",
    "syscall",
    "dec rbx",
    "jnz 2b",
    "mov r15, rax",
    "mov eax, 0xdead",
    "syscall"
);

// The five bytes of `mov eax, nr` overwritten by a jump to a trampoline nearby; the `syscall` behind
// them stays, for those who jump to it: the guest kernel restarts a call by setting rip back by two.
crate::code!(
    patched,
    "2: .byte 0xe9",
    ".long 3f - 2b - 5",
    "syscall",
    "4: dec rbx",
    "jnz 2b",
    "mov r15, rax",
    "mov eax, 0xdead",
    "syscall",
    "3: mov eax, 39",
    "lea rcx, [rip + 4b]",
    "jmp r14"
);

/// host address = guest address + BIAS, modulo 2^64.
pub const BIAS: u64 = 0x7e00_0000_0000;
const PER_CPU: u64 = 0xffff_8880_7fc0_0000;
const KERNEL_STACK_TOP: u64 = 0xffff_c900_0001_4000;
const TASK: u64 = 0xffff_8880_0340_0000;
const PID: u32 = 4711;
const LOOPS: u64 = 1000;

type Case = (&'static str, Option<fn()>, Handler, Handler);

/// Prices the miniature by each way in, with and without keys.
pub fn run() {
    let filter: fn() = || host::trap_calls_from(TEXT, TEXT + host::PAGE);
    let sud: fn() = || host::dispatch_calls_outside(1 << 32, (1 << 47) - (1 << 32));
    let cases: &[Case] = &[
        ("seccomp trap, keys", Some(filter), h_round_keys, probe_out_vectors_keys),
        ("seccomp trap, no keys", Some(filter), h_round_open, probe_out_vectors_open),
        ("user dispatch, keys", Some(sud), h_round_keys, probe_out_vectors_keys),
        ("patched site, keys", None, probe_patched_keys, probe_out_keys),
        ("patched site, no keys", None, probe_patched_open, probe_out_open),
    ];
    for (name, catcher, way_in, way_out) in cases {
        let status = host::in_child(|| {
            prepare_kernel(!name.ends_with("no keys"));
            // SAFETY: the round-trip assembly reads these only while a guest runs.
            unsafe { PROBE_WAY_OUT = *way_out as *const () as u64 };
            let is_patched = catcher.is_none();
            host::install_code(TEXT, if is_patched { patched() } else { trapped() });
            guest::catch_all(if is_patched { guest::h_leave } else { *way_in });
            catcher.unwrap_or(filter)();
            let start = Regs { r14: *way_in as *const () as u64, ..Regs::at_text(LOOPS) };
            let cost = price(41, LOOPS, || guest::enter(&start));
            let exit = guest::last_exit();
            law(
                format!("{name}: the guest sees its pid"),
                (exit.rax(), exit.words[7]) == (EXIT, PID.into()),
            );
            row(format!("null system call by {name}"), cost);
        });
        assert_eq!(status, 0, "{name}");
    }
    assert_eq!(host::in_child(restart), 0, "restart");
}

/// Entering a patched site at its `syscall`: the trap takes over.
fn restart() {
    prepare_kernel(true);
    // SAFETY: as in `run`.
    unsafe { PROBE_WAY_OUT = probe_out_vectors_keys as *const () as u64 };
    host::install_code(TEXT, patched());
    guest::catch_all(h_round_keys);
    host::trap_calls_from(TEXT, TEXT + host::PAGE);
    let rip = (TEXT + 5) as u64;
    guest::enter(&Regs { rax: 39, rip, ..Regs::at_text(1) });
    let exit = guest::last_exit();
    let seen = (exit.rax(), exit.words[7]) == (EXIT, PID.into());
    law("a patched site entered at its syscall instruction still works", seen);
}

/// Maps the kernel's stack, task and per-CPU area at their biased addresses, keyed as in the design.
fn prepare_kernel(keyed: bool) {
    guest::prepare_stacks();
    let key = if keyed { host::key_alloc() } else { 0 };
    for page in [KERNEL_STACK_TOP - 0x1000, TASK, PER_CPU] {
        let at = page.wrapping_add(BIAS) as usize;
        host::map_anon(at, host::PAGE, host::RW);
        host::protect_key(at, host::PAGE, host::RW, key);
    }
    // SAFETY: the three pages were mapped just above.
    unsafe {
        let per_cpu = PER_CPU.wrapping_add(BIAS);
        (per_cpu as *mut u64).write(TASK);
        ((per_cpu + 0x1c) as *mut u64).write_unaligned(KERNEL_STACK_TOP);
        ((TASK.wrapping_add(BIAS) + 16) as *mut u32).write(PID);
        PROBE_KERNEL_FS = per_cpu;
        PROBE_BIAS = BIAS;
    }
}
