//! Programs in C for guests, made on the host.

use anyhow::{Context, Result, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The folder of what programs include.
const INCLUDES: &str = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/tests");

/// Compiles a program from its text into a folder, with options (words) for the host's `cc`; where the program is.
///
/// # Errors
/// There is no compiler, it refuses the text, or the folder cannot be written.
pub fn compile(directory: &Path, name: &str, text: &str, options: &str) -> Result<PathBuf> {
    let (source, program) = (directory.join(name).with_extension("c"), directory.join(name));
    fs::write(&source, text)?;
    let mut compiler = Command::new("cc");
    compiler.arg(INCLUDES).args(options.split_whitespace()).arg(&source).arg("-o").arg(&program);
    let done = compiler.status().context("cannot run cc: install gcc")?;
    ensure!(done.success(), "{compiler:?} ended with {done}");
    Ok(program)
}
