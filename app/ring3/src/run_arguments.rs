//! The options of `ring3 run`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Command, FromArgMatches};
use vmm::BootProtocol;

use crate::{
    disk::DiskChoice,
    gdb::GdbAddress,
    injection::{Extent, FaultOptions},
    net::NetArgument,
    on_panic::PanicOptions,
    share::ShareChoice,
    values::{
        ClockChoice, ConsoleChoice, DevicesChoice, EngineArguments, MemorySize, SandboxChoice,
        seconds,
    },
};

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
    /// The machine stands still until the `ring3 trace` or `ring3 profile` that started it looks at it
    #[arg(long, hide = true)]
    pub watched: bool,
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
    /// Number of virtual CPUs, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: u32,
    /// How guest code is run.
    #[command(flatten)]
    pub engine: EngineArguments,
    /// How near to the host's the guest's time of day is
    ///
    /// Linux sets its clock when it starts, by a clock that counts whole seconds. With exact, what that leaves is
    /// made up for at once, and then the guest follows the host by KVM's paravirtual clock. clocksource=kvm-clock,
    /// which has it keep its time by that one, is added to the command line. Without this option Linux's is exact
    /// unless --append has a clocksource=, no-kvmclock or nopv, and other kernels' is rtc.
    #[arg(long, value_enum)]
    pub clock: Option<ClockChoice>,
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
    /// leaves the guest public addresses only: none of this host's, none of the networks it is on, no private,
    /// link-local or metadata address. Each allow=CIDR:PORT behind it opens some again, such as
    /// allow=10.0.2.2:5432 for a port of this host's loopback.
    #[arg(
        long,
        value_name = "user[,hostfwd=tcp:ADDRESS:PORT-:PORT][,dns=ADDRESS][,restrict[,allow=CIDR:PORT]]|\
                      passt[,hostfwd=...]|socket,path=FILE|tap,ifname=NAME|vhost-user:SOCKET"
    )]
    pub net: Vec<NetArgument>,
    /// Folder of this host for the guest, which mounts it by its tag; can be repeated
    ///
    /// In the guest: mount -t virtiofs TAG /mnt. With ro, the guest cannot change it. Where ring3 runs as root the guest
    /// can make no device nodes and no setuid programs in it; with privileged it can. vhost-user:SOCKET:TAG is a folder
    /// that another program serves there, such as virtiofsd.
    #[arg(long, value_name = "DIR:TAG[:ro|:privileged]|vhost-user:SOCKET:TAG")]
    pub share: Vec<ShareChoice>,
    /// Where disks, networks and folders are served: in processes of their own, which can reach nothing else, or in the machine's (to look for a
    /// failure)
    #[arg(long, value_enum, default_value_t = DevicesChoice::Processes)]
    pub devices: DevicesChoice,
    /// Faults.
    #[command(flatten)]
    pub fault: FaultOptions,
    /// Shut this process in once the machine is ready: it can then open no file, start no program and connect nowhere. off is to look for a
    /// failure; --devices inline means off
    #[arg(long, value_enum, default_value_t = SandboxChoice::On, hide_short_help = true)]
    pub sandbox: SandboxChoice,
    /// What happens when its kernel crashes.
    #[command(flatten)]
    pub panic: PanicOptions,
    /// Wait for a debugger there: in GDB, target remote PATH, or target remote :PORT
    ///
    /// Whoever can connect to it can do with the guest as they please. `ring3 gdb` needs no such option.
    #[arg(long, value_name = "unix:PATH|tcp:ADDRESS:PORT")]
    pub gdb: Option<GdbAddress>,
    /// Execute nothing before a debugger says so
    #[arg(long, requires = "gdb")]
    pub paused: bool,
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

impl RunArguments {
    /// What `ring3 run` makes of these words, which the command's name is not among.
    ///
    /// # Errors
    /// They are not its options: a line that says why.
    pub fn of_words(words: Vec<String>) -> Result<Self, String> {
        let command = Self::augment_args(Command::new("ring3 run").no_binary_name(true));
        let matches = command.try_get_matches_from(words);
        matches.and_then(|matches| Self::from_arg_matches(&matches)).map_err(|error| {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            line.trim_start_matches("error: ").to_owned()
        })
    }

    /// The guest's console is at standard input and output.
    pub fn is_interactive(&self) -> bool {
        self.console != ConsoleChoice::None
    }

    /// What of the machine can have faults.
    pub fn extent(&self) -> Extent {
        let disks = self.disk.iter().map(|disk| matches!(disk, DiskChoice::Image(_)));
        let nets = self.net.iter().map(NetArgument::is_ours);
        let (disks, nets) = (disks.collect(), nets.collect());
        Extent { disks, nets, memory: self.memory.0, timeout: self.timeout }
    }
}
