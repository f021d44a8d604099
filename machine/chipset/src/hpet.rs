//! The high precision event timer (IA-PC HPET specification 1.0a): a 100 MHz counter and three
//! comparators, without FSB delivery.
//!
//! As with the other timers nothing counts: the counter follows from the clock, and each armed
//! comparator knows when it will match.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bus::{Device, InterruptLine, Rearm, Timed};
use host::Clock;

use crate::alarm::Alarm;
use crate::time::missed;

/// Where the registers are, a GPA.
pub const BASE: u64 = 0xfed0_0000;
/// Bytes of registers.
pub const LEN: u64 = 0x400;
/// Low half of the capabilities: Intel, legacy replacement, 64-bit counter, 3 timers, revision 1.
pub const ID: u32 = 0x8086_a201;

/// Nanoseconds of a count.
const TICK_NS: u64 = 10;
const PERIOD_FS: u64 = TICK_NS * 1_000_000;
const TIMERS: usize = 3;
/// GSIs any timer can be routed to: 2, 8 and 16 to 23.
const ROUTES: u64 = 0x00ff_0104;
/// Periodic interrupts closer together than this merge, in nanoseconds.
const MIN_PERIOD_NS: u64 = 50_000;

const ENABLE: u64 = 1 << 0;
const LEGACY: u64 = 1 << 1;

const LEVEL: u64 = 1 << 1;
const INTERRUPT: u64 = 1 << 2;
const PERIODIC: u64 = 1 << 3;
const PERIODIC_CAPABLE: u64 = 1 << 4;
const SIZE_CAPABLE: u64 = 1 << 5;
const SET_VALUE: u64 = 1 << 6;
const MODE_32: u64 = 1 << 8;
/// Bits of a timer's configuration software may set.
const TIMER_WRITABLE: u64 = LEVEL | INTERRUPT | PERIODIC | SET_VALUE | MODE_32 | 0x1f << 9;

const REG_CAPABILITIES: u64 = 0x000;
const REG_CONFIG: u64 = 0x010;
const REG_STATUS: u64 = 0x020;
const REG_COUNTER: u64 = 0x0f0;
const REG_TIMERS: u64 = 0x100;

/// A wire that is cut while the HPET stands in for the device behind it.
pub(crate) struct LegacyLine {
    line: Arc<dyn InterruptLine>,
    cut: AtomicBool,
}

impl LegacyLine {
    pub(crate) fn new(line: Arc<dyn InterruptLine>) -> Self {
        Self { line, cut: AtomicBool::new(false) }
    }

    fn set_cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::Relaxed);
        if cut {
            self.line.set(false);
        }
    }
}

impl InterruptLine for LegacyLine {
    fn set(&self, level: bool) {
        self.line.set(level && !self.cut.load(Ordering::Relaxed));
    }
    fn tick(&self, count: u64) {
        if !self.cut.load(Ordering::Relaxed) {
            self.line.tick(count);
        }
    }
    fn forget_ticks(&self) {
        self.line.forget_ticks();
    }
}

#[derive(Clone, Copy)]
struct HpetTimer {
    config: u64,
    comparator: u64,
    period: u64,
    /// When it matches, in nanoseconds.
    expiry: Option<u64>,
}

impl HpetTimer {
    /// The bits of counter and comparator that take part.
    fn mask(&self) -> u64 {
        if self.config & MODE_32 != 0 { 0xffff_ffff } else { u64::MAX }
    }

    fn periodic(&self) -> bool {
        self.config & PERIODIC != 0
    }
}

pub(crate) struct Hpet {
    clock: Arc<dyn Clock>,
    alarm: Alarm,
    config: u64,
    status: u64,
    /// The counter when it last started, or while it is stopped.
    base: u64,
    /// When it last started, in nanoseconds.
    start: u64,
    timers: [HpetTimer; TIMERS],
    /// One wire into each GSI.
    lines: Vec<Arc<dyn InterruptLine>>,
    /// The PIT's and the RTC's wires.
    legacy: [Arc<LegacyLine>; 2],
}

impl Hpet {
    pub(crate) fn new(
        clock: Arc<dyn Clock>,
        rearm: Arc<dyn Rearm>,
        lines: Vec<Arc<dyn InterruptLine>>,
        legacy: [Arc<LegacyLine>; 2],
    ) -> Self {
        let config = PERIODIC_CAPABLE | SIZE_CAPABLE | ROUTES << 32;
        let timer = HpetTimer { config, comparator: u64::MAX, period: 0, expiry: None };
        let alarm = Alarm::new(rearm);
        let timers = [timer; TIMERS];
        Self { clock, alarm, config: 0, status: 0, base: 0, start: 0, timers, lines, legacy }
    }

    fn enabled(&self) -> bool {
        self.config & ENABLE != 0
    }

    fn counter(&self, now: u64) -> u64 {
        let run = if self.enabled() { now.saturating_sub(self.start) / TICK_NS } else { 0 };
        self.base.wrapping_add(run)
    }

    /// The GSI a timer's interrupt goes to.
    fn gsi(&self, index: usize) -> usize {
        match (self.config & LEGACY != 0, index) {
            (true, 0) => 2,
            (true, 1) => 8,
            _ => (self.timers[index].config >> 9 & 0x1f) as usize,
        }
    }

    fn line(&self, index: usize) -> Option<&Arc<dyn InterruptLine>> {
        let gsi = self.gsi(index);
        let routable = (ROUTES | 1 << 2 | 1 << 8) >> gsi & 1 != 0;
        self.lines.get(gsi).filter(|_| routable)
    }

    fn forget_ticks(&self, index: usize) {
        if let Some(line) = self.line(index) {
            line.forget_ticks();
        }
    }

    fn drive(&self, index: usize, level: bool) {
        if let Some(line) = self.line(index) {
            line.set(level);
        }
    }

    fn read(&self, register: u64, now: u64) -> u64 {
        match register {
            REG_CAPABILITIES => u64::from(ID) | PERIOD_FS << 32,
            REG_CONFIG => self.config,
            REG_STATUS => self.status,
            REG_COUNTER => self.counter(now),
            _ => match self.timer_register(register) {
                Some((index, 0)) => self.timers[index].config,
                Some((index, 8)) => self.timers[index].comparator & self.timers[index].mask(),
                _ => 0,
            },
        }
    }

    fn timer_register(&self, register: u64) -> Option<(usize, u64)> {
        let offset = register.checked_sub(REG_TIMERS)?;
        let index = (offset / 0x20) as usize;
        (index < TIMERS).then_some((index, offset % 0x20))
    }

    /// Writes the bits of `mask`.
    fn write(&mut self, register: u64, value: u64, mask: u64, now: u64) {
        let merge = |old: u64| old & !mask | value & mask;
        match register {
            REG_CONFIG => self.set_config(merge(self.config) & (ENABLE | LEGACY), now),
            REG_STATUS => self.clear_status(value & mask),
            REG_COUNTER => {
                self.base = merge(self.counter(now));
                self.start = now;
                (0..TIMERS).for_each(|index| self.arm(index, now));
            }
            _ => match self.timer_register(register) {
                Some((index, 0)) => {
                    let config = merge(self.timers[index].config);
                    self.set_timer_config(index, config, now);
                }
                Some((index, 8)) => self.set_comparator(index, value, mask, now),
                _ => {}
            },
        }
    }

    fn set_config(&mut self, config: u64, now: u64) {
        self.base = self.counter(now);
        self.start = now;
        (0..TIMERS).for_each(|index| self.forget_ticks(index));
        if (config ^ self.config) & LEGACY != 0 {
            (0..2).for_each(|index| self.drive(index, false));
        }
        self.config = config;
        for line in &self.legacy {
            line.set_cut(config & LEGACY != 0);
        }
        (0..TIMERS).for_each(|index| self.arm(index, now));
    }

    fn clear_status(&mut self, bits: u64) {
        let cleared = bits & self.status;
        for index in (0..TIMERS).filter(|index| cleared & 1 << index != 0) {
            self.status &= !(1 << index);
            self.drive(index, false);
        }
    }

    fn set_timer_config(&mut self, index: usize, config: u64, now: u64) {
        let old = self.timers[index].config;
        // A level that waits follows neither a new route nor a new mode.
        if self.status & 1 << index != 0 && (old ^ config) & (LEVEL | INTERRUPT | 0x1f << 9) != 0 {
            self.clear_status(1 << index);
        }
        self.forget_ticks(index);
        self.timers[index].config = old & !TIMER_WRITABLE | config & TIMER_WRITABLE;
        self.arm(index, now);
    }

    /// Periodic timers (section 2.3.9.2.2): a write sets the period, and the comparator too only
    /// after SET_VALUE, which it clears.
    fn set_comparator(&mut self, index: usize, value: u64, mask: u64, now: u64) {
        let timer = &mut self.timers[index];
        let merge = |old: u64| old & !mask | value & mask;
        if !timer.periodic() || timer.config & SET_VALUE != 0 {
            timer.comparator = merge(timer.comparator) & timer.mask();
        }
        if timer.periodic() {
            timer.period = merge(timer.period) & timer.mask();
        }
        timer.config &= !SET_VALUE;
        self.arm(index, now);
    }

    /// Works out when a timer matches next.
    fn arm(&mut self, index: usize, now: u64) {
        let counter = self.counter(now);
        let wanted = self.enabled() && self.timers[index].config & INTERRUPT != 0;
        self.forget_ticks(index);
        let timer = &mut self.timers[index];
        let away = timer.comparator.wrapping_sub(counter) & timer.mask();
        let ns = away.checked_mul(TICK_NS).and_then(|ns| now.checked_add(ns));
        timer.expiry = ns.filter(|_| wanted);
        self.update_alarm();
    }

    fn update_alarm(&mut self) {
        let earliest = self.timers.iter().filter_map(|timer| timer.expiry).min();
        self.alarm.set(earliest);
    }

    /// Interrupts; `missed` matches before this went unnoticed, if they count.
    fn fire(&mut self, index: usize, missed: Option<u64>) {
        if self.timers[index].config & LEVEL != 0 {
            self.status |= 1 << index;
            self.drive(index, true);
        } else if let (Some(missed), Some(line)) = (missed, self.line(index)) {
            line.tick(missed + 1);
        } else {
            self.drive(index, true);
            self.drive(index, false);
        }
    }

    /// Moves a periodic comparator to its next match, past those missed, which it counts.
    fn advance(&mut self, index: usize, expiry: u64, now: u64) -> Option<u64> {
        let timer = &mut self.timers[index];
        timer.expiry = None;
        if !timer.periodic() || timer.period == 0 {
            return None;
        }
        let period_ns = timer.period.checked_mul(TICK_NS)?;
        let late = now - expiry + MIN_PERIOD_NS.saturating_sub(period_ns);
        let periods = late / period_ns + 1;
        let counts = periods.wrapping_mul(timer.period);
        timer.comparator = timer.comparator.wrapping_add(counts) & timer.mask();
        timer.expiry = expiry.checked_add(periods.saturating_mul(period_ns));
        missed(now - expiry, period_ns)
    }
}

impl Device for Hpet {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let now = self.clock.monotonic_ns();
        let value = Hpet::read(self, offset & !7, now).to_le_bytes();
        data.fill(0xff);
        let bytes = value.iter().skip((offset & 7) as usize);
        data.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let (mut value, mut mask) = ([0; 8], [0; 8]);
        let places = value.iter_mut().zip(&mut mask).skip((offset & 7) as usize);
        for ((value, mask), byte) in places.zip(data) {
            (*value, *mask) = (*byte, 0xff);
        }
        let now = self.clock.monotonic_ns();
        let (value, mask) = (u64::from_le_bytes(value), u64::from_le_bytes(mask));
        self.expire(now); // a match that is due must not be lost to the change
        Hpet::write(self, offset & !7, value, mask, now);
    }
}

impl Timed for Hpet {
    fn deadline(&self) -> Option<u64> {
        self.alarm.deadline()
    }

    fn expire(&mut self, now: u64) {
        for index in 0..TIMERS {
            if let Some(expiry) = self.timers[index].expiry.filter(|at| *at <= now) {
                let missed = self.advance(index, expiry, now);
                self.fire(index, missed);
            }
        }
        self.update_alarm();
    }
}
