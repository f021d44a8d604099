//! What whoever started this process left it, as it was before std changed some of it.
//!
//! Before `main`, std puts /dev/null where a standard stream is closed, and has SIGPIPE ignored.

#![allow(unsafe_code)]
// UNSAFETY: code before `main` is a function in a section, and umask and sigaction are C's.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Standard streams that were closed, a bit each.
static CLOSED: AtomicU8 = AtomicU8::new(0);
static UMASK: AtomicU32 = AtomicU32::new(0);
/// Signals that were ignored: signal N is bit N - 1.
static IGNORED: AtomicU64 = AtomicU64::new(0);

/// Limits that concern a command, whoever runs it.
const RESOURCES: [u32; 2] = [libc::RLIMIT_STACK, DESCRIPTORS];
/// Linux's number of the limit of descriptors.
pub const DESCRIPTORS: u32 = libc::RLIMIT_NOFILE;
/// The limit of each of these, and how far it may be raised.
static LIMITS: [[AtomicU64; 2]; 2] =
    [const { [const { AtomicU64::new(libc::RLIM_INFINITY) }; 2] }; 2];

const SIGNALS: i32 = 64;

/// Runs before `main`.
#[used]
// SAFETY: the linker has what is in this section called once, before `main`, with arguments that a C function may leave alone;
// `note` needs nothing of std's that is set up later.
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    // SAFETY: questions about numbers, which need not be descriptors; and there is one thread, so that no file is made while
    // the mask is another.
    unsafe {
        for number in (0..3).filter(|number| libc::fcntl(*number, libc::F_GETFD) < 0) {
            CLOSED.fetch_or(1 << number, Ordering::Relaxed);
        }
        let mask = libc::umask(0o77);
        libc::umask(mask);
        UMASK.store(mask, Ordering::Relaxed);
    }
    let ignored = (1..=SIGNALS).filter(|number| is_ignored_now(*number));
    let ignored = ignored.fold(0, |all, number| all | 1 << (number - 1));
    IGNORED.store(ignored, Ordering::Relaxed);
    for (resource, [current, maximum]) in RESOURCES.into_iter().zip(&LIMITS) {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a question, with room for the answer.
        if unsafe { libc::getrlimit(resource, &raw mut limit) } == 0 {
            current.store(limit.rlim_cur, Ordering::Relaxed);
            maximum.store(limit.rlim_max, Ordering::Relaxed);
        }
    }
}

fn is_ignored_now(signal: i32) -> bool {
    // SAFETY: zeros are a valid structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a question, with room for the answer.
    let answered = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) } == 0;
    answered && action.sa_sigaction == libc::SIG_IGN
}

/// Has a file that grows beyond `ulimit -f` be an error, as std has what SIGPIPE would tell. For `main`: who only links this crate
/// keeps its signals, and leaves them to what it starts.
pub fn ignore_file_size_signal() {
    // SAFETY: ignoring a signal runs nothing.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// The limits of the stack and of descriptors, before this program raised any of them: Linux's number of what is limited, the limit, and
/// how far it may be raised (`getrlimit`). All ones mean no limit.
pub fn limits() -> impl Iterator<Item = (u32, [u64; 2])> {
    let both = |limit: &[AtomicU64; 2]| limit.each_ref().map(|part| part.load(Ordering::Relaxed));
    RESOURCES.into_iter().zip(LIMITS.iter().map(both))
}

/// Whether standard input (0), output (1) or error (2) was closed.
pub fn is_closed(stream: u8) -> bool {
    CLOSED.load(Ordering::Relaxed) >> stream & 1 != 0
}

/// Permissions that were to be taken from files made.
pub fn umask() -> u32 {
    UMASK.load(Ordering::Relaxed)
}

/// Signals that were ignored: signal N is bit N - 1.
pub fn ignored_signals() -> u64 {
    IGNORED.load(Ordering::Relaxed)
}

/// Whether this signal was.
pub fn is_ignored(signal: i32) -> bool {
    (1..=SIGNALS).contains(&signal) && ignored_signals() >> (signal - 1) & 1 != 0
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// This test's own program is started anew, with things as they seldom are.
    #[test]
    fn what_was_left_is_known() {
        if std::env::var_os("RING3_TEST_LEFT").is_some() {
            assert!(is_closed(0) && !is_closed(1));
            assert_eq!(umask(), 0o31);
            assert!(is_ignored(libc::SIGHUP) && !is_ignored(libc::SIGTERM));
            assert!(!is_ignored(libc::SIGPIPE), "only std has it ignored");
            return;
        }
        let this = std::env::current_exe().expect("a program");
        let mut shell = Command::new("sh");
        let test = "inherited::tests::what_was_left_is_known";
        let script = format!("umask 31; trap '' HUP; exec \"$0\" --exact {test} <&-");
        shell.args(["-c", &script]).arg(this).env("RING3_TEST_LEFT", "1");
        let output = shell.output().expect("run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}
