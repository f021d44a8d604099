//! memtest86+: a kernel of its own, without Linux, whose every access is checked. One pass runs all
//! its tests over all memory.

use std::{collections::BTreeSet, ops::ControlFlow};

use anyhow::{Context, Result, ensure};
use xtask::{assets::Assets, command::progress};

use crate::{
    machine::{Limits, Machine},
    screen::Screen,
};

const CMDLINE: &str = "console=ttyS0,115200 nopause nobigstatus nobench";
/// The tests of a pass.
const TESTS: std::ops::RangeInclusive<u32> = 0..=9;

/// Runs a pass over `memory` MiB.
///
/// # Errors
/// A test found errors or did not run, or the pass did not end in time.
pub fn run(assets: &Assets, memory: u32, limits: Limits) -> Result<String> {
    let kernel = assets.memtest()?;
    let machine = Machine { kernel: &kernel, initrd: None, cmdline: CMDLINE, memory };
    let (mut screen, mut pass) = (Screen::new(), Pass::default());
    let bar = progress("memtest86+ starts");
    let ended = machine.run(limits, &mut |printed| {
        screen.print(printed);
        pass.look(&screen.text());
        bar.set_message(pass.to_string());
        if pass.is_over() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    ended.with_context(|| screen.text())?;
    pass.verdict().with_context(|| screen.text())?;
    Ok(format!("tests {:?} over {memory} MiB, 0 errors", pass.tests))
}

/// What the screen has said about a pass.
#[derive(Debug, Default)]
struct Pass {
    tests: BTreeSet<u32>,
    done: u32,
    errors: u32,
}

impl Pass {
    fn look(&mut self, screen: &str) {
        let number = |label: &str| {
            let rest = screen.split_once(label)?.1.trim_start();
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
            digits.parse().ok()
        };
        self.tests.extend(number("| Test #"));
        self.done = number("Pass:").unwrap_or(self.done);
        self.errors = number("Errors:").unwrap_or(self.errors);
    }

    fn is_over(&self) -> bool {
        self.done > 0 || self.errors > 0
    }

    fn verdict(&self) -> Result<()> {
        ensure!(self.errors == 0, "{} errors in memory", self.errors);
        ensure!(self.done > 0, "no pass was completed");
        let missing: Vec<_> = TESTS.filter(|test| !self.tests.contains(test)).collect();
        ensure!(missing.is_empty(), "tests {missing:?} did not run");
        Ok(())
    }
}

impl std::fmt::Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let now = self.tests.last().copied().unwrap_or(0);
        write!(f, "memtest86+ test {now}, {} errors", self.errors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn screen(test: u32, done: u32, errors: u32) -> String {
        format!(
            "L3 Cache:   32MB            | Test #{test}  [Moving inversions]\n\
             Using: All Cores            | Pass:  {done}        Errors: {errors}  \n"
        )
    }

    #[test]
    fn a_pass_is_all_tests_without_errors() {
        let mut pass = Pass::default();
        for test in 0..=9 {
            pass.look(&screen(test, 0, 0));
            assert!(!pass.is_over());
        }
        pass.look(&screen(0, 1, 0));
        assert!(pass.is_over());
        pass.verdict().expect("sound");
        pass.look(&screen(0, 1, 7));
        pass.verdict().expect_err("errors");
    }

    #[test]
    fn a_test_left_out_is_noticed() {
        let mut pass = Pass::default();
        pass.look(&screen(3, 1, 0));
        assert!(pass.verdict().expect_err("9 are missing").to_string().contains("[0, 1, 2, 4"));
    }
}
