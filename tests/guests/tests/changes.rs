//! What the host changes in a folder of `ring3 exec` is seen soon, though the guest does not ask for it.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use guests::ring3;
use tempfile::TempDir;

const FILES: usize = 200;
/// Says which of the files it sees changed, and at last how often it has looked.
const SCRIPT: &str = r#"
$| = 1;
sub now { my @s = lstat("files/$_[0]"); @s ? "$s[1] $s[2] $s[7]" : "gone" }
my ($looks, %was) = (0);
$was{$_} = now($_) for 0 .. 199;
open(my $open, "<", "files/199");
my $size = -s $open;
print "ready\n";
until (-e "end") {
    for my $file (0 .. 199) {
        my $is = now($file);
        $looks++;
        next if $is eq $was{$file};
        $was{$file} = $is;
        print "$file\n";
    }
    next if -s $open == $size;
    $size = -s $open;
    print "open $size\n";
}
print "looks $looks\n";
"#;
/// What is promised, and what a test on a busy host waits for.
const SOON: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(20);
/// If the guest asked each 90 ms, it would ask more often in the time that it looks at least.
const QUESTIONS: u64 = 2000;
const LOOKS_FOR: Duration = Duration::from_secs(3);

fn start(kernel: &str, folder: &Path) -> Result<(Child, BufReader<ChildStdout>)> {
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--kernel", kernel, "--timeout", "300", "--", "perl", "-e", SCRIPT]);
    command.current_dir(folder).env("RING3_LOG", "debug").stdin(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut said = BufReader::new(child.stdout.take().context("no standard output")?);
    let mut line = String::new();
    said.read_line(&mut line)?;
    ensure!(line == "ready\n", "{kernel}: {line}");
    Ok((child, said))
}

/// One change of a file, of all kinds in turns.
fn change(folder: &Path, number: usize) -> Result<()> {
    let file = folder.join(format!("files/{number}"));
    match number % 4 {
        0 => fs::write(file, "longer than before")?,
        1 => fs::set_permissions(file, fs::Permissions::from_mode(0o600))?,
        2 => fs::remove_file(file)?,
        _ => {
            let other = folder.join("other");
            fs::write(&other, "another file")?;
            fs::rename(other, file)?;
        }
    }
    Ok(())
}

/// How often the guest has asked the folders' processes for names and attributes, as these say at their end.
fn questions(log: &str) -> u64 {
    let counts = |line: &str, what: &str| {
        let rest = line.split_once(what).map(|(_, rest)| rest.split_whitespace().next());
        rest.flatten().and_then(|number| number.parse::<u64>().ok()).unwrap_or_default()
    };
    let told = log.lines().filter(|line| line.contains(" requests, "));
    told.map(|line| counts(line, "lookup ") + counts(line, "getattr ")).max().unwrap_or(u64::MAX)
}

#[test]
fn a_change_of_the_hosts_is_seen_soon_and_nobody_asks_for_it() -> Result<()> {
    for kernel in ["debian-12", "debian-13", "debian-sid"] {
        let folder = TempDir::new()?;
        fs::create_dir(folder.path().join("files"))?;
        for number in 0..FILES {
            fs::write(folder.path().join(format!("files/{number}")), "x")?;
        }
        let (mut child, mut said) = start(kernel, folder.path())?;
        let begun = Instant::now();
        let mut took = Vec::new();
        for number in 0..16 {
            thread::sleep(SOON);
            let start = Instant::now();
            change(folder.path(), number)?;
            let mut line = String::new();
            // A file that is written is seen once or twice: it is empty before.
            while line.trim() != number.to_string() {
                line.clear();
                ensure!(said.read_line(&mut line)? > 0, "{kernel}: it has ended");
            }
            took.push(start.elapsed());
        }
        // Whoever has a file open sees it grow, wherever it is.
        let away = folder.path().join("away");
        fs::rename(folder.path().join("files/199"), &away)?;
        thread::sleep(SOON);
        for size in ["22", "333"] {
            fs::write(&away, size)?;
            let (mut line, expected) = (String::new(), format!("open {}\n", size.len()));
            while line != expected {
                line.clear();
                ensure!(said.read_line(&mut line)? > 0, "{kernel}: it has ended");
            }
        }
        thread::sleep(LOOKS_FOR.saturating_sub(begun.elapsed()));
        fs::write(folder.path().join("end"), "")?;
        let (mut rest, mut log) = (String::new(), String::new());
        said.read_to_string(&mut rest)?;
        child.stderr.take().context("no standard error")?.read_to_string(&mut log)?;
        ensure!(child.wait()?.success() && rest.contains("looks "), "{kernel}: {rest}{log}");
        took.sort();
        ensure!(took[8] < SOON && took[15] < LONG, "{kernel}: {took:?}");
        let asked = questions(&log);
        ensure!(asked < QUESTIONS, "{kernel}: asked {asked} times; {rest}");
    }
    Ok(())
}
