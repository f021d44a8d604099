//! A machine killed at any moment loses nothing it has acknowledged as flushed.
//!
//! `cargo run --release -p guests --bin power-cuts` makes as many rounds as one likes.

use anyhow::{Result, ensure};
use guests::power_cut::PowerCut;

/// Few, because each is a boot.
const ROUNDS: usize = 3;

fn survives(format: &str, options: &'static str) -> Result<()> {
    let mut machine = PowerCut::new(format, options, 7)?;
    (0..ROUNDS).try_for_each(|_| machine.round())?;
    let written = machine.finish()?;
    ensure!(written.files > 0 && written.rows > 0, "nothing was written: {written:?}");
    Ok(())
}

#[test]
fn raw_disks_keep_what_was_flushed() -> Result<()> {
    survives("raw", "")
}

#[test]
fn qcow2_disks_keep_what_was_flushed() -> Result<()> {
    survives("qcow2", "")
}
