//! Where a run is, and how long it will still take: a bar on a terminal, a line per row elsewhere.
//!
//! Rows differ by a factor of a hundred in what they take, so time left is not told by their
//! number but by weights.

use std::time::{Duration, Instant};

use humantime::format_duration;
use indicatif::{ProgressBar, ProgressStyle};

use crate::{network, program, protocol::Row, startup};

/// Progress through rows.
pub(crate) struct Progress {
    bar: ProgressBar,
    begun: Instant,
    done: u64,
    all: u64,
    row: String,
}

impl Progress {
    pub(crate) fn new(rows: &[Row]) -> Self {
        let style = ProgressStyle::with_template("{bar:30} {elapsed} {msg}");
        let all = rows.iter().map(|row| u64::from(weight(row))).sum();
        let bar = ProgressBar::new(all);
        let bar = style.map(|style| bar.clone().with_style(style)).unwrap_or(bar);
        Self { bar, begun: Instant::now(), done: 0, all, row: String::new() }
    }

    /// A row begins.
    pub(crate) fn row(&mut self, row: &Row) {
        self.row.clone_from(&row.name);
        let text = self.text();
        if self.bar.is_hidden() {
            eprintln!("{} {text}", whole_seconds(self.begun.elapsed()));
        }
        self.bar.set_message(text);
    }

    /// The row under way is now in this environment.
    pub(crate) fn environment(&self, name: &str) {
        self.bar.set_message(format!("{} in {name}", self.text()));
    }

    /// The row has ended.
    pub(crate) fn done(&mut self, row: &Row) {
        self.done += u64::from(weight(row));
        self.bar.set_position(self.done);
    }

    /// Everything has ended.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn text(&self) -> String {
        match left(self.begun.elapsed(), self.done, self.all) {
            Some(left) => format!("about {} left: {}", whole_seconds(left), self.row),
            None => self.row.clone(),
        }
    }
}

/// What a row takes when all environments run it, beside others: halves of what one takes whose
/// operation is short.
fn weight(row: &Row) -> u32 {
    match (row.group.as_str(), row.name.as_str()) {
        (_, "lua" | "lua2" | "lua4") => 240,
        (_, "twenty") => 150,
        (_, "compile") => 120,
        // Measured together with another.
        (_, "twentymem" | "start") => 0,
        (startup::GROUP, _) => 10,
        (network::GROUP, _) => 24,
        (group, _) if group == program::ROWS[0] => 14,
        _ => 2,
    }
}

/// The time left, once enough is done to tell; `done` and `all` are weights.
fn left(spent: Duration, done: u64, all: u64) -> Option<Duration> {
    let told = done > 0 && done * 50 >= all;
    told.then(|| spent.mul_f64(all.saturating_sub(done) as f64 / done as f64))
}

fn whole_seconds(time: Duration) -> humantime::FormattedDuration {
    format_duration(Duration::from_secs(time.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_is_in_proportion_to_what_is_left() {
        let second = Duration::from_secs(1);
        assert_eq!(left(second * 10, 0, 100), None);
        assert_eq!(left(second * 10, 1, 100), None, "too little to tell");
        assert_eq!(left(second * 10, 25, 100), Some(second * 30));
        assert_eq!(left(second * 10, 100, 100), Some(Duration::ZERO));
    }

    #[test]
    fn programs_weigh_more_than_system_calls_and_what_is_known_nothing() {
        let weight = |group: &str, name: &str| weight(&Row::new(group, name, ""));
        assert!(weight(program::ROWS[0], "lua") > weight("system calls", "getppid"));
        assert!(weight(startup::GROUP, "twenty") > weight(startup::GROUP, "idle"));
        assert_eq!(weight(startup::GROUP, "twentymem"), 0);
    }
}
