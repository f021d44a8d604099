//! What a test's end means.
//!
//! A program ends by writing its status to the debug exit port: 0 is success, 1 failure, and 38
//! (77 >> 1) that all was skipped. ring3 passes the value on as exit code 2 * value + 1, and says
//! `debug-exit` in its summary: without that word, the code is ring3's own.

use std::fmt;

/// Status of a program whose tests were all skipped.
const SKIPPED: i32 = 77 >> 1;

/// How a run of ring3 ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The guest wrote this status.
    Status(i32),
    /// Otherwise: ring3's word for it.
    Otherwise(String),
}

impl Ended {
    /// From ring3's exit code and the summary it printed by `--json`.
    pub fn of(code: Option<i32>, messages: &str) -> Self {
        let word = messages.split_once("\"outcome\":\"").and_then(|(_, rest)| rest.split_once('"'));
        match (word, code) {
            (Some(("debug-exit", _)), Some(code)) => Self::Status(code >> 1),
            (Some((word, _)), _) => Self::Otherwise(word.to_owned()),
            (None, Some(code)) => Self::Otherwise(format!("ring3 failed with code {code}")),
            (None, None) => Self::Otherwise("ring3 was killed".to_owned()),
        }
    }
}

/// What came of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every check passed, but for so many the program itself skipped.
    Passed {
        /// Checks.
        checks: u32,
        /// Checks skipped.
        skipped: u32,
    },
    /// The program found nothing to test: why, in its words.
    Skipped(String),
    /// It does not apply: why.
    NotApplicable(String),
    /// It failed: the checks that did, or how it ended.
    Failed(Vec<String>),
}

impl Outcome {
    /// From a test's end and all it printed. A test with a `reason` not to apply may fail.
    pub fn of(ended: &Ended, log: &str, reason: Option<&str>) -> Self {
        let failures: Vec<_> =
            log.lines().filter_map(|line| line.strip_prefix("FAIL: ")).map(str::to_owned).collect();
        match (ended, reason) {
            (Ended::Status(0), _) if failures.is_empty() => {
                Self::Passed { checks: count(log, "PASS"), skipped: count(log, "SKIP") }
            }
            (&Ended::Status(SKIPPED), _) => Self::Skipped(skip_reason(log)),
            (_, Some(reason)) => Self::NotApplicable(reason.to_owned()),
            (Ended::Status(0 | 1), None) if !failures.is_empty() => Self::Failed(failures),
            (ended, None) => Self::Failed([failures, vec![how(ended, log)]].concat()),
        }
    }
}

fn count(log: &str, word: &str) -> u32 {
    log.lines().filter(|line| line.starts_with(word)).count() as u32
}

/// The first line that says why, without its mark.
fn skip_reason(log: &str) -> String {
    let marked = log.lines().find_map(|line| line.strip_prefix("SKIP: "));
    let told = || log.lines().find(|line| line.contains("not "));
    let reason = marked.or_else(told).unwrap_or("no reason given").trim();
    reason.trim_start_matches("WARNING: ").to_owned()
}

fn how(ended: &Ended, log: &str) -> String {
    let unhandled = log.lines().find(|line| line.starts_with("Unhandled exception"));
    match (ended, unhandled) {
        (_, Some(line)) => line.to_owned(),
        (Ended::Status(status), None) => format!("ended with status {status}"),
        (Ended::Otherwise(word), None) => word.clone(),
    }
}

/// How many tests came out how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Passed.
    pub passed: u32,
    /// Failed.
    pub failed: u32,
    /// Skipped by themselves.
    pub skipped: u32,
    /// Do not apply.
    pub not_applicable: u32,
}

impl Tally {
    /// Counts.
    pub fn of<'a>(outcomes: impl Iterator<Item = &'a Outcome>) -> Self {
        let mut tally = Self::default();
        for outcome in outcomes {
            *match outcome {
                Outcome::Passed { .. } => &mut tally.passed,
                Outcome::Failed(_) => &mut tally.failed,
                Outcome::Skipped(_) => &mut tally.skipped,
                Outcome::NotApplicable(_) => &mut tally.not_applicable,
            } += 1;
        }
        tally
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, skipped, not_applicable } = self;
        write!(
            f,
            "{passed} passed, {failed} failed, {skipped} skipped by themselves, \
             {not_applicable} not applicable"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEBUG_EXIT: &str = "{\"outcome\":\"debug-exit\",\"exit_code\":1}";

    #[test]
    fn a_code_counts_only_with_the_word() {
        assert_eq!(Ended::of(Some(1), DEBUG_EXIT), Ended::Status(0));
        assert_eq!(Ended::of(Some(77), DEBUG_EXIT), Ended::Status(38));
        assert!(matches!(Ended::of(Some(1), "ring3: no memory"), Ended::Otherwise(_)));
        let timeout = Ended::of(Some(124), "{\"outcome\":\"timeout\"}");
        assert_eq!(timeout, Ended::Otherwise("timeout".to_owned()));
    }

    #[test]
    fn success_needs_status_and_no_failure() {
        let of = |status, log| Outcome::of(&Ended::Status(status), log, None);
        assert_eq!(of(0, "PASS: a\nSKIP: b\n"), Outcome::Passed { checks: 1, skipped: 1 });
        let failed = Outcome::Failed(vec!["a".to_owned()]);
        assert_eq!(of(0, "FAIL: a\n"), failed, "whatever the status says");
        assert_eq!(of(1, "PASS: b\nFAIL: a\n"), failed);
        assert_eq!(of(38, "SKIP: no PMU\n"), Outcome::Skipped("no PMU".to_owned()));
        let died = of(63, "FAIL: a\nUnhandled exception 6 #UD at ip 0\n");
        let lines = ["a", "Unhandled exception 6 #UD at ip 0"].map(str::to_owned);
        assert_eq!(died, Outcome::Failed(lines.to_vec()));
    }

    #[test]
    fn what_does_not_apply_may_fail_but_also_pass() {
        let of = |status| Outcome::of(&Ended::Status(status), "", Some("KVM only"));
        assert_eq!(of(1), Outcome::NotApplicable("KVM only".to_owned()));
        assert_eq!(of(0), Outcome::Passed { checks: 0, skipped: 0 });
    }
}
