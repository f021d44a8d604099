//! What a child of the monitor's does to become a wedge: it maps the window, and gives up everything else.
// UNSAFETY: maps memory at fixed addresses and makes plain system calls, in a process that has nothing to
// lose.
#![allow(unsafe_code)]

use crate::{
    process::{IMAGE, PAGE},
    strict,
};
use frame::{
    ALT_STACK, ALT_STACK_LEN, AREA, AREA_ALIAS, AREA_LEN, BLOB, Base, CACHE, COPIES, COPIES_LEN,
    FRAME, FRAME_LEN, GATE, JOURNAL, LISTENER_FD, LOOKUPS, Lookups, MARKS, MAX_SITES, RAM, RAM_FD,
    REGIONS, REGIONS_LEN, SHARED, SITES, SITES_LEN, STACK, STACK_LEN, STUB_LEN, STUBS, Shared,
    TABLES, TABLES_LEN, TAPS, TURNS, Taps, Turns as TurnsPage, USER_CACHE, USER_CACHE_LEN,
    USER_PAGE, USER_TABLES,
};

/// Descriptors of what a wedge consists of, but for the blob.
pub(crate) struct Parts {
    pub(crate) base: Base,
    pub(crate) shared: i32,
    pub(crate) frame: i32,
    pub(crate) turns: i32,
    pub(crate) taps: i32,
    pub(crate) tables: i32,
    pub(crate) cache: i32,
    pub(crate) user_tables: i32,
    pub(crate) user_cache: i32,
    pub(crate) stubs: i32,
    pub(crate) regions: i32,
    pub(crate) sites: i32,
    pub(crate) lookups: i32,
    pub(crate) marks: i32,
    /// With its length in bytes.
    pub(crate) ram: (i32, usize),
    pub(crate) walked: bool,
    /// If user code has a process of its own, what this one shares with it.
    pub(crate) user: Option<strict::Shared>,
}

pub(crate) const R: i32 = libc::PROT_READ;
pub(crate) const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
pub(crate) const RX: i32 = libc::PROT_READ | libc::PROT_EXEC;

/// The child: maps the window and becomes the blob. Only plain system calls.
pub(crate) fn become_wedge(image: i32, parts: &Parts) -> ! {
    let user = parts.user.as_ref();
    let listener =
        user.map(|user| strict::receive(user.socket).unwrap_or_else(|| strict::give_up()));
    let shared_len = size_of::<Shared>().next_multiple_of(PAGE);
    let closed = [
        (SHARED, shared_len, RW, parts.shared),
        (STACK, STACK_LEN, RW, -1),
        (ALT_STACK, ALT_STACK_LEN, RW, -1),
        (TURNS, size_of::<TurnsPage>(), RW, parts.turns),
        (FRAME, FRAME_LEN, RW, parts.frame),
        (TAPS, size_of::<Taps>(), RW, parts.taps),
        (TABLES, USER_TABLES, R, parts.tables),
        (TABLES + USER_TABLES, TABLES_LEN - USER_TABLES, R, parts.user_tables),
        (CACHE, USER_CACHE - CACHE, RX, parts.cache),
        (USER_CACHE, USER_CACHE_LEN, RX, parts.user_cache),
        (REGIONS, REGIONS_LEN, R, parts.regions),
        (COPIES, COPIES_LEN, R, parts.lookups),
        (LOOKUPS, size_of::<Lookups>(), RW, parts.lookups),
        (MARKS, (parts.ram.1 / PAGE).next_multiple_of(PAGE), R, parts.marks),
        (RAM, parts.ram.1, RW, parts.ram.0),
    ];
    let closed = &closed[..if parts.walked { closed.len() } else { closed.len() - 3 }];
    let here = |usual: usize| parts.base.at(usual as u64) as usize;
    // SAFETY: this process is about to be nothing but the window.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        forget_handlers();
        forget_rseq();
        fixed(here(BLOB), IMAGE.len().next_multiple_of(PAGE), RX, image);
        fixed(here(GATE), PAGE, RW, -1);
        move_vdso();
        fixed(SITES, SITES_LEN - AREA_LEN, R, parts.sites);
        fixed_part(AREA, AREA_LEN, R, (parts.frame, (AREA_ALIAS - FRAME) as i64));
        // The stubs load with the keys closed where they go on.
        fixed(here(STUBS), MAX_SITES * STUB_LEN, RX, parts.stubs);
        let key = if crate::keys() { libc::syscall(libc::SYS_pkey_alloc, 0, 0) } else { 0 };
        for (at, len, protection, fd) in closed.iter().copied() {
            fixed(here(at), len, protection, fd);
            let marked = key == 0
                || libc::syscall(libc::SYS_pkey_mprotect, here(at), len, protection, key) == 0;
            if !marked {
                libc::_exit(112);
            }
        }
        if let Some(user) = user {
            fixed(here(USER_PAGE), PAGE, RW, user.page);
            fixed(here(JOURNAL), PAGE, RW, user.journal);
        }
        close(parts.ram, listener);
        std::arch::asm!("jmp {}", in(reg) here(BLOB), options(noreturn))
    }
}

/// Where the vDSO goes before it is unmapped with everything else. The host remembers where it was, and has
/// SYSENTER go on there, in 32-bit mode: what is left of the address is that of a page that is never mapped.
const VDSO_AT: usize = 5 << 32;
/// Pages it has at the most.
const VDSO_PAGES: usize = 16;

/// Best effort: where the host refuses, SYSENTER without a stack goes on anywhere.
///
/// # Safety
/// In the child only, which asks for the time no more.
unsafe fn move_vdso() {
    // SAFETY: as asked of the caller. The host moves it as a whole or not at all.
    unsafe {
        let vdso = libc::getauxval(libc::AT_SYSINFO_EHDR) as *mut libc::c_void;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let moved = |pages: usize| {
            let len = pages * PAGE;
            libc::mremap(vdso, len, len, flags, VDSO_AT) != libc::MAP_FAILED
        };
        let _ = !vdso.is_null() && (1..=VDSO_PAGES).any(moved);
    }
}

/// Leaves the process no descriptor but RAM's and, if there is one, the one it hears of user code by; no
/// rights, and little of the host.
///
/// # Safety
/// In the child only.
pub(crate) unsafe fn close((ram, len): (i32, usize), listener: Option<i32>) {
    // SAFETY: as asked of the caller.
    unsafe {
        keep_only(ram, listener);
        be_the_first_to_go();
        give_up_rights();
        limit(len as u64, listener.is_some());
    }
}

/// Maps a descriptor, or anonymous memory for -1, where nothing is yet.
///
/// # Safety
/// In the child only.
pub(crate) unsafe fn fixed(at: usize, len: usize, protection: i32, fd: i32) {
    // SAFETY: as asked of the caller.
    unsafe { fixed_part(at, len, protection, (fd, 0)) }
}

/// The same from an offset on.
///
/// # Safety
/// In the child only.
unsafe fn fixed_part(at: usize, len: usize, protection: i32, (fd, offset): (i32, i64)) {
    let kind = if fd < 0 { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS } else { libc::MAP_SHARED };
    let flags = kind | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: replaces nothing.
    unsafe {
        if libc::mmap(at as *mut _, len, protection, flags, fd, offset) != at as *mut _ {
            libc::_exit(111);
        }
    }
}

/// Guest code may come to make host calls, and these take descriptors: there is none but guest RAM's.
///
/// # Safety
/// In the child only.
unsafe fn keep_only(ram: i32, listener: Option<i32>) {
    let [first, second] = [RAM_FD, LISTENER_FD].map(|fd| fd as i32);
    // SAFETY: descriptors of this process, which uses no other any more.
    unsafe {
        // Neither takes the other's place before that is at its own.
        let ram = libc::fcntl(ram, libc::F_DUPFD, second + 1);
        let listener = listener.map(|fd| libc::fcntl(fd, libc::F_DUPFD, second + 1));
        let kept = libc::dup2(ram, first) >= 0
            && listener.is_none_or(|fd| libc::dup2(fd, second) >= 0)
            && libc::syscall(
                libc::SYS_close_range,
                first + 1 + i32::from(listener.is_some()),
                u32::MAX,
                0,
            ) == 0;
        if !kept {
            libc::_exit(113);
        }
    }
}

/// Guest code can make this process take memory, by page tables and private pages. If the host runs out
/// of it, nobody else is to be killed for that, and nothing is to be written to a disk. Best effort.
///
/// # Safety
/// In the child only.
pub(crate) unsafe fn be_the_first_to_go() {
    let worst = c"1000";
    // SAFETY: plain system calls; the strings are constants.
    unsafe {
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        libc::write(file, worst.as_ptr().cast(), worst.count_bytes());
        libc::close(file);
    }
}

/// What is root's outside is nothing here: guest code needs no rights, whoever runs it.
///
/// # Safety
/// In the child only.
unsafe fn give_up_rights() {
    /// `_LINUX_CAPABILITY_VERSION_3`, for this process; and three sets of 64 bits, in halves.
    const VERSION: [u32; 2] = [0x2008_0522, 0];
    let none = [0_u32; 6];
    // SAFETY: the call reads both.
    unsafe {
        if libc::syscall(libc::SYS_capset, VERSION.as_ptr(), none.as_ptr()) != 0 {
            libc::_exit(114);
        }
    }
}

/// Bytes a wedge may have of memory that it writes and shares with nobody: stacks, and pages of code while
/// they are changed.
const PRIVATE: u64 = 64 << 20;
/// Address space beyond RAM: the window, and memory without content.
const SPACE: u64 = 32 << 30;

/// What the host grants at the most, in case something gets by what it may ask for. A guest may have its RAM
/// mapped several times.
///
/// # Safety
/// In the child only.
unsafe fn limit(ram: u64, listens: bool) {
    let limits = [
        (libc::RLIMIT_CORE, 0),
        (libc::RLIMIT_FSIZE, 0),
        (libc::RLIMIT_MEMLOCK, 0),
        (libc::RLIMIT_MSGQUEUE, 0),
        (libc::RLIMIT_NPROC, 0),
        (libc::RLIMIT_NOFILE, RAM_FD + 1 + u64::from(listens)),
        (libc::RLIMIT_DATA, PRIVATE),
        (libc::RLIMIT_AS, SPACE + 4 * ram),
    ];
    for (resource, most) in limits {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        // SAFETY: reads the structure. Where the host's own limit is lower, that stays.
        unsafe { libc::setrlimit(resource, &raw const limit) };
    }
}

/// The monitor's signal handlers are about to be unmapped, and what is sent to the whole process group
/// is the monitor's to answer.
///
/// # Safety
/// In the child only.
pub(crate) unsafe fn forget_handlers() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: ignoring runs no code; where the host refuses it, nothing changes.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Unregisters glibc's rseq area: it is about to be unmapped, and the kernel writes it.
///
/// # Safety
/// In a thread that runs no more of the C library.
pub(crate) unsafe fn forget_rseq() {
    unsafe extern "C" {
        static __rseq_offset: isize;
        static __rseq_size: u32;
    }
    // SAFETY: the area is the one glibc registered for this thread; 0x53053053 is its signature.
    unsafe {
        let thread: usize;
        std::arch::asm!("rdfsbase {}", out(reg) thread, options(nomem, nostack));
        let area = thread.wrapping_add_signed(__rseq_offset);
        libc::syscall(libc::SYS_rseq, area, 32.max(__rseq_size), 1, 0x5305_3053u32);
    }
}
