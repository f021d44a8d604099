//! Results for people: a line on the terminal, a page of documentation.

use crate::{
    outcome::{Outcome, Tally},
    run::Finished,
};

/// Failed checks of one test shown on the page; the rest are counted.
const SHOWN: usize = 12;

const HEAD: &str = "\
# kvm-unit-tests

[kvm-unit-tests](https://gitlab.com/kvm-unit-tests/kvm-unit-tests) are small kernels that check one
thing each: exceptions, paging, the local APIC, task switches. Nothing of them is in this tree. To
run them, build them and give the folder with the programs and their `unittests.cfg` to the runner:

    ./configure --arch=x86_64 && make    # in a checkout of theirs
    ./configure --arch=i386 && make      # in another one, for the 32-bit programs
    cargo build --release -p ring3
    cargo run --release -p guests --bin kvm-unit-tests -- .../kvm-unit-tests/x86 \\
        --i386 .../kvm-unit-tests-i386/x86 --table docs/kvm-unit-tests.md

`--only NAME` runs one test, `--logs DIRECTORY` keeps what they print. This page is written by
`--table`. Tests get as many CPUs as they ask for, and the devices of `ring3 run --test-devices`.

- **pass**: the program said so, and no check failed. Checks it skipped itself are counted.
- **skip**: the program found the feature it tests missing and said so.
- **n/a**: it is not started, or fails without that saying anything about this machine: the reason
  is in the table.
- **FAIL**: anything else, with the checks that failed below the table.
";

/// A result for the terminal.
pub fn line(finished: &Finished) -> String {
    let seconds = finished.duration.as_secs_f64();
    format!("{:<5} {seconds:7.1} s  {}", word(&finished.outcome), note(finished, usize::MAX))
}

/// The whole page.
pub fn page(results: &[Finished], tally: &Tally) -> String {
    let mut page = format!("{HEAD}\n{tally}.\n\n| test | result | |\n|---|---|---|\n");
    for finished in results {
        let (name, result) = (&finished.test.name, word(&finished.outcome));
        page += &format!("| {name} | {result} | {} |\n", escaped(&note(finished, 1)));
    }
    for finished in results {
        if let Outcome::Failed(lines) = &finished.outcome {
            page += &format!("\n## {}\n\n{}", finished.test.name, failures(lines));
        }
    }
    page
}

fn failures(lines: &[String]) -> String {
    let mut list = String::new();
    for line in lines.iter().take(SHOWN) {
        list += &format!("- {}\n", escaped(line));
    }
    if lines.len() > SHOWN {
        list += &format!("- and {} more\n", lines.len() - SHOWN);
    }
    list
}

fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Passed { .. } => "pass",
        Outcome::Skipped(_) => "skip",
        Outcome::NotApplicable(_) => "n/a",
        Outcome::Failed(_) => "FAIL",
    }
}

/// What there is to say about a result; of failures at most `most`.
fn note(finished: &Finished, most: usize) -> String {
    let cpus = match finished.test.cpus {
        1 => String::new(),
        cpus => format!("; with {cpus} CPUs"),
    };
    match &finished.outcome {
        Outcome::Passed { checks: 0, .. } => format!("runs to its end, and counts no checks{cpus}"),
        Outcome::Passed { checks, skipped: 0 } => format!("{checks} checks{cpus}"),
        Outcome::Passed { checks, skipped } => format!("{checks} checks, {skipped} skipped{cpus}"),
        Outcome::Skipped(reason) | Outcome::NotApplicable(reason) => reason.clone(),
        Outcome::Failed(lines) if lines.len() > most => {
            format!("{} failures, see below{cpus}", lines.len())
        }
        Outcome::Failed(lines) => lines.join("; ") + &cpus,
    }
}

/// A text within a table.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use std::time::Duration;

    fn finished(name: &str, outcome: Outcome) -> Finished {
        let test = config::parse(&format!("[{name}]")).expect("a test").remove(0);
        Finished { test, outcome, log: String::new(), duration: Duration::ZERO }
    }

    #[test]
    fn the_page_lists_tests_and_failures() {
        let many = (0..SHOWN + 3).map(|n| format!("check {n} a|b")).collect();
        let results = [
            finished("good", Outcome::Passed { checks: 3, skipped: 1 }),
            finished("bad", Outcome::Failed(many)),
        ];
        let tally = Tally::of(results.iter().map(|finished| &finished.outcome));
        let page = page(&results, &tally);
        assert!(page.contains("1 passed, 1 failed"));
        assert!(page.contains("| good | pass | 3 checks, 1 skipped |"));
        assert!(page.contains("| bad | FAIL | 15 failures, see below |"));
        assert!(page.contains("## bad\n\n- check 0 a\\|b\n") && page.contains("- and 3 more"));
    }
}
