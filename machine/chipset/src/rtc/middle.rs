//! A reading of the clock that ends in the middle of a second, since that is when Linux takes it to be.
//!
//! Linux's driver writes register B, looks for an alarm that is set, reads the time once for that, and once more to
//! set the system's by it (`__devm_rtc_register_device`). The last reading is what counts. The code that runs for
//! the first time between them takes a while, so the first wait ends somewhat before the middle, and the second,
//! behind the last register of the last reading, in it. A driver that reads in another order waits once or never,
//! and has the time to the second.

use super::{NS_PER_S, REG_SECOND, REG_SECOND_ALARM, REG_YEAR};
use crate::Sleep;

/// How long before the middle of a second the first wait ends, in nanoseconds.
const LEAD_NS: u64 = 20_000_000;
/// Readings of the time behind that for the alarm.
const READINGS: u32 = 2;

/// What has been seen of the driver.
#[derive(Clone, Copy, Default)]
pub(super) struct Middle {
    /// None where nothing is to wait, or nothing any more.
    sleep: Option<Sleep>,
    stage: Stage,
}

#[derive(Clone, Copy, Default)]
enum Stage {
    #[default]
    NoDriver,
    Driver,
    Alarm,
    /// The guest's time in the middle of the second, and which reading this is. The year has been read in it: a
    /// look whether the second is still the same is its end.
    Near {
        middle: i64,
        reading: u32,
        year: bool,
    },
}

impl Middle {
    pub(super) fn new(sleep: Sleep) -> Self {
        Self { sleep: Some(sleep), stage: Stage::NoDriver }
    }

    /// Register B is written.
    pub(super) fn driver_comes(&mut self) {
        if matches!(self.stage, Stage::NoDriver) {
            self.stage = Stage::Driver;
        }
    }

    /// A register is read at a guest's time in nanoseconds; this waits if it should take longer.
    pub(super) fn read(&mut self, index: usize, now: i64) {
        let Some(sleep) = self.sleep else { return };
        self.stage = match (self.stage, index) {
            (Stage::Driver, REG_SECOND_ALARM) => Stage::Alarm,
            (Stage::Alarm, REG_SECOND) => {
                let into = now.rem_euclid(NS_PER_S as i64) as u64;
                let nap = (NS_PER_S + NS_PER_S / 2 - LEAD_NS - into) % NS_PER_S;
                sleep(nap);
                Stage::Near { middle: now + (nap + LEAD_NS) as i64, reading: 0, year: false }
            }
            (Stage::Near { middle, reading, .. }, REG_YEAR) => {
                Stage::Near { middle, reading, year: true }
            }
            (Stage::Near { middle, reading, year: true }, REG_SECOND) => {
                if reading + 1 == READINGS {
                    self.sleep = None;
                    sleep(u64::try_from(middle - now).unwrap_or(0));
                }
                Stage::Near { middle, reading: reading + 1, year: false }
            }
            (stage, _) => stage,
        };
    }
}
