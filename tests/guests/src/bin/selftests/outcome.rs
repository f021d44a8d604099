//! How programs of a suite ended, in ring3 and where it is compared with.

use std::fmt;

/// Exit codes of `timeout`, for a program it had to end.
const TIMED_OUT: [i32; 3] = [124, 137, 143];

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    /// There was nothing to test.
    Skipped,
    TimedOut,
    Failed(i32),
    /// It was not seen to end.
    Lost,
}

impl Outcome {
    /// By its exit code; `skipped` is the suite's for nothing to test.
    pub fn of(code: i32, skipped: i32) -> Self {
        match code {
            0 => Self::Passed,
            code if code == skipped => Self::Skipped,
            code if TIMED_OUT.contains(&code) => Self::TimedOut,
            code => Self::Failed(code),
        }
    }

    /// By the exit code a console shows, if it does.
    pub fn shown(code: Option<&str>, skipped: i32) -> Self {
        let code = code.and_then(|code| code.parse().ok());
        code.map_or(Self::Lost, |code| Self::of(code, skipped))
    }

    /// Whether a program that ends so has shown no fault of the machine.
    pub fn is_good(self) -> bool {
        matches!(self, Self::Passed | Self::Skipped)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.pad("passed"),
            Self::Skipped => f.pad("skipped"),
            Self::TimedOut => f.pad("timed out"),
            Self::Failed(code) => f.pad(&format!("failed ({code})")),
            Self::Lost => f.pad("lost"),
        }
    }
}

/// Programs with their two outcomes, a line each below a line of headings.
pub fn side_by_side([suite, one, other]: [&str; 3], rows: &[(&str, Outcome, Outcome)]) -> String {
    let head = format!("{suite:32} {one:12} {other}\n");
    let row =
        |(name, one, other): &(&str, Outcome, Outcome)| format!("{name:32} {one:12} {other}\n");
    head + &rows.iter().map(row).collect::<String>()
}
