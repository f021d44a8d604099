//! `ring3 trace` beside strace in the guest: both tell the same calls of the same threads, with the same results.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use guests::{KERNELS, compile, ring3};
use tempfile::TempDir;

/// A shell and Python, each with children and files.
const SCRIPT: &str = "\
for i in 1 2; do (echo $i; cat /etc/hostname) > /dev/null; done; ls /nowhere 2> /dev/null
python3 -c 'import os; os.listdir(\"/\"); print(open(\"/etc/hostname\").read())' > /dev/null";

/// A compiler, which has children and many files.
const COMPILER: &str = "\
printf '#include <stdio.h>\\nint main(void) { puts(\"1\"); return 0; }\\n' > one.c
gcc -O2 -o one one.c; ./one > /dev/null";
/// A program of many threads.
const THREADS: &str = "javac Threads.java && java -Xmx128m Threads > /dev/null";
const JAVA: &str = "\
import java.util.concurrent.*;
public class Threads {
    public static void main(String[] words) throws Exception {
        var pool = Executors.newFixedThreadPool(8);
        var sums = new ConcurrentLinkedQueue<Future<Long>>();
        for (int n = 0; n < 64; n++) {
            final int own = n;
            sums.add(pool.submit(() -> {
                Thread.sleep(own % 5);
                return java.nio.file.Files.size(java.nio.file.Path.of(\"/etc/hostname\")) + own;
            }));
        }
        for (var sum : sums) System.out.println(sum.get());
        pool.shutdown();
    }
}
";

/// A script that makes each system call of Linux 6.1, by its number, with arguments that mean nothing. It leaves out the calls that end,
/// stop or copy the caller, that wait, and that take the caller's terminal; and 335, for which Linux since 6.11 ends whoever calls it
/// from elsewhere than it has said (`uretprobe`).
const EVERY_CALL: &str = "\
/usr/bin/python3 -c '
import ctypes
call = ctypes.CDLL(None).syscall
without = {15, 34, 56, 57, 58, 60, 127, 130, 153, 231, 335, 435}
for number in range(0, 451):
    if number not in without:
        call(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
'";

/// Name and result of each call, by thread.
type Calls = BTreeMap<u32, Vec<(String, String)>>;

/// What strace has written. Calls that another thread's were printed into come in two parts.
fn of_strace(text: &str) -> Calls {
    let mut calls = Calls::new();
    let mut begun: BTreeMap<u32, String> = BTreeMap::new();
    for line in text.lines() {
        let Some((tid, line)) = line.split_once(' ') else { continue };
        let (Ok(tid), mut line) = (tid.parse(), line.trim_start().to_owned()) else { continue };
        if let Some((first, _)) = line.split_once(" <unfinished ...>") {
            begun.insert(tid, first.to_owned());
            continue;
        }
        if let Some((_, rest)) = line.split_once(" resumed>") {
            line = begun.remove(&tid).unwrap_or_default() + rest;
        }
        let (Some((name, _)), Some((_, result))) = (line.split_once('('), line.rsplit_once(" = "))
        else {
            continue; // a signal, or an end
        };
        let result = result.split([' ', '(']).take(2).collect::<Vec<_>>().join(" ");
        calls.entry(tid).or_default().push((name.to_owned(), outcome(&result)));
    }
    calls
}

/// What `ring3 trace --format json` has written.
fn of_ring3(text: &str) -> Result<Calls> {
    let mut calls = Calls::new();
    for line in text.lines() {
        let event: serde_json::Value = serde_json::from_str(line)?;
        let tid = event["tid"].as_u64().context("no thread")? as u32;
        let word = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
        calls.entry(tid).or_default().push((word("name"), outcome(&word("result"))));
    }
    Ok(calls)
}

/// An error by its name, any other result as one word; addresses and numbers may be written in two ways.
fn outcome(result: &str) -> String {
    let mut words = result.split_whitespace();
    match (words.next(), words.next()) {
        (Some("-1" | "?"), Some(name)) => name.to_owned(),
        (Some(word), _) => {
            match word.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16)) {
                Some(Ok(number)) => number.to_string(),
                _ => word.to_owned(),
            }
        }
        (None, _) => String::new(),
    }
}

/// Strace does not know the call's result, because another thread ended the process meanwhile: it was told of no return, or could
/// not read the result any more.
fn is_cut_off(inside: &(String, String)) -> bool {
    matches!(inside.1.as_str(), "?" | "<unavailable>")
}

/// A thread was in this call when another one ended the process. The kernel's function returned, with ERESTART* or with a result, and
/// that is what ring3 sees. Strace is told of a return only if no signal that kills waits by then (`ptrace_stop` of Linux).
fn is_end(inside: &(String, String), outside: &(String, String)) -> bool {
    inside.0 == outside.0 && is_cut_off(inside)
}

/// Whether both tell of a number that is no system call: strace by a name or the number, ring3 by the kernel's one function for these.
fn is_none(inside: &(String, String), outside: &(String, String)) -> bool {
    outside.0 == "ni_syscall" && inside.1 == "ENOSYS" && outside.1 == "ENOSYS"
}

/// What strace and its child do before the program's first call is not what strace traces.
fn agree(tid: u32, inside: &[(String, String)], outside: &[(String, String)]) -> Result<()> {
    let calls_of = |calls: &[(String, String)]| {
        let others = calls.iter().filter(|(name, _)| name != "exit_group" && name != "exit");
        others.cloned().collect::<Vec<_>>()
    };
    let (inside, outside) = (calls_of(inside), calls_of(outside));
    let whole = agree_on(tid, &inside, &outside);
    match inside.split_last() {
        // Strace was told of the call before its function, and by then another thread had ended the process: Linux then leaves the
        // function out (`syscall_trace_enter`), and ring3 sees nothing.
        Some((last, before)) if is_cut_off(last) && whole.is_err() => {
            agree_on(tid, before, &outside).or(whole)
        }
        _ => whole,
    }
}

fn agree_on(tid: u32, wanted: &[(String, String)], outside: &[(String, String)]) -> Result<()> {
    let before = outside.len().checked_sub(wanted.len());
    let before = before.with_context(|| {
        format!("{tid}: {} calls of {}, the last {:?}", outside.len(), wanted.len(), wanted.last())
    })?;
    for (n, (wanted_call, seen)) in wanted.iter().zip(&outside[before..]).enumerate() {
        let ended = n + 1 == wanted.len() && is_end(wanted_call, seen);
        ensure!(
            wanted_call == seen || ended || is_none(wanted_call, seen),
            "{tid}, call {n} of {}: {wanted_call:?} inside, {seen:?} outside",
            wanted.len()
        );
    }
    Ok(())
}

#[test]
fn a_call_that_a_process_has_ended_in_may_have_no_result_and_no_function() {
    let calls = |all: &[(&str, &str)]| -> Vec<(String, String)> {
        all.iter().map(|(name, result)| ((*name).to_owned(), (*result).to_owned())).collect()
    };
    let outside = calls(&[("execve", "0"), ("futex", "0"), ("gettid", "7")]);
    let agrees = |last: &[(&str, &str)]| {
        agree(1, &calls(&[&[("futex", "0"), ("gettid", "7")], last].concat()), &outside).is_ok()
    };
    assert!(agrees(&[]));
    assert!(agrees(&[("futex", "?")]), "it was told of before its function");
    assert!(!agrees(&[("futex", "0")]), "it has returned");
    assert!(!agrees(&[("futex", "?"), ("futex", "?")]), "a thread ends once");
    let unread = calls(&[("futex", "0"), ("gettid", "<unavailable>")]);
    assert!(agree(1, &unread, &outside).is_ok(), "strace came too late for the result");
    let elsewhere = calls(&[("futex", "<unavailable>"), ("gettid", "7")]);
    assert!(agree(1, &elsewhere, &outside).is_err(), "it is not the last");
}

/// What strace says inside of a guest and `ring3 trace` outside is the same, of each thread.
fn both_tell_the_same(script: &str, threads: usize) -> Result<()> {
    let folder = TempDir::new()?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("Threads.java"), JAVA)?;
    fs::write(path("script"), script)?;
    let script = format!("cd {}; strace -f -o inside bash script", path(""));
    let mut command = Command::new(ring3()?);
    command.args(["trace", "-e", "syscall", "--format", "json", "-o", &path("outside"), "--"]);
    command.args(["exec", "--memory", "2G", "--timeout", "300", "--rw", &path("")]);
    command.args(["--", "sh", "-c", &script]).stdin(Stdio::null());
    let output = command.output()?;
    ensure!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let inside =
        fs::read_to_string(path("inside")).context("strace is needed: apt-get install strace")?;
    let (inside, outside) = (of_strace(&inside), of_ring3(&fs::read_to_string(path("outside"))?)?);
    ensure!(inside.len() >= threads, "{} threads", inside.len());
    let calls: usize = inside.values().map(Vec::len).sum();
    println!("{calls} calls of {} threads", inside.len());
    for (tid, calls) in &inside {
        let seen = outside.get(tid).with_context(|| format!("no thread {tid}"))?;
        agree(*tid, calls, seen)?;
    }
    Ok(())
}

#[test]
fn strace_and_ring3_trace_agree_call_by_call() -> Result<()> {
    both_tell_the_same(SCRIPT, 5)
}

#[test]
fn they_agree_on_a_compiler() -> Result<()> {
    both_tell_the_same(COMPILER, 5)
}

#[test]
fn they_agree_on_a_program_of_many_threads() -> Result<()> {
    both_tell_the_same(THREADS, 20)
}

#[test]
fn they_agree_on_every_system_call() -> Result<()> {
    both_tell_the_same(EVERY_CALL, 2)
}

/// Programs of the Linux Test Project: calls of files, memory, processes, signals, waits and sockets, with wrong arguments, too.
const LTP: &str = "\
open01 open08 openat01 read01 read02 write01 write05 close01 dup01 dup201 lseek01 stat01 fstat02 mkdir03 rmdir02 \
unlink05 pipe01 pipe06 fork01 wait401 kill03 getpid01 getppid01 mmap02 munmap01 mprotect01 brk01 chmod01 access01 \
access04 fcntl02 fcntl05 poll01 select01 socket01 bind01 accept01 signal01 clone01 readlink01 symlink02 link02";

/// The programs of a folder and those in it, by name.
fn programs_of(folder: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let mode = entry.metadata()?.permissions().mode();
        match entry.file_type()?.is_dir() {
            true => programs_of(&entry.path(), found)?,
            false if mode & 0o111 == 0 => {}
            false => {
                found.insert(entry.file_name().to_string_lossy().into_owned(), entry.path());
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "minutes, and LTP to build: LTP names the folder of its programs"]
fn they_agree_on_programs_of_ltp() -> Result<()> {
    let folder = env::var_os("LTP").context("LTP names the folder of its programs")?;
    let (mut programs, mut script) = (BTreeMap::new(), String::new());
    programs_of(Path::new(&folder), &mut programs)?;
    // What a kernel is configured for would be read from files and unpacked.
    script += "export KCONFIG_SKIP_CHECK=1 LTPROOT=/tmp TMPDIR=/tmp\n";
    for name in LTP.split_whitespace() {
        let program = programs.get(name).with_context(|| format!("no {name}"))?;
        script += &format!("{} > /dev/null 2>&1\n", program.display());
    }
    both_tell_the_same(&(script + "true\n"), 80)
}

/// Compiles a program that makes no other system calls than its own: there is no library.
const BARE: &str = "-O1 -static -nostdlib -ffreestanding -fno-stack-protector";

/// A program of 32-bit code: it opens a file and reads from it. Then it asks by the entry that the vDSO has for this CPU.
const NARROW: &str = r#"
static long call(long number, long a, long b, long c) {
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c) : "memory");
    return result;
}
__attribute__((used)) static volatile long vdso;
static long fast_call(long number, long a, long b, long c) {
    long result;
    __asm__ volatile("call *vdso" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c), "S"(0) : "memory");
    return result;
}
static char text[16];
static volatile char path[] = "?etc/hostname";
__attribute__((used)) static void run(long *stack) {
    path[0] = '/'; /* the page is there before the call */
    long file = call(5, (long)path, 0, 0);
    call(3, file, (long)text, 4);
    long own = call(20, 0, 0, 0);
    while (*stack++) {} /* arguments: there is one at least, and their number */
    while (*stack++) {} /* the environment */
    for (; stack[0]; stack += 2) {
        if (stack[0] == 32) vdso = stack[1];
    }
    long mapped = fast_call(192, 0, 4096, 3);
    call(1, mapped < 0 && call(6, own, 0, 0) == -9 ? 0 : 1, 0, 0);
}
__asm__(".globl _start\n_start: mov %esp, %eax; push %eax; call run");
"#;

#[test]
fn system_calls_of_32_bit_programs_are_traced() -> Result<()> {
    let folder = TempDir::new()?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    let options = format!("-m32 -fno-pic -no-pie {BARE}");
    compile(folder.path(), "narrow", NARROW, &options)?;
    for (events, read) in [
        ("syscall:open,syscall:read,syscall:close,syscall:getpid,syscall:mmap2", "read(3, \""),
        ("syscall", "read(3, "),
    ] {
        let mut command = Command::new(ring3()?);
        command.args(["trace", "-e", events, "--comm", "narrow", "-o", &path("trace"), "--"]);
        command.args(["exec", "--memory", "512M", "--", &path("narrow")]).stdin(Stdio::null());
        let run = command.output()?;
        ensure!(run.status.success(), "{run:?}");
        let said = fs::read_to_string(path("trace"))?;
        let calls = ["open(\"/etc/hostname\", O_RDONLY) = 3", read, "close(", "getpid() = "];
        for call in calls.into_iter().chain(["mmap2(NULL, 4096, "]) {
            ensure!(said.matches(call).count() == 1, "not one {call} in {said}");
        }
        ensure!(said.matches(") = -1 EBADF").count() == 2, "mmap2 and close: {said}");
    }
    Ok(())
}

/// A program whose system calls begin on one CPU and end on another. It has made no other calls before.
const MOVES: &str = r#"
static long call(long number, long a, long b, long c) {
    __asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return number;
}
void _start(void) {
    for (unsigned long n = 0; n < 3; n++) {
        unsigned long cpus = n % 2 + 1;
        if (call(203, 0, sizeof cpus, (long)&cpus) < 0) call(60, 1, 0, 0);
    }
    call(60, 0, 0, 0);
}
"#;

#[test]
fn system_calls_that_end_on_another_cpu_are_traced() -> Result<()> {
    let folder = TempDir::new()?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    compile(folder.path(), "moves", MOVES, BARE)?;
    let mut command = Command::new(ring3()?);
    command.args(["trace", "-e", "syscall", "--comm", "moves", "-o", &path("trace"), "--"]);
    command.args(["exec", "--memory", "512M", "--cpus", "2", "--", &path("moves")]);
    let run = command.stdin(Stdio::null()).output()?;
    ensure!(run.status.success(), "{run:?}");
    let said = fs::read_to_string(path("trace"))?;
    let ended = said.lines().filter(|line| line.contains("sched_setaffinity(0, 8, "));
    ensure!(ended.filter(|line| line.contains(") = 0 <")).count() == 3, "not three: {said}");
    Ok(())
}

/// Has the kernel count switches and interrupts itself, between two writes that a trace sees, and says how many it counted.
const COUNTED: &str = "\
mount -t tracefs none /sys/kernel/tracing; cd /sys/kernel/tracing
echo 0 > tracing_on; echo 20000 > buffer_size_kb
for event in sched/sched_switch irq_vectors/local_timer_entry irq/irq_handler_entry
do echo 1 > events/$event/enable; done
echo 1 > tracing_on
for i in 1 2 3 4; do ls -R /usr/share/doc 2> /dev/null | head -500 > /dev/null; sleep 0.05; done
echo 0 > tracing_on
for event in sched_switch local_timer_entry irq_handler_entry; do grep -c $event: trace; done";

/// A record of a trace: of a write to `tracing_on`, a switch, or an interrupt. `ns` is its start and `until` its end, both in ns.
#[derive(Clone, Copy)]
struct Recorded {
    vcpu: u64,
    ns: u64,
    until: u64,
}

/// Whether ftrace has certainly counted the event `it`, and whether ftrace may have counted it. `before` and `after` are the records
/// beside `it` on the same vCPU. On the vCPU that writes to `tracing_on`, records have the order of the program. Another vCPU may have
/// been kept waiting between ring3's record of the event and ftrace's; then ftrace's lies between `before` and `after`.
fn counts([on, off]: [Recorded; 2], [before, it, after]: [Recorded; 3]) -> [bool; 2] {
    let [soonest, latest] = [on, off]
        .map(|write| write.vcpu == it.vcpu)
        .map(|ordered| if ordered { (it.ns, it.ns) } else { (before.ns, after.ns) });
    let surely = soonest.0 >= on.until && latest.1 < off.ns;
    let perhaps = soonest.1 >= on.ns && latest.0 < off.until;
    [surely, perhaps]
}

/// ftrace's counts; and a trace's, while ftrace counted for certain and while it may have.
fn counted(kernel: &str) -> Result<[[u64; 3]; 3]> {
    let folder = TempDir::new()?;
    let output = folder.path().join("events").display().to_string();
    let mut command = Command::new(ring3()?);
    command.args(["trace", "-e", "switch,irq,return:rb_simple_write", "--format", "json"]);
    command.args(["-o", &output, "--", "exec", "--kernel", kernel, "--memory", "1G"]);
    command.args(["--timeout", "300", "--", "sh", "-c", COUNTED]).stdin(Stdio::null());
    let run = command.output()?;
    ensure!(run.status.success() && run.stderr.is_empty(), "{run:?}");
    let inside = String::from_utf8(run.stdout)?;
    let inside: Vec<u64> =
        inside.lines().map(|line| Ok(line.trim().parse()?)).collect::<Result<_>>()?;
    let inside = *inside.first_chunk().context("three counts")?;
    let (mut writes, mut events) = (Vec::new(), Vec::new());
    for line in fs::read_to_string(output)?.lines() {
        let event: serde_json::Value = serde_json::from_str(line)?;
        let number = |key: &str| event[key].as_u64().unwrap_or_default();
        let (vcpu, ns) = (number("vcpu"), number("ns"));
        let recorded = Recorded { vcpu, ns, until: ns + number("took") };
        match (event["kind"].as_str(), event["name"].as_str()) {
            (Some("return"), _) => writes.push(recorded),
            (Some("switch"), _) => events.push((recorded, 0)),
            (_, Some("apic_timer_interrupt")) => events.push((recorded, 1)),
            (_, Some("device")) => events.push((recorded, 2)),
            _ => {}
        }
    }
    // The first write says that nothing is counted yet. Something may happen while the others are under way.
    let [_, on, off] = writes[..] else { bail!("{} writes", writes.len()) };
    let mut counted = [[0; 3]; 2];
    for vcpu in 0..=events.iter().map(|(event, _)| event.vcpu).max().unwrap_or_default() {
        let own: Vec<_> = events.iter().filter(|(event, _)| event.vcpu == vcpu).collect();
        for near in own.windows(3) {
            let these = counts([on, off], [near[0].0, near[1].0, near[2].0]);
            counted.iter_mut().zip(these).for_each(|(all, one)| all[near[1].1] += u64::from(one));
        }
    }
    Ok([inside, counted[0], counted[1]])
}

#[test]
fn ftrace_and_ring3_trace_count_the_same_switches_and_interrupts() -> Result<()> {
    for kernel in KERNELS {
        let [inside, surely, perhaps] = counted(kernel)?;
        println!("{kernel}: {inside:?} inside, {surely:?} to {perhaps:?} outside");
        for ((inside, surely), perhaps) in inside.iter().zip(surely).zip(perhaps) {
            let same = *inside > 0 && (surely..=perhaps).contains(inside);
            ensure!(same, "{kernel}: {inside} inside, {surely} to {perhaps} outside");
        }
    }
    Ok(())
}

#[test]
fn trace_cmd_reads_a_trace() -> Result<()> {
    let folder = TempDir::new()?;
    let output = folder.path().join("trace.dat").display().to_string();
    let mut command = Command::new(ring3()?);
    command.args(["trace", "-e", "syscall,switch", "--format", "trace-dat", "-o", &output, "--"]);
    command.args(["exec", "--memory", "512M", "--", "cat", "/etc/hostname"]).stdin(Stdio::null());
    let run = command.output()?;
    ensure!(run.status.success(), "{run:?}");
    let report = Command::new("trace-cmd").args(["report", "-i", &output]).output();
    let report = report.context("trace-cmd is needed: apt-get install trace-cmd")?;
    let text = String::from_utf8_lossy(&report.stdout);
    let has = |task: &str, what: &str| {
        text.lines().any(|line| line.trim_start().starts_with(task) && line.contains(what))
    };
    ensure!(has("cat-", "openat(AT_FDCWD, \"/etc/hostname\""), "{text}");
    ensure!(has("", " sched_switch: ") && has("", " ==> "), "{text}");
    ensure!(report.status.success() && report.stderr.is_empty(), "{report:?}");
    Ok(())
}

#[test]
fn what_cannot_be_traced_is_refused_with_its_name() -> Result<()> {
    let trace = |event: &str| -> Result<_> {
        let mut command = Command::new(ring3()?);
        command.args(["trace", "-e", event, "--", "exec", "--memory", "512M", "--", "sleep", "20"]);
        Ok(command.stdin(Stdio::null()).output()?)
    };
    for (event, said) in [
        ("syscall:fly", "no system call `fly`"),
        ("flights", "no event `flights`"),
        ("break:no_such_symbol", "no symbol `no_such_symbol`"),
    ] {
        let output = trace(event)?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1) && text.contains(said), "{event}: {output:?}");
    }
    Ok(())
}

/// Programs that spend their time where their source says, in themselves and in the kernel.
const SPINNER: &str = "\
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
static volatile unsigned long sum;
static char buffer[1 << 20];
__attribute__((noinline)) void inner(void) { for (long n = 0; n < 50000000; n++) sum += n; }
__attribute__((noinline)) void outer(void) { for (int n = 0; n < 10; n++) inner(); sum++; }
__attribute__((noinline)) void zeros(int file) {
    for (int n = 0; n < 6000; n++) {
        long result = SYS_read;
        __asm__ volatile(\"syscall\" : \"+a\"(result) : \"D\"((long)file), \"S\"(buffer), \"d\"(sizeof buffer)
            : \"rcx\", \"r11\", \"memory\");
    }
}
__attribute__((noinline)) void yields(void) {
    for (int n = 0; n < 100000; n++) {
        long result = SYS_sched_yield;
        __asm__ volatile(\"syscall\" : \"+a\"(result) : : \"rcx\", \"r11\", \"memory\");
    }
}
int main(int count, char **words) {
    cpu_set_t first;
    if (count > 1) {
        yields();
        return 0;
    }
    outer();
    zeros(open(\"/dev/zero\", O_RDONLY));
    CPU_ZERO(&first);
    CPU_SET(0, &first);
    if (sched_setaffinity(0, sizeof first, &first) != 0) return 1;
    if (fork() == 0) execl(words[0], words[0], \"other\", (char *)0);
    yields();
    return 0;
}
";

/// How many samples of the program have these functions, one above the other, and how many the last of them anyhow.
/// Samples in `__switch_to` and `__switch_to_asm` are left out: the stack is the next process's by then, and Linux still names this one.
fn having(folded: &str, functions: &[&str]) -> Result<(u64, u64)> {
    let (mut right, mut all) = (0, 0);
    let lines = folded.lines().filter(|line| !line.contains(";__switch_to"));
    for line in lines.filter(|line| line.starts_with("spinner;")) {
        let (stack, count) = line.rsplit_once(' ').context("no count")?;
        let mut frames = stack.split(';');
        if frames.clone().any(|frame| Some(&frame) == functions.last()) {
            all += count.parse::<u64>()?;
            let found = functions.iter().all(|function| frames.any(|frame| frame == *function));
            right += if found { count.parse::<u64>()? } else { 0 };
        }
    }
    Ok((right, all))
}

/// A busy host gives few samples, so there are several runs if need be.
fn profiled(kernel: &str, program: &str, output: &str) -> Result<()> {
    let chains: [&[&str]; 3] = [
        &["main", "outer", "inner"],
        &["main", "zeros", "do_syscall_64_[k]", "vfs_read_[k]", "read_zero_[k]"],
        // While Linux switches to the other process, CR3 already has that process's page tables.
        &["main", "yields", "do_syscall_64_[k]", "__x64_sys_sched_yield_[k]"],
    ];
    let mut counts = [0; 3];
    for _ in 0..6 {
        let mut command = Command::new(ring3()?);
        command.args(["profile", "--hertz", "200", "--format", "folded", "-o", output]);
        command.args(["--", "exec", "--kernel", kernel, "--memory", "512M", "--timeout", "300"]);
        let run = command.args(["--", program]).stdin(Stdio::null()).output()?;
        ensure!(run.status.success(), "{run:?}");
        let folded = fs::read_to_string(output)?;
        for (count, chain) in counts.iter_mut().zip(chains) {
            let (right, all) = having(&folded, chain)?;
            ensure!(right == all, "{right} of {all} have {chain:?}: {folded}");
            *count += right;
        }
        if counts.iter().all(|count| *count >= 10) {
            return Ok(());
        }
    }
    anyhow::bail!("{counts:?} samples of {kernel} after six runs")
}

#[test]
fn a_profile_shows_functions_of_programs_and_of_the_kernel_and_who_called_them() -> Result<()> {
    let folder = TempDir::new()?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    // Optimized, functions that call nobody have no frame pointer.
    compile(folder.path(), "spinner", SPINNER, "-O0 -fno-omit-frame-pointer")?;
    for kernel in KERNELS {
        profiled(kernel, &path("spinner"), &path("folded"))?;
    }
    Ok(())
}

/// A guest whose kernel fills memory with zeros until a line comes.
const ZEROS: &str = "dd if=/dev/zero of=/dev/null bs=1M & echo up; read line; kill $!";

/// Samples of the kernel's translated code that perf has taken: functions, as far as they have names.
fn samples_of_kernel_code(data: &str, symbols: &str) -> Result<Vec<String>> {
    let mut perf = Command::new("perf");
    perf.args(["script", "-i", data, "--symfs", symbols, "-F", "ip,sym,dso"]);
    let output = perf.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let of_code = text.lines().filter(|line| line.contains("(/memfd:ring3-code"));
    Ok(of_code.filter_map(|line| Some(line.split_whitespace().nth(1)?.to_owned())).collect())
}

#[test]
fn the_hosts_perf_names_functions_of_the_guests_kernel() -> Result<()> {
    let folder = TempDir::new()?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (data, symbols, name) =
        (path("data"), path("symbols"), format!("perf-{}", std::process::id()));
    let mut perf = Command::new("perf");
    perf.args(["record", "-q", "-e", "cpu-clock", "-F", "499", "-o", &data, "--"]).arg(ring3()?);
    perf.args(["exec", "--name", &name, "--memory", "512M", "--timeout", "100", "--"]);
    perf.args(["sh", "-c", ZEROS]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut machine = perf.spawn().context("perf is needed: apt-get install linux-perf")?;
    let mut line = String::new();
    BufReader::new(machine.stdout.take().context("no output")?).read_line(&mut line)?;
    if line.is_empty() {
        println!("SKIPPED: this user may not use perf");
        return Ok(());
    }
    thread::sleep(Duration::from_secs(1));
    let mapped = Command::new(ring3()?).args(["perf-map", &name, &symbols]).output()?;
    drop(machine.stdin.take());
    ensure!(machine.wait()?.success() && mapped.status.success(), "{mapped:?}");
    let samples = samples_of_kernel_code(&data, &symbols)?;
    let named = samples.iter().filter(|name| !name.starts_with('[')).count();
    println!("{} samples of translated code, {named} with names", samples.len());
    ensure!(named >= 20 && named * 10 >= samples.len() * 8, "{samples:?}");
    ensure!(samples.iter().any(|name| name == "read_zero"), "{samples:?}");
    let map = fs::read_dir(&symbols)?.flatten().map(|entry| entry.path());
    let map = map.into_iter().find(|path| path.extension().is_some_and(|end| end == "map"));
    let map = fs::read_to_string(map.context("no map")?)?;
    let line = map.lines().find(|line| line.ends_with(" read_zero")).context("no read_zero")?;
    let numbers: Vec<_> =
        line.split(' ').take(2).map(|word| u64::from_str_radix(word, 16)).collect();
    ensure!(matches!(numbers[..], [Ok(_), Ok(1..)]), "{line}");
    Ok(())
}
