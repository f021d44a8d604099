//! `ring3::exec`, called by a program that is not `ring3` (`src/bin/in-a-guest.rs`).

use std::{
    fs,
    process::{Command, Stdio},
};

use anyhow::{Result, ensure};
use tempfile::TempDir;

/// Its devices are served by that program, too, started anew.
#[test]
fn a_program_that_uses_the_library_runs_a_command() -> Result<()> {
    let directory = TempDir::new()?;
    let mut program = Command::new(env!("CARGO_BIN_EXE_in-a-guest"));
    program.args(["sh", "-c", "echo from a guest; echo made > made; exit 9"]);
    let output = program.current_dir(directory.path()).stdin(Stdio::null()).output()?;
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(9) && messages.is_empty(), "{output:?}");
    ensure!(output.stdout == b"from a guest\n", "{output:?}");
    ensure!(fs::read_to_string(directory.path().join("made"))? == "made\n");
    Ok(())
}
