//! KVM's paravirtual clock: the guest's time is the host's wall clock, to the nanosecond, and follows it.
//!
//! A guest that keeps its time by it reads the time-stamp counter and a line that lies in its memory. The line
//! is drawn anew about once a second, so that the guest follows what NTP does to the host's clock. It never
//! steps back: a guest that is ahead waits by going slower. If the host's clock is set to another time the guest
//! keeps its own, as under KVM. What is drawn is the same for all vCPUs, at the same moment.
//!
//! All vCPUs' copies are busy before a line is drawn, and none is any more afterwards. So no vCPU reads a time that
//! another has seen pass.
//!
//! Linux sets its time of day by the CMOS clock, at some moment after it has read that (see [`crate::rtc`]). Its
//! clock nearly stands from the reading on ([`KvmClock::hold`]): however long the guest takes to its setting, what
//! it sets is known. Then the clock is put forward by what is missing.
//!
//! Nobody sleeps for this. Whoever takes an interrupt to a vCPU calls [`KvmClock::refresh`]: a guest that takes
//! none is not reading the clock, or soon takes one.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering, fence},
    },
    thread::{self, ThreadId},
};

use host::Clock;
use ram::Ram;
use x86::{
    kvm::{self, ENABLED, Line},
    paravirt::answer,
};

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
/// The rate of a clock that is held: a thousandth of its own, so that whoever waits for it comes to an end.
const HELD_RATE: i64 = -999_000_000;
/// The reading by which Linux sets its clock: its driver reads twice for an alarm (what day it is for, and whether
/// it has passed), and then for that.
const SETTING: u32 = 3;
/// Interrupts that the vCPU takes after that reading until the guest has set its clock. Each shows that the guest
/// has run: it may be without a CPU of the host for long. A tick of Linux's is 4 or 10 ms.
const HELD_INTERRUPTS: u32 = 16;
/// Interrupts until that reading comes, if it does: before it the driver makes its files and says so, which other
/// threads of the kernel have a part in.
const AWAITED_INTERRUPTS: u32 = 250;
/// A halt of the vCPU counts for so many interrupts after the reading that sets the clock: a vCPU that halts has set
/// its clock, and may get no interrupt for a long time. A halt before that reading counts for one interrupt, because
/// the driver waits for other threads then.
const HALT: u32 = 8;
/// Bytes of the version word.
const VERSION_LEN: u64 = 4;

/// The clocks of a machine's vCPUs.
pub struct KvmClock {
    ram: Ram,
    clock: Arc<dyn Clock>,
    state: Mutex<ClockState>,
    /// The counter when the next line is due: never if no vCPU has a clock.
    due: AtomicU64,
}

struct ClockState {
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
    hold: Option<Hold>,
}

/// A clock that nearly stands.
struct Hold {
    /// The vCPU's that reads the CMOS clock.
    thread: ThreadId,
    /// Interrupts of that vCPU until it ends.
    left: u32,
    readings: u32,
    /// What the guest's wall clock has been set to at time zero.
    zero: Option<u64>,
}

impl Hold {
    fn new() -> Self {
        Self { thread: thread::current().id(), left: AWAITED_INTERRUPTS, readings: 0, zero: None }
    }

    /// The vCPU of this thread has taken `by` interrupts, or halted instead. True if that ends the hold.
    fn ends(&mut self, by: u32) -> bool {
        if self.thread == thread::current().id() {
            self.left = self.left.saturating_sub(by);
        }
        self.left == 0
    }

    /// The number of interrupts that a halt counts for now.
    fn halt(&self) -> u32 {
        if self.zero.is_some() { HALT } else { 1 }
    }

    /// A time is read, by the vCPU whose thread this is: Linux may have moved its driver to another one since it
    /// began. The last reading is what the clock is about to be set by.
    fn is_read(&mut self, zero: u64) {
        self.readings += 1;
        if self.readings == SETTING {
            (self.left, self.zero) = (HELD_INTERRUPTS, Some(zero));
        }
        if self.readings <= SETTING {
            self.thread = thread::current().id();
        }
    }
}

impl KvmClock {
    /// Clocks at zero, none of them shown to a vCPU yet.
    pub fn new(ram: Ram, clock: Arc<dyn Clock>) -> Self {
        let (tsc, wall) = moment(&*clock);
        let line = Line::new(tsc, 0, clock.tsc_hz(), 0);
        let (places, wall_place) = (Vec::new(), 0);
        let (rate, error, hold) = (0, 0, None);
        let state = ClockState { line, wall, zero: wall, rate, error, places, wall_place, hold };
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

    /// Writes the host's time of day and the time-stamp counter of the same moment to `gpa`, and returns the
    /// hypercall's result. After the host's clock has been set to another time that is the new time.
    pub fn pair(&self, gpa: u64, which: u64) -> u64 {
        if which != kvm::PAIRED_WALL_CLOCK {
            return answer::NOT_SUPPORTED;
        }
        let (tsc, wall) = moment(&*self.clock);
        let written = self.ram.write_gpa(gpa, &kvm::encode_pairing(tsc, wall));
        written.map_or(answer::NO_MEMORY, |()| answer::DONE)
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
            self.go_on(|_| 1);
        }
    }

    /// The vCPU of this thread halts.
    pub fn halts(&self) {
        if self.due.load(Ordering::Relaxed) <= self.clock.tsc() {
            self.go_on(Hold::halt);
        }
    }

    #[cold]
    fn go_on(&self, by: fn(&Hold) -> u32) {
        let mut state = lock(&self.state);
        if state.hold.as_mut().is_none_or(|hold| hold.ends(by(hold))) {
            self.show(&mut state);
        }
    }

    /// Has the clock nearly stand: a vCPU, whose thread this is, begins to read the time that the guest's is set by.
    pub fn hold(&self) {
        let mut state = lock(&self.state);
        if state.places.iter().any(|place| place & ENABLED != 0) {
            state.hold = Some(Hold::new());
            self.show(&mut state);
        }
    }

    /// Whether it nearly stands.
    pub fn is_held(&self) -> bool {
        lock(&self.state).hold.is_some()
    }

    /// A time was read, in nanoseconds since 1970, that the guest's clock may be set to: by one of the readings after
    /// the last [`KvmClock::hold`] it is.
    pub fn set(&self, wall: u64) {
        let mut state = lock(&self.state);
        let now = state.line.at(self.clock.tsc());
        if let Some(hold) = &mut state.hold {
            hold.is_read(wall.wrapping_sub(now));
        }
    }

    /// Draws a line, and shows it to all vCPUs that have a clock.
    fn show(&self, state: &mut ClockState) {
        let places = state.places.iter().filter(|place| *place & ENABLED != 0);
        let places: Vec<_> = places.map(|place| place & !ENABLED).collect();
        let versions: Vec<_> = places.iter().map(|place| begin(&self.ram, *place)).collect();
        // Who has read an old line has read the counter before what follows.
        fence(Ordering::SeqCst);
        state.draw(&*self.clock);
        let bytes = state.line.encode();
        for (place, version) in places.iter().zip(versions) {
            end(&self.ram, *place, version, &bytes);
        }
        let period = if state.hold.is_some() { 0 } else { PERIOD_NS };
        let ticks = self.clock.tsc_hz() / NS_PER_S * period;
        let due = state.line.tsc.saturating_add(ticks);
        self.due.store(if places.is_empty() { u64::MAX } else { due }, Ordering::Relaxed);
    }
}

impl ClockState {
    /// Goes on from where the line is now, towards the host's wall clock.
    fn draw(&mut self, clock: &dyn Clock) {
        let (tsc, wall) = moment(clock);
        match self.hold.take_if(|hold| hold.left == 0) {
            Some(hold) => self.release(&hold, (tsc, wall), clock.tsc_hz()),
            None if self.hold.is_some() => {
                self.line = Line::new(tsc, self.line.at(tsc), clock.tsc_hz(), HELD_RATE);
            }
            None => self.follow((tsc, wall), clock.tsc_hz()),
        }
    }

    /// Puts the clock forward to what it should be, by what the guest's time of day was set to. If the host's clock
    /// was put back meanwhile, the guest's goes on from where it is.
    fn release(&mut self, hold: &Hold, (tsc, wall): (u64, u64), hz: u64) {
        let now = self.line.at(tsc);
        let missing = wall.wrapping_sub(hold.zero.unwrap_or(self.zero)).wrapping_sub(now) as i64;
        let ns = now.wrapping_add(missing.max(0).unsigned_abs());
        (self.zero, self.error, self.wall) = (wall.wrapping_sub(ns), 0, wall);
        self.line = Line::new(tsc, ns, hz, self.rate);
    }

    fn follow(&mut self, (tsc, wall): (u64, u64), hz: u64) {
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
    end(ram, gpa, begin(ram, gpa), bytes);
}

/// Makes the version word odd.
fn begin(ram: &Ram, gpa: u64) -> u32 {
    let mut version = [0; VERSION_LEN as usize];
    // A place that is not RAM takes nothing.
    let _ = ram.read_gpa(gpa, &mut version);
    let busy = u32::from_le_bytes(version) | 1;
    let _ = ram.write_gpa(gpa, &busy.to_le_bytes());
    busy
}

/// Writes what lies behind the version word, and makes that even.
fn end(ram: &Ram, gpa: u64, busy: u32, bytes: &[u8]) {
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

    /// As Linux does: three readings, and some time behind the last the clock is set by it.
    #[test]
    fn a_clock_that_is_set_by_the_cmos_clock_is_the_hosts() {
        for late in [1_000_000, 300_000_000_u64] {
            let guest = Guest::new();
            guest.host.pass(700_000_000, 0);
            guest.kvm.hold();
            assert!(guest.kvm.is_held());
            let read = guest.host.wall_clock_ns() - 400_000_000;
            (1..SETTING).for_each(|_| guest.kvm.set(7));
            guest.host.pass(10_000_000, 0);
            guest.kvm.refresh();
            guest.kvm.set(read);
            guest.host.pass(late, 0);
            let zero = read - guest.system_time();
            let mut last = 0;
            guest.kvm.set(8); // whoever reads later sets nothing
            for _ in 0..HELD_INTERRUPTS {
                assert!(guest.kvm.is_held());
                guest.host.pass(4_000_000, 0);
                guest.kvm.refresh();
                assert!(guest.system_time() >= last);
                last = guest.system_time();
            }
            assert!(!guest.kvm.is_held());
            guest.host.pass(3 * NS_PER_S, 0);
            guest.kvm.refresh();
            let off = (zero + guest.system_time()).wrapping_sub(guest.host.wall_clock_ns()) as i64;
            assert!(off.unsigned_abs() <= late / 1000 + 10, "{off} ns off, {late} ns late");
            guest.kvm.msr_write(0, kvm::WALL_CLOCK, WALL_PLACE);
            assert!(guest.off().abs() < 10, "who asks for the wall clock gets the host's");
        }
    }

    /// Two readings set nothing: what the guest's clock stood is made up for.
    #[test]
    fn a_hold_without_a_setting_is_made_up_for() {
        let guest = Guest::new();
        guest.kvm.hold();
        (1..SETTING).for_each(|_| guest.kvm.set(7));
        guest.host.pass(50_000_000, 0);
        assert!(guest.system_time() < 60_000);
        (1..AWAITED_INTERRUPTS).for_each(|_| guest.kvm.refresh());
        assert!(guest.kvm.is_held(), "however long the driver takes for its files");
        guest.kvm.refresh();
        assert!(guest.off().abs() < 10, "{}", guest.off());
        let elsewhere = Guest::new();
        elsewhere.kvm.hold();
        thread::scope(|scope| {
            scope.spawn(|| (0..1000).for_each(|_| elsewhere.kvm.refresh()));
        });
        assert!(elsewhere.kvm.is_held(), "another vCPU's interrupts say nothing");
    }

    /// The driver begins on one vCPU, and Linux moves it to another one before it sets the clock.
    #[test]
    fn who_reads_last_is_who_sets_the_clock() {
        let guest = Guest::new();
        guest.kvm.hold();
        (1..SETTING).for_each(|_| guest.kvm.set(7));
        thread::scope(|scope| {
            let setter = scope.spawn(|| {
                guest.kvm.set(START);
                thread::park();
                (0..HELD_INTERRUPTS).for_each(|_| guest.kvm.refresh());
            });
            while lock(&guest.kvm.state).hold.as_ref().is_some_and(|hold| hold.readings < SETTING) {
                thread::yield_now();
            }
            (0..1000).for_each(|_| guest.kvm.refresh());
            assert!(guest.kvm.is_held(), "the first vCPU's interrupts say nothing any more");
            setter.thread().unpark();
        });
        assert!(!guest.kvm.is_held());
    }

    /// An idle vCPU may get no interrupt for a long time: its halts end the hold.
    #[test]
    fn a_vcpu_that_halts_has_set_its_clock() {
        let guest = Guest::new();
        guest.kvm.hold();
        (1..SETTING).for_each(|_| guest.kvm.set(7));
        (0..100).for_each(|_| guest.kvm.halts());
        assert!(guest.kvm.is_held(), "it may wait for another one before it reads again");
        guest.kvm.set(START);
        guest.kvm.halts();
        assert!(guest.kvm.is_held());
        guest.kvm.halts();
        assert!(!guest.kvm.is_held());
    }

    /// A guest that asks for the host's time of day gets it, also when that has been set.
    #[test]
    fn a_pairing_is_the_hosts_clock_as_it_is_now() {
        let guest = Guest::new();
        guest.host.pass(2_345_678, 0);
        guest.host.pass(NS_PER_S, -7200 * NS_PER_S as i64);
        assert_eq!(guest.kvm.pair(WALL_PLACE, kvm::PAIRED_WALL_CLOCK), answer::DONE);
        let told = guest.word(WALL_PLACE) * NS_PER_S + guest.word(WALL_PLACE + 8);
        assert_eq!(
            (told, guest.word(WALL_PLACE + 16)),
            (guest.host.wall_clock_ns(), guest.host.tsc())
        );
        assert_eq!(guest.kvm.pair(WALL_PLACE, 1), answer::NOT_SUPPORTED);
        for place in [3 << 20, (2 << 20) - 63, u64::MAX - 1] {
            assert_eq!(guest.kvm.pair(place, kvm::PAIRED_WALL_CLOCK), answer::NO_MEMORY);
        }
    }

    #[test]
    fn nothing_is_written_where_no_clock_is_wanted() {
        let guest = Guest::new();
        guest.kvm.msr_write(0, kvm::SYSTEM_TIME, PLACE);
        let before = guest.word(PLACE + 8);
        guest.host.pass(10 * NS_PER_S, 0);
        guest.kvm.refresh();
        guest.kvm.hold();
        assert!(!guest.kvm.is_held());
        assert_eq!(guest.word(PLACE + 8), before);
        // Outside of RAM, across its end and at the end of all addresses.
        for place in [3 << 20, (2 << 20) - 16, u64::MAX - 1] {
            assert!(guest.kvm.msr_write(1, kvm::SYSTEM_TIME, place | ENABLED));
            assert!(guest.kvm.msr_write(1, kvm::WALL_CLOCK, place));
        }
    }
}
