//! Linux's RTC driver, by which Linux sets its time of day when it boots: what the driver reads, and when.
//!
//! It writes register B, looks for an alarm that is set, reads the time twice for that, and once more to set the
//! system's by it (`__devm_rtc_register_device`): to the middle of the second it has read. If a minute ends while it
//! looks for the alarm it looks again (`__rtc_read_alarm`). The guest's clock stands
//! meanwhile, and is then put forward by what is missing ([`KvmClock::hold`]). It cannot be put back. So the time
//! that is read is half a second behind: its middle has passed.
//!
//! A driver that reads in another order has the time to the second.

use std::sync::Arc;

use super::{NS_PER_S, REG_SECOND, REG_SECOND_ALARM, REG_YEAR};
use crate::KvmClock;

const HALF_A_SECOND: u64 = NS_PER_S / 2;

/// What has been seen of the driver.
pub(super) struct Driver {
    clock: Option<Arc<KvmClock>>,
    stage: Stage,
}

#[derive(Clone, Copy)]
enum Stage {
    No,
    Driver,
    Alarm,
    /// The clock is held. The second in which the year was read, if it has been: if a look then shows the same
    /// second, a time has been read.
    Time(Option<i64>),
    Done,
}

impl Driver {
    pub(super) fn new(clock: Option<Arc<KvmClock>>) -> Self {
        Self { clock, stage: Stage::No }
    }

    /// Register B is written.
    pub(super) fn comes(&mut self) {
        if matches!(self.stage, Stage::No) {
            self.stage = Stage::Driver;
        }
    }

    /// Nanoseconds by which the time that the driver reads is behind the host's.
    pub(super) fn lag(&self) -> i64 {
        if self.held().is_some() { HALF_A_SECOND as i64 } else { 0 }
    }

    fn held(&self) -> Option<&KvmClock> {
        let reading = matches!(self.stage, Stage::Time(_));
        self.clock.as_deref().filter(|clock| reading && clock.is_held())
    }

    /// A register is about to be read.
    pub(super) fn begins(&mut self, index: usize) {
        self.stage = match (self.stage, index, &self.clock) {
            (Stage::Driver, REG_SECOND_ALARM, _) => Stage::Alarm,
            (Stage::Time(_), REG_SECOND_ALARM, _) if self.held().is_some() => Stage::Alarm,
            (Stage::Alarm, REG_SECOND, Some(clock)) => {
                clock.hold();
                Stage::Time(None)
            }
            (Stage::Time(_), ..) if self.held().is_none() => Stage::Done,
            (stage, ..) => stage,
        };
    }

    /// It is read, and shows so many seconds since 1970.
    pub(super) fn ends(&mut self, index: usize, second: i64) {
        self.stage = match (self.stage, index) {
            (Stage::Time(_), REG_YEAR) => Stage::Time(Some(second)),
            (Stage::Time(Some(read)), REG_SECOND) => {
                if let Some(clock) = self.held().filter(|_| read == second) {
                    clock.set(second as u64 * NS_PER_S + HALF_A_SECOND);
                }
                Stage::Time(None)
            }
            (stage, _) => stage,
        };
    }
}
