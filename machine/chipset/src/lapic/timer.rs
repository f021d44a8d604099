//! The local APIC timer (SDM 10.5.4): one-shot, periodic, TSC deadline.
//!
//! Nothing counts. Armed, the timer knows when it reaches zero, and the current count follows from
//! how far away that is; so a count, a mode or a divider changed on the way keeps its phase.

use std::sync::Arc;

use bus::Rearm;
use host::Clock;
use x86::cpuid::CRYSTAL_HZ;

use crate::alarm::Alarm;
use crate::time::{NS_PER_S, missed};

/// Nanoseconds of a tick before the divider.
const TICK_NS: u64 = NS_PER_S / CRYSTAL_HZ as u64;
/// Periodic interrupts closer together than this merge: a guest must not keep the host's timer
/// thread spinning.
const MIN_PERIOD_NS: u64 = 50_000;
const _: () = assert!(TICK_NS * CRYSTAL_HZ as u64 == NS_PER_S, "a tick is whole nanoseconds");

/// LVT timer bits 18:17.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    OneShot,
    Periodic,
    TscDeadline,
}

impl Mode {
    pub(crate) fn from_lvt(lvt: u32) -> Self {
        match lvt >> 17 & 3 {
            0 => Self::OneShot,
            1 => Self::Periodic,
            _ => Self::TscDeadline,
        }
    }
}

pub(crate) struct Timer {
    clock: Arc<dyn Clock>,
    /// When the count reaches zero; not set when stopped.
    alarm: Alarm,
    mode: Mode,
    initial: u32,
    divide_configuration: u32,
    /// IA32_TSC_DEADLINE, zero when disarmed.
    tsc_deadline: u64,
}

impl Timer {
    pub(crate) fn new(clock: Arc<dyn Clock>, rearm: Arc<dyn Rearm>) -> Self {
        Self {
            clock,
            alarm: Alarm::new(rearm),
            mode: Mode::OneShot,
            initial: 0,
            divide_configuration: 0,
            tsc_deadline: 0,
        }
    }

    pub(crate) fn reset(&mut self) {
        self.stop();
        self.mode = Mode::OneShot;
        self.initial = 0;
        self.divide_configuration = 0;
    }

    fn stop(&mut self) {
        self.alarm.set(None);
        self.tsc_deadline = 0;
    }

    /// Nanoseconds a count lasts.
    fn count_ns(&self) -> u64 {
        let code = (self.divide_configuration & 3) | (self.divide_configuration >> 1 & 4);
        TICK_NS << ((code + 1) & 7)
    }

    fn period_ns(&self) -> u64 {
        u64::from(self.initial) * self.count_ns()
    }

    pub(crate) fn initial(&self) -> u32 {
        self.initial
    }

    /// Writes the initial count: starts counting, or stops if zero.
    pub(crate) fn set_initial(&mut self, count: u32) {
        if self.mode == Mode::TscDeadline {
            return;
        }
        self.initial = count;
        let expiry = self.clock.monotonic_ns() + self.period_ns();
        self.alarm.set((count != 0).then_some(expiry));
    }

    /// The current count.
    pub(crate) fn current(&self) -> u32 {
        let (Some(expiry), false) = (self.alarm.at(), self.mode == Mode::TscDeadline) else {
            return 0;
        };
        let (now, period) = (self.clock.monotonic_ns(), self.period_ns());
        let left = match self.mode {
            // Past expiry it has reloaded, only the interrupt is still on its way.
            Mode::Periodic if period != 0 && now >= expiry => period - (now - expiry) % period,
            Mode::Periodic if period != 0 => (expiry - now - 1) % period + 1,
            _ => expiry.saturating_sub(now),
        };
        left.div_ceil(self.count_ns()) as u32
    }

    pub(crate) fn divide_configuration(&self) -> u32 {
        self.divide_configuration
    }

    /// Changes the divider; the counts left are those left.
    pub(crate) fn set_divide_configuration(&mut self, value: u32) {
        let counting = self.alarm.at().is_some() && self.mode != Mode::TscDeadline;
        let left = u64::from(self.current());
        self.divide_configuration = value & 0xb;
        if counting {
            self.alarm.set(Some(self.clock.monotonic_ns() + left * self.count_ns()));
        }
    }

    /// Between one-shot and periodic the count goes on; TSC-deadline mode disarms on both edges.
    pub(crate) fn set_mode(&mut self, mode: Mode) {
        if (mode == Mode::TscDeadline) != (self.mode == Mode::TscDeadline) {
            self.stop();
            self.initial = 0;
        }
        self.mode = mode;
    }

    pub(crate) fn now(&self) -> u64 {
        self.clock.monotonic_ns()
    }

    pub(crate) fn tsc_deadline(&self) -> u64 {
        self.tsc_deadline
    }

    /// Arms the timer for when the TSC reaches `deadline`; zero disarms. Ignored in other modes.
    pub(crate) fn set_tsc_deadline(&mut self, deadline: u64) {
        if self.mode != Mode::TscDeadline {
            return;
        }
        self.tsc_deadline = deadline;
        let at = (deadline != 0).then(|| self.when_tsc_reaches(deadline));
        self.alarm.set(at);
    }

    fn when_tsc_reaches(&self, deadline: u64) -> u64 {
        let ticks = u128::from(deadline.saturating_sub(self.clock.tsc()));
        let hz = u128::from(self.clock.tsc_hz().max(1));
        let ns = (ticks * u128::from(NS_PER_S)).div_ceil(hz);
        self.clock.monotonic_ns().saturating_add(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        self.alarm.deadline()
    }

    /// Whether the timer interrupts at `now`: if so, how many interrupts went unnoticed before, or
    /// nothing if none is owed, see [`missed`].
    pub(crate) fn expire(&mut self, now: u64) -> Option<Option<u64>> {
        let expiry = self.alarm.take_due(now)?;
        match self.mode {
            Mode::OneShot => Some(None),
            Mode::Periodic => Some(self.reload(expiry, now)),
            Mode::TscDeadline if self.clock.tsc() < self.tsc_deadline => {
                // The two clocks drift a little apart.
                self.set_tsc_deadline(self.tsc_deadline);
                None
            }
            Mode::TscDeadline => {
                self.tsc_deadline = 0;
                Some(None)
            }
        }
    }

    /// The next expiry after `now`; those missed since `expiry`.
    fn reload(&mut self, expiry: u64, now: u64) -> Option<u64> {
        let period = self.period_ns();
        if period == 0 {
            return None;
        }
        let late = now - expiry + MIN_PERIOD_NS.saturating_sub(period);
        self.alarm.set(Some(expiry + (late / period + 1) * period));
        missed(now - expiry, period)
    }
}
