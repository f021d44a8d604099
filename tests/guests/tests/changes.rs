//! A guest of `ring3 exec` soon sees what the host changes in the current folder. Files that have not changed are not asked for again.

use std::{
    fmt::Write as _,
    fs::{self, Permissions},
    io::{BufRead, BufReader, Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use guests::{KERNELS, ring3};
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
/// Changes files by chance for a while, or says what there is.
const CHANGES: &str = r#"
$| = 1;
my @names = map { my $folder = $_; map { "$folder/$_" } "a" .. "d" } ".", "p", "q", "p/r";
sub any { $names[rand @names] }
sub put { my ($path, $how) = @_; open(my $file, $how, $path) or return; print $file "g" x rand 5000 }
my @ops = (
    sub { put(any(), ">") }, sub { put(any(), ">>") }, sub { unlink any() }, sub { rename any(), any() },
    sub { link any(), any() }, sub { chmod 0600 + rand 64, any() }, sub { rename "q", "moved"; mkdir "q" },
    sub { my $new = any() . ".g"; put($new, ">"); rename $new, any() },
    sub { lstat $_ for @names }, sub { lstat $_ for @names }, sub { open(my $file, "<", any()) and <$file> },
);
sub all {
    my ($folder) = @_;
    opendir(my $open, $folder) or return;
    for my $name (sort readdir $open) {
        next if $name =~ /^\.\.?$/;
        my $path = "$folder/$name";
        my @is = lstat $path;
        my $sum = 0;
        if (-f _ and open(my $file, "<", $path)) { local $/; $sum = unpack("%32C*", <$file> // "") }
        printf "%s %d %o %d %d %d\n", $path, @is[1, 2, 3, 9], $sum;
        all($path) if -d $path;
    }
}
srand 1;
while (my $line = <STDIN>) {
    if ($line eq "change\n") {
        $ops[rand @ops]->() for 1 .. 1500;
    } else {
        all(".");
    }
    print "done\n";
}
"#;
/// What is promised, and what a test on a busy host waits for.
const SOON: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(20);
/// If the guest asked each 90 ms, it would ask more often in the time that it looks at least.
const QUESTIONS: u64 = 2000;
const LOOKS_FOR: Duration = Duration::from_secs(3);

fn exec(kernel: &str, folder: &Path, script: &str) -> Result<(Child, BufReader<ChildStdout>)> {
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--root", "--kernel", kernel, "--timeout", "300", "--"]);
    command.args(["perl", "-e", script]).current_dir(folder).env("RING3_LOG", "debug");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let said = BufReader::new(child.stdout.take().context("no standard output")?);
    Ok((child, said))
}

fn start(kernel: &str, folder: &Path) -> Result<(Child, BufReader<ChildStdout>)> {
    let (child, mut said) = exec(kernel, folder, SCRIPT)?;
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
        1 => fs::set_permissions(file, Permissions::from_mode(0o600))?,
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
    for kernel in KERNELS {
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

fn any_path(folder: &Path, chance: &mut Rng) -> PathBuf {
    let inner = [".", "p", "q", "p/r"][chance.usize(..4)];
    folder.join(inner).join(["a", "b", "c", "d"][chance.usize(..4)])
}

/// The host changes something by chance. What is not there cannot be changed.
fn host_changes(folder: &Path, chance: &mut Rng) {
    let (one, other) = (any_path(folder, chance), any_path(folder, chance));
    let content = vec![b'h'; chance.usize(..5000)];
    let _ = match chance.usize(..8) {
        0 | 1 => fs::write(one, content),
        2 => fs::remove_file(one),
        3 => fs::rename(one, other),
        4 => fs::hard_link(one, other),
        5 => fs::set_permissions(one, Permissions::from_mode(0o600 + chance.usize(..64) as u32)),
        6 => fs::rename(folder.join("moved"), folder.join("p/back")),
        _ => {
            let new = one.with_extension("h");
            fs::write(&new, content).and_then(|()| fs::rename(new, other))
        }
    };
}

/// All there is, as the guest says it.
fn all(folder: &Path, shown: &str, to: &mut String) -> Result<()> {
    let mut names = fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    names.sort_by_key(fs::DirEntry::file_name);
    for entry in names {
        let path = format!("{shown}/{}", entry.file_name().to_string_lossy());
        let is = entry.metadata()?;
        let content = if is.is_file() { fs::read(entry.path())? } else { Vec::new() };
        let sum: u64 = content.iter().map(|byte| u64::from(*byte)).sum();
        let (ino, mode, names, changed) = (is.ino(), is.mode(), is.nlink(), is.mtime());
        writeln!(to, "{path} {ino} {mode:o} {names} {changed} {sum}")?;
        if is.is_dir() {
            all(&entry.path(), &path, to)?;
        }
    }
    Ok(())
}

/// What the guest says until it is done.
fn answer(said: &mut impl BufRead) -> Result<String> {
    let mut all = String::new();
    while !all.ends_with("done\n") {
        ensure!(said.read_line(&mut all)? > 0, "it has ended: {all}");
    }
    Ok(all.trim_end_matches("done\n").to_owned())
}

#[test]
fn guest_and_host_change_a_folder_and_see_the_same() -> Result<()> {
    for kernel in KERNELS {
        let folder = TempDir::new()?;
        fs::create_dir_all(folder.path().join("p/r"))?;
        fs::create_dir(folder.path().join("q"))?;
        let (mut child, mut said) = exec(kernel, folder.path(), CHANGES)?;
        let mut orders = child.stdin.take().context("no standard input")?;
        let mut chance = Rng::with_seed(1);
        for round in 0..8 {
            orders.write_all(b"change\n")?;
            for _ in 0..300 {
                host_changes(folder.path(), &mut chance);
                thread::sleep(Duration::from_millis(1));
            }
            answer(&mut said)?;
            thread::sleep(3 * SOON);
            orders.write_all(b"say\n")?;
            let (theirs, mut ours) = (answer(&mut said)?, String::new());
            all(folder.path(), ".", &mut ours)?;
            ensure!(!ours.is_empty() && ours == theirs, "{kernel}, {round}: {theirs}\nnot {ours}");
        }
        drop(orders);
        ensure!(child.wait()?.success(), "{kernel}");
    }
    Ok(())
}
