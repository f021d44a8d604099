//! The raw host calls the probes share: mappings, seccomp, user dispatch, signals, children.
//!
//! Thin on purpose: a probe should show the system call it is about, not a library's idea of it.

use std::io;
use std::ptr;

/// Bytes in a host page.
pub const PAGE: usize = 4096;

/// Aborts the probe with the failing call's name and errno: a probe has nobody to report to.
pub fn must(what: &str, result: i64) -> i64 {
    if result == -1 {
        eprintln!("{what}: {}", io::Error::last_os_error());
        std::process::exit(2);
    }
    result
}

/// Read, write and execute permission.
pub const RWX: i32 = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
/// Read and write permission.
pub const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Maps `len` bytes of private anonymous memory at exactly `at`, replacing what is there.
pub fn map_anon(at: usize, len: usize, prot: i32) {
    map(at, len, prot, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
}

/// Maps at exactly `at` (MAP_FIXED is added).
pub fn map(at: usize, len: usize, prot: i32, flags: i32, fd: i32, offset: usize) {
    let flags = flags | libc::MAP_FIXED;
    // SAFETY: callers name windows that hold nothing of the Rust runtime.
    let got = unsafe { libc::mmap(at as *mut _, len, prot, flags, fd, offset as i64) };
    must("mmap", got as i64);
}

/// Removes the mappings in a range.
pub fn unmap(at: usize, len: usize) {
    // SAFETY: as for `map`.
    must("munmap", unsafe { libc::munmap(at as *mut _, len) }.into());
}

/// Changes the protection of a range.
pub fn protect(at: usize, len: usize, prot: i32) {
    // SAFETY: as for `map`.
    must("mprotect", unsafe { libc::mprotect(at as *mut _, len, prot) }.into());
}

/// Sets a range's protection and protection key.
pub fn protect_key(at: usize, len: usize, prot: i32, key: i32) {
    // SAFETY: as for `map`.
    must("pkey_mprotect", unsafe { libc::syscall(libc::SYS_pkey_mprotect, at, len, prot, key) });
}

/// Allocates a protection key (the first one a process gets is 1).
pub fn key_alloc() -> i32 {
    // SAFETY: no memory is involved.
    must("pkey_alloc", unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) }) as i32
}

/// A memfd of `len` bytes: what guest RAM is.
pub fn memfd(len: usize) -> i32 {
    // SAFETY: the name is a C string; the descriptor is fresh.
    unsafe {
        let fd = must("memfd_create", libc::memfd_create(c"ram".as_ptr(), 0).into()) as i32;
        must("ftruncate", libc::ftruncate(fd, len as i64).into());
        fd
    }
}

/// Copies machine code to a fresh page range at `at` and makes it read-execute.
pub fn install_code(at: usize, code: &[u8]) {
    let len = code.len().next_multiple_of(PAGE);
    map_anon(at, len, RW);
    // SAFETY: the range was mapped writable just above and is `len >= code.len()` long.
    unsafe { ptr::copy_nonoverlapping(code.as_ptr(), at as *mut u8, code.len()) };
    protect(at, len, libc::PROT_READ | libc::PROT_EXEC);
}

/// Maps an alternate signal stack at `at` and registers it. SS_AUTODISARM is not used, unlike by
/// the engine: code of the probe never has its stack pointer there.
pub fn alt_stack(at: usize, len: usize) {
    map_anon(at, len, RW);
    register_alt_stack(at, len, 0);
}

/// Registers memory that exists as the alternate stack.
pub fn register_alt_stack(at: usize, len: usize, flags: i32) {
    let stack = libc::stack_t { ss_sp: at as *mut _, ss_flags: flags, ss_size: len };
    // SAFETY: the stack description lives across the call.
    must("sigaltstack", unsafe { libc::sigaltstack(&raw const stack, ptr::null_mut()) }.into());
}

/// An address of code the kernel jumps to with (signal, siginfo, ucontext).
pub type Handler = unsafe extern "C" fn();

/// Installs `handler` on the alternate stack, signal not blocked while it runs.
pub fn on_signal(signal: i32, handler: Handler) {
    // SAFETY: a zeroed sigaction is valid; glibc supplies the restorer.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        must("sigaction", libc::sigaction(signal, &raw const action, ptr::null_mut()).into());
    }
}

/// seccomp: calls made from `[start, end)` (within one 4 GiB) trap, all others pass.
pub fn trap_calls_from(start: usize, end: usize) {
    let k = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let ld = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let (jeq, jge) = (libc::BPF_JMP | libc::BPF_JEQ, libc::BPF_JMP | libc::BPF_JGE);
    let ret = libc::BPF_RET | libc::BPF_K;
    let mut filter = [
        k(ld, 0, 0, 12), // instruction_pointer, high word
        k(jeq, 0, 4, (start >> 32) as u32),
        k(ld, 0, 0, 8), // low word
        k(jge, 0, 2, start as u32),
        k(jge, 1, 0, end as u32),
        k(ret, 0, 0, libc::SECCOMP_RET_TRAP),
        k(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    install_filter(&mut filter);
}

/// seccomp: 32-bit calls trap, and those whose instruction pointer lies in the low 4 GiB or the
/// highest 4 GiB (the vsyscall page); all others pass.
pub fn trap_all_guest_calls() {
    let k = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let jeq = libc::BPF_JMP | libc::BPF_JEQ;
    let ret = libc::BPF_RET | libc::BPF_K;
    install_filter(&mut [
        k(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 4), // arch: x86-64?
        k(jeq, 0, 3, 0xc000_003e),
        k(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 12),
        k(jeq, 1, 0, 0),
        k(jeq, 0, 1, u32::MAX),
        k(ret, 0, 0, libc::SECCOMP_RET_TRAP),
        k(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]);
}

/// Installs a classic BPF program as the process's seccomp filter.
pub fn install_filter(filter: &mut [libc::sock_filter]) {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program outlives the call, which copies it.
    unsafe {
        must("no_new_privs", libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into());
        let set = libc::SECCOMP_SET_MODE_FILTER;
        must("seccomp", libc::syscall(libc::SYS_seccomp, set, 0, &raw const program));
    }
}

/// Syscall user dispatch without a selector: calls from outside `[start, start+len)` raise SIGSYS.
pub fn dispatch_calls_outside(start: usize, len: usize) {
    let (set, on) = (59, 1); // PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON
    // SAFETY: no memory is handed over.
    must("SUD", unsafe { libc::prctl(set, on, start, len, 0) }.into());
}

/// Runs `body` in a forked child and returns its wait status; anything but zero fails the run.
pub fn in_child(body: impl FnOnce()) -> i32 {
    use std::io::Write;
    io::stdout().flush().ok();
    // SAFETY: this program has one thread, so the child may use everything the parent could.
    unsafe {
        let pid = must("fork", libc::fork().into()) as i32;
        if pid == 0 {
            body();
            io::stdout().flush().ok();
            libc::_exit(i32::from(crate::report::failed()));
        }
        let mut status = 0;
        must("waitpid", libc::waitpid(pid, &raw mut status, 0).into());
        if status != 0 {
            crate::report::fail();
        }
        status
    }
}

/// Keeps this thread on one CPU.
pub fn pin(cpu: usize) {
    // SAFETY: a zeroed cpu_set_t is the empty set; a missing CPU only makes the call fail.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}

/// Lets the host place this thread.
pub fn pin_anywhere() {
    // SAFETY: as for `pin`.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        (0..libc::CPU_SETSIZE as usize).for_each(|cpu| libc::CPU_SET(cpu, &mut set));
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}
