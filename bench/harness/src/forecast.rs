//! What a row will take in an environment, by how much slower than native it was in others: what
//! is a thousand times slower is not asked for what takes an hour there.

use std::time::Duration;

use crate::stats;

/// Multiples of native that an environment's rows of one kind were.
#[derive(Debug, Default)]
pub(crate) struct Forecast {
    multiples: Vec<f64>,
}

impl Forecast {
    /// A row took so many nanoseconds natively, and in this environment.
    pub(crate) fn learn(&mut self, native: f64, here: f64) {
        self.multiples.push(here / native);
    }

    /// Why an operation of so many nanoseconds natively is not tried here: it would take longer
    /// than `limit`. What nothing is known of is tried.
    pub(crate) fn refuses(&self, native: f64, limit: Duration) -> Option<String> {
        let multiple = stats::median(&self.multiples);
        let here = native * multiple / 1e9;
        // A median of nothing is not a number, and more than no limit.
        (here > limit.as_secs_f64()).then(|| {
            format!(
                "not tried: {multiple:.0} times native, as in rows before it, it would take more than {} s",
                limit.as_secs()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_take_too_long_is_refused_and_said_why() {
        let mut forecast = Forecast::default();
        let limit = Duration::from_secs(60);
        assert_eq!(forecast.refuses(1e9, limit), None, "nothing is known");
        for multiple in [90.0, 100.0, 5000.0] {
            forecast.learn(2e6, multiple * 2e6);
        }
        assert_eq!(forecast.refuses(0.5e9, limit), None, "50 s");
        let why = forecast.refuses(0.7e9, limit).expect("70 s");
        assert!(why.contains("100 times native") && why.contains("60 s"), "{why}");
    }
}
