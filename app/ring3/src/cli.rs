//! The command line: what can be asked, and how each option explains itself.
//!
//! Names and forms are those of QEMU, Firecracker and podman where they agree.

use clap::{Args, Parser, Subcommand};

use crate::{
    control::{
        DrgnArguments, DumpArguments, GdbArguments, PerfMapArguments, ProfileArguments,
        PsArguments, StatsArguments, Target, TopArguments, TraceArguments,
    },
    device::DeviceArguments,
    disk::ImageArguments,
    exec::arguments::{ExecArguments, ShellArguments},
    fault::FaultArguments,
    kernel::KernelArguments,
    run_arguments::RunArguments,
    serve::ServeArguments,
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
  4    the guest asked for a reset, or a fault was one
  5    a fault cut the power
  6    triple fault: the guest's kernel crashed too badly to say so
  8    with --on-panic stop, dump or exit: the guest's kernel said that it crashed
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
    /// Write a machine's memory and registers to a file, for crash and drgn
    Dump(DumpArguments),
    /// Debug a machine with GDB; it goes on when GDB leaves
    Gdb(GdbArguments),
    /// Have drgn look at a running machine, which goes on
    Drgn(DrgnArguments),
    /// Show what a Linux guest does: system calls, processes, interrupts, functions of its kernel
    Trace(TraceArguments),
    /// Show what a machine does a second: exits, misses, mappings, translations, system calls, interrupts
    Top(TopArguments),
    /// Show where a Linux guest's time goes: functions of its kernel and its programs
    Profile(ProfileArguments),
    /// Have the host's perf name the functions of a Linux guest's kernel: perf report --symfs DIR
    PerfMap(PerfMapArguments),
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
    /// Run machines whose parts fail on purpose, and count what that came to
    Fault(FaultArguments),
    /// Serve a disk, a folder or a network to another program's machine, such as QEMU's, by vhost-user
    Serve(ServeArguments),
    /// Serve a device for a machine; ring3 itself starts it
    #[command(hide = true)]
    Device(DeviceArguments),
    /// Say what this host offers, and what it means for speed
    Doctor(DoctorArguments),
}

/// A survey to make.
#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::{EngineChoice, MemorySize};
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
