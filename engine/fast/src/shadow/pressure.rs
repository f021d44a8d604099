//! Spaces that have more pages than the host allows mappings.
//!
//! When a space that is full gives mappings up, a program that goes on using them pays for each access a fault and a
//! mapping, some ten microseconds. A space that gives up some again within [`SOON`] is *under pressure*: its user code is
//! run translated, with look-ups, which cost a program that computes up to half of its speed, and need no mappings. Nobody
//! can see when its working set becomes small again; so after a while it is tried without, and if that goes wrong the next
//! trial comes later.

use crate::Scattered;
use std::time::{Duration, Instant};

/// A space that gives up mappings twice within this time is under pressure.
const SOON: Duration = Duration::from_secs(2);
/// Time until the first trial without look-ups, and the longest time until a later one.
const STAYS: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// What is known of a space.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pressure {
    /// When look-ups were turned on, if they are on.
    since: Option<Instant>,
    /// When mappings were last given up.
    given_up: Option<Instant>,
    /// How long look-ups stay on until the next trial; `None` if they never were on.
    stay: Option<Duration>,
    /// Look-ups are on whatever happens.
    always: bool,
}

impl Pressure {
    /// Mappings are given up.
    pub fn note(&mut self) {
        self.note_at(Instant::now());
    }

    fn note_at(&mut self, now: Instant) {
        let again = self.given_up.is_some_and(|last| now.duration_since(last) < SOON);
        self.given_up = Some(now);
        if self.since.is_none() && (again || self.stay.is_some()) {
            self.stay = Some(self.stay.map_or(STAYS.0, |stay| (stay * 2).min(STAYS.1)));
            self.since = Some(now);
        }
    }

    /// Look-ups are to be used.
    pub fn is_on(&self) -> bool {
        self.since.is_some() || self.always
    }

    /// The same from now on.
    pub fn look(&mut self, scattered: Scattered) -> bool {
        match scattered {
            Scattered::Map => *self = Self::default(),
            Scattered::Always => self.always = true,
            Scattered::Lookup => self.look_at(Instant::now),
        }
        self.is_on()
    }

    fn look_at(&mut self, now: impl FnOnce() -> Instant) {
        let Some((since, stay)) = self.since.zip(self.stay) else { return };
        if now().duration_since(since) > stay {
            (self.since, self.given_up) = (None, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_up_twice_soon_is_pressure_and_is_tried_ever_later() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut pressure = Pressure::default();
        pressure.note_at(at(0));
        pressure.note_at(at(5));
        assert!(!pressure.is_on(), "it has walked over much memory once");
        pressure.note_at(at(6));
        assert!(pressure.is_on());
        pressure.look_at(|| at(15));
        assert!(pressure.is_on());
        pressure.look_at(|| at(17));
        assert!(!pressure.is_on(), "a trial");
        pressure.note_at(at(18));
        assert!(pressure.is_on(), "once is enough now");
        pressure.look_at(|| at(30));
        assert!(pressure.is_on(), "for twice as long");
        pressure.look_at(|| at(39));
        assert!(!pressure.is_on());
        assert!(!Pressure::default().look(Scattered::Map));
        assert!(Pressure::default().look(Scattered::Always));
    }
}
