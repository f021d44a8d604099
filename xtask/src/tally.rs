//! The output of test programs, counted: tests that passed, tests that failed, and tests or parts of tests
//! that were skipped, with the reason.
//!
//! A test that cannot be tried on this machine prints [`SKIPPED`] and the reason, and returns. One that leaves
//! out a part prints [`SKIPPED_IN_PART`] and the reason; it counts as passed and as skipped. A test that is ignored
//! counts as skipped too, unless its reason says which other test runs it.

/// How the line begins with which a test says that it was skipped.
const SKIPPED: &str = "SKIPPED: ";
/// The same for a test that was skipped in part.
const SKIPPED_IN_PART: &str = "SKIPPED IN PART: ";
/// How the reason of an ignored test begins if another test runs it.
const RUN_BY: &str = "run by ";

/// A test that was skipped, or skipped in part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip {
    /// The test's path inside its program.
    pub test: String,
    /// The words it was skipped with.
    pub reason: String,
}

impl std::fmt::Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.test, self.reason)
    }
}

/// The section of a test program's output that is read.
#[derive(Debug, Default)]
enum Section {
    #[default]
    Tests,
    /// Output of tests that passed; the name of the current test.
    Successes(String),
    Failures,
}

/// Counts of tests.
#[derive(Debug, Default)]
pub struct Tally {
    /// Tests that passed, in whole or in part.
    pub passed: u64,
    /// Tests that failed.
    pub failed: u64,
    /// Tests that were skipped, in whole or in part.
    pub skips: Vec<Skip>,
    /// Skipped tests of the current program: its sum will count them as passed.
    skipped_whole: u64,
    section: Section,
}

impl Tally {
    /// Counts a line of output of a program that runs with `--show-output`; whether it is worth showing:
    /// what passing tests print is not.
    pub fn add(&mut self, line: &str) -> bool {
        match line.trim_end() {
            "successes:" => self.section = Section::Successes(String::new()),
            "failures:" => self.section = Section::Failures,
            line if line.starts_with("test result: ") => self.result(line),
            line => return self.inside(line),
        }
        !matches!(self.section, Section::Successes(_))
    }

    /// The sum of a test program.
    fn result(&mut self, line: &str) {
        let parts = line.split([':', ';', '.']).map(str::trim);
        let count = |what| {
            let number = parts.clone().find_map(|part| part.strip_suffix(what))?;
            number.trim().parse::<u64>().ok()
        };
        self.passed += count("passed").unwrap_or(0).saturating_sub(self.skipped_whole);
        self.skipped_whole = 0;
        self.failed += count("failed").unwrap_or(0);
        self.section = Section::Tests;
    }

    fn inside(&mut self, line: &str) -> bool {
        match &mut self.section {
            Section::Tests => self.skips.extend(ignored(line)),
            Section::Failures => {}
            Section::Successes(test) => {
                let heading =
                    line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"));
                if let Some(heading) = heading {
                    heading.clone_into(test);
                    return false;
                }
                let whole = line.strip_prefix(SKIPPED);
                let Some(reason) = whole.or_else(|| line.strip_prefix(SKIPPED_IN_PART)) else {
                    return false;
                };
                let skip = Skip { test: test.clone(), reason: reason.to_owned() };
                // A test that tries in several ways says the same several times.
                if self.skips.contains(&skip) {
                    return false;
                }
                self.skips.push(skip);
                self.skipped_whole += u64::from(whole.is_some());
            }
        }
        true
    }
}

/// A test that is ignored, and that no other test runs.
fn ignored(line: &str) -> Option<Skip> {
    let (test, reason) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
    let reason = reason.trim_start_matches([',', ' ']);
    let skip = Skip { test: test.to_owned(), reason: reason.to_owned() };
    (!reason.starts_with(RUN_BY)).then_some(skip)
}

/// The skips that are allowed: a test's name, and words that its reason holds.
#[derive(Debug)]
pub struct Allowed(Vec<(String, String)>);

impl Allowed {
    /// Reads lines of `TEST: WORDS`; lines that begin with `#` are comments.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let entries = lines.filter_map(|line| line.split_once(": "));
        Self(entries.map(|(test, words)| (test.to_owned(), words.trim().to_owned())).collect())
    }

    /// Whether this skip is allowed.
    pub fn has(&self, skip: &Skip) -> bool {
        self.0.iter().any(|(test, words)| *test == skip.test && skip.reason.contains(words))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "
running 5 tests
test a ... ok
test b ... ok
test c ... ok
test d ... ignored, minutes
test e ... ignored, run by `a` as another user

successes:

---- a stdout ----
much
---- b stdout ----
SKIPPED: qemu: No such file; install the package qemu
SKIPPED: qemu: No such file; install the package qemu
---- c stdout ----
SKIPPED IN PART: no keys

successes:
    a
    b
    c

test result: ok. 3 passed; 0 failed; 2 ignored; 0 measured; finished in 0.01s
test result: FAILED. 2 passed; 3 failed; 1 ignored; 0 measured; finished in 0.01s
";

    fn counted(text: &str) -> Tally {
        let mut tally = Tally { passed: 10, ..Tally::default() };
        for line in text.lines() {
            tally.add(line);
        }
        tally
    }

    #[test]
    fn results_are_summed_and_skips_are_taken_out() {
        let tally = counted(OUTPUT);
        assert_eq!((tally.passed, tally.failed), (10 + 3 - 1 + 2, 3));
        let skips: Vec<_> = tally.skips.iter().map(Skip::to_string).collect();
        let expected =
            ["d: minutes", "b: qemu: No such file; install the package qemu", "c: no keys"];
        assert_eq!(skips, expected);
    }

    #[test]
    fn a_test_that_fails_is_not_skipped() {
        let tally = counted("failures:\n\n---- a stdout ----\nSKIPPED: b\n\nfailures:\n    a\n");
        assert_eq!(tally.skips, []);
        assert_eq!(tally.passed, 10);
    }

    #[test]
    fn what_tests_print_is_shown_if_they_fail() {
        let mut tally = Tally::default();
        let shown: Vec<_> = OUTPUT.lines().filter(|line| tally.add(line)).collect();
        assert!(!shown.contains(&"much"));
        let mut tally = Tally::default();
        assert!("failures:\n---- a stdout ----\nmuch".lines().all(|line| tally.add(line)));
    }

    #[test]
    fn skips_are_allowed_by_name_and_reason() {
        let allowed = Allowed::parse("# why\na: no keys\n\nb::c: QEMU 7\n");
        let skip = |test: &str, reason: &str| Skip { test: test.into(), reason: reason.into() };
        assert!(allowed.has(&skip("a", "this host has no keys")));
        assert!(allowed.has(&skip("b::c", "QEMU 7 crashes")));
        assert!(!allowed.has(&skip("a", "this host has no disk")));
        assert!(!allowed.has(&skip("c", "no keys")));
    }
}
