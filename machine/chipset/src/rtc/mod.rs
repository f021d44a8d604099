//! The MC146818 real-time clock and its CMOS RAM (Motorola data sheet; the PC's century byte).
//!
//! The time is the host's wall clock, in UTC, plus what the guest has set it off by. Flags are
//! worked out when somebody looks or when an enabled interrupt is due: between, nothing ticks.
//!
//! The clock shows whole seconds. Linux reads it when its driver starts, at any moment of a second, and sets its
//! time to the middle of that second: it is up to half a second off. Where the guest has a clock that can be put
//! right, that learns of the reading (see [`driver`]).

mod calendar;
mod driver;

use std::sync::Arc;

use bus::{Device, InterruptLine, Rearm, Timed};
use host::Clock;

use crate::KvmClock;
use crate::alarm::Alarm;
use crate::time::{NS_PER_S, ns_for, ticks_in};
use calendar::{DAY, Date};
use driver::Driver;

/// Index port; the data port follows.
pub const BASE: u64 = 0x70;

/// The oscillator's frequency after the divider, in hertz.
const HZ: u64 = 32_768;
/// Update-in-progress is set so long before the update, in nanoseconds.
const UPDATE_NOTICE_NS: u64 = 244_000;

const REG_SECOND: usize = 0;
const REG_SECOND_ALARM: usize = 1;
const REG_MINUTE: usize = 2;
const REG_MINUTE_ALARM: usize = 3;
const REG_HOUR: usize = 4;
const REG_HOUR_ALARM: usize = 5;
const REG_WEEKDAY: usize = 6;
const REG_DAY: usize = 7;
const REG_MONTH: usize = 8;
const REG_YEAR: usize = 9;
const REG_A: usize = 10;
const REG_B: usize = 11;
const REG_C: usize = 12;
const REG_D: usize = 13;
const REG_CENTURY: usize = 0x32;

/// A: update in progress.
const UPDATE_IN_PROGRESS: u8 = 0x80;
/// B: updates are held, to set the time.
const SET: u8 = 0x80;
/// B and C: periodic, alarm and update-ended interrupt.
const PERIODIC: u8 = 0x40;
const ALARM: u8 = 0x20;
const UPDATE: u8 = 0x10;
/// B: registers are binary, not BCD.
const BINARY: u8 = 0x04;
/// B: hours are 0 to 23.
const HOURS_24: u8 = 0x02;
/// C: an enabled interrupt waits.
const INTERRUPT: u8 = 0x80;
/// D: RAM and time are valid.
const VALID: u8 = 0x80;
/// Hours: afternoon, in 12-hour mode.
const PM: u8 = 0x80;
/// Alarm registers from here on match anything.
const ANY: u8 = 0xc0;

/// The real-time clock.
pub(crate) struct Rtc {
    clock: Arc<dyn Clock>,
    alarm: Alarm,
    line: Arc<dyn InterruptLine>,
    index: usize,
    /// Registers A to D, alarms and plain RAM; the time's registers are not kept here.
    ram: [u8; 128],
    /// Guest time minus host time, in nanoseconds.
    offset: i64,
    /// The time while updates are held.
    held: Option<Date>,
    /// Guest second up to which flags are worked out.
    seen_second: i64,
    /// Periodic interrupts up to which flags are worked out.
    seen_period: u64,
    driver: Driver,
}

impl Rtc {
    pub(crate) fn new(
        clock: Arc<dyn Clock>,
        rearm: Arc<dyn Rearm>,
        line: Arc<dyn InterruptLine>,
        kvm_clock: Option<Arc<KvmClock>>,
    ) -> Self {
        let mut ram = [0; 128];
        ram[REG_A] = 0x26; // 32768 Hz, 1024 periodic interrupts a second
        ram[REG_B] = HOURS_24;
        ram[REG_D] = VALID;
        let mut rtc = Self {
            clock,
            alarm: Alarm::new(rearm),
            line,
            index: 0,
            ram,
            offset: 0,
            held: None,
            seen_second: 0,
            seen_period: 0,
            driver: Driver::new(kvm_clock),
        };
        rtc.seen_second = rtc.now().div_euclid(NS_PER_S as i64);
        rtc.seen_period = rtc.periods();
        rtc
    }

    /// Guest time in nanoseconds.
    fn now(&self) -> i64 {
        (self.clock.wall_clock_ns() as i64).wrapping_add(self.offset - self.driver.lag())
    }

    fn date(&self) -> Date {
        self.held.unwrap_or_else(|| Date::from_seconds(self.now().div_euclid(NS_PER_S as i64)))
    }

    /// log2 of the oscillator ticks between periodic interrupts.
    fn rate(&self) -> Option<u32> {
        match u32::from(self.ram[REG_A] & 0xf) {
            0 => None,
            rate @ 1..3 => Some(rate + 6),
            rate => Some(rate - 1),
        }
    }

    /// Periodic interrupts since the clock's start.
    fn periods(&self) -> u64 {
        self.rate().map_or(0, |rate| ticks_in(self.clock.monotonic_ns(), HZ) >> rate)
    }

    fn encode(&self, value: u8) -> u8 {
        if self.ram[REG_B] & BINARY != 0 { value } else { (value / 10) << 4 | (value % 10) }
    }

    fn decode(&self, value: u8) -> u8 {
        if self.ram[REG_B] & BINARY != 0 { value } else { (value >> 4) * 10 + (value & 0xf) }
    }

    fn encode_hour(&self, hour: u8) -> u8 {
        if self.ram[REG_B] & HOURS_24 != 0 {
            return self.encode(hour);
        }
        self.encode((hour + 11) % 12 + 1) | if hour >= 12 { PM } else { 0 }
    }

    fn decode_hour(&self, value: u8) -> u8 {
        if self.ram[REG_B] & HOURS_24 != 0 {
            return self.decode(value);
        }
        self.decode(value & !PM) % 12 + if value & PM != 0 { 12 } else { 0 }
    }

    fn read_register(&mut self, index: usize) -> u8 {
        self.driver.begins(index);
        let date = self.date();
        self.driver.ends(index, date.seconds());
        match index {
            REG_SECOND => self.encode(date.second),
            REG_MINUTE => self.encode(date.minute),
            REG_HOUR => self.encode_hour(date.hour),
            REG_WEEKDAY => self.encode(date.weekday),
            REG_DAY => self.encode(date.day),
            REG_MONTH => self.encode(date.month),
            REG_YEAR => self.encode(date.year.rem_euclid(100) as u8),
            REG_CENTURY => self.encode((date.year / 100).rem_euclid(100) as u8),
            REG_A => self.ram[REG_A] | self.update_in_progress(),
            REG_C => self.take_flags(),
            _ => self.ram[index & 127],
        }
    }

    fn update_in_progress(&self) -> u8 {
        let of_second = self.now().rem_euclid(NS_PER_S as i64) as u64;
        let soon = of_second >= NS_PER_S - UPDATE_NOTICE_NS;
        if soon && self.held.is_none() { UPDATE_IN_PROGRESS } else { 0 }
    }

    fn take_flags(&mut self) -> u8 {
        self.sync();
        let flags = std::mem::take(&mut self.ram[REG_C]);
        self.line.set(false);
        self.rearm();
        flags
    }

    fn write_register(&mut self, index: usize, value: u8) {
        self.sync();
        match index {
            REG_SECOND | REG_MINUTE | REG_HOUR | REG_DAY | REG_MONTH | REG_YEAR | REG_CENTURY => {
                self.set_date(index, value);
            }
            REG_A => {
                self.ram[REG_A] = value & !UPDATE_IN_PROGRESS;
                self.seen_period = self.periods();
            }
            REG_B => {
                self.set_control(value);
                self.driver.comes();
            }
            REG_WEEKDAY | REG_C | REG_D => {}
            _ => self.ram[index & 127] = value,
        }
        self.raise();
        self.rearm();
    }

    fn set_date(&mut self, index: usize, value: u8) {
        let mut date = self.date();
        let number = self.decode(value);
        match index {
            REG_SECOND => date.second = number,
            REG_MINUTE => date.minute = number,
            REG_HOUR => date.hour = self.decode_hour(value),
            REG_DAY => date.day = number,
            REG_MONTH => date.month = number,
            REG_YEAR => date.year += i64::from(number) - date.year.rem_euclid(100),
            _ => date.year = i64::from(number) * 100 + date.year.rem_euclid(100),
        }
        if self.held.is_some() {
            self.held = Some(date);
        } else {
            self.set_time(date);
        }
    }

    /// Sets the time, keeping the fraction of the second.
    fn set_time(&mut self, date: Date) {
        let change = date.seconds() - self.now().div_euclid(NS_PER_S as i64);
        self.offset = self.offset.wrapping_add(change.wrapping_mul(NS_PER_S as i64));
        self.seen_second = self.now().div_euclid(NS_PER_S as i64);
    }

    /// Holding updates also disables the update-ended interrupt.
    fn set_control(&mut self, value: u8) {
        let value = if value & SET != 0 { value & !UPDATE } else { value };
        let before = std::mem::replace(&mut self.ram[REG_B], value);
        if value & !before & SET != 0 {
            self.held = Some(self.date());
        } else if before & !value & SET != 0
            && let Some(date) = self.held.take()
        {
            self.set_time(date);
        }
    }

    /// Sets the flags of everything that has happened since the last look.
    fn sync(&mut self) {
        let periods = self.periods();
        if periods != self.seen_period {
            self.seen_period = periods;
            self.ram[REG_C] |= PERIODIC;
        }
        let second = self.now().div_euclid(NS_PER_S as i64);
        if second != self.seen_second && self.held.is_none() {
            self.ram[REG_C] |= UPDATE;
            let passed = (second - DAY).max(self.seen_second)..second;
            if self.ram[REG_C] & ALARM == 0 && passed.into_iter().any(|s| self.alarm_at(s + 1)) {
                self.ram[REG_C] |= ALARM;
            }
        }
        self.seen_second = second;
    }

    fn alarm_at(&self, second: i64) -> bool {
        let date = Date::from_seconds(second);
        let matches = |register: usize, now| self.ram[register] >= ANY || self.ram[register] == now;
        matches(REG_SECOND_ALARM, self.encode(date.second))
            && matches(REG_MINUTE_ALARM, self.encode(date.minute))
            && matches(REG_HOUR_ALARM, self.encode_hour(date.hour))
    }

    /// Interrupts if an enabled flag is set.
    fn raise(&mut self) {
        if self.ram[REG_C] & self.ram[REG_B] & (PERIODIC | ALARM | UPDATE) != 0 {
            self.ram[REG_C] |= INTERRUPT;
            self.line.set(true);
        }
    }

    /// Enabled interrupts whose flag is not set yet want to be called.
    fn rearm(&mut self) {
        let wanted = self.ram[REG_B] & !self.ram[REG_C];
        let now = self.clock.monotonic_ns();
        let period = self.rate().filter(|_| wanted & PERIODIC != 0);
        let periodic = period.map(|rate| ns_for((self.periods() + 1) << rate, HZ));
        let of_second = self.now().rem_euclid(NS_PER_S as i64) as u64;
        let ticking = wanted & (ALARM | UPDATE) != 0 && self.held.is_none();
        let update = ticking.then_some(now + NS_PER_S - of_second);
        self.alarm.set(periodic.into_iter().chain(update).min());
    }
}

impl Device for Rtc {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff); // the index port cannot be read
        if let (1, Some(byte)) = (offset, data.first_mut()) {
            *byte = self.read_register(self.index);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (port, value) in (offset..).zip(data) {
            match port {
                0 => self.index = usize::from(value & 0x7f), // bit 7 masks NMIs, of which are none
                _ => self.write_register(self.index, *value),
            }
        }
    }
}

impl Timed for Rtc {
    fn deadline(&self) -> Option<u64> {
        self.alarm.deadline()
    }

    fn expire(&mut self, now: u64) {
        if self.alarm.take_due(now).is_some() {
            self.sync();
            self.raise();
            self.rearm();
        }
    }
}
