//! KVM's paravirtual clock: the guest's time is the host's wall clock, to the nanosecond, and follows it.
//!
//! A guest that keeps its time by it reads the time-stamp counter and a line that lies in its memory. The line
//! is drawn anew about once a second, so that the guest follows what NTP does to the host's clock. It never
//! steps back: a guest that is ahead waits by going slower. If the host's clock is set to another time the guest
//! keeps its own, as under KVM. What is drawn is the same for all vCPUs, at the same moment.
//!
//! Nobody sleeps for this. Whoever takes an interrupt to a vCPU calls [`KvmClock::refresh`]: a guest that takes
//! none is not reading the clock, or soon takes one.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use host::Clock;
use ram::Ram;
use x86::kvm::{self, ENABLED, Line};

use crate::{lock, time::NS_PER_S};

/// How long a line lasts at least, in nanoseconds.
const PERIOD_NS: u64 = NS_PER_S;
/// By how much the host's clock may go faster or slower than the counter, in parts of a thousand million: what
/// Linux lets NTP do.
const LARGEST_RATE: i64 = 500_000;
/// What the host's clock may be off beyond that without having been set, in nanoseconds.
const LARGEST_ERROR_NS: i64 = 10_000_000;
/// Readings taken for one exact pair of counter and wall clock.
const ATTEMPTS: usize = 8;
/// Bytes of the version word.
const VERSION_LEN: u64 = 4;

/// The clocks of a machine's vCPUs.
pub struct KvmClock {
    ram: Ram,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// The counter when the next line is due: never if no vCPU has a clock.
    due: AtomicU64,
}

struct State {
    line: Line,
    /// The wall clock at the line's beginning, and what it was at time zero.
    wall: u64,
    zero: u64,
    /// How much faster the host's wall clock goes than the counter, in parts of a thousand million.
    rate: i64,
    /// How far the guest was ahead of the host at the line's beginning, as a negative number.
    error: i64,
    /// What the vCPUs wrote to the MSR.
    places: Vec<u64>,
    wall_place: u64,
}

impl KvmClock {
    /// Clocks at zero, none of them shown to a vCPU yet.
    pub fn new(ram: Ram, clock: Arc<dyn Clock>) -> Self {
        let (tsc, wall) = moment(&*clock);
        let line = Line::new(tsc, 0, clock.tsc_hz(), 0);
        let (places, wall_place) = (Vec::new(), 0);
        let state = State { line, wall, zero: wall, rate: 0, error: 0, places, wall_place };
        Self { ram, clock, state: Mutex::new(state), due: AtomicU64::new(u64::MAX) }
    }

    /// RDMSR; `None` if the register is not the clock's.
    pub fn msr_read(&self, cpu: usize, index: u32) -> Option<u64> {
        let state = lock(&self.state);
        match index {
            kvm::WALL_CLOCK => Some(state.wall_place),
            kvm::SYSTEM_TIME => Some(state.places.get(cpu).copied().unwrap_or(0)),
            _ => None,
        }
    }

    /// WRMSR; false if the register is not the clock's. A place outside of RAM is lost, as any write there is.
    pub fn msr_write(&self, cpu: usize, index: u32, value: u64) -> bool {
        match index {
            kvm::WALL_CLOCK => self.tell_wall_clock(value),
            kvm::SYSTEM_TIME => self.place(cpu, value),
            _ => return false,
        }
        true
    }

    fn tell_wall_clock(&self, gpa: u64) {
        let mut state = lock(&self.state);
        state.draw(&*self.clock);
        state.wall_place = gpa;
        let bytes = kvm::encode_wall_clock(state.zero);
        publish(&self.ram, gpa, &bytes);
    }

    fn place(&self, cpu: usize, value: u64) {
        let mut state = lock(&self.state);
        if state.places.len() <= cpu {
            state.places.resize(cpu + 1, 0);
        }
        state.places[cpu] = value;
        self.show(&mut state);
    }

    /// Draws the line anew if that is due: to be called when a vCPU is given an interrupt.
    #[inline]
    pub fn refresh(&self) {
        let due = self.due.load(Ordering::Relaxed);
        if due != u64::MAX && self.clock.tsc() >= due {
            self.show(&mut lock(&self.state));
        }
    }

    /// Draws a line, and shows it to all vCPUs that have a clock.
    fn show(&self, state: &mut State) {
        state.draw(&*self.clock);
        let bytes = state.line.encode();
        let shown = state.places.iter().filter(|place| *place & ENABLED != 0);
        let count = shown.map(|place| publish(&self.ram, place & !ENABLED, &bytes)).count();
        let ticks = self.clock.tsc_hz() / NS_PER_S * PERIOD_NS;
        let due = if count > 0 { state.line.tsc.saturating_add(ticks) } else { u64::MAX };
        self.due.store(due, Ordering::Relaxed);
    }
}

impl State {
    /// Goes on from where the line is now, towards the host's wall clock.
    fn draw(&mut self, clock: &dyn Clock) {
        let (tsc, wall) = moment(clock);
        let hz = clock.tsc_hz();
        let passed = Line::new(self.line.tsc, 0, hz, 0).at(tsc) as i64;
        let now = self.line.at(tsc);
        let error = wall.wrapping_sub(self.zero).wrapping_sub(now) as i64;
        if !possible(passed).contains(&(error.wrapping_sub(self.error))) {
            (self.zero, self.error, self.wall) = (wall.wrapping_sub(now), 0, wall);
            self.line = Line::new(tsc, now, hz, self.rate);
            return;
        }
        if passed >= PERIOD_NS as i64 {
            self.rate = parts(wall.wrapping_sub(self.wall) as i64 - passed, passed);
        }
        // What is missing is made up for at once. What is too much takes as long again as the last line lasted.
        let slower = parts(error.min(0), passed.max(PERIOD_NS as i64));
        let ns = now.wrapping_add(error.max(0).unsigned_abs());
        (self.line, self.error, self.wall) =
            (Line::new(tsc, ns, hz, self.rate + slower), error.min(0), wall);
    }
}

/// By how much the guest's clock can be off after so long, if nobody sets the host's.
fn possible(passed: i64) -> Range<i64> {
    let most = passed / 1000 + LARGEST_ERROR_NS;
    -most..most
}

/// `part` of `whole` in parts of a thousand million, as far as a clock goes wrong.
fn parts(part: i64, whole: i64) -> i64 {
    let parts = i128::from(part) * 1_000_000_000 / i128::from(whole.max(1));
    parts.clamp(i128::from(-LARGEST_RATE), i128::from(LARGEST_RATE)) as i64
}

/// Writes what lies behind a version word, which is odd meanwhile.
fn publish(ram: &Ram, gpa: u64, bytes: &[u8]) {
    let mut version = [0; VERSION_LEN as usize];
    // A place that is not RAM takes nothing.
    let _ = ram.read_gpa(gpa, &mut version);
    let busy = u32::from_le_bytes(version) | 1;
    let _ = ram.write_gpa(gpa, &busy.to_le_bytes());
    let _ = gpa.checked_add(VERSION_LEN).map(|at| ram.write_gpa(at, bytes));
    let _ = ram.write_gpa(gpa, &busy.wrapping_add(1).to_le_bytes());
}

/// The counter and the wall clock at the same moment: the pair, out of some, that was read in the least time.
fn moment(clock: &dyn Clock) -> (u64, u64) {
    let pairs = (0..ATTEMPTS).map(|_| {
        let (before, wall) = (clock.tsc(), clock.wall_clock_ns());
        let width = clock.tsc().wrapping_sub(before);
        (width, before.wrapping_add(width / 2), wall)
    });
    pairs.min().map_or((0, 0), |(_, tsc, wall)| (tsc, wall))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicI64;

    const PLACE: u64 = 0x5000;
    const WALL_PLACE: u64 = 0x6000;
    const START: u64 = 1_700_000_000_123_456_789;

    /// A counter of 2 GHz, and a wall clock that goes by another rate.
    #[derive(Default)]
    struct Host {
        ns: AtomicU64,
        /// What the wall clock is ahead.
        ahead: AtomicI64,
    }

    impl Host {
        /// Lets time pass, in which the wall clock gains.
        fn pass(&self, ns: u64, gain: i64) {
            self.ns.fetch_add(ns, Ordering::SeqCst);
            self.ahead.fetch_add(gain, Ordering::SeqCst);
        }
    }

    impl Clock for Host {
        fn monotonic_ns(&self) -> u64 {
            self.ns.load(Ordering::SeqCst)
        }
        fn wall_clock_ns(&self) -> u64 {
            (START + self.monotonic_ns()).wrapping_add_signed(self.ahead.load(Ordering::SeqCst))
        }
        fn tsc(&self) -> u64 {
            2 * self.monotonic_ns()
        }
        fn tsc_hz(&self) -> u64 {
            2_000_000_000
        }
    }

    struct Guest {
        ram: Ram,
        host: Arc<Host>,
        kvm: KvmClock,
    }

    impl Guest {
        fn new() -> Self {
            let (ram, host) = (Ram::new(2 << 20).expect("RAM"), Arc::new(Host::default()));
            let kvm = KvmClock::new(ram.clone(), host.clone());
            assert!(kvm.msr_write(0, kvm::SYSTEM_TIME, PLACE | ENABLED));
            assert!(kvm.msr_write(0, kvm::WALL_CLOCK, WALL_PLACE));
            Self { ram, host, kvm }
        }

        fn word(&self, gpa: u64) -> u64 {
            let mut bytes = [0; 8];
            self.ram.read_gpa(gpa, &mut bytes).expect("RAM");
            u64::from_le_bytes(bytes)
        }

        /// What Linux reads, which has a version that is even.
        fn system_time(&self) -> u64 {
            assert_eq!(self.word(PLACE) & 1, 0);
            let (multiplier, shift) = (self.word(PLACE + 24) as u32, self.word(PLACE + 28) as i8);
            let ticks = self.host.tsc() - self.word(PLACE + 8);
            let ticks = if shift < 0 { ticks >> -shift } else { ticks << shift };
            self.word(PLACE + 16) + ((u128::from(ticks) * u128::from(multiplier)) >> 32) as u64
        }

        /// How far the guest's wall clock is ahead of the host's.
        fn off(&self) -> i64 {
            let zero = self.word(WALL_PLACE + 4);
            let zero = (zero & 0xffff_ffff) * NS_PER_S + (zero >> 32);
            (zero + self.system_time()).wrapping_sub(self.host.wall_clock_ns()) as i64
        }
    }

    #[test]
    fn the_wall_clock_is_the_hosts() {
        let guest = Guest::new();
        guest.host.pass(12_345_678, 0);
        assert!(guest.off().abs() < 10, "{}", guest.off());
        assert_eq!(guest.kvm.msr_read(0, kvm::SYSTEM_TIME), Some(PLACE | ENABLED));
        assert_eq!(guest.kvm.msr_read(0, kvm::WALL_CLOCK), Some(WALL_PLACE));
        assert_eq!(guest.kvm.msr_read(0, 0x4b56_4d02), None);
        assert!(!guest.kvm.msr_write(0, 0x4b56_4d02, 1), "no other MSR of KVM's");
    }

    /// The host's clock is slewed, first one way and then the other, for hours.
    #[test]
    fn the_guest_follows_without_going_back() {
        let guest = Guest::new();
        let mut last = 0;
        for step in 0_u64..20_000 {
            let nap = if step % 1000 == 0 { 60 * NS_PER_S } else { 300_000_000 };
            let rate = if step < 10_000 { 300 } else { -400 };
            guest.host.pass(nap, nap as i64 / 1_000_000 * rate);
            let before = guest.system_time();
            guest.kvm.refresh();
            let now = guest.system_time();
            assert!(before >= last && now >= before, "step {step} goes back");
            assert!(
                step % 10_000 < 300 || guest.off().abs() < 1_000_000,
                "{step}: {}",
                guest.off()
            );
            last = now;
        }
    }

    #[test]
    fn a_clock_that_is_set_is_not_followed() {
        let guest = Guest::new();
        guest.host.pass(2 * NS_PER_S, 3600 * NS_PER_S as i64);
        guest.kvm.refresh();
        guest.host.pass(2 * NS_PER_S, 0);
        guest.kvm.refresh();
        assert!(guest.system_time().abs_diff(4 * NS_PER_S) < 10);
        // Who asks for the wall clock again gets the new one.
        guest.kvm.msr_write(0, kvm::WALL_CLOCK, WALL_PLACE);
        assert!(guest.off().abs() < 10, "{}", guest.off());
    }

    #[test]
    fn nothing_is_written_where_no_clock_is_wanted() {
        let guest = Guest::new();
        guest.kvm.msr_write(0, kvm::SYSTEM_TIME, PLACE);
        let before = guest.word(PLACE + 8);
        guest.host.pass(10 * NS_PER_S, 0);
        guest.kvm.refresh();
        assert_eq!(guest.word(PLACE + 8), before);
        // Outside of RAM, across its end and at the end of all addresses.
        for place in [3 << 20, (2 << 20) - 16, u64::MAX - 1] {
            assert!(guest.kvm.msr_write(1, kvm::SYSTEM_TIME, place | ENABLED));
            assert!(guest.kvm.msr_write(1, kvm::WALL_CLOCK, place));
        }
    }
}
