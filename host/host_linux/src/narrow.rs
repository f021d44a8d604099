//! Whether the host runs 32-bit programs: a child tries it.
// UNSAFETY: forks a child that runs code which it has written itself.
#![allow(unsafe_code)]

use std::sync::OnceLock;

/// Selectors of the host's flat 32-bit code segment and data segment for programs.
const USER_CS_32: u64 = 0x23;
const USER_DS: u64 = 0x2b;

pub(crate) fn runs_32_bit() -> bool {
    static RUNS: OnceLock<bool> = OnceLock::new();
    *RUNS.get_or_init(tried)
}

/// The host runs 32-bit code that uses a thread-local segment and makes a system call. A host or a filter around this process may
/// refuse any of it, and some end whoever tries: so a child does.
fn tried() -> bool {
    // SAFETY: the child makes plain system calls and ends; its parent waits for it.
    unsafe {
        match libc::fork() {
            -1 => false,
            0 => try_narrow(),
            child => {
                let mut status = -1;
                libc::waitpid(child, &raw mut status, 0) == child && status == 0
            }
        }
    }
}

/// `mov eax, 0x63; mov gs, eax; mov ebx, gs:[0]; mov eax, 1; int 0x80`: ends with the segment's first word.
const NARROW: [u8; 21] =
    [0xb8, 0x63, 0, 0, 0, 0x8e, 0xe8, 0x65, 0x8b, 0x1d, 0, 0, 0, 0, 0xb8, 1, 0, 0, 0, 0xcd, 0x80];
const PAGE: usize = 4096;
/// Offset in a page of what the host is told of the segment, and of the code.
const TOLD: usize = 16;
const CODE: usize = 64;

/// The child.
///
/// # Safety
/// In the child only.
unsafe fn try_narrow() -> ! {
    // SAFETY: this process does nothing else. The page lies below 2 GiB.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        for signal in [libc::SIGSEGV, libc::SIGSYS, libc::SIGILL, libc::SIGBUS] {
            libc::signal(signal, libc::SIG_DFL);
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let page = libc::mmap(std::ptr::null_mut(), PAGE, writable, flags, -1, 0);
        if page == libc::MAP_FAILED {
            libc::_exit(1);
        }
        let at = page as usize;
        ((at + TOLD) as *mut [u32; 4]).write(segment(at as u32));
        ((at + CODE) as *mut [u8; NARROW.len()]).write(NARROW);
        libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_EXEC);
        if set_thread_area(at + TOLD) != 0 {
            libc::_exit(1);
        }
        std::arch::asm!("mov rcx, rsp", "push {ss}", "push rcx", "pushfq", "push {cs}", "push {code}", "iretq",
            ss = const USER_DS, cs = const USER_CS_32, code = in(reg) at + CODE, options(noreturn))
    }
}

/// All of the 4 GiB from a base on, as the first thread-local segment (`struct user_desc`): 32-bit data, its limit in pages.
const fn segment(base: u32) -> [u32; 4] {
    const FIRST: u32 = 12;
    const FLAGS: u32 = 1 | 1 << 4;
    [FIRST, base, 0xf_ffff, FLAGS]
}

/// By INT 0x80, as there is no other way for 64-bit code.
///
/// # Safety
/// `told` is below 4 GiB, and readable.
unsafe fn set_thread_area(told: usize) -> u32 {
    const SET_THREAD_AREA: u32 = 243;
    let result: u32;
    // SAFETY: as asked of the caller; it changes a segment nobody uses.
    unsafe {
        std::arch::asm!("xchg rbx, {0}", "int 0x80", "xchg rbx, {0}", inout(reg) told => _,
            inlateout("eax") SET_THREAD_AREA => result, lateout("r8") _, lateout("r9") _, lateout("r10") _, lateout("r11") _);
    }
    result
}

#[cfg(test)]
mod tests {
    /// What CI runs on has all of it.
    #[test]
    fn a_child_runs_32_bit_code() {
        let ia32 = std::fs::read_to_string("/proc/self/status")
            .is_ok_and(|status| status.contains("x86_32"))
            || std::path::Path::new("/proc/sys/abi/vsyscall32").exists();
        assert_eq!(super::runs_32_bit(), ia32);
    }
}
