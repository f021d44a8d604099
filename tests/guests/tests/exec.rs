//! `ring3 exec`: a command under another kernel has its streams, its files, its signals, its status.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::{self, available_parallelism},
};

use anyhow::{Context, Result, ensure};
use guests::{KERNELS, compile, counter, hand_over, ring3};
use tempfile::TempDir;

const TIMEOUT: &str = "400";
const MEMORY: &str = "512M";

fn exec(directory: &Path, script: &str) -> Result<Command> {
    exec_with(&["--memory", MEMORY], directory, script)
}

/// The same, with these options.
fn exec_with(options: &[&str], directory: &Path, script: &str) -> Result<Command> {
    let mut command = Command::new(ring3()?);
    command.arg("exec").args(options);
    command.args(["--timeout", TIMEOUT, "--", "sh", "-c", script]);
    command.current_dir(directory).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

/// Every byte value, in no simple order.
fn noise(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

#[test]
fn streams_files_and_status_are_the_commands() -> Result<()> {
    let directory = TempDir::new()?;
    let private = format!("/etc/ring3-test-{}", std::process::id());
    let script = format!(
        "cat; printf 'to stderr' >&2; pwd > made; uname -r >> made; echo x > {private} || exit 1; \
         cat {private} > /dev/null && sleep 1000 & exit 42"
    );
    let mut child = exec(directory.path(), &script)?.spawn()?;
    let input = noise(1 << 20);
    let mut stdin = child.stdin.take().context("no standard input")?;
    let sent = input.clone();
    let writer = thread::spawn(move || stdin.write_all(&sent));
    let output = child.wait_with_output()?;
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(42), "{:?}: {messages}", output.status);
    ensure!(output.stdout == input, "{} bytes came back", output.stdout.len());
    ensure!(messages == "to stderr", "{messages}");
    writer.join().ok().context("the writer failed")??;
    let made = fs::read_to_string(directory.path().join("made"))?;
    let here = directory.path().canonicalize()?;
    ensure!(made.starts_with(&format!("{}\n6.12.", here.display())), "{made}");
    ensure!(!Path::new(&private).exists(), "the host's files have changed");
    Ok(())
}

/// A number that no patched call has ended the machine.
#[test]
fn bytes_like_a_patched_call_are_no_call() -> Result<()> {
    for isolation in ["fast", "strict"] {
        let directory = TempDir::new()?;
        compile(directory.path(), "likeness", include_str!("likeness.c"), "-O1")?;
        let options = ["--memory", MEMORY, "--guest-isolation", isolation];
        let script = format!("./likeness {:x}", wedge_abi::SITES >> 16);
        let output = exec_with(&options, directory.path(), &script)?.output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success() && said == "9\n", "{isolation}: {output:?}");
    }
    Ok(())
}

/// As on the host, where a program that a shell starts leads no session.
#[test]
fn a_terminal_that_a_command_opens_does_not_hang_it_up() -> Result<()> {
    let (code, said) = compiled("hangup", include_str!("hangup.c"))?;
    ensure!((code, said.as_str()) == (Some(0), "goes on\n"), "{code:?}: {said}");
    Ok(())
}

#[test]
fn a_signal_reaches_the_command() -> Result<()> {
    let directory = TempDir::new()?;
    let script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.1; done";
    let mut child = exec(directory.path(), script)?.spawn()?;
    let mut stdout = BufReader::new(child.stdout.take().context("no standard output")?);
    let mut line = String::new();
    stdout.read_line(&mut line)?;
    ensure!(line == "ready\n", "{line}");
    let pid = child.id().to_string();
    ensure!(Command::new("kill").args(["-TERM", &pid]).status()?.success());
    let mut rest = String::new();
    stdout.read_to_string(&mut rest)?;
    ensure!(rest == "caught\n", "{rest}");
    ensure!(child.wait()?.code() == Some(5));
    Ok(())
}

/// Compiles a program and runs it in a guest of each kernel; what it said, which has to be the same.
fn compiled(name: &str, source: &str) -> Result<(Option<i32>, String)> {
    let directory = TempDir::new()?;
    compile(directory.path(), name, source, "-O1")?;
    let command = format!("./{name}");
    let run = |kernel| said(&["--kernel", kernel, "--memory", MEMORY], directory.path(), &command);
    let first = run(KERNELS[0])?;
    for kernel in &KERNELS[1..] {
        let said = run(kernel)?;
        ensure!(said == first, "{kernel}: {said:?}, {}: {first:?}", KERNELS[0]);
    }
    Ok(first)
}

/// How a command ended in a guest with these options, and what it said.
fn said(options: &[&str], directory: &Path, command: &str) -> Result<(Option<i32>, String)> {
    let output = exec_with(options, directory, command)?.stdin(Stdio::null()).output()?;
    Ok((output.status.code(), String::from_utf8(output.stdout)?))
}

/// Each interrupt comes once: one that is lost is the last one, since the timer is set anew by its handler.
#[test]
fn no_interrupt_is_lost_among_system_calls() -> Result<()> {
    let (code, said) = compiled("ticks", include_str!("ticks.c"))?;
    ensure!(code == Some(0) && said == "4000 ticks\n", "{code:?}: {said}");
    Ok(())
}

/// By string instructions, whose faults come to the guest's kernel without the monitor, in the midst of them.
#[test]
fn the_kernel_copies_to_memory_that_nobody_has_touched() -> Result<()> {
    let (code, said) = compiled("fresh", include_str!("fresh.c"))?;
    ensure!(code == Some(0) && said == "3000 rounds\n", "{code:?}: {said}");
    let directory = TempDir::new()?;
    compile(directory.path(), "fresh", include_str!("fresh.c"), "-O1")?;
    let options = ["--memory", MEMORY, "--guest-isolation=fast", "--stats"];
    let output = exec_with(&options, directory.path(), "./fresh")?.output()?;
    let messages = String::from_utf8_lossy(&output.stderr);
    let of = |name| counter(&messages, name);
    let (with, without) = (of("kernel signals")?, of("fast page faults")?);
    ensure!(with < without, "{with} faults with the monitor, {without} without");
    Ok(())
}

#[test]
fn low_memory_is_the_programs() -> Result<()> {
    let directory = TempDir::new()?;
    compile(directory.path(), "low", include_str!("low.c"), "-O1")?;
    for how in [&[][..], &["--guest-isolation=fast"], &["--guest-isolation=strict"]] {
        let mut guest = Command::new(ring3()?);
        // With one CPU another program runs between a call and the instruction behind it.
        guest.args(["exec", "--cpus=1", "--memory", MEMORY, "--timeout", TIMEOUT]);
        guest.args(how).args(["--", "./low"]);
        let output = guest.current_dir(directory.path()).stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let right = output.status.success() && said == "the memory is the program's\n";
        ensure!(right, "{how:?}: {:?}: {said}", output.status);
    }
    Ok(())
}

/// At addresses that the engine likes, at random ones, and in every 32 MiB of 1.9 TiB: by itself, by the kernel, executed.
#[test]
fn memory_anywhere_is_the_programs() -> Result<()> {
    // On one vCPU. On another, where the program has had no memory, it would find the engine's (CAVEATS.md).
    let command = "taskset -c 0 ./places 500 1 1";
    let directory = TempDir::new()?;
    compile(directory.path(), "places", include_str!("places.c"), "-O1")?;
    let (code, said) = said(&["--memory", "1G"], directory.path(), command)?;
    ensure!(code == Some(0) && said.ends_with(" 0 wrong\n"), "{code:?}: {said}");
    Ok(())
}

/// Memory is given to the thread that has asked for it, whoever goes on first: nothing is in the engine's way, and nothing interpreted.
#[test]
fn registers_of_another_thread_give_no_memory() -> Result<()> {
    let directory = TempDir::new()?;
    compile(directory.path(), "waits", include_str!("waits.c"), "-O1 -pthread")?;
    // With one CPU the other thread goes on while the call waits.
    let options = ["--engine=fast", "--guest-isolation=fast", "--cpus=1", "--stats"];
    let output = exec_with(&options, directory.path(), "./waits 20")?.output()?;
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && output.stdout == b"0 failed\n", "{output:?}");
    ensure!(counter(&messages, "instructions")? < 5_000_000, "{messages}");
    ensure!(counter(&messages, "moves out of a program's way")? == 0, "{messages}");
    Ok(())
}

/// Machines inside of each other have their wedges at different addresses: each is fast.
#[test]
fn ring3_runs_in_ring3() -> Result<()> {
    says("two deep\n", &["--memory=2G"], &within("echo two deep", "1G")?)
}

/// Three deep without protection keys: with them each write to code costs so much that it takes minutes (CAVEATS.md).
#[test]
#[ignore = "minutes"]
fn ring3_runs_in_ring3_in_ring3() -> Result<()> {
    let three_deep = within(&within("echo three deep", "384M")?, "1G")?;
    says("three deep\n", &["--memory=2G", "--guest-isolation=fast"], &three_deep)
}

/// A command that runs a command in a machine.
fn within(command: &str, memory: &str) -> Result<String> {
    let ring3 = ring3()?;
    let ring3 = ring3.to_str().context("a path")?;
    let options = format!("--engine fast --cpus 1 --memory {memory} --timeout {TIMEOUT}");
    Ok(format!("{ring3} exec {options} -- {command}"))
}

/// A machine that runs such a command says this and nothing else.
fn says(expected: &str, options: &[&str], script: &str) -> Result<()> {
    let mut outer = Command::new(ring3()?);
    outer.args(["exec", "--engine=fast", "--cpus=1", "--timeout", TIMEOUT]).args(options);
    let output = outer.args(["--", "sh", "-c", script]).stdin(Stdio::null()).output()?;
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{:?}: {messages}", output.status);
    ensure!(output.stdout == expected.as_bytes() && messages.is_empty(), "{output:?}");
    Ok(())
}

#[test]
fn tables_among_code_are_read_as_written() -> Result<()> {
    let (code, said) = compiled("mixed", include_str!("mixed.c"))?;
    ensure!(code == Some(0) && said == "what was written is read\n", "{code:?}: {said}");
    Ok(())
}

/// The makers of CPUs differ in how much they fetch of what they refuse: a guest is as its host.
#[test]
fn what_is_undefined_at_a_page_s_end_is_as_on_the_host() -> Result<()> {
    let directory = TempDir::new()?;
    let program = compile(directory.path(), "ends", include_str!("ends.c"), "-O1")?;
    let native = Command::new(program).output()?;
    let guest = exec(directory.path(), "./ends")?.stdin(Stdio::null()).output()?;
    ensure!(native.status.success() && guest.status.success(), "{native:?} {guest:?}");
    let [native, guest] =
        [native, guest].map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    ensure!(native.lines().count() > 1000, "{native}");
    let pairs = native.lines().zip(guest.lines());
    let different: Vec<_> = pairs.filter(|(native, guest)| native != guest).take(10).collect();
    ensure!(different.is_empty() && native.len() == guest.len(), "{different:#?}");
    Ok(())
}

/// Where the host gives CPUID no way to fault, and where calls are made often, what runs are changed copies.
#[test]
fn code_is_read_as_it_is_in_its_file() -> Result<()> {
    let (code, said) = compiled("text", include_str!("text.c"))?;
    ensure!(code == Some(0) && said.ends_with("all were the same\n"), "{code:?}: {said}");
    Ok(())
}

/// The kernel reads RAM, whatever user code executes.
#[test]
fn code_is_written_as_it_is_in_its_file() -> Result<()> {
    let (code, said) = compiled("written", include_str!("written.c"))?;
    ensure!(code == Some(0) && said.ends_with(" ways, all the file's\n"), "{code:?}: {said}");
    Ok(())
}

/// git, make, cargo and npm; and the host sees what they made.
#[test]
fn builds_work_in_a_shared_folder() -> Result<()> {
    let directory = TempDir::new()?;
    let cargo = env!("CARGO");
    let script = format!("CARGO={cargo}\n{}", include_str!("../programs/builds.sh"));
    let output = exec(directory.path(), &script)?.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && output.stdout.ends_with(b"all built\n"), "{said}");
    if said.contains("without npm") {
        eprintln!("SKIPPED IN PART: npm is not installed; install the package npm");
    }
    let mut git = Command::new("git");
    git.args(["-c", "safe.directory=*", "status", "--short"]);
    let status = git.current_dir(directory.path().join("project")).output()?;
    ensure!(status.status.success() && status.stdout.is_empty(), "{status:?}");
    let built = Command::new(directory.path().join("crate/target/debug/hello")).output()?;
    ensure!(built.stdout == b"35\n", "{built:?}");
    Ok(())
}

/// The host's root is kept as it was first seen, unless the command is to look again.
#[test]
fn a_file_of_the_root_is_kept_or_looked_at_again() -> Result<()> {
    for (option, expected) in [("--devices=processes", "old"), ("--fresh", "other")] {
        let (here, outside) = (TempDir::new()?, TempDir::new()?);
        let file = outside.path().join("file");
        fs::write(&file, "old")?;
        let shown = file.display();
        let script = format!("cat {shown}; echo; read go; sleep 2; cat {shown}");
        let mut command = Command::new(ring3()?);
        command.args(["exec", option, "--timeout", TIMEOUT, "--", "sh", "-c", &script]);
        command.current_dir(here.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        ensure!(line == "old\n", "{option}: {line}");
        fs::write(&file, "other")?;
        child.stdin.take().context("no standard input")?.write_all(b"go\n")?;
        let mut rest = String::new();
        stdout.read_to_string(&mut rest)?;
        ensure!(rest == expected && child.wait()?.success(), "{option}: {rest}");
    }
    Ok(())
}

/// Linux since 6.6 asks for all that statx tells by a request that folders do not answer.
#[test]
fn files_of_the_root_are_what_the_host_says_they_are() -> Result<()> {
    const QUESTIONS: &str = "for file in /etc/passwd /usr/bin /usr/bin/sh /etc/mtab; do \
         stat $file > /dev/null && stat -c '%n %s %Y %a %u %F' $file || exit; done; \
         sync -f /etc/passwd && flock -s /etc/passwd true 2>&1";
    let asked = Command::new("sh").args(["-c", QUESTIONS]).output()?;
    for kernel in KERNELS {
        let guest = exec_with(&["--kernel", kernel], Path::new("/"), QUESTIONS)?.output()?;
        ensure!(guest == asked, "{kernel}: {guest:?}, the host: {asked:?}");
    }
    Ok(())
}

#[test]
fn a_command_that_is_not_there_is_127() -> Result<()> {
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--timeout", TIMEOUT, "--", "no-such-command"]);
    let output = command.stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(127), "{:?}: {said}", output.status);
    ensure!(said.trim() == "ring3: no-such-command: command not found", "{said}");
    Ok(())
}

/// Nobody's user.
const NOBODY: u32 = 65_534;

/// A folder that an ordinary user can work in, with a ring3, a kernel, a file of somebody else's, and that user's number.
struct Ordinary {
    directory: TempDir,
    user: u32,
}

impl Ordinary {
    fn new() -> Result<Self> {
        let directory = TempDir::new()?;
        let inside = |name: &str| directory.path().join(name);
        hand_over(directory.path())?;
        fs::write(inside("secret"), "secret")?;
        fs::set_permissions(inside("secret"), fs::Permissions::from_mode(0o600))?;
        fs::create_dir(inside("work"))?;
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755))?;
        let own = fs::metadata(inside("secret"))?.uid();
        let user = if own == 0 { NOBODY } else { own };
        chown(inside("work"), Some(user), (own == 0).then_some(NOBODY))?;
        Ok(Self { directory, user })
    }

    fn inside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn tester_is_root(&self) -> Result<bool> {
        Ok(fs::metadata(self.inside("secret"))?.uid() == 0)
    }
}

/// An ordinary user has all of it, without a capability, and keeps to that user's rights on both sides.
#[test]
fn an_ordinary_user_needs_no_capability() -> Result<()> {
    let ordinary = Ordinary::new()?;
    let (inside, user) = (|name: &str| ordinary.inside(name), ordinary.user);
    let is_root = ordinary.tester_is_root()?;

    let mut setpriv = Command::new("setpriv");
    setpriv.args(["--no-new-privs", "--inh-caps=-all"]);
    if is_root {
        setpriv.args(["--bounding-set=-all", "--clear-groups"]);
        setpriv.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")]);
    }
    let script = "id -u; grep CapEff /proc/self/status; echo made > made; cat ../secret; touch /etc/private && echo private";
    setpriv.arg(inside("ring3")).args(["exec", "--memory", "512M", "--timeout", TIMEOUT, "--"]);
    setpriv.args(["sh", "-c", script]).current_dir(inside("work"));
    let output = setpriv.env("XDG_CACHE_HOME", inside("cache")).stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(said.starts_with(&format!("{user}\nCapEff:\t0000000000000000\n")), "{said}{messages}");
    ensure!(!is_root || !said.contains("secret"), "{said}");
    ensure!(!messages.contains("ERROR") && !messages.contains("not permitted"), "{messages}");
    ensure!(!said.contains("private"), "/etc is root's in the guest, too: {said}");
    let made = fs::metadata(inside("work/made"))?;
    ensure!(made.uid() == user, "it belongs to {}", made.uid());
    Ok(())
}

/// Root under sudo becomes who called, groups, home and all, in front of the guest; and an ordinary user stays.
#[test]
fn under_sudo_the_machine_is_the_callers() -> Result<()> {
    let ordinary = Ordinary::new()?;
    let (is_root, user) = (ordinary.tester_is_root()?, ordinary.user);
    let mut command = Command::new(ordinary.inside("ring3"));
    command.args(["exec", "--root", "--memory", "512M", "--timeout", TIMEOUT]);
    if is_root {
        command.env("SUDO_UID", user.to_string());
    } else {
        command.args(["--user", &user.to_string()]);
    }
    command.args(["--", "sh", "-c", "id -u; echo $USER; cat ../secret; echo made > made"]);
    command.env("USER", "another").current_dir(ordinary.inside("work"));
    command.env("XDG_CACHE_HOME", ordinary.inside("cache"));
    let output = command.stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let messages = String::from_utf8_lossy(&output.stderr);
    let told = "as nobody, who called sudo (--as-root keeps root's rights)";
    ensure!(messages.contains(told) == is_root, "{messages}");
    ensure!(!is_root || said == "0\nnobody\n", "{said}{messages}");
    let made = fs::metadata(ordinary.inside("work/made"))?;
    ensure!(made.uid() == user, "it belongs to {}: {messages}", made.uid());
    Ok(())
}

/// Programs have the same addresses each time, and random ones if somebody asks for that.
#[test]
fn programs_are_at_the_same_addresses_unless_asked() -> Result<()> {
    let folder = TempDir::new()?;
    let script = "stacks() { for n in 1 2 3 4; do grep -F '[stack]' /proc/self/maps; done | sort -u | wc -l; }
                  stacks; echo 2 > /proc/sys/kernel/randomize_va_space; stacks";
    let output = exec_with(&["--root"], folder.path(), script)?.output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said == "1\n4\n", "{said}{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Linux since 6.8 can answer a first touch with more than a page. Not where its command line says otherwise.
#[test]
fn memory_is_handed_out_in_pieces_where_the_kernel_can() -> Result<()> {
    const PIECES: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB";
    let script = format!(
        "head -c 4000000 /dev/zero | tail -c 4000000 > /dev/null; cat {PIECES}/enabled {PIECES}/stats/anon_fault_alloc"
    );
    for (append, means) in [("quiet", "inherit"), ("thp_anon=16K:always", "never")] {
        let options = ["--kernel=debian-13", "--append", append];
        let output = exec_with(&options, Path::new("/"), &script)?.output()?;
        let said = String::from_utf8(output.stdout)?;
        let (setting, pieces) = said.trim_end().split_once('\n').context("two lines")?;
        ensure!(setting.contains(&format!("[{means}]")), "{append}: {said}");
        ensure!((pieces.parse::<u32>()? != 0) == (means == "inherit"), "{append}: {said}");
    }
    Ok(())
}

/// By their defaults Linux 7.2 ends each turn of a process by a timer, and every Linux interrupts a busy CPU for each program that another
/// CPU wakes there.
#[test]
fn the_scheduler_spares_interrupts() -> Result<()> {
    const FEATURES: &str =
        "mount -t debugfs none /sys/kernel/debug && cat /sys/kernel/debug/sched/features";
    for kernel in KERNELS {
        let options = ["--kernel", kernel];
        let output = exec_with(&options, Path::new("/"), FEATURES)?.output()?;
        let features = String::from_utf8(output.stdout)?;
        let has = |wanted: &str| features.split_whitespace().any(|feature| feature == wanted);
        ensure!(has("NO_TTWU_QUEUE"), "{kernel}: {features}");
        ensure!(has("NO_HRTICK") || kernel != "debian-sid", "{kernel}: {features}");
    }
    Ok(())
}

/// An idle CPU looks for work for a while before it halts. A machine's only CPU halts at once, and so do CPUs that outnumber the host's.
#[test]
fn idle_cpus_look_before_they_halt() -> Result<()> {
    const ASK: &str = "cat /sys/devices/system/cpu/cpuidle/current_driver";
    let hosts = available_parallelism()?.get();
    for cpus in [1, 2, (hosts + 1).min(16)] {
        for offered in ["auto", "eoi"] {
            let looks = (2..=hosts).contains(&cpus) && offered == "auto";
            let cpus = format!("--cpus={cpus}");
            let options = ["--kernel=debian-13", &cpus, "--paravirt", offered];
            let driver =
                String::from_utf8(exec_with(&options, Path::new("/"), ASK)?.output()?.stdout)?;
            let expected = if looks { "haltpoll\n" } else { "none\n" };
            ensure!(driver == expected, "{cpus}, {offered}: {driver}");
        }
    }
    Ok(())
}
