//! What a child of this process does to become a body: it maps what the body consists of, and gives up everything else.
// UNSAFETY: maps memory at fixed addresses and makes plain system calls, in a process that has nothing to lose.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::atomic::AtomicU32,
    time::Duration,
};

use host::{Access, Body, Part, Supervision};

use crate::{child::LinuxChild, notifications, process};

/// Descriptors of a body.
const KEPT: i32 = 0;
const LISTENER: i32 = 1;

/// Status of a child that could not become its body, by what it failed at.
mod status {
    pub(super) const MAP: i32 = 111;
    pub(super) const KEY: i32 = 112;
    pub(super) const DESCRIPTORS: i32 = 113;
    pub(super) const RIGHTS: i32 = 114;
    pub(super) const NOTIFICATIONS: i32 = 115;
}

pub(crate) fn start(body: &Body<'_>) -> io::Result<Box<dyn host::Child>> {
    // SAFETY: the child only makes plain system calls and then is the body.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let _ = become_body(body);
            give_up(status::NOTIFICATIONS)
        }
        pid => Ok(Box::new(LinuxChild::adopt(pid)?)),
    }
}

/// Plain system calls only, no memory of the library's. Returns only if the body is a target and the host has no
/// notifications; nothing has been mapped then.
pub(crate) fn become_body(body: &Body<'_>) -> io::Error {
    // SAFETY: this process is about to be nothing but the body, and has no handlers if it cannot.
    unsafe { forget_handlers() };
    let listener = match supervise(&body.supervision) {
        Ok(listener) => listener,
        Err(error) => return error,
    };
    // SAFETY: this process is about to be nothing but the body.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        process::forget_rseq();
        move_vdso();
        let key = match body.parts.iter().any(|part| part.keyed) {
            true => libc::syscall(libc::SYS_pkey_alloc, 0, 0),
            false => 0,
        };
        body.parts.iter().for_each(|part| map(part, key));
        keep_only(body.keeps.as_raw_fd(), listener);
        be_the_first_to_go();
        give_up_rights();
        limit(body, listener.is_some());
        std::arch::asm!("jmp {}", in(reg) body.entry, options(noreturn))
    }
}

/// A target sends its supervisor the means to answer, and a supervisor waits for them: its descriptor. That goes
/// first, since the socket is closed with all else, and the host may have none.
fn supervise(supervision: &Supervision<'_>) -> io::Result<Option<RawFd>> {
    match supervision {
        Supervision::None => Ok(None),
        Supervision::Target { socket, call } => {
            let listener = notifications::listener(*call)?;
            // The supervisor is ready as soon as it has this, and whoever uses both sends signals then.
            block_signals();
            if !notifications::send(socket.as_raw_fd(), listener) {
                give_up(status::NOTIFICATIONS);
            }
            Ok(None)
        }
        Supervision::Supervisor { socket } => {
            let received = notifications::receive(socket.as_raw_fd());
            Ok(Some(received.unwrap_or_else(|| give_up(status::NOTIFICATIONS))))
        }
    }
}

/// What is sent from here on waits until the body unblocks it.
fn block_signals() {
    let all = u64::MAX;
    let (how, none) = (libc::SIG_SETMASK, std::ptr::null::<u64>());
    // SAFETY: reads the set of 8 bytes.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const all, none, 8) };
}

/// A child that cannot become what it is to be.
fn give_up(status: i32) -> ! {
    // SAFETY: ends this process, and nothing else.
    unsafe { libc::_exit(status) }
}

/// Maps a part where nothing is yet.
///
/// # Safety
/// In the child only.
unsafe fn map(part: &Part<'_>, key: i64) {
    let protection = match part.access {
        Access::Read => libc::PROT_READ,
        Access::Write => libc::PROT_READ | libc::PROT_WRITE,
        Access::Execute => libc::PROT_READ | libc::PROT_EXEC,
    };
    let (kind, fd, offset) = match part.content {
        Some((content, offset)) => (libc::MAP_SHARED, content.as_raw_fd(), offset as i64),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0),
    };
    let (at, flags) = (part.at as *mut libc::c_void, kind | libc::MAP_FIXED_NOREPLACE);
    // SAFETY: replaces nothing.
    unsafe {
        if libc::mmap(at, part.len, protection, flags, fd, offset) != at {
            give_up(status::MAP);
        }
        let closed = !part.keyed
            || libc::syscall(libc::SYS_pkey_mprotect, at, part.len, protection, key) == 0;
        if !closed {
            give_up(status::KEY);
        }
    }
}

/// Where the vDSO goes before the body unmaps it with everything else. The host remembers where it was, and has
/// SYSENTER go on there, in 32-bit mode: what is left of the address is that of a page that is never mapped.
const VDSO_AT: usize = 5 << 32;
/// Pages it has at the most.
const VDSO_PAGES: usize = 16;

/// Best effort: where the host refuses, SYSENTER without a stack goes on anywhere.
///
/// # Safety
/// In the child only, which asks for the time no more, and before its parts are mapped.
unsafe fn move_vdso() {
    const PAGE: usize = 4096;
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

/// Code of the body may come to make host calls, and these take descriptors: there are none but these.
///
/// # Safety
/// In the child only.
unsafe fn keep_only(kept: RawFd, listener: Option<RawFd>) {
    // SAFETY: descriptors of this process, which uses no other any more.
    unsafe {
        // Neither takes the other's place before that is at its own.
        let kept = libc::fcntl(kept, libc::F_DUPFD, LISTENER + 1);
        let listener = listener.map(|fd| libc::fcntl(fd, libc::F_DUPFD, LISTENER + 1));
        let first_other = if listener.is_some() { LISTENER + 1 } else { KEPT + 1 };
        let done = libc::dup2(kept, KEPT) >= 0
            && listener.is_none_or(|fd| libc::dup2(fd, LISTENER) >= 0)
            && libc::syscall(libc::SYS_close_range, first_other, u32::MAX, 0) == 0;
        if !done {
            give_up(status::DESCRIPTORS);
        }
    }
}

/// Its code can make this process take memory, by page tables and private pages. If the host runs out
/// of it, nobody else is to be killed for that, and nothing is to be written to a disk. Best effort.
///
/// # Safety
/// In the child only.
unsafe fn be_the_first_to_go() {
    let worst = c"1000";
    // SAFETY: plain system calls; the strings are constants.
    unsafe {
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        libc::write(file, worst.as_ptr().cast(), worst.count_bytes());
        libc::close(file);
    }
}

/// What is root's outside is nothing here: its code needs no rights, whoever runs it.
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
            give_up(status::RIGHTS);
        }
    }
}

/// What the host grants at the most, in case something gets by what it may ask for.
///
/// # Safety
/// In the child only.
unsafe fn limit(body: &Body<'_>, listens: bool) {
    let limits = [
        (libc::RLIMIT_CORE, 0),
        (libc::RLIMIT_FSIZE, 0),
        (libc::RLIMIT_MEMLOCK, 0),
        (libc::RLIMIT_MSGQUEUE, 0),
        (libc::RLIMIT_NPROC, 0),
        (libc::RLIMIT_NOFILE, 1 + u64::from(listens)),
        (libc::RLIMIT_DATA, body.private),
        (libc::RLIMIT_AS, body.space),
    ];
    for (resource, most) in limits {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        // SAFETY: reads the structure. Where the host's own limit is lower, that stays.
        unsafe { libc::setrlimit(resource, &raw const limit) };
    }
}

/// This process's signal handlers are about to be out of reach, and what is sent to the whole process group
/// is its parent's to answer.
///
/// # Safety
/// In the child only.
unsafe fn forget_handlers() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: ignoring runs no code; where the host refuses it, nothing changes.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

pub(crate) fn wake(word: &AtomicU32) {
    // SAFETY: the word stays mapped; waking touches nothing else.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
}

pub(crate) fn wait(word: &AtomicU32, value: u32, patience: Duration) {
    let timeout = libc::timespec {
        tv_sec: patience.as_secs().cast_signed(),
        tv_nsec: patience.subsec_nanos().into(),
    };
    let timeout = &raw const timeout;
    // SAFETY: the word stays mapped; waiting touches nothing else.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, timeout) };
}

#[cfg(test)]
mod tests {
    use std::{
        os::{
            fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
            unix::net::UnixStream,
        },
        sync::atomic::Ordering,
        time::Instant,
    };

    use host::{End, MemoryObject};

    use super::*;

    const PAGE: usize = 4096;
    /// HVA where nothing of a test's process lies.
    const AT: usize = 0x0180_0000_0000;
    /// `mov eax, 72; mov edi, 0; mov esi, 1; syscall; neg eax; mov edi, eax; mov eax, 231; syscall`: ends with the error of
    /// asking after a descriptor, whose number is the byte at [`NUMBER`].
    const CODE: [u8; 28] = [
        0xb8, 72, 0, 0, 0, 0xbf, 0, 0, 0, 0, 0xbe, 1, 0, 0, 0, 0x0f, 5, 0xf7, 0xd8, 0x89, 0xc7,
        0xb8, 231, 0, 0, 0, 0x0f, 5,
    ];
    const NUMBER: usize = 6;

    fn code(descriptor: u8) -> Box<dyn MemoryObject> {
        let object = crate::memory::object("test", PAGE as u64).expect("memory");
        let page = object.map_large().expect("mapped");
        let mut code = CODE;
        code[NUMBER] = descriptor;
        // SAFETY: mapped to be written, and nobody else has it.
        unsafe { page.base().cast().write(code) };
        object
    }

    fn body(content: BorrowedFd<'_>) -> Body<'_> {
        let (access, content) = (Access::Execute, Some((content, 0)));
        Body {
            parts: vec![Part { at: AT, len: PAGE, access, content, keyed: false }],
            entry: AT,
            keeps: content.map(|(content, _)| content).expect("given"),
            supervision: Supervision::None,
            space: 1 << 40,
            private: 1 << 20,
        }
    }

    /// Waits until a child has ended.
    fn end_of(child: &dyn host::Child) -> Option<End> {
        let looks = std::iter::repeat_with(|| {
            std::thread::yield_now();
            child.ended()
        });
        looks.flatten().next()
    }

    #[test]
    fn a_body_is_its_mappings_and_one_descriptor() {
        for (number, error) in [(0, 0), (1, libc::EBADF), (2, libc::EBADF)] {
            let code = code(number);
            let child = start(&body(code.descriptor().expect("a descriptor"))).expect("a process");
            assert_eq!(end_of(&*child), Some(End::Exited(error)), "descriptor {number}");
        }
    }

    #[test]
    fn what_lies_in_a_parts_way_is_not_replaced() {
        let code = code(0);
        let mut twice = body(code.descriptor().expect("a descriptor"));
        twice.parts.push(twice.parts[0]);
        let child = start(&twice).expect("a process");
        assert_eq!(end_of(&*child), Some(End::Exited(status::MAP)));
    }

    /// What `/proc` says of a process: a set of signals.
    fn signals(process: i32, set: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("/proc");
        let line = status.lines().find_map(|line| line.strip_prefix(set)).expect("such a line");
        u64::from_str_radix(line.trim(), 16).expect("a set")
    }

    #[test]
    fn a_signal_waits_until_a_target_has_a_handler() {
        /// `jmp $`
        const FOREVER: [u8; 2] = [0xeb, 0xfe];
        let of_kick = 1_u64 << (libc::SIGUSR1 - 1);
        let code = code(0);
        // SAFETY: mapped to be written, and nobody else has it.
        unsafe { code.map_large().expect("mapped").base().cast().write(FOREVER) };
        for _ in 0..20 {
            let (ours, its) = UnixStream::pair().expect("sockets");
            let mut target = body(code.descriptor().expect("a descriptor"));
            let call = libc::SYS_sched_yield as u32;
            target.supervision = Supervision::Target { socket: its.as_fd(), call };
            let child = start(&target).expect("a process");
            drop(its);
            let listener = notifications::receive(ours.as_raw_fd()).expect("notifications");
            child.signal(libc::SIGUSR1);
            let [blocked, pending] = ["SigBlk:", "ShdPnd:"].map(|set| signals(child.number(), set));
            child.end();
            // SAFETY: received, and nobody else's.
            drop(unsafe { OwnedFd::from_raw_fd(listener) });
            assert_eq!((blocked & of_kick, pending & of_kick), (of_kick, of_kick));
        }
    }

    #[test]
    fn a_wait_is_for_a_value_and_a_time() {
        let (word, long) = (AtomicU32::new(1), Duration::from_secs(60));
        let begin = Instant::now();
        wait(&word, 0, long);
        wait(&word, 1, Duration::from_millis(1));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                word.store(2, Ordering::SeqCst);
                wake(&word);
            });
            while word.load(Ordering::SeqCst) == 1 {
                wait(&word, 1, long);
            }
        });
        assert!(begin.elapsed() < long);
    }
}
