//! A folder of the host in a guest: read, written, seen from both sides, and read-only where asked.

use std::{env, fs, os::unix::fs::MetadataExt, process::Command};

use anyhow::{Result, bail, ensure};
use guests::{Guest, Machine, ring3};
use tempfile::TempDir;
use xtask::{assets::Kernel, command::output};

const SCRIPT: &str = r"
mkdir -p /work /lib
mount -t virtiofs work /work && echo mounted
cat /work/greeting
seq 1 100000 > /work/numbers; md5sum < /work/numbers
mkdir -p /work/deep/er && mv /work/numbers /work/deep/er/ && ln -s er/numbers /work/deep/link
md5sum < /work/deep/link
chmod 750 /work/deep/er/numbers
echo more >> /work/greeting; rm /work/doomed
ls /work | sort | tr '\n' ' '; echo
i=0; while [ $i -lt 200 ]; do echo $i > /work/deep/f$i; i=$((i+1)); done; ls /work/deep | wc -l
mount -t virtiofs lib /lib && cat /lib/greeting
echo x > /lib/new || echo cannot write
rm /lib/greeting || echo cannot remove
cat /work/outside 2>/dev/null || echo the link leads nowhere
umount /work && echo unmounted
";

/// MD5 of the numbers 1 to 100000, one a line.
const SUM: &str = "dea9193b768319cbb4ff1a137ac03113  -";

const ORPHANED: &str = "
mkdir -p /work
mount -t virtiofs work /work && cat /work/greeting
exec 3</work/numbers && echo opened
read line
cat /work/other || echo cannot read
ls /work/folder || echo cannot list
cat <&3 >/dev/null || echo cannot go on reading
mount -t tmpfs none /mnt && echo the rest goes on
";

/// Whoever serves a folder is killed: its files are errors, and nothing else is.
#[test]
fn a_folder_whose_process_is_killed_is_an_error() -> Result<()> {
    let folder = TempDir::new()?;
    for (name, content) in [("greeting", "hello\n"), ("other", "other\n"), ("numbers", "1\n")] {
        fs::write(folder.path().join(name), content)?;
    }
    fs::create_dir(folder.path().join("folder"))?;
    let guest = Guest::new(Kernel::BookwormCloud).runs(ORPHANED);
    let share = format!("{}:work", folder.path().display());
    let mut machine = Machine::start(&guest.with("--share").with(&share))?;
    machine.says("hello")?;
    machine.says("opened")?;
    let [server] = machine.processes("share")?[..] else { bail!("not one process serves it") };
    output(Command::new("kill").args(["-KILL", &server.to_string()]))?;
    machine.hears("")?;
    for line in ["cannot read", "cannot list", "cannot go on reading", "the rest goes on"] {
        machine.says(line)?;
    }
    machine.says("init: script ended with 0")?;
    ensure!(machine.ends()?.success());
    Ok(())
}

#[test]
fn a_folder_is_shared_both_ways() -> Result<()> {
    let (directory, library) = (TempDir::new()?, TempDir::new()?);
    let work = directory.path().join("work");
    fs::create_dir(&work)?;
    fs::write(directory.path().join("secret"), "secret\n")?;
    fs::write(work.join("greeting"), "hello\n")?;
    fs::write(work.join("doomed"), "")?;
    std::os::unix::fs::symlink("../secret", work.join("outside"))?;
    fs::write(library.path().join("greeting"), "read me\n")?;

    let guest = Guest::new(Kernel::BookwormCloud).runs(SCRIPT);
    let guest = guest.with("--share").with(&format!("{}:work", work.display()));
    let guest = guest.with("--share").with(&format!("{}:lib:ro", library.path().display()));
    let finished = guest.boots()?;
    finished.prints(&[
        "mounted",
        "hello",
        SUM,
        SUM,
        "deep greeting outside",
        "202",
        "read me",
        "cannot write",
        "cannot remove",
        "the link leads nowhere",
        "unmounted",
    ])?;
    finished.powers_off()?;

    ensure!(fs::read_to_string(work.join("greeting"))? == "hello\nmore\n");
    ensure!(fs::metadata(work.join("deep/link"))?.mode() & 0o7777 == 0o750);
    ensure!(!work.join("doomed").exists());
    ensure!(fs::read_to_string(library.path().join("greeting"))? == "read me\n");
    Ok(())
}

/// fsx, pjdfstest and stress-ng in the folder that `exec` shares for writing. `SUITES` names the folder they are in, `SECONDS_EACH` how long
/// fsx runs (60).
#[test]
#[ignore = "minutes, and suites to install: SUITES names their folder"]
fn suites_of_file_systems() -> Result<()> {
    let folder = TempDir::new()?;
    let suites = env::var("SUITES").unwrap_or_else(|_| "/usr/local/bin".to_owned());
    let seconds = env::var("SECONDS_EACH").unwrap_or_else(|_| "60".to_owned());
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--root", "--env", &format!("SUITES={suites}")]);
    command.args(["--env", &format!("SECONDS_EACH={seconds}"), "--", "sh", "-c"]);
    command.arg(include_str!("../programs/file_suites.sh"));
    let said = command.current_dir(folder.path()).output()?;
    let said = format!("{}{}", output_of(&said.stdout), output_of(&said.stderr));
    ensure!(said.ends_with("all suites passed\n"), "{said}");
    Ok(())
}

fn output_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
