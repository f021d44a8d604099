//! Threads that check what they may rely on when they run on several CPUs. Says `all is well` at the end.
//!
//! Each part is a law of the CPU or of Linux that holds whatever the timing: the host is the first to be tried.

use std::{
    arch::{asm, x86_64::__cpuid},
    ffi::{c_int, c_long, c_void},
    hint::spin_loop,
    ptr::{null_mut, write_volatile},
    sync::{
        Barrier, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering::*},
    },
    thread,
    time::{Duration, Instant},
};

const PAGE: usize = 4096;
const READ: c_int = 1;
const WRITE: c_int = 2;
const EXECUTE: c_int = 4;
const SHARED: c_int = 1;
const PRIVATE: c_int = 2;
const FIXED: c_int = 0x10;
const ANONYMOUS: c_int = 0x20;
const SIGSEGV: c_int = 11;
const SIGUSR1: c_int = 10;
const SA_SIGINFO: c_int = 4;

unsafe extern "C" {
    fn mmap(
        at: *mut c_void,
        len: usize,
        rights: c_int,
        flags: c_int,
        fd: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn mprotect(at: *mut c_void, len: usize, rights: c_int) -> c_int;
    fn memfd_create(name: *const i8, flags: u32) -> c_int;
    fn ftruncate(fd: c_int, len: i64) -> c_int;
    fn sigaction(signal: c_int, action: *const Action, old: *mut Action) -> c_int;
    fn sched_setaffinity(pid: c_int, len: usize, mask: *const u64) -> c_int;
    fn sched_getcpu() -> c_int;
    fn pthread_self() -> usize;
    fn pthread_kill(thread: usize, signal: c_int) -> c_int;
    fn sysconf(name: c_int) -> c_long;
}

#[repr(C)]
struct Action {
    handler: usize,
    mask: [u64; 16],
    flags: c_int,
    restorer: usize,
}

fn handle(signal: c_int, handler: extern "C" fn(c_int, *const u8, *const u8)) {
    let action = Action {
        handler: handler as *const () as usize,
        mask: [0; 16],
        flags: SA_SIGINFO,
        restorer: 0,
    };
    // SAFETY: the handlers below touch atomics only.
    assert_eq!(unsafe { sigaction(signal, &action, null_mut()) }, 0);
}

fn map(at: usize, len: usize, rights: c_int, flags: c_int, fd: c_int) -> usize {
    // SAFETY: memory of our own, at places where we have nothing else.
    let found = unsafe { mmap(at as *mut c_void, len, rights, flags, fd, 0) } as usize;
    assert!(found != usize::MAX, "mmap");
    found
}

fn protect(at: usize, rights: c_int) {
    // SAFETY: as for `map`.
    assert_eq!(unsafe { mprotect(at as *mut c_void, PAGE, rights) }, 0, "mprotect");
}

fn cpus() -> usize {
    // SAFETY: asks a number (_SC_NPROCESSORS_ONLN).
    unsafe { sysconf(84) as usize }
}

/// Runs `body` in so many threads at once, each on a CPU of its own as far as there are.
fn together(count: usize, body: impl Fn(usize) + Sync) {
    let (start, cpus) = (Barrier::new(count), cpus());
    thread::scope(|scope| {
        for index in 0..count {
            let (start, body) = (&start, &body);
            scope.spawn(move || {
                go_to(index % cpus);
                start.wait();
                body(index);
            });
        }
    });
}

fn go_to(cpu: usize) {
    let mask = [1u64 << cpu, 0];
    // SAFETY: reads two words.
    assert_eq!(unsafe { sched_setaffinity(0, 16, mask.as_ptr()) }, 0, "CPU {cpu}");
}

/// Read-modify-write instructions of every size, beside each other in one word and in pages that are executed.
fn atomics(threads: usize, rounds: u64) {
    static BYTES: [AtomicU8; 4] = [const { AtomicU8::new(0) }; 4];
    static WORDS: [AtomicU16; 2] = [const { AtomicU16::new(0) }; 2];
    static LONG: AtomicU64 = AtomicU64::new(0);
    static SPIN: AtomicU32 = AtomicU32::new(0);
    let (mut plain, code) = (0u64, map(0, PAGE, READ | WRITE | EXECUTE, PRIVATE | ANONYMOUS, -1));
    let plain = &raw mut plain as usize;
    // SAFETY: a page of ours; its first byte is RET.
    let inside = unsafe {
        write_volatile(code as *mut u8, 0xc3);
        &*((code + 64) as *const AtomicU64)
    };
    together(threads, |index| {
        for round in 0..rounds {
            BYTES[index % 4].fetch_add(1, Relaxed);
            WORDS[index % 2].fetch_sub(1, Relaxed);
            let mut old = LONG.load(Relaxed);
            while let Err(found) = LONG.compare_exchange_weak(old, old + 3, SeqCst, Relaxed) {
                old = found;
            }
            while SPIN.swap(1, Acquire) != 0 {
                spin_loop();
            }
            // SAFETY: one thread at a time, which is what is tried.
            unsafe { *(plain as *mut u64) += 1 };
            SPIN.store(0, Release);
            if round % 64 == 0 {
                inside.fetch_add(1, SeqCst);
                // SAFETY: RET.
                unsafe { asm!("call {}", in(reg) code, clobber_abi("C")) };
            }
        }
    });
    let all = threads as u64 * rounds;
    let in_all =
        |n: usize, of: usize| (threads / of + usize::from(n < threads % of)) as u64 * rounds;
    (0..4).for_each(|n| assert_eq!(BYTES[n].load(SeqCst), in_all(n, 4) as u8, "bytes"));
    (0..2).for_each(|n| {
        assert_eq!(WORDS[n].load(SeqCst), 0u16.wrapping_sub(in_all(n, 2) as u16), "words")
    });
    assert_eq!(LONG.load(SeqCst), 3 * all, "compare and exchange");
    // SAFETY: all threads have ended.
    assert_eq!(unsafe { *(plain as *const u64) }, all, "a spinning lock");
    assert_eq!(inside.load(SeqCst), threads as u64 * rounds.div_ceil(64), "beside code");
}

/// Locked instructions whose bytes lie in two cache lines, and in two pages.
fn across(threads: usize, rounds: u64) {
    let pages = map(0, 2 * PAGE, READ | WRITE, PRIVATE | ANONYMOUS, -1);
    let places = [pages + 62, pages + PAGE - 2];
    together(threads, |_| {
        for _ in 0..rounds {
            for at in places {
                // SAFETY: eight bytes of our pages.
                unsafe { asm!("lock inc dword ptr [{}]", in(reg) at) };
            }
        }
    });
    for at in places {
        // SAFETY: as above, and all threads have ended.
        let found = unsafe { std::ptr::read_unaligned(at as *const u32) };
        assert_eq!(u64::from(found), threads as u64 * rounds, "at {at:#x}");
    }
}

/// Stores are seen in their order, and nobody's own store is passed by a later load behind a fence.
fn ordering(rounds: u64) {
    static DATA: AtomicU64 = AtomicU64::new(0);
    static FLAG: AtomicU64 = AtomicU64::new(0);
    static STORED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
    static SEEN: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
    together(2, |index| {
        for round in 1..=rounds {
            if index == 0 {
                DATA.store(round, Relaxed);
                FLAG.store(round, Release);
            } else {
                let flag = FLAG.load(Acquire);
                assert!(DATA.load(Relaxed) >= flag, "a store has passed another");
            }
        }
    });
    let meet = Barrier::new(2);
    together(2, |index| {
        for round in 1..=rounds / 100 {
            meet.wait();
            STORED[index].store(round, SeqCst);
            SEEN[index].store(STORED[1 - index].load(SeqCst), SeqCst);
            meet.wait();
            assert!(
                SEEN.iter().any(|seen| seen.load(SeqCst) == round),
                "both loads have passed the stores"
            );
        }
    });
}

/// A token goes round by way of mutexes and condition variables.
fn futexes(threads: usize, rounds: usize) {
    let (turn, changed) = (Mutex::new(0), Condvar::new());
    together(threads, |index| {
        for round in 0..rounds {
            let mine = round * threads + index;
            let mut turn = changed
                .wait_while(turn.lock().expect("whole"), |turn| *turn != mine)
                .expect("whole");
            *turn += 1;
            changed.notify_all();
        }
    });
    assert_eq!(*turn.lock().expect("whole"), threads * rounds);
}

static CLOSED_PAGE: AtomicUsize = AtomicUsize::new(0);
static OPEN: AtomicBool = AtomicBool::new(true);

/// A write to the page while it is closed: waits until it is open again.
extern "C" fn closed(_: c_int, info: *const u8, _: *const u8) {
    // SAFETY: si_addr.
    let address = unsafe { *(info.add(16) as *const usize) };
    if address & !(PAGE - 1) != CLOSED_PAGE.load(SeqCst) {
        std::process::abort();
    }
    while !OPEN.load(SeqCst) {
        thread::yield_now();
    }
}

/// When mprotect has returned, nobody writes the page.
fn closing(threads: usize, rounds: usize) {
    handle(SIGSEGV, closed);
    let page = map(0, PAGE, READ | WRITE, PRIVATE | ANONYMOUS, -1);
    CLOSED_PAGE.store(page, SeqCst);
    let over = AtomicBool::new(false);
    together(threads + 1, |index| {
        // SAFETY: the page stays for good.
        let word = unsafe { &*((page + index * 64) as *const AtomicU64) };
        if index < threads {
            while !over.load(Relaxed) {
                word.fetch_add(1, Relaxed);
            }
            return;
        }
        // SAFETY: as above.
        let sum = || {
            (0..threads)
                .map(|n| unsafe { &*((page + n * 64) as *const AtomicU64) }.load(SeqCst))
                .sum::<u64>()
        };
        for _ in 0..rounds {
            OPEN.store(false, SeqCst);
            protect(page, READ);
            let before = sum();
            (0..200).for_each(|_| spin_loop());
            thread::yield_now();
            assert_eq!(sum(), before, "the page was written while it was closed");
            protect(page, READ | WRITE);
            OPEN.store(true, SeqCst);
            thread::yield_now();
        }
        over.store(true, SeqCst);
    });
}

/// When mmap has put another page there, nobody sees the old one.
fn replacing(threads: usize, rounds: u64) {
    let page = map(0, PAGE, READ | WRITE, PRIVATE | ANONYMOUS, -1);
    let (current, over) = (AtomicU64::new(0), AtomicBool::new(false));
    together(threads + 1, |index| {
        // SAFETY: there is always a page.
        let word = unsafe { &*(page as *const AtomicU64) };
        if index < threads {
            while !over.load(Relaxed) {
                let least = current.load(SeqCst);
                let seen = word.load(SeqCst);
                // A page that has just come is empty.
                assert!(seen == 0 || seen >= least, "page {seen} after page {least}");
            }
            return;
        }
        for round in 1..=rounds {
            map(page, PAGE, READ | WRITE, PRIVATE | ANONYMOUS | FIXED, -1);
            word.store(round, SeqCst);
            current.store(round, SeqCst);
        }
        over.store(true, SeqCst);
    });
}

/// `mov eax, value; ret`
fn function(at: usize, value: u32) {
    let bytes = u64::from_le_bytes([0xb8, 0, 0, 0, 0, 0xc3, 0x90, 0x90]) | u64::from(value) << 8;
    // SAFETY: eight aligned bytes of ours, stored at once: nobody executes half of them.
    unsafe { write_volatile(at as *mut u64, bytes) };
}

fn call(at: usize) -> u32 {
    let value;
    // SAFETY: `function` has put it there.
    unsafe { asm!("call {}", in(reg) at, lateout("eax") value, clobber_abi("C")) };
    value
}

/// Code that one thread writes and others execute: after a serializing instruction they see what was told of (SDM 8.1.3).
fn rewriting(threads: usize, rounds: u32, write: usize, execute: usize) {
    let (told, over) = (AtomicU32::new(0), AtomicBool::new(false));
    function(write, 0);
    together(threads + 1, |index| {
        if index < threads {
            while !over.load(Relaxed) {
                let least = told.load(SeqCst);
                __cpuid(0);
                let found = call(execute);
                assert!(found >= least, "code {found} after code {least}");
            }
            return;
        }
        for round in 1..=rounds {
            function(write, round);
            told.store(round, SeqCst);
            if round % 16 == 0 {
                thread::yield_now();
            }
        }
        over.store(true, SeqCst);
    });
}

fn rewriting_all(threads: usize, rounds: u32) {
    let all = READ | WRITE | EXECUTE;
    let one = map(0, PAGE, all, PRIVATE | ANONYMOUS, -1);
    rewriting(threads, rounds, one, one);
    // SAFETY: a memory object of our own.
    let object = unsafe {
        let object = memfd_create(c"code".as_ptr(), 0);
        assert!(object >= 0 && ftruncate(object, PAGE as i64) == 0, "memfd");
        object
    };
    let write = map(0, PAGE, READ | WRITE, SHARED, object);
    let execute = map(0, PAGE, READ | EXECUTE, SHARED, object);
    rewriting(threads, rounds, write, execute);
}

static TAKEN: AtomicUsize = AtomicUsize::new(0);

extern "C" fn taken(_: c_int, _: *const u8, _: *const u8) {
    TAKEN.fetch_add(1, SeqCst);
}

/// A thread that computes takes every signal that another one sends it, one after the other.
fn signals(rounds: usize) {
    handle(SIGUSR1, taken);
    let (target, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    together(2, |index| {
        if index == 0 {
            // SAFETY: asks who we are.
            target.store(unsafe { pthread_self() }, SeqCst);
            let mut value = 1.0_f64;
            while !over.load(Relaxed) {
                value = value * 1.000_001 + 0.5;
            }
            assert!(value > 1.0);
            return;
        }
        while target.load(SeqCst) == 0 {
            thread::yield_now();
        }
        for round in 1..=rounds {
            // SAFETY: the thread lives until it is told.
            assert_eq!(unsafe { pthread_kill(target.load(SeqCst), SIGUSR1) }, 0);
            while TAKEN.load(SeqCst) != round {
                thread::yield_now();
            }
        }
        over.store(true, SeqCst);
    });
}

/// Each CPU is where it says it is, and has an identifier of its own.
fn places() {
    let mut known = Vec::new();
    for cpu in 0..cpus() {
        go_to(cpu);
        // SAFETY: asks a number.
        assert_eq!(unsafe { sched_getcpu() } as usize, cpu);
        let (short, long) = (__cpuid(1).ebx >> 24, std::arch::x86_64::__cpuid_count(0xb, 0).edx);
        assert_eq!(short, long, "APIC identifiers of CPU {cpu}");
        known.push(long);
    }
    known.sort_unstable();
    known.dedup();
    assert_eq!(known.len(), cpus(), "APIC identifiers: {known:?}");
    (0..cpus()).for_each(|cpu| go_to(cpu));
}

/// Who has seen a time reads none before it, on whatever CPU.
fn times(threads: usize, rounds: usize) {
    static LATEST: AtomicU64 = AtomicU64::new(0);
    together(threads, |_| {
        for _ in 0..rounds {
            let before = LATEST.load(SeqCst);
            let (low, high): (u64, u64);
            // SAFETY: reads the counter, not before what precedes it.
            unsafe { asm!("lfence", "rdtsc", out("rax") low, out("rdx") high) };
            let now = high << 32 | low;
            assert!(now >= before, "{} ticks back", before - now);
            LATEST.fetch_max(now, SeqCst);
        }
    });
}

fn main() {
    let threads = cpus().max(2);
    let scale = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1);
    let part = |name: &str, body: &dyn Fn()| {
        let started = Instant::now();
        body();
        println!("{name}: {} ms", started.elapsed().as_millis());
    };
    let guard = thread::spawn(|| {
        thread::sleep(Duration::from_secs(300));
        println!("nothing moves any more");
        std::process::exit(1);
    });
    part("places", &|| places());
    part("atomics", &|| atomics(threads, 20_000 * scale as u64));
    part("across", &|| across(threads, 2000 * scale as u64));
    part("ordering", &|| ordering(100_000 * scale as u64));
    part("futexes", &|| futexes(threads, 500 * scale));
    part("closing", &|| closing(threads, 200 * scale));
    part("replacing", &|| replacing(threads, 300 * scale as u64));
    part("rewriting", &|| rewriting_all(threads, 500 * scale as u32));
    part("signals", &|| signals(1000 * scale));
    part("times", &|| times(threads, 20_000 * scale));
    drop(guard);
    println!("{threads} threads: all is well");
}
