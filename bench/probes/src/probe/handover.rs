//! Probe 5: handing a vCPU from one process (one guest address space) to another, and what doing
//! without would cost.

use crate::host::{self, must};
use crate::measure::price;
use crate::report::row;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// One side's way of giving the turn away and waiting for it to return.
type Pass = fn(&Table, usize);

/// What both sides share: whose turn it is, and descriptors for the ways that need them.
struct Table {
    turn: &'static AtomicU32,
    stop: &'static AtomicU32,
    pipes: [[i32; 2]; 2],
    events: [i32; 2],
}

const ROUNDS: u64 = 500;

/// Prices round trips (two hand-overs) by mechanism and placement.
pub fn run() {
    let ways: &[(&str, Pass)] = &[
        ("futex wake, then wait", futex),
        ("spin 2000 times, then futex", spin_then_futex),
        ("pure spin", spin),
        ("spin with sched_yield", yielding),
        ("pipe", pipe),
        ("eventfd", event),
    ];
    for (name, pass) in ways {
        for (place, cpus) in
            [("same CPU", Some((1, 1))), ("two CPUs", Some((0, 1))), ("placed by the host", None)]
        {
            if *name == "pure spin" && place != "two CPUs" {
                continue;
            }
            let status =
                host::in_child(|| processes(&format!("{name}, {place}: round trip"), *pass, cpus));
            assert_eq!(status, 0, "{name}");
        }
    }
    for (place, cpu) in [("two CPUs", 0), ("same CPU", 1)] {
        host::in_child(|| kick(&format!("kick: kill() to the handler's first line, {place}"), cpu));
    }
    host::in_child(|| threads("futex, two threads of one process, same CPU: round trip", futex));
}

fn table() -> Table {
    let at = 0x4600_0000;
    host::map(at, host::PAGE, host::RW, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0);
    // SAFETY: a zeroed shared page holds the words for as long as the process lives.
    let word = |n: usize| unsafe { &*((at + 64 * n) as *const AtomicU32) };
    let mut pipes = [[0; 2]; 2];
    // SAFETY: pipe fills two descriptors; eventfd takes numbers only.
    unsafe {
        for pair in &mut pipes {
            must("pipe", libc::pipe(pair.as_mut_ptr()).into());
        }
        let events = [libc::eventfd(0, 0), libc::eventfd(0, 0)];
        Table { turn: word(0), stop: word(1), pipes, events }
    }
}

fn place(cpu: Option<usize>) {
    match cpu {
        Some(cpu) => host::pin(cpu),
        None => host::pin_anywhere(),
    }
}

fn processes(name: &str, pass: Pass, cpus: Option<(usize, usize)>) {
    let table = table();
    place(cpus.map(|c| c.0));
    // SAFETY: the child only passes turns and exits.
    let child = must("fork", unsafe { libc::fork() }.into()) as i32;
    if child == 0 {
        place(cpus.map(|c| c.1));
        partner(&table, pass);
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(0) };
    }
    caller(name, &table, pass);
    // SAFETY: collects the child.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
}

fn threads(name: &str, pass: Pass) {
    let table: &'static Table = Box::leak(Box::new(table()));
    place(Some(1));
    let other = std::thread::spawn(move || {
        place(Some(1));
        partner(table, pass);
    });
    caller(name, table, pass);
    other.join().expect("the partner ends when told to");
}

/// Where the kicked process notes the time.
const KICKED_AT: usize = 0x4700_0000;

extern "C" fn on_kick(_: i32) {
    // SAFETY: the shared word is mapped before the handler is installed.
    unsafe { &*(KICKED_AT as *const AtomicU64) }.store(crate::measure::tsc(), Ordering::SeqCst);
}

/// A monitor's signal to a process busy with guest code on CPU 1.
fn kick(name: &str, from: usize) {
    host::map(KICKED_AT, host::PAGE, host::RW, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0);
    // SAFETY: installs a handler, then forks a child that spins until killed.
    let child = unsafe {
        libc::signal(libc::SIGUSR1, on_kick as *const () as usize);
        must("fork", libc::fork().into()) as i32
    };
    if child == 0 {
        place(Some(1));
        loop {
            std::hint::spin_loop();
        }
    }
    place(Some(from));
    std::thread::sleep(std::time::Duration::from_millis(20));
    // SAFETY: mapped above.
    let noted = unsafe { &*(KICKED_AT as *const AtomicU64) };
    let cost = crate::measure::price_ticks(201, 1, || {
        noted.store(0, Ordering::SeqCst);
        let start = crate::measure::tsc();
        // SAFETY: the child is ours.
        unsafe { libc::kill(child, libc::SIGUSR1) };
        while noted.load(Ordering::SeqCst) == 0 {
            // SAFETY: no arguments; lets the child run where it shares our CPU.
            unsafe { libc::sched_yield() };
        }
        noted.load(Ordering::SeqCst).saturating_sub(start)
    });
    row(name, cost);
    // SAFETY: ends and collects the child.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
}

/// Side 0: starts each round and measures. A round is 0 -> 1 -> 0.
fn caller(name: &str, table: &Table, pass: Pass) {
    let cost = price(31, ROUNDS, || (0..ROUNDS).for_each(|_| pass(table, 0)));
    row(name, cost);
    table.stop.store(1, Ordering::SeqCst);
    pass(table, 0);
}

/// Side 1: waits for its first turn, then passes it back for ever.
fn partner(table: &Table, pass: Pass) {
    WAITING_FIRST.store(1, Ordering::Relaxed);
    while table.stop.load(Ordering::SeqCst) == 0 {
        pass(table, 1);
    }
    table.turn.store(0, Ordering::SeqCst);
    wake(table.turn);
    give(table.pipes[0][1], 1);
    give(table.events[0], 8);
}

/// Side 1 must wait before it passes for the first time.
static WAITING_FIRST: AtomicU32 = AtomicU32::new(0);

/// Gives the turn away unless this is side 1's first call.
fn first(side: usize) -> bool {
    side == 1 && WAITING_FIRST.swap(0, Ordering::Relaxed) == 1
}

fn other(side: usize) -> u32 {
    1 - side as u32
}

fn wake(word: &AtomicU32) {
    // SAFETY: the futex word lives in the shared page.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, 1) };
}

fn futex(table: &Table, side: usize) {
    if !first(side) {
        table.turn.store(other(side), Ordering::SeqCst);
        wake(table.turn);
    }
    while table.turn.load(Ordering::SeqCst) != side as u32 {
        // SAFETY: as in `wake`; no timeout.
        unsafe { libc::syscall(libc::SYS_futex, table.turn, libc::FUTEX_WAIT, other(side), 0) };
    }
}

fn spin_then_futex(table: &Table, side: usize) {
    if !first(side) {
        table.turn.store(other(side), Ordering::SeqCst);
        wake(table.turn);
    }
    for _ in 0..2000 {
        if table.turn.load(Ordering::Acquire) == side as u32 {
            return;
        }
        std::hint::spin_loop();
    }
    while table.turn.load(Ordering::SeqCst) != side as u32 {
        // SAFETY: as in `wake`; no timeout.
        unsafe { libc::syscall(libc::SYS_futex, table.turn, libc::FUTEX_WAIT, other(side), 0) };
    }
}

fn spin(table: &Table, side: usize) {
    if !first(side) {
        table.turn.store(other(side), Ordering::Release);
    }
    while table.turn.load(Ordering::Acquire) != side as u32 {
        std::hint::spin_loop();
    }
}

fn yielding(table: &Table, side: usize) {
    if !first(side) {
        table.turn.store(other(side), Ordering::Release);
    }
    while table.turn.load(Ordering::Acquire) != side as u32 {
        // SAFETY: no arguments.
        unsafe { libc::sched_yield() };
    }
}

fn give(fd: i32, len: usize) {
    let one = 1u64;
    // SAFETY: eight bytes at most are read from `one`.
    unsafe { libc::write(fd, (&raw const one).cast(), len) };
}

fn take(fd: i32, len: usize) {
    let mut got = 0u64;
    // SAFETY: eight bytes at most are written to `got`.
    unsafe { libc::read(fd, (&raw mut got).cast(), len) };
}

fn pipe(table: &Table, side: usize) {
    if !first(side) {
        give(table.pipes[1 - side][1], 1);
    }
    take(table.pipes[side][0], 1);
}

fn event(table: &Table, side: usize) {
    if !first(side) {
        give(table.events[1 - side], 8);
    }
    take(table.events[side], 8);
}
