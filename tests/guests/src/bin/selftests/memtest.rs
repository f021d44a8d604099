//! memtest86+: a kernel of its own, without Linux, whose every access is checked. Its tests 0 to 9
//! run over all memory, one after the other.
//!
//! Test 10 looks for bits that fade within minutes, which is a matter of capacitors; that it has
//! begun shows that the others are done. The screen is sent about once a second, so a test over
//! little memory may come and go unseen.

use std::ops::ControlFlow;

use anyhow::{Context, Result, ensure};
use xtask::{assets::Assets, command::progress, self_tests::SelfTestAssets};

use crate::{
    machine::{Limits, Machine},
    screen::Screen,
};

const CMDLINE: &str = "console=ttyS0,115200 nopause nobigstatus nobench";
/// The test after those that are to be run.
const END: u32 = 10;

/// Runs the tests over `memory` MiB.
///
/// # Errors
/// A test found errors, or they did not end in time.
pub fn run(assets: &Assets, memory: u32, limits: Limits<'_>) -> Result<String> {
    let kernel = assets.memtest()?;
    let machine = Machine { kernel: &kernel, initrd: None, modules: &[], cmdline: CMDLINE, memory };
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
    Ok(format!("tests 0 to {} over {memory} MiB, 0 errors", END - 1))
}

/// What the screen has said so far.
#[derive(Debug, Default)]
struct Pass {
    /// The test that runs, once there is one.
    test: Option<u32>,
    /// A test ran after one with a higher number.
    disordered: bool,
    errors: u32,
}

impl Pass {
    fn look(&mut self, screen: &str) {
        let number = |label: &str| {
            let rest = screen.split_once(label)?.1.trim_start();
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
            digits.parse().ok()
        };
        let test = number("| Test #");
        self.disordered |= test.is_some() && test < self.test;
        self.test = test.or(self.test);
        self.errors = number("Errors:").unwrap_or(self.errors);
    }

    fn is_over(&self) -> bool {
        self.test >= Some(END) || self.errors > 0 || self.disordered
    }

    fn verdict(&self) -> Result<()> {
        ensure!(self.errors == 0, "{} errors in memory", self.errors);
        ensure!(!self.disordered, "the tests did not run in order");
        ensure!(self.test >= Some(END), "the tests did not end: {:?} was the last", self.test);
        Ok(())
    }
}

impl std::fmt::Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.test {
            Some(test) => write!(f, "memtest86+ test {test}, {} errors", self.errors),
            None => f.write_str("memtest86+ starts"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn screen(test: u32, errors: u32) -> String {
        format!(
            "L3 Cache:   32MB            | Test #{test}  [Moving inversions]\n\
             Using: All Cores            | Pass:  0        Errors: {errors}  \n"
        )
    }

    #[test]
    fn a_pass_is_all_tests_without_errors() {
        let mut pass = Pass::default();
        pass.look("| Test #  \n| Pass:  0        Errors: 0\n");
        for test in 0..END {
            pass.look(&screen(test, 0));
            assert!(!pass.is_over());
            pass.verdict().expect_err("not yet");
        }
        pass.look(&screen(END, 0));
        assert!(pass.is_over());
        pass.verdict().expect("sound");
    }

    #[test]
    fn errors_and_restarts_end_it() {
        let mut broken = Pass::default();
        broken.look(&screen(4, 7));
        assert!(broken.is_over());
        assert_eq!(broken.verdict().expect_err("broken").to_string(), "7 errors in memory");
        let mut restarted = Pass::default();
        restarted.look(&screen(4, 0));
        restarted.look(&screen(0, 0));
        assert!(restarted.is_over());
        restarted.verdict().expect_err("it began again");
    }
}
