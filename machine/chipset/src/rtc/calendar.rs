//! Seconds and calendar dates (proleptic Gregorian, UTC).

/// Seconds of a day.
pub(crate) const DAY: i64 = 86_400;

/// A date and time as the clock's registers show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Date {
    pub(crate) second: u8,
    pub(crate) minute: u8,
    /// 0 to 23.
    pub(crate) hour: u8,
    /// 1 is Sunday.
    pub(crate) weekday: u8,
    /// From 1.
    pub(crate) day: u8,
    /// From 1.
    pub(crate) month: u8,
    pub(crate) year: i64,
}

impl Date {
    /// From seconds since 1970-01-01T00:00:00Z. Years begin in March here, so that the leap day
    /// comes last, and 400 of them (an era) always have the same length.
    pub(crate) fn from_seconds(seconds: i64) -> Self {
        let (days, of_day) = (seconds.div_euclid(DAY), seconds.rem_euclid(DAY));
        let shifted = days + 719_468; // since 0000-03-01
        let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * of_year + 2) / 153;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
        Self {
            second: (of_day % 60) as u8,
            minute: (of_day / 60 % 60) as u8,
            hour: (of_day / 3600) as u8,
            weekday: ((days + 4).rem_euclid(7) + 1) as u8,
            day: (of_year - (153 * march_month + 2) / 5 + 1) as u8,
            month: month as u8,
            year: era * 400 + year_of_era + i64::from(month <= 2),
        }
    }

    /// Seconds since 1970-01-01T00:00:00Z. Fields beyond their range carry over; the weekday does
    /// not matter.
    pub(crate) fn seconds(&self) -> i64 {
        let month = i64::from(self.month.clamp(1, 12));
        let year = self.year - i64::from(month <= 2);
        let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
        let march_month = (month + 9) % 12;
        let of_year = (153 * march_month + 2) / 5 + i64::from(self.day) - 1;
        let of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year;
        let days = era * 146_097 + of_era - 719_468;
        let of_day =
            i64::from(self.hour) * 3600 + i64::from(self.minute) * 60 + i64::from(self.second);
        days * DAY + of_day
    }
}
