//! System calls, and the few functions that compilers expect to find.

use core::arch::{asm, global_asm};

// What the compiler calls for copies and comparisons: this program has no C library.
global_asm!(
    ".globl memcpy, memmove, memset, memcmp, bcmp, strlen",
    "memmove:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "cmp rdi, rsi",
    "ja 2f",
    "memcpy_up: rep movsb",
    "ret",
    "2: lea rdi, [rdi + rcx - 1]",
    "lea rsi, [rsi + rcx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    "memcpy:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "jmp memcpy_up",
    "memset:",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "memcmp:",
    "bcmp:",
    "mov rcx, rdx",
    "xor eax, eax",
    "test rcx, rcx",
    "jz 3f",
    "repe cmpsb",
    "je 3f",
    "movzx eax, byte ptr [rdi - 1]",
    "movzx ecx, byte ptr [rsi - 1]",
    "sub ecx, eax",
    "mov eax, ecx",
    "3: ret",
    "strlen:",
    "mov rax, -1",
    "4: inc rax",
    "cmp byte ptr [rdi + rax], 0",
    "jne 4b",
    "ret",
);

/// Makes a system call with up to six arguments.
///
/// Returns what the kernel returns: a negative error number if it refuses.
pub fn call(number: usize, arguments: &[usize]) -> isize {
    let mut a = [0; 6];
    arguments.iter().zip(&mut a).for_each(|(&from, to)| *to = from);
    let result;
    // SAFETY: the callers pass addresses that are their own memory or nobody's but the programs'.
    unsafe {
        asm!("syscall", inlateout("rax") number => result,
            in("rdi") a[0], in("rsi") a[1], in("rdx") a[2], in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r11") _);
    }
    result
}

/// A system call, its arguments of any type that can be made a number.
macro_rules! sys {
    ($nr:expr $(, $arg:expr)*) => {
        $crate::sys::call($nr, &[$($arg as usize),*])
    };
}
pub(crate) use sys;

pub const READ: usize = 0;
pub const WRITE: usize = 1;
pub const OPEN: usize = 2;
pub const CLOSE: usize = 3;
pub const POLL: usize = 7;
pub const MMAP: usize = 9;
pub const MPROTECT: usize = 10;
pub const MUNMAP: usize = 11;
pub const RT_SIGACTION: usize = 13;
pub const RT_SIGPROCMASK: usize = 14;
pub const PREAD: usize = 17;
pub const PWRITE: usize = 18;
pub const READV: usize = 19;
pub const MREMAP: usize = 25;
pub const MADVISE: usize = 28;
pub const PAUSE: usize = 34;
pub const NANOSLEEP: usize = 35;
pub const GETITIMER: usize = 36;
pub const SETITIMER: usize = 38;
pub const GETPID: usize = 39;
pub const FORK: usize = 57;
pub const EXECVE: usize = 59;
pub const EXIT: usize = 60;
pub const WAIT4: usize = 61;
pub const KILL: usize = 62;
pub const UNAME: usize = 63;
pub const FTRUNCATE: usize = 77;
pub const PTRACE: usize = 101;
pub const RT_SIGPENDING: usize = 127;
pub const RT_SIGTIMEDWAIT: usize = 128;
pub const SIGALTSTACK: usize = 131;
pub const MODIFY_LDT: usize = 154;
pub const ARCH_PRCTL: usize = 158;
pub const SETRLIMIT: usize = 160;
pub const GETTID: usize = 186;
pub const FUTEX: usize = 202;
pub const TIMER_CREATE: usize = 222;
pub const TIMER_SETTIME: usize = 223;
pub const TIMER_DELETE: usize = 226;
pub const CLOCK_GETTIME: usize = 228;
pub const EXIT_GROUP: usize = 231;
pub const TGKILL: usize = 234;
pub const PIPE2: usize = 293;
pub const PROCESS_VM_READV: usize = 310;
pub const PROCESS_VM_WRITEV: usize = 311;
pub const MEMFD_CREATE: usize = 319;

pub const PROT_READ: u64 = 1;
pub const MAP_SHARED: u64 = 1;
pub const MAP_PRIVATE: u64 = 2;
pub const MAP_FIXED: u64 = 0x10;
pub const MAP_ANONYMOUS: u64 = 0x20;
pub const MAP_NORESERVE: u64 = 0x4000;
pub const MAP_FIXED_NOREPLACE: u64 = 0x10_0000;

/// Writes all of `bytes`.
pub fn print(fd: usize, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let count = sys!(WRITE, fd, bytes.as_ptr(), bytes.len());
        if count <= 0 {
            exit(9);
        }
        bytes = &bytes[count as usize..];
    }
}

/// Ends the process.
pub fn exit(code: usize) -> ! {
    loop {
        sys!(EXIT_GROUP, code);
    }
}
