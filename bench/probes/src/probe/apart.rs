//! User code in a process of its own: what it costs to stop it inside the host's kernel and let it go on, by
//! seccomp's notifications and by ptrace, and what it costs to have its mappings allowed one by one.

use crate::host::{self, must};
use crate::measure::price;
use crate::report::{fact, row};
use std::io;

const ROUNDS: u64 = 500;
const BATCHES: usize = 31;
/// A call that the filter hands to the supervisor.
const HANDED: i64 = libc::SYS_getppid;
/// `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`: the one who is woken runs on the CPU of the one who waits next.
const SYNC_WAKE_UP: u64 = 1;

/// What the host has put into a request, and expects back; see seccomp_unotify(2).
#[repr(C)]
#[derive(Default)]
struct Request {
    id: u64,
    pid: u32,
    flags: u32,
    data: [u64; 8],
}

#[repr(C)]
struct Response {
    id: u64,
    value: i64,
    error: i32,
    flags: u32,
}

/// Prices each way on one CPU and on two.
pub fn run() {
    for (place, cpus) in [("same CPU", (1, 1)), ("two CPUs", (0, 1))] {
        for (wake, flags) in [("", 0), (", synchronous wake-up", SYNC_WAKE_UP)] {
            let name = format!("notification{wake}, {place}: round trip");
            notified(HANDED, flags, cpus, move || calls(&name));
        }
    }
    host::in_child(traced);
    host::in_child(|| mappings("mmap and munmap of a page"));
    notified(libc::SYS_mmap, SYNC_WAKE_UP, (1, 1), || {
        mappings("the same, each mmap allowed by a notification");
    });
}

/// Null calls of the user's.
fn calls(name: &str) {
    // SAFETY: no arguments.
    let call = || unsafe { libc::syscall(HANDED) };
    row(name, price(BATCHES, ROUNDS, || (0..ROUNDS).for_each(|_| _ = call())));
}

fn mappings(name: &str) {
    let ram = host::memfd(host::PAGE);
    let kind = libc::MAP_SHARED | libc::MAP_POPULATE;
    let one = || {
        host::map(0x4800_0000, host::PAGE, host::RW, kind, ram, 0);
        host::unmap(0x4800_0000, host::PAGE);
    };
    row(name, price(BATCHES, ROUNDS, || (0..ROUNDS).for_each(|_| one())));
}

/// Runs `body` in a process whose calls of this number wait for a supervisor on another CPU or the same one.
fn notified(number: i64, flags: u64, cpus: (usize, usize), body: impl FnOnce()) {
    let number_of_listener = 0x4700_0000 as *mut i32;
    host::map(0x4700_0000, host::PAGE, host::RW, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0);
    host::pin(cpus.0);
    let status = host::in_child(|| {
        // SAFETY: a copy of this process that shares its descriptors; it has one thread.
        let child = unsafe {
            libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0)
        };
        if must("clone", child) == 0 {
            host::pin(cpus.1);
            let listener = listen_to(number);
            // SAFETY: mapped above.
            unsafe { number_of_listener.write_volatile(listener) };
            body();
            io::Write::flush(&mut io::stdout()).ok();
            // SAFETY: ends the process alone.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: mapped above.
        while unsafe { number_of_listener.read_volatile() } == 0 {
            std::thread::yield_now();
        }
        // SAFETY: as above.
        supervise(unsafe { number_of_listener.read_volatile() }, flags, number == libc::SYS_mmap);
    });
    assert_eq!(status, 0);
    host::unmap(0x4700_0000, host::PAGE);
}

/// Calls of this number are notifications from now on, which the descriptor gives.
fn listen_to(number: i64) -> i32 {
    let op =
        |code: u32, yes: u8, k: u32| libc::sock_filter { code: code as u16, jt: yes, jf: 0, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let mut filter = [
        op(load, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ, 1, number as u32),
        op(libc::BPF_RET, 0, libc::SECCOMP_RET_ALLOW),
        op(libc::BPF_RET, 0, libc::SECCOMP_RET_USER_NOTIF),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let flags =
        libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    let set = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: the program outlives the call, which copies it.
    unsafe {
        must("no_new_privs", libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into());
        must("seccomp", libc::syscall(libc::SYS_seccomp, set, flags, &raw const program)) as i32
    }
}

/// Lets calls go on until nobody is left who makes them.
fn supervise(listener: i32, flags: u64, allow: bool) {
    // SAFETY: takes a number.
    if unsafe { libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS, flags) } != 0 {
        fact("synchronous wake-up", "the host has none (Linux 6.6)");
    }
    loop {
        let mut request = Request::default();
        // SAFETY: the host writes the structure.
        if unsafe { libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut request) } != 0 {
            if io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) {
                continue;
            }
            return; // since Linux 6.11; before, the row is the last one
        }
        let flags = if allow { libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32 } else { 0 };
        let response = Response { id: request.id, value: 0, error: 0, flags };
        // SAFETY: the host reads the structure.
        unsafe { libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw const response) };
    }
}

/// Null calls that a tracer takes in the host's stead.
fn traced() {
    host::pin(1);
    // SAFETY: the child lets itself be traced and stops.
    let child = unsafe {
        match must("fork", libc::fork().into()) as i32 {
            0 => {
                libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
                libc::raise(libc::SIGSTOP);
                loop {
                    libc::syscall(HANDED);
                }
            }
            child => child,
        }
    };
    let mut status = 0;
    let mut stop = || {
        let mut registers = std::mem::MaybeUninit::<libc::user_regs_struct>::uninit();
        // SAFETY: a child of ours that stands still once it is waited for.
        unsafe {
            libc::waitpid(child, &raw mut status, 0);
            libc::ptrace(libc::PTRACE_GETREGS, child, 0, registers.as_mut_ptr());
            libc::ptrace(libc::PTRACE_SETREGS, child, 0, registers.as_mut_ptr());
            libc::ptrace(libc::PTRACE_SYSEMU, child, 0, 0);
        }
    };
    let cost = price(BATCHES, ROUNDS, || (0..ROUNDS).for_each(|_| stop()));
    row("ptrace (SYSEMU, registers read and written), same CPU: round trip", cost);
    // SAFETY: our child.
    unsafe { libc::kill(child, libc::SIGKILL) };
}
