//! Running other programs, with errors that say what to do.

use std::{
    ffi::OsStr,
    io::{self, BufRead, BufReader, ErrorKind, Read},
    path::Path,
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use crate::interrupt::Worker;

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
    let mut text = Vec::new();
    let copy = |stdout: &mut ChildStdout| stdout.read_to_end(&mut text).map(drop);
    attend(command, &name, copy)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Runs to the end, telling `hear` of each line of standard output when it comes.
///
/// # Errors
/// As for [`output`].
pub fn watch(command: &mut Command, mut hear: impl FnMut(&str)) -> Result<()> {
    let name = name_of(command);
    attend(command, &name, |stdout| {
        BufReader::new(stdout).lines().try_for_each(|line| line.map(|line| hear(&line)))
    })
}

/// Runs to the end, with `read` for its standard output.
fn attend(
    command: &mut Command,
    name: &str,
    read: impl FnOnce(&mut ChildStdout) -> io::Result<()>,
) -> Result<()> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut worker = started(Worker::start(command), name)?;
    let said = said(&mut worker.0)?;
    worker.0.stdout.as_mut().map_or(Ok(()), read)?;
    let said = said.join().unwrap_or_default();
    succeeded(name, worker.0.wait()?, &said)
}

/// Collects what a program says on standard error.
fn said(child: &mut Child) -> Result<thread::JoinHandle<String>> {
    let stderr = child.stderr.take();
    let listen = move || {
        // What cannot be read explains nothing.
        stderr.and_then(|stderr| io::read_to_string(stderr).ok()).unwrap_or_default()
    };
    thread::Builder::new().name("said".into()).spawn(listen).context("cannot start a thread")
}

fn started<T>(outcome: io::Result<T>, name: &str) -> Result<T> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NotFound => bail!(missing(name)),
        other => other.with_context(|| format!("cannot run `{name}`")),
    }
}

fn succeeded(name: &str, status: ExitStatus, said: &str) -> Result<()> {
    if !status.success() {
        bail!("`{name}` failed ({status}): {}", said.trim());
    }
    Ok(())
}

/// Runs with our own standard streams.
///
/// # Errors
/// The program is missing or failed.
pub fn run(command: &mut Command) -> Result<()> {
    let name = name_of(command);
    match started(command.status(), &name)? {
        status if !status.success() => bail!("`{name}` failed ({status})"),
        _ => Ok(()),
    }
}

fn name_of(command: &Command) -> String {
    let program = Path::new(command.get_program());
    program.file_name().unwrap_or(OsStr::new("program")).to_string_lossy().into_owned()
}

/// A spinner that says what takes so long, and how long it has taken; it appears on terminals only.
pub fn progress(message: impl Into<String>) -> ProgressBar {
    shown(ProgressBar::new_spinner(), "{spinner} {msg} ({elapsed})", message.into())
}

/// A bar of 100 steps for what is known to come to an end; it appears on terminals only.
pub fn percentage(message: impl Into<String>) -> ProgressBar {
    shown(ProgressBar::new(100), "{msg} [{bar:30}] {percent} % ({elapsed})", message.into())
}

fn shown(bar: ProgressBar, template: &str, message: String) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_spinner()).progress_chars("=> ");
    let bar = bar.with_style(style).with_message(message);
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
    fn lines_are_heard_and_failures_carry_what_was_said() {
        let mut heard = Vec::new();
        let script = "echo one; echo because >&2; echo two; exit $0";
        watch(Command::new("sh").args(["-c", script, "0"]), |line| heard.push(line.to_owned()))
            .expect("it succeeds");
        assert_eq!(heard, ["one", "two"]);
        let error = watch(Command::new("sh").args(["-c", script, "3"]), |_| {});
        assert!(format!("{:#}", error.expect_err("it fails")).contains("because"));
    }

    #[test]
    fn a_missing_program_names_its_package() {
        let directory = tempfile::tempdir().expect("a directory");
        let nowhere = directory.path().join("mke2fs");
        let text = format!("{:#}", output(&mut Command::new(nowhere)).expect_err("not there"));
        assert_eq!(text, "`mke2fs` is not installed: install the package e2fsprogs");
    }
}
