//! Signals that are sent, and what handlers do to the code they interrupt.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::code;
use crate::{
    asm::Asm,
    cpu::{self, Open, RAX, RCX, RDI, RSP, State, Stop},
    random::Random,
    sys::*,
    trace::note,
    world::World,
};

static SEEN: AtomicU32 = AtomicU32::new(0);
static CHANGE: AtomicU64 = AtomicU64::new(0);

fn returns(stop: &mut Stop) -> bool {
    stop.note_signal();
    note!(" ax={:x} ", stop.context.registers[RAX]);
    SEEN.fetch_add(1, Ordering::SeqCst);
    !stop.is_fault()
}

/// Code that sends itself signals, with and without handlers' masks.
pub fn raise(random: &mut Random, world: &World) {
    let signal = random.pick(&[10_u64, 12, 15, 34, 40, 64, 30, 17]);
    let flags = random.pick(&[0_u64, 0x4000_0000, 0x1000_0000, 0x8000_0000]);
    note!(
        "catch {signal} {flags:x} = {} ",
        cpu::catch_masked(signal as usize, flags, random.bits() & 0xff00)
    );
    let process = sys!(GETPID) as u64;
    let mut asm = Asm::new();
    for _ in 0..1 + random.below(4) {
        let number = random.pick(&[KILL, TGKILL]);
        // The process's number is in R12, and never in memory: mov rdi, r12; mov rsi, r12.
        asm.add(&[0x4c, 0x89, 0xe7]);
        if number == KILL {
            asm.load(6, signal)
        } else {
            asm.add(&[0x4c, 0x89, 0xe6])
        };
        asm.load(2, signal);
        asm.system_call(number as u32);
    }
    asm.add(&[0x0f, 0x0b]);
    let mut state = State::at(code::put_low(asm.bytes()));
    code::registers(random, world, &mut state);
    state.context.eflags &= !0x40000;
    state.set(4, process);
    if random.chance(30) {
        state.context.mask = 1 << (signal - 1);
    }
    if flags != 0x8000_0000 {
        // Once caught, a signal with RESETHAND would end the program.
        code::stack(&mut state);
    }
    let mut stop = cpu::run(&state, Some(once_if(flags == 0x8000_0000)));
    // Children send it, too, at times of their own.
    let ignored = [0_u64; 4];
    sys!(RT_SIGACTION, 17, ignored.as_ptr(), 0, 8);
    let pending = pending();
    note!("pending {pending:x} ");
    // The process number.
    [RDI, cpu::RSI, 4].iter().for_each(|&register| stop.context.registers[register] = 0);
    stop.note(Open::default());
}

fn once_if(once: bool) -> cpu::Hook {
    if once { leaves } else { returns }
}

fn leaves(_: &mut Stop) -> bool {
    false
}

fn pending() -> u64 {
    let mut set = 0_u64;
    sys!(RT_SIGPENDING, &raw mut set, 8);
    set
}

/// Changes what the handler was given: registers, flags, segments, vector state, addresses.
fn alters(stop: &mut Stop) -> bool {
    if SEEN.fetch_add(1, Ordering::SeqCst) > 0 {
        return false;
    }
    stop.note_signal();
    let mut random = Random::new(CHANGE.load(Ordering::SeqCst));
    let c = &mut stop.context;
    // Behind the UD2.
    c.rip = c.rip.wrapping_add(2);
    for _ in 0..1 + random.below(3) {
        match random.below(9) {
            0 => c.registers[random.below(16) as usize] = random.value(),
            1 => c.eflags = random.bits() & 0x0024_0dd5 & !0x40000,
            2 => c.eflags ^= 1 << random.below(22),
            3 => c.cs = random.pick(&[0x33, 0x23, 0x2b, 0x10, 0, 3, 7, 0x3b]),
            4 => c.ss = random.pick(&[0x2b, 0x33, 0, 0x18, 3, 0x23]),
            5 => {
                c.rip = random.pick(&[
                    0x8000_0000_0000,
                    0xffff_8000_0000_0000,
                    0,
                    c.rip,
                    0x7fff_ffff_ffff,
                ])
            }
            6 => c.registers[RSP] = random.value(),
            7 => c.mask = random.bits() & 0x3ff << 32,
            _ => c.registers[RCX] ^= 1,
        }
    }
    // Makers differ in what a return to 32-bit code makes of addresses that such code cannot reach.
    if c.cs == cpu::CODE32 {
        c.rip &= 0x7fff_ffff;
        // And of a stack that goes over the end of 4 GiB.
        if c.registers[RSP] as u32 <= 64 {
            c.registers[RSP] += 64;
        }
    }
    // And in which they refuse first, RIP or SS; the number of SS is in the frame then.
    if (c.rip as i64) << 16 >> 16 != c.rip as i64 {
        c.ss = cpu::DATA;
    }
    true
}

/// A handler alters the registers it returns to.
pub fn frame(random: &mut Random, world: &World) {
    let mut asm = Asm::new();
    asm.add(&[0x0f, 0x0b, 0x90, 0x48, 0xff, 0xc0, 0x9c, 0x58, 0x8c, 0xd3, 0x0f, 0x0b]);
    // Below 4 GiB: makers differ in returns to 32-bit code at addresses that it cannot reach.
    let mut state = State::at(code::put_low(asm.bytes()));
    code::vectors(random, &mut state);
    code::stack(&mut state);
    if random.chance(25) {
        // What sigreturn itself has to refuse, or to repair.
        let at = random.pick(&[24_usize, 25, 512, 520, 464, 480, 832, 0, 2]);
        // The host may have further parts of XSAVE's state, which the guest does not have.
        let bits = if at == 512 { 3 } else { 8 };
        state.fpu.bytes[at] ^= 1 << random.below(bits);
    }
    if random.chance(10) {
        state.context.fpu = random.pick(&[0x1000, 0x8000_0000_0000, u64::MAX]);
    }
    SEEN.store(0, Ordering::SeqCst);
    CHANGE.store(random.bits(), Ordering::SeqCst);
    cpu::run(&state, Some(alters)).note(Open::default());
}

/// As [`counts`]. After a few signals the timer is turned off: on a host with much to do each may take longer than the timer.
fn stops_timer(stop: &mut Stop) -> bool {
    const SIGNALS: u32 = 20;
    let goes_on = counts(stop);
    if goes_on && SEEN.load(Ordering::SeqCst) == SIGNALS {
        let off = [0_u64; 4];
        sys!(SETITIMER, 0, off.as_ptr(), 0);
    }
    goes_on
}

fn counts(stop: &mut Stop) -> bool {
    if stop.signal == 14 {
        SEEN.fetch_add(1, Ordering::SeqCst);
        return true;
    }
    false
}

/// A calculation that a timer interrupts, and waits that it ends.
pub fn timer(random: &mut Random, world: &World) {
    note!("timer {} ", cpu::catch(14, 0));
    SEEN.store(0, Ordering::SeqCst);
    let micros = 200 + random.below(1000);
    let every = [0, micros, 0, micros];
    let mut asm = Asm::new();
    // L: lea rax, [rax + rcx * 2]; add rax, rdx; rol rdx, 1; paddq xmm0, xmm1; add [rdi], al; dec ecx; jnz L; ud2
    // All of it leaves flags that are defined: the code may end at the border of a page, behind any instruction.
    asm.add(&[
        0x48, 0x8d, 0x04, 0x48, 0x48, 0x01, 0xd0, 0x48, 0xd1, 0xc2, 0x66, 0x0f, 0xd4, 0xc1,
    ]);
    if random.chance(50) {
        asm.add(&[0x00, 0x07]);
    }
    asm.add(&[0xff, 0xc9]);
    let back = -(asm.len() as i32 + 2);
    asm.add(&[0x75, back as u8, 0x0f, 0x0b]);
    let mut state = State::at(code::put(random, world, asm.bytes()));
    code::registers(random, world, &mut state);
    state.context.eflags &= !0x40000;
    state.set(RDI, code::scratch());
    state.set(RCX, 1000 + random.below(60_000));
    // It may fire before the code is entered.
    cpu::watch(counts);
    sys!(SETITIMER, 0, every.as_ptr(), 0);
    let mut stop = cpu::run(&state, Some(stops_timer));
    cpu::watch(counts);
    sys!(SETITIMER, 0, every.as_ptr(), 0);
    sleep_interrupted(random);
    let off = [0_u64; 4];
    sys!(SETITIMER, 0, off.as_ptr(), 0);
    stop.note(Open::default());
}

/// Sleeps far longer than the timer lets it.
fn sleep_interrupted(random: &mut Random) {
    if random.chance(50) {
        // A guest may be without a CPU of its host for many seconds.
        let long = [1000_u64, 0];
        let mut rest = [0_u64; 2];
        let result = sys!(NANOSLEEP, long.as_ptr(), rest.as_mut_ptr());
        // Of a sleep that ends at once the kernel says more than was asked for: it adds the slack of its timers.
        note!("sleep {result} {} ", rest[0] > 0);
    } else {
        note!("pause {} ", sys!(PAUSE));
    }
    note!("{} ", SEEN.load(Ordering::SeqCst) > 0);
}
