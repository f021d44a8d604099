//! The command line: what can be asked, and how each option explains itself.
//!
//! Names and forms are those of QEMU, Firecracker and podman where they agree.

use std::{path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use vmm::{BootProtocol, LockStep};

use crate::{
    control::{PsArguments, StatsArguments, Target},
    device::{DeviceArguments, Nearness},
    disk::{DiskChoice, ImageArguments},
    exec::arguments::{ExecArguments, ShellArguments},
    kernel::KernelArguments,
    net::NetArgument,
    serve::ServeArguments,
    share::ShareChoice,
};

const EXAMPLES: &str = "\
Examples:
  Boot a Debian kernel to whatever its initramfs starts, with the serial console here:
    ring3 run --kernel /boot/vmlinuz-6.1.0-28-cloud-amd64 --initrd initrd.img \\
        --append console=ttyS0

  The same with 2 GiB of memory and a disk, which the guest sees as /dev/vda:
    ring3 run --kernel vmlinuz --initrd initrd.img --append 'console=ttyS0 root=/dev/vda' \\
        --memory 2G --disk debian.img

  What is in a file, but with more memory:
    ring3 run --config debian.toml --memory 4G

  A network, with port 8080 of this host leading to the guest's port 80:
    ring3 run --kernel vmlinuz --initrd initrd.img --append console=ttyS0 \\
        --net user,hostfwd=tcp:127.0.0.1:8080-:80

  A test machine in a script: no input, at most a minute, counters at the end:
    ring3 run --kernel vmlinuz --initrd test.cpio --append console=ttyS0 \\
        --timeout 60 --stats --json </dev/null

  A multiboot kernel with modules (Xen, kvm-unit-tests):
    ring3 run --kernel xen --append com1=115200,8n1 --module 'vmlinuz console=hvc0' \\
        --module initrd.img

  A command under Debian 12's kernel, with your files and in this folder:
    ring3 exec -- make test

  What this host offers:
    ring3 doctor
";

const EXIT_CODES: &str = "\
Keys, when standard input is a terminal:
  Ctrl-A X       leave: the machine is switched off at once
  Ctrl-A Ctrl-A  send Ctrl-A to the guest
  Ctrl-A H       list these keys

Exit codes:
  0    the guest switched the machine off, or Ctrl-A X
  1    ring3 or the host failed
  2    the command line is wrong: an option, a file, a size
  4    the guest asked for a reset
  6    triple fault: the guest's kernel crashed too badly to say so
  124  --timeout expired
  128+N  signal N ended ring3 (130 SIGINT, 143 SIGTERM, 129 SIGHUP)
  odd  the guest wrote V to the debug exit port 0xf4: (V << 1) | 1
";

/// A virtual machine monitor that lives entirely in ring 3
///
/// Runs unmodified x86-64 operating systems in ordinary processes: no /dev/kvm, no root, no kernel
/// module.
#[derive(Debug, Parser)]
#[command(name = "ring3", version, after_help = EXAMPLES, arg_required_else_help = true)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Boot a kernel and run it until it switches itself off
    #[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n{EXIT_CODES}"))]
    Run(Box<RunArguments>),
    /// Run a command under another kernel, with this host's files
    Exec(Box<ExecArguments>),
    /// An interactive shell under another kernel, with this host's files
    Shell(Box<ShellArguments>),
    /// List, fetch or remove kernels
    Kernel(KernelArguments),
    /// Make disk images
    Image(ImageArguments),
    /// List running machines
    Ps(PsArguments),
    /// Say what a machine takes of this host: CPU time and memory
    Stats(StatsArguments),
    /// Switch a machine off at the mains
    Stop(Target),
    /// Attach to a machine's console; Ctrl-A X leaves it, and the machine goes on
    Console(Target),
    /// Make a machine stand still
    Pause(Target),
    /// Let a machine go on
    Resume(Target),
    /// Print a shell's completions, to be put where the shell looks for them
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print a manual page, of ring3 or of one of its commands: ring3 man run | man -l -
    Man {
        /// The command, such as `run` or `image create`
        #[arg(value_name = "COMMAND")]
        command: Vec<String>,
    },
    /// Serve a disk, a folder or a network to another program's machine, such as QEMU's, by vhost-user
    Serve(ServeArguments),
    /// Serve a device for a machine; ring3 itself starts it
    #[command(hide = true)]
    Device(DeviceArguments),
    /// Say what this host offers, and what it means for speed
    Doctor(DoctorArguments),
}

/// A machine to run.
#[derive(Debug, Args)]
pub struct RunArguments {
    /// Options from a TOML file: `memory = "2G"` is --memory 2G, `stats = true` is --stats, and a list repeats
    /// its option. Files are meant from where it is; options of the command line win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Kernel to boot: a bzImage, an ELF file with a PVH note, or a multiboot image
    #[arg(long, short = 'k', value_name = "FILE")]
    pub kernel: PathBuf,
    /// What `ring3 ps` calls the machine; the process number if not given
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Initial RAM disk for it
    #[arg(long, short = 'i', value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Kernel command line
    #[arg(long, short = 'a', value_name = "STRING", default_value = "")]
    pub append: String,
    /// Module for a multiboot kernel, with its own command line after a space; can be repeated
    #[arg(long, value_name = "FILE [ARGS]", conflicts_with = "initrd")]
    pub module: Vec<String>,
    /// How to start the kernel: auto, linux, bzimage, pvh or multiboot
    #[arg(long, value_name = "PROTOCOL", default_value_t = BootProtocol::Auto)]
    pub boot_protocol: BootProtocol,
    /// Guest memory: a number of MiB, or with a suffix K, M, G or T
    #[arg(long, short = 'm', value_name = "SIZE", default_value = "1G")]
    pub memory: MemorySize,
    /// Number of virtual CPUs; only 1 so far
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: u32,
    /// How guest code is run.
    #[command(flatten)]
    pub engine: EngineArguments,
    /// Which of the guest's consoles is here
    #[arg(long, value_enum, default_value_t = ConsoleChoice::Stdio)]
    pub console: ConsoleChoice,
    /// Disk image, a virtio block device; can be repeated
    ///
    /// The format is raw, or qcow2 if the name ends so, or what format= says. cache=none passes the host's
    /// page cache by. vhost-user:SOCKET is a disk that another program serves there, such as
    /// qemu-storage-daemon.
    #[arg(
        long,
        value_name = "FILE[,format=raw|qcow2][,readonly][,cache=writeback|none][,serial=TEXT]|\
                      vhost-user:SOCKET"
    )]
    pub disk: Vec<DiskChoice>,
    /// Network interface; can be repeated
    ///
    /// user is a network of its own, without privileges; passt is that of the program passt (of 2025 or later); socket leads to
    /// the other machine that is given the same path; tap is a device of this host; vhost-user:SOCKET is what
    /// another program serves there. With user, the guest gets an address by DHCP and reaches what this host reaches; the host itself is
    /// 10.0.2.2. Each hostfwd makes a port of this host lead to one of the guest's; restrict
    /// keeps the guest from the host's own services (its loopback).
    #[arg(
        long,
        value_name = "user[,hostfwd=tcp:ADDRESS:PORT-:PORT][,dns=ADDRESS][,restrict]|\
                      passt[,hostfwd=...]|socket,path=FILE|tap,ifname=NAME|vhost-user:SOCKET"
    )]
    pub net: Vec<NetArgument>,
    /// Folder of this host for the guest, which mounts it by its tag; can be repeated
    ///
    /// In the guest: mount -t virtiofs TAG /mnt. With ro, the guest cannot change it. vhost-user:SOCKET:TAG is a folder
    /// that another program serves there, such as virtiofsd.
    #[arg(long, value_name = "DIR:TAG[:ro]|vhost-user:SOCKET:TAG")]
    pub share: Vec<ShareChoice>,
    /// Where disks, networks and folders are served: in processes of their own, which can reach nothing else, or in the machine's (to look for a
    /// failure)
    #[arg(long, value_enum, default_value_t = DevicesChoice::Processes)]
    pub devices: DevicesChoice,
    /// Add the devices kvm-unit-tests drive (QEMU's pc-testdev)
    #[arg(long)]
    pub test_devices: bool,
    /// Print counters to standard error at the end
    #[arg(long)]
    pub stats: bool,
    /// Print how it ended, and the counters, to standard error as one JSON object
    #[arg(long)]
    pub json: bool,
    /// Give up after this long, with exit code 124
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
}

/// How guest code is run.
#[derive(Clone, Copy, Debug, Args)]
pub struct EngineArguments {
    /// How guest code is run
    #[arg(long, value_enum, default_value_t = EngineChoice::Auto)]
    pub engine: EngineChoice,
    /// Compare translated kernel code with the interpreter, and stop at the first difference
    ///
    /// For developers of ring3. Each block of code is compared the first few times it runs: runs=N says how
    /// often, runs=all each time (very slow). from=N starts after so many turns of the process that runs guest
    /// code ("wedge turns" of --stats), every=N compares all blocks anew after so many.
    #[arg(
        long,
        value_name = "runs=N|all,from=N,every=N",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        hide_short_help = true
    )]
    pub lock_step: Option<LockStep>,
    /// Translate user code, too, instead of running it directly
    ///
    /// For developers of ring3: programs exercise the translator then. Slow.
    #[arg(long, hide_short_help = true)]
    pub translate_user: bool,
    /// How the host hands ring3 the system calls of programs in the guest
    ///
    /// For comparison. Calls that a program makes often are patched, and reach the host in neither way.
    #[arg(long, value_enum, default_value_t = SystemCalls::Seccomp, hide_short_help = true)]
    pub system_calls: SystemCalls,
}

impl EngineArguments {
    /// System calls come by syscall user dispatch.
    pub fn user_dispatch(&self) -> bool {
        self.system_calls == SystemCalls::Dispatch
    }
}

/// A survey to make.
#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// How guest code is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineChoice {
    /// The best this host can do: fast, or else the interpreter
    Auto,
    /// The reference interpreter
    Interp,
    /// User code directly on the CPU, the kernel translated
    Fast,
    /// User code directly on the CPU, the kernel interpreted (to narrow down a failure)
    Direct,
    /// User code interpreted, the kernel translated (to narrow down a failure)
    Jit,
}

/// How the host hands over system calls of the guest's programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SystemCalls {
    /// By a seccomp filter
    Seccomp,
    /// By syscall user dispatch, in addition to the filter (Linux 5.11; slower)
    Dispatch,
}

/// Where devices are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DevicesChoice {
    /// Each in a process of its own; disks and folders come to the vCPU's CPU while the guest waits for small answers
    Processes,
    /// Each in a process of its own, on whatever CPU is free
    Apart,
    /// By threads of the machine's process
    Inline,
}

impl DevicesChoice {
    /// Where a disk's or folder's process runs, if it has one.
    pub fn nearness(self) -> Nearness {
        match self {
            Self::Processes => Nearness::Near,
            Self::Apart | Self::Inline => Nearness::Apart,
        }
    }
}

/// Which of the guest's consoles is at standard input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ConsoleChoice {
    /// The first serial port: console=ttyS0
    Stdio,
    /// A virtio console: console=hvc0; what the serial port prints is shown, too
    Virtio,
    /// None
    None,
}

/// An amount of memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySize(pub u64);

impl FromStr for MemorySize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a size such as 512M or 2G");
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
            "K" | "KB" | "KIB" => 10,
            "" | "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            "T" | "TB" | "TIB" => 40,
            _ => return Err(wrong()),
        };
        let count: u64 = digits.parse().map_err(|_| wrong())?;
        count.checked_mul(1 << shift).map(Self).ok_or_else(|| format!("{text} is too much"))
    }
}

/// A positive number of seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(value) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err("must be more than 0 seconds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<RunArguments, clap::Error> {
        let words = line.split_whitespace();
        match Arguments::try_parse_from(["ring3", "run"].into_iter().chain(words))?.command {
            Command::Run(run) => Ok(*run),
            _ => unreachable!("run was asked for"),
        }
    }

    #[test]
    fn definition_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn sizes() {
        let size = |text: &str| text.parse().map(|MemorySize(bytes)| bytes);
        assert_eq!(size("512"), Ok(512 << 20));
        assert_eq!(size("1g"), Ok(1 << 30));
        assert_eq!(size("64KiB"), Ok(64 << 10));
        for wrong in ["", "G", "-1", "1.5G", "1X", "99999999999T", "1 G"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn defaults() {
        let run = parse("--kernel vmlinuz").expect("enough");
        assert_eq!(run.memory, MemorySize(1 << 30));
        assert_eq!((run.cpus, run.engine.engine), (1, EngineChoice::Auto));
        assert_eq!(run.timeout, None);
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(parse("").is_err(), "no kernel");
        assert!(parse("--kernel k --initrd i --module m").is_err());
        assert!(parse("--kernel k --timeout 0").is_err());
        assert!(parse("--kernel k --timeout nan").is_err());
        assert!(parse("--kernel k --unknown").is_err());
    }
}
