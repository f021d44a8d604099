//! Running other programs, with errors that say what to do.

use std::{
    ffi::OsStr,
    io::ErrorKind,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;

/// Programs we call and the Debian package that has each.
const PACKAGES: [(&str, &str); 15] = [
    ("apt-get", "apt"),
    ("apt-cache", "apt"),
    ("dpkg-deb", "dpkg"),
    ("dpkg-source", "dpkg-dev"),
    ("cargo", "cargo (or rustup)"),
    ("rustfmt", "rustfmt (or rustup component add rustfmt)"),
    ("strace", "strace"),
    ("mke2fs", "e2fsprogs"),
    ("git", "git"),
    ("make", "make"),
    ("gcc", "gcc"),
    ("tar", "tar"),
    ("mmdebstrap", "mmdebstrap"),
    ("unshare", "util-linux"),
    ("passt", "passt"),
];

/// A program that is not installed, in one line.
fn missing(program: &str) -> String {
    let package = PACKAGES.iter().find(|(name, _)| *name == program).map(|(_, package)| *package);
    match package {
        Some(package) => {
            format!("`{program}` is not installed: install the package {package}")
        }
        None => format!("`{program}` is not installed"),
    }
}

/// Runs to the end and returns standard output.
///
/// # Errors
/// The program is missing, or failed: then the error carries its standard error.
pub fn output(command: &mut Command) -> Result<String> {
    let name = name_of(command);
    let output = match command.stdin(Stdio::null()).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => bail!(missing(&name)),
        other => other.with_context(|| format!("cannot run `{name}`"))?,
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{name}` failed ({}): {}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs with our own standard streams.
///
/// # Errors
/// The program is missing or failed.
pub fn run(command: &mut Command) -> Result<()> {
    let name = name_of(command);
    match command.status() {
        Err(error) if error.kind() == ErrorKind::NotFound => bail!(missing(&name)),
        Err(error) => Err(error).with_context(|| format!("cannot run `{name}`")),
        Ok(status) if !status.success() => bail!("`{name}` failed ({status})"),
        Ok(_) => Ok(()),
    }
}

fn name_of(command: &Command) -> String {
    let program = Path::new(command.get_program());
    program.file_name().unwrap_or(OsStr::new("program")).to_string_lossy().into_owned()
}

/// A spinner that says what takes so long; it appears on terminals only.
pub fn progress(message: impl Into<String>) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(message.into());
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_carry_what_the_program_said() {
        let error = output(Command::new("sh").args(["-c", "echo because >&2; exit 3"]));
        let text = format!("{:#}", error.expect_err("it fails"));
        assert!(text.contains("because") && text.contains("`sh`"), "{text}");
    }

    #[test]
    fn a_missing_program_names_its_package() {
        let directory = tempfile::tempdir().expect("a directory");
        let nowhere = directory.path().join("mke2fs");
        let text = format!("{:#}", output(&mut Command::new(nowhere)).expect_err("not there"));
        assert_eq!(text, "`mke2fs` is not installed: install the package e2fsprogs");
    }
}
