//! GDB at a guest that knows nothing of it: breakpoints in its kernel and in a program, steps, watched memory, Ctrl-C; and the
//! guest goes on to its end.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use guests::ring3;
use tempfile::{NamedTempFile, TempDir};
use xtask::{
    assets::{Assets, Kernel, Manifest, unpack},
    command::output,
};

/// Calls into the kernel and runs a program, without end, until a line is typed. (Bash drops a line that it has only
/// half read when its time is over, so a time limit for reading would lose the line on a busy host.)
const SCRIPT: &str = "\
awk '$3 ~ /^(__x64_sys_getcwd|oops_begin|fuse_file_alloc|page_offset_base|jiffies|linux_proc_banner|linux_banner)$/ { print $3, $1 }' /proc/kallsyms
echo ready
until read -t 0; do setarch -R /bin/true; /bin/pwd > /dev/null; sleep 0.1; done
cat /proc/version
exit 7";
/// Where Linux puts a position-independent program if it does not choose at random.
const PROGRAM: u64 = 0x5555_5555_4000;

/// A guest that is to be debugged.
struct Debuggee {
    ring3: Child,
    stdout: BufReader<ChildStdout>,
    symbols: HashMap<String, String>,
}

impl Drop for Debuggee {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.ring3.kill();
        let _ = self.ring3.wait();
    }
}

impl Debuggee {
    /// Starts it, and waits until it is in its loop.
    fn new(engine: &str) -> Result<Self> {
        let mut command = Command::new(ring3()?);
        command.args(["exec", "--memory", "512M", "--timeout", "300", "--engine", engine]);
        command.args(["--", "bash", "-c", SCRIPT]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut ring3 = command.spawn()?;
        let mut stdout = BufReader::new(ring3.stdout.take().context("no standard output")?);
        let mut symbols = HashMap::new();
        loop {
            let mut line = String::new();
            ensure!(stdout.read_line(&mut line)? != 0, "it ended early");
            match line.trim().split_once(' ') {
                Some((name, address)) => symbols.insert(name.to_owned(), format!("0x{address}")),
                None => return Ok(Self { ring3, stdout, symbols }),
            };
        }
    }

    fn symbol(&self, name: &str) -> Result<&str> {
        self.symbols.get(name).map(String::as_str).with_context(|| format!("no {name}"))
    }

    /// What GDB says to these commands.
    fn gdb(&self, commands: &str) -> Result<String> {
        let mut file = NamedTempFile::new()?;
        file.write_all(commands.as_bytes())?;
        let connect =
            format!("target remote | {} gdb --pipe {}", ring3()?.display(), self.ring3.id());
        let mut gdb = Command::new("gdb");
        gdb.args(["-nx", "-batch", "-l", "60", "-ex", "set confirm off", "-ex", &connect, "-x"]);
        let output = gdb.arg(file.path()).stdin(Stdio::null()).output();
        let output = output.context("GDB is needed: apt-get install gdb")?;
        Ok([&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat())
    }

    /// Lets it come to its end; what it said, and how it ended.
    fn ends(mut self) -> Result<(String, Option<i32>)> {
        self.ring3.stdin.take().context("no standard input")?.write_all(b"\n")?;
        let mut said = String::new();
        self.stdout.read_to_string(&mut said)?;
        Ok((said, self.ring3.wait()?.code()))
    }
}

/// The entry of a program's file.
fn entry(path: &str) -> Result<u64> {
    let head = fs::read(path)?;
    Ok(u64::from_le_bytes(head.get(24..32).context("too short")?.try_into()?))
}

fn says(output: &str, expected: &[&str]) -> Result<()> {
    for part in expected {
        ensure!(output.contains(part), "no `{part}` in: {output}");
    }
    Ok(())
}

/// A breakpoint in the kernel, steps from there, and what GDB reads of registers and memory.
fn kernel_is_debugged(guest: &Debuggee) -> Result<()> {
    let (getcwd, banner) = (guest.symbol("__x64_sys_getcwd")?, guest.symbol("linux_banner")?);
    let output = guest.gdb(&format!(
        "monitor kaslr\nmonitor processes\n\
         hbreak *{getcwd}\ncontinue\n\
         printf \"at it %d %d\\n\", $rip == {getcwd}, $cs & 3\n\
         x/s {banner}\n\
         stepi\nprintf \"behind it %d\\n\", $rip > {getcwd} && $rip < {getcwd} + 16\n\
         continue\nprintf \"again %d\\n\", $rip == {getcwd}\n\
         printf \"paging %d, long mode %d\\n\", $cr0 >> 31 & 1, $efer >> 10 & 1\n\
         set $was = $rax\nset $rax = 0x1234\nprintf \"set %x\\n\", $rax\nset $rax = $was\n\
         detach\n"
    ))?;
    let expected = [
        "add-symbol-file vmlinux -o 0x",
        " kthreadd ",
        " bash ",
        "at it 1 0",
        "\"Linux version 6.",
        "behind it 1",
        "again 1",
        "paging 1, long mode 1",
        "set 1234",
        "detached",
    ];
    says(&output, &expected)
}

/// A breakpoint in a program, which is not in memory yet when it is set, and Ctrl-C.
fn program_is_debugged(guest: &Debuggee) -> Result<()> {
    let entry = PROGRAM + entry("/bin/true")?;
    let output = guest.gdb(&format!(
        "hbreak *{entry:#x}\ncontinue\n\
         printf \"at it %d %d\\n\", $rip == {entry:#x}, $cs & 3\n\
         stepi\nstepi\nprintf \"behind it %d\\n\", $rip > {entry:#x} && $rip < {entry:#x} + 16\n\
         continue\nprintf \"again %d\\n\", $rip == {entry:#x}\ndelete\n\
         python import threading, os, signal\n\
         python threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n\
         continue\n"
    ))?;
    says(&output, &["at it 1 3", "behind it 1", "again 1", "received signal SIGINT"])
}

/// Memory that the kernel changes at each tick, and memory that GDB changes.
fn memory_is_watched_and_changed(guest: &Debuggee) -> Result<()> {
    let (jiffies, banner) = (guest.symbol("jiffies")?, guest.symbol("linux_proc_banner")?);
    let output = guest.gdb(&format!(
        "set $was = *(long *) {jiffies}\nwatch *(long *) {jiffies}\ncontinue\n\
         printf \"later %d\\n\", *(long *) {jiffies} > $was\ndelete\n\
         set {{char}} ({banner} + 3) = 'V'\n"
    ))?;
    says(&output, &["Hardware watchpoint 1", "Old value", "later 1"])
}

/// Exceptions stop the guest where their handler begins; a breakpoint in a program that another process executes does not.
fn exceptions_are_caught_and_processes_spared(guest: &Debuggee) -> Result<()> {
    let entry = PROGRAM + entry("/bin/true")?;
    let output = guest.gdb(&format!(
        "monitor catch exception pf\ncontinue\n\
         python print('at %s' % (gdb.parse_and_eval('(unsigned long) $cr2') > 0))\n\
         monitor catch none\n\
         monitor only 99999\nmonitor only 1\nhbreak *{entry:#x}\n\
         python import threading, os, signal\n\
         python threading.Timer(4, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n\
         continue\nmonitor only all\ncontinue\nprintf \"at it %d %d\\n\", $rip == {entry:#x}, $cs & 3\n"
    ))?;
    let expected = [
        "exception 14",
        "received signal SIGTRAP",
        "at True",
        "there is no process 99999",
        "received signal SIGINT",
        "at it 1 3",
    ];
    says(&output, &expected)
}

/// A kernel that jumps to nowhere is stopped before it tells of that, and goes on.
fn an_oops_is_caught(guest: &Debuggee) -> Result<()> {
    let (getcwd, oops) = (guest.symbol("__x64_sys_getcwd")?, guest.symbol("oops_begin")?);
    let output = guest.gdb(&format!(
        "monitor catch oops\nhbreak *{getcwd}\ncontinue\ndelete\nset $rip = 0\n\
         continue\nprintf \"at it %d %d\\n\", $rip == {oops}, $cs & 3\n"
    ))?;
    says(&output, &["oops (oops_begin)", "oops (panic)", "received signal SIGTRAP", "at it 1 0"])
}

fn is_debugged(engine: &str) -> Result<()> {
    let guest = Debuggee::new(engine)?;
    kernel_is_debugged(&guest)?;
    program_is_debugged(&guest)?;
    exceptions_are_caught_and_processes_spared(&guest)?;
    an_oops_is_caught(&guest)?;
    memory_is_watched_and_changed(&guest)?;
    let (said, code) = guest.ends()?;
    ensure!(code == Some(7) && said.contains("Linux Version 6."), "{code:?}: {said}");
    Ok(())
}

#[test]
fn a_guest_is_debugged() -> Result<()> {
    is_debugged("auto")
}

#[test]
fn an_interpreted_guest_is_debugged() -> Result<()> {
    is_debugged("interp")
}

/// Fields of a program header of ELF (`Elf64_Phdr`).
const VADDR: usize = 16;
const PADDR: usize = 24;

/// Byte offset in a core of the memory at `address`: a GVA if `field` is [`VADDR`], a GPA if it is [`PADDR`].
fn place(core: &[u8], field: usize, address: u64) -> Option<usize> {
    let word =
        |at: usize| core.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().expect("eight")));
    let count = usize::from(core[56]);
    // The last header first: RAM is behind the kernel's image, which has a GPA, too.
    (0..count).rev().map(|n| 64 + 56 * n).find_map(|header| {
        let inside = address.checked_sub(word(header + field)?)?;
        let loads = core[header] == 1 && inside < word(header + 32)?;
        loads.then_some((word(header + 8)? + inside) as usize)
    })
}

/// What crash and drgn look for is in the core, and the machine goes on.
#[test]
fn a_guest_is_dumped() -> Result<()> {
    let guest = Debuggee::new("auto")?;
    let core = NamedTempFile::new()?;
    let dump = |path: &str| -> Result<_> {
        Ok(Command::new(ring3()?).args(["dump", &guest.ring3.id().to_string(), path]).output()?)
    };
    let output = dump(&core.path().display().to_string())?;
    ensure!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let notes = Command::new("readelf").args(["-ln"]).arg(core.path()).output()?;
    let notes = String::from_utf8_lossy(&notes.stdout).into_owned();
    says(&notes, &["LOAD", "NT_PRSTATUS", "VMCOREINFO"])?;
    // The text of the kernel's banner is where its symbol says, in a kernel that lies where it was linked to: by the
    // address it is mapped at, and by its place in RAM.
    let banner = u64::from_str_radix(guest.symbol("linux_banner")?.trim_start_matches("0x"), 16)?;
    let bytes = fs::read(core.path())?;
    let [image, ram] = [banner, banner - 0xffff_ffff_8000_0000];
    for (field, address) in [(VADDR, image), (PADDR, ram)] {
        let at = place(&bytes, field, address).context("the core has no such memory")?;
        ensure!(bytes[at..].starts_with(b"Linux version 6."), "{address:#x}");
    }
    let refused = dump("/nowhere/core")?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(1) && said.contains("/nowhere"), "{said}");
    ensure!(guest.ends()?.1 == Some(7));
    Ok(())
}

/// A script for drgn that needs no debug symbols. It reads the kernel's banner at three addresses: in the kernel's
/// image, in the kernel's mapping of all RAM, and by GPA.
fn look(guest: &Debuggee) -> Result<String> {
    let [banner, base, jiffies] =
        ["linux_banner", "page_offset_base", "jiffies"].map(|name| guest.symbol(name));
    let (banner, base, jiffies) = (banner?, base?, jiffies?);
    Ok(format!(
        "import time\n\
         physical = {banner} - 0xffffffff80000000\n\
         print('image', prog.read({banner}, 13))\n\
         print('physical', prog.read(physical, 13, True))\n\
         print('mapped', prog.read(prog.read_u64({base}) + physical, 13))\n\
         was = prog.read_u64({jiffies}); time.sleep(1)\n\
         print('goes on', prog.read_u64({jiffies}) > was)\n"
    ))
}

const LOOKED: [&str; 3] =
    ["image b'Linux version'", "physical b'Linux version'", "mapped b'Linux version'"];

#[test]
fn drgn_reads_a_machine_that_runs_and_a_core() -> Result<()> {
    let guest = Debuggee::new("auto")?;
    let (folder, id) = (TempDir::new()?, guest.ring3.id().to_string());
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("look.py"), look(&guest)?)?;
    let said = |command: &mut Command| -> Result<String> {
        let output = command.output().context("drgn is needed: apt-get install python3-drgn")?;
        Ok([&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat())
    };
    let live = said(Command::new(ring3()?).args(["drgn", &id, "--script", &path("look.py")]))?;
    says(&live, &[&LOOKED[..], &["goes on True"]].concat())?;
    output(Command::new(ring3()?).args(["dump", &id, &path("core")]))?;
    let still = said(Command::new("drgn").args(["-q", "-c", &path("core"), &path("look.py")]))?;
    says(&still, &[&LOOKED[..], &["goes on False"]].concat())?;
    ensure!(guest.ends()?.1 == Some(7));
    Ok(())
}

/// The kernel that guests of `ring3 exec` have, with its debug symbols.
fn symbols() -> Result<PathBuf> {
    let (assets, kernel) = (Assets::open()?, Kernel::BookwormCloud);
    assets.kernel(kernel)?;
    let package = assets.installed(kernel).context("no kernel")? + "-dbg";
    assets.entry(&package, |fresh| {
        let unpacked = unpack(&assets.archive(kernel.suite())?, &package, fresh)?;
        let release = package.trim_start_matches("linux-image-").trim_end_matches("-dbg");
        let symbols = unpacked.path().join(format!("usr/lib/debug/boot/vmlinux-{release}"));
        fs::copy(symbols, fresh.join("vmlinux"))?;
        Manifest::of(&package, fresh, &["vmlinux".to_owned()])
    })?;
    Ok(assets.directory(&package).join("vmlinux"))
}

/// Processes and the kernel's release, from structures of the kernel.
const PROCESSES: &str = "\
from drgn.helpers.linux.pid import for_each_task
print('process', sorted({task.comm.string_().decode() for task in for_each_task(prog)}))
print('release', prog['init_uts_ns'].name.release.string_().decode())
";

#[test]
#[ignore = "minutes, and a kernel with debug symbols"]
fn crash_and_drgn_read_cores_by_debug_symbols() -> Result<()> {
    let guest = Debuggee::new("auto")?;
    let (folder, id) = (TempDir::new()?, guest.ring3.id().to_string());
    let path = |name: &str| folder.path().join(name).display().to_string();
    let vmlinux = symbols()?.display().to_string();
    fs::write(path("processes.py"), PROCESSES)?;
    fs::write(path("commands"), "ps\nlog\nbt -c 0\nquit\n")?;
    output(Command::new(ring3()?).args(["dump", &id, &path("core")]))?;
    let live = ["drgn", &id, "--script", &path("processes.py"), "--", "-s", &vmlinux];
    let live = output(Command::new(ring3()?).args(live))?;
    let core = ["-q", "-c", &path("core"), "-s", &vmlinux, &path("processes.py")];
    let core_of_drgn = output(Command::new("drgn").args(core))?;
    for said in [live, core_of_drgn] {
        says(&said, &["'bash'", "'kthreadd'", "release 6.1."])?;
    }
    let crash = ["-s", "-i", &path("commands"), &vmlinux, &path("core")];
    let said = output(Command::new("crash").args(crash))?;
    says(&said, &["kthreadd", "bash", "Linux version 6.1."])?;
    ensure!(guest.ends()?.1 == Some(7));
    Ok(())
}

/// Linux's own scripts for GDB, from its source.
fn scripts() -> Result<PathBuf> {
    const SOURCE: &str = "linux-source-6.1";
    let (assets, name) = (Assets::open()?, "gdb-scripts-of-linux-6.1");
    assets.entry(name, |fresh| {
        let unpacked = unpack(&assets.archive(Kernel::BookwormCloud.suite())?, SOURCE, fresh)?;
        let source = unpacked.path().join(format!("usr/src/{SOURCE}.tar.xz"));
        let mut tar = Command::new("tar");
        tar.arg("xf").arg(source).arg("-C").arg(fresh).arg("--strip-components=3");
        output(tar.args(["--wildcards", "*/scripts/gdb/linux/*.py"]))?;
        let files = fs::read_dir(fresh.join("linux"))?;
        let files: Result<Vec<_>> = files
            .map(|file| Ok(format!("linux/{}", file?.file_name().to_string_lossy())))
            .collect();
        Manifest::of(SOURCE, fresh, &files?)
    })?;
    Ok(assets.directory(name))
}

#[test]
#[ignore = "minutes, and a kernel with debug symbols"]
fn linuxs_own_scripts_run_in_gdb() -> Result<()> {
    let guest = Debuggee::new("auto")?;
    let (vmlinux, scripts) = (symbols()?, scripts()?);
    let modules = Assets::open()?.kernel(Kernel::BookwormCloud)?.tree.context("no modules")?;
    let function = guest.symbol("fuse_file_alloc")?;
    let said = guest.gdb(&format!(
        "set pagination off\nsymbol-file {}\n\
         python import sys; sys.dont_write_bytecode = True; sys.path.insert(0, '{}')\n\
         python import linux.tasks, linux.dmesg, linux.symbols\nlx-ps\nlx-dmesg\n\
         info symbol {function}\nlx-symbols {}\ninfo symbol {function}\n",
        vmlinux.display(),
        scripts.display(),
        modules.display(),
    ))?;
    says(&said, &["swapper/0", "kthreadd", "bash", "Linux version 6.1."])?;
    // A module's function, before its symbols are loaded and then.
    says(&said, &["No symbol matches", "/fuse.ko", "fuse_file_alloc in section .text of "])?;
    ensure!(guest.ends()?.1 == Some(7));
    Ok(())
}
