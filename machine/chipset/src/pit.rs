//! The 8254 interval timer and port 0x61 (Intel 8254 data sheet; PIIX3 data sheet, NMISC).
//!
//! Nothing counts: a channel knows when its count was loaded, and count and output follow from the
//! time since. Only channel 0 has a deadline, the next rising edge of its output.

use std::sync::Arc;

use bus::{Device, InterruptLine, Rearm, Shared, Timed};
use host::Clock;

use crate::alarm::Alarm;
use crate::lock;
use crate::time::{missed, ns_for, ticks_in};

/// Ports of the counters and the control word.
pub const BASE: u64 = 0x40;
/// System control port B: gate and output of channel 2.
pub const PORT_B: u64 = 0x61;
/// Input frequency, in hertz.
pub const HZ: u64 = 1_193_182;

/// Interrupts closer together than this merge, in nanoseconds.
const MIN_PERIOD_NS: u64 = 50_000;
/// The DRAM refresh bit of port 0x61 toggles this often, in nanoseconds.
const REFRESH_NS: u64 = 15_085;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Low,
    High,
    Both,
}

struct Channel {
    mode: u8,
    bcd: bool,
    access: Access,
    /// Ticks from load to terminal count, 1 to 65536. Zero: none loaded since the control word.
    count: u64,
    /// When counting began, in nanoseconds; pushed on by what it was held.
    start: u64,
    /// Counting is held by the gate, with so many ticks done.
    held: Option<u64>,
    gate: bool,
    /// The low byte, while the high byte is awaited.
    write_low: Option<u8>,
    /// The next read of a two-byte access gives the high byte.
    read_high: bool,
    latched_count: Option<u16>,
    latched_status: Option<u8>,
}

impl Channel {
    fn new(gate: bool) -> Self {
        Self {
            mode: 3,
            bcd: false,
            access: Access::Both,
            count: 0,
            start: 0,
            held: None,
            gate,
            write_low: None,
            read_high: false,
            latched_count: None,
            latched_status: None,
        }
    }

    /// Begins again on the gate's rising edge and ignores its level.
    fn triggered_by_gate(&self) -> bool {
        matches!(self.mode, 1 | 5)
    }

    fn periodic(&self) -> bool {
        matches!(self.mode, 2 | 3)
    }

    /// Ticks since counting began; `None` if it has not.
    fn ticks(&self, now: u64) -> Option<u64> {
        let running = || ticks_in(now.saturating_sub(self.start), HZ);
        (self.count != 0).then(|| self.held.unwrap_or_else(running))
    }

    fn modulus(&self) -> u64 {
        if self.bcd { 10_000 } else { 0x1_0000 }
    }

    /// The counting element, as it reads.
    fn counter(&self, now: u64) -> u16 {
        let Some(ticks) = self.ticks(now) else { return 0 };
        let value = match self.mode {
            2 => self.count - ticks % self.count,
            3 => self.count - ticks * 2 % self.count,
            _ => (self.count + self.modulus() - ticks % self.modulus()) % self.modulus(),
        };
        let value = (value % self.modulus()) as u16;
        if self.bcd { to_bcd(value) } else { value }
    }

    fn output(&self, now: u64) -> bool {
        let Some(ticks) = self.ticks(now) else { return self.mode != 0 };
        match self.mode {
            0 | 1 => ticks >= self.count,
            2 => ticks % self.count != self.count - 1,
            3 => ticks % self.count < self.count.div_ceil(2),
            _ => ticks != self.count,
        }
    }

    /// The first rising edge of the output after `now`, in nanoseconds.
    fn next_edge(&self, now: u64) -> Option<u64> {
        let ticks = self.ticks(now).filter(|_| self.held.is_none())?;
        let edge = match self.mode {
            2 | 3 => (ticks / self.count + 1) * self.count,
            4 | 5 => self.count + 1,
            _ => self.count,
        };
        (edge > ticks).then(|| self.start + ns_for(edge, HZ))
    }

    fn control(&mut self, value: u8) {
        self.access = match value >> 4 & 3 {
            1 => Access::Low,
            2 => Access::High,
            _ => Access::Both,
        };
        let mode = value >> 1 & 7;
        self.mode = if mode > 5 { mode & 3 } else { mode };
        self.bcd = value & 1 != 0;
        self.count = 0;
        self.held = None;
        self.write_low = None;
        self.read_high = false;
        self.latched_count = None;
        self.latched_status = None;
    }

    fn latch_count(&mut self, now: u64) {
        if self.latched_count.is_none() {
            self.latched_count = Some(self.counter(now));
        }
    }

    fn latch_status(&mut self, now: u64) {
        let access = match self.access {
            Access::Low => 1,
            Access::High => 2,
            Access::Both => 3,
        };
        let output = u8::from(self.output(now)) << 7;
        let null_count = u8::from(self.count == 0) << 6;
        let status = output | null_count | access << 4 | self.mode << 1 | u8::from(self.bcd);
        self.latched_status.get_or_insert(status);
    }

    fn read(&mut self, now: u64) -> u8 {
        if let Some(status) = self.latched_status.take() {
            return status;
        }
        let value = self.latched_count.unwrap_or_else(|| self.counter(now));
        let [low, high] = value.to_le_bytes();
        let (byte, last) = match self.access {
            Access::Low => (low, true),
            Access::High => (high, true),
            Access::Both => {
                self.read_high = !self.read_high;
                if self.read_high { (low, false) } else { (high, true) }
            }
        };
        if last {
            self.latched_count = None;
        }
        byte
    }

    fn write(&mut self, value: u8, now: u64) {
        match (self.access, self.write_low.take()) {
            (Access::Low, _) => self.load(value.into(), now),
            (Access::High, _) => self.load(u16::from(value) << 8, now),
            (Access::Both, Some(low)) => self.load(u16::from_le_bytes([low, value]), now),
            (Access::Both, None) => {
                self.write_low = Some(value);
                if self.mode == 0 {
                    self.held = self.ticks(now); // the first byte stops mode 0
                }
            }
        }
    }

    fn load(&mut self, value: u16, now: u64) {
        let count = if self.bcd { from_bcd(value) } else { u64::from(value) };
        self.count = if count == 0 { self.modulus() } else { count };
        self.start = now;
        let waits = !self.gate || self.triggered_by_gate();
        self.held = waits.then_some(if self.triggered_by_gate() { self.count + 1 } else { 0 });
    }

    fn set_gate(&mut self, gate: bool, now: u64) {
        let rising = gate && !self.gate;
        let falling = !gate && self.gate;
        self.gate = gate;
        if rising && (self.triggered_by_gate() || self.periodic()) {
            self.start = now;
            self.held = None;
        } else if rising && let Some(ticks) = self.held.take() {
            self.start = now.saturating_sub(ns_for(ticks, HZ));
        } else if falling && !self.triggered_by_gate() {
            self.held = self.ticks(now);
        }
    }
}

fn to_bcd(value: u16) -> u16 {
    let digit = |unit: u16, shift: u32| (value / unit % 10) << shift;
    digit(1, 0) | digit(10, 4) | digit(100, 8) | digit(1000, 12)
}

fn from_bcd(value: u16) -> u64 {
    (0..4).rev().fold(0, |sum, digit| sum * 10 + u64::from(value >> (digit * 4) & 0xf))
}

/// The interval timer.
pub(crate) struct Pit {
    clock: Arc<dyn Clock>,
    channels: [Channel; 3],
    line: Arc<dyn InterruptLine>,
    alarm: Alarm,
    speaker: bool,
}

impl Pit {
    pub(crate) fn new(
        clock: Arc<dyn Clock>,
        rearm: Arc<dyn Rearm>,
        line: Arc<dyn InterruptLine>,
    ) -> Self {
        let channels = [Channel::new(true), Channel::new(true), Channel::new(false)];
        Self { clock, channels, line, alarm: Alarm::new(rearm), speaker: false }
    }

    fn control(&mut self, value: u8, now: u64) {
        let select = usize::from(value >> 6);
        match self.channels.get_mut(select) {
            None => self.read_back(value, now),
            Some(channel) if value & 0x30 == 0 => channel.latch_count(now),
            Some(channel) => channel.control(value),
        }
    }

    fn read_back(&mut self, value: u8, now: u64) {
        for (index, channel) in self.channels.iter_mut().enumerate() {
            if value & 2 << index == 0 {
                continue;
            }
            if value & 0x20 == 0 {
                channel.latch_count(now);
            }
            if value & 0x10 == 0 {
                channel.latch_status(now);
            }
        }
    }

    fn rearm(&mut self, now: u64) {
        self.alarm.set(self.channels[0].next_edge(now));
    }
}

impl Device for Pit {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let now = self.clock.monotonic_ns();
        for (port, byte) in (offset as usize..).zip(data) {
            *byte = self.channels.get_mut(port).map_or(0xff, |channel| channel.read(now));
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let now = self.clock.monotonic_ns();
        self.expire(now); // an edge that is due must not be lost to the change
        for (port, value) in (offset as usize..).zip(data) {
            match self.channels.get_mut(port) {
                Some(channel) => channel.write(*value, now),
                None => self.control(*value, now),
            }
            if port == 0 {
                self.line.forget_ticks();
            }
        }
        self.rearm(now);
    }
}

impl Timed for Pit {
    fn deadline(&self) -> Option<u64> {
        self.alarm.deadline()
    }

    fn expire(&mut self, now: u64) {
        let Some(due) = self.alarm.take_due(now) else { return };
        let period = self.channels[0].periodic().then(|| ns_for(self.channels[0].count, HZ));
        match period.and_then(|period| missed(now - due, period)) {
            Some(missed) => self.line.tick(missed + 1),
            None => {
                self.line.set(true);
                self.line.set(false);
            }
        }
        self.rearm(now + period.map_or(0, |ns| MIN_PERIOD_NS.saturating_sub(ns)));
    }
}

/// Port 0x61.
pub(crate) struct PortB {
    pub(crate) pit: Shared<Pit>,
}

impl Device for PortB {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        let pit = lock(&self.pit);
        let now = pit.clock.monotonic_ns();
        let refresh = ((now / REFRESH_NS) & 1) as u8;
        let channel = &pit.channels[2];
        let output = u8::from(channel.output(now));
        data.fill(u8::from(channel.gate) | u8::from(pit.speaker) << 1 | refresh << 4 | output << 5);
    }

    fn write(&mut self, _: u64, data: &[u8]) {
        let Some(value) = data.first() else { return };
        let mut pit = lock(&self.pit);
        let now = pit.clock.monotonic_ns();
        pit.speaker = value & 2 != 0;
        pit.channels[2].set_gate(value & 1 != 0, now);
    }
}
