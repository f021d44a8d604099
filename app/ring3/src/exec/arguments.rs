//! What `ring3 exec` and `ring3 shell` can be asked.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, FromArgMatches};

use crate::{
    net::NetArgument,
    values::{self, DevicesChoice, EngineArguments, MemorySize, SandboxChoice, seconds},
};

const EXAMPLES: &str = "\
Examples:
  Run a program under Debian 13's kernel, with your files and in this folder:
    ring3 exec -- uname -a

  Build and test what is here, under Debian 12's kernel:
    ring3 exec --kernel debian-12 --memory 2G -- make test

  A shell as root of the guest, with a network:
    ring3 shell --root --net user
";

const STATUS: &str = "\
Exit status: the command's own; 128 + N if signal N killed it; 127 if there is no such command, 126 if
it cannot be run, 125 if there is no guest to run it in, 124 if --timeout expired; 128 + N if signal N ended
ring3 itself, 137 if `ring3 stop` did; 1 if the command succeeded, but not all that it wrote could be passed on.
";

/// A command to run in a guest.
#[derive(Debug, Args)]
#[command(after_help = format!("{EXAMPLES}\n{STATUS}"))]
pub struct ExecArguments {
    /// The guest.
    #[command(flatten)]
    pub guest: Guest,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

/// A shell in a guest.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ShellArguments {
    /// The guest.
    #[command(flatten)]
    pub guest: Guest,
}

/// A guest that has this host's files. Its default is what the command line makes of no options.
#[derive(Debug, Args)]
pub struct Guest {
    /// A kernel by name (see `ring3 kernel list`), fetched if need be, or a bzImage
    #[arg(long, short = 'k', value_name = "NAME|FILE", default_value = "debian-13")]
    pub kernel: String,
    /// Where a bzImage's modules are (a lib/modules/RELEASE folder); those of a named kernel are known
    #[arg(long, value_name = "DIR")]
    pub modules: Option<PathBuf>,
    /// Folder whose changes are real, as those of the current one are; can be repeated
    ///
    /// Everything else of the file system is read-only below a private overlay: the command may
    /// change it, and the changes are gone when it ends.
    #[arg(long, value_name = "DIR")]
    pub rw: Vec<PathBuf>,
    /// Keep the current folder's changes private too
    #[arg(long)]
    pub private: bool,
    /// Ask the host for its files anew after a second, and for their extended attributes
    ///
    /// Otherwise the command sees a file outside of the folders whose changes are real as it was when the command
    /// first looked at it, whatever the host does to it meanwhile, and has no extended attributes anywhere (capabilities of files,
    /// access control lists). In the folders whose changes are real it then asks each 90 ms, and relies on no notice of the host's. With this it
    /// runs slower.
    #[arg(long)]
    pub fresh: bool,
    /// As root of this host, let the command make device nodes and setuid programs in the folders whose changes are real
    ///
    /// They would be this host's. Without this option such files are refused.
    #[arg(long, hide_short_help = true)]
    pub privileged_files: bool,
    /// Network interface, as for `ring3 run`; without it there is only loopback
    ///
    /// With user, the command reaches what this host reaches; with user,restrict public addresses only.
    #[arg(long, value_name = "user[,hostfwd=...]")]
    pub net: Option<NetArgument>,
    /// Environment variable to pass on, or to set; can be repeated
    ///
    /// Passed on anyway: PATH, HOME, USER, LOGNAME, SHELL, TERM, COLORTERM, TZ, EDITOR, LANG, LC_*.
    #[arg(long, short = 'e', value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Run as the guest's root instead of as the user you are
    #[arg(long)]
    pub root: bool,
    /// As root of this host, run the machine as this user (a login or a number)
    ///
    /// Without it, under sudo, that is the user who called. Nothing in the guest, not even its root, has then more of this host's
    /// files than this user.
    #[arg(long, value_name = "NAME", conflicts_with = "as_root")]
    pub user: Option<String>,
    /// Under sudo, keep root's rights: the command is this host's root, with all its files
    #[arg(long)]
    pub as_root: bool,
    /// Guest memory: a number of MiB, or with a suffix K, M, G or T
    #[arg(long, short = 'm', value_name = "SIZE", default_value = "1G")]
    pub memory: MemorySize,
    /// Number of virtual CPUs, 1 to 16; where none is given, as many CPUs as ring3 may use, at most 8
    #[arg(long, value_name = "N", default_value_t = values::usual_cpus())]
    pub cpus: u32,
    /// How guest code is run.
    #[command(flatten)]
    pub engine: EngineArguments,
    /// Where folders and the network are served: in processes of their own, which can reach nothing else, or in ring3's (to look
    /// for a failure)
    #[arg(long, value_enum, default_value_t = DevicesChoice::Processes)]
    pub devices: DevicesChoice,
    /// Shut this process in once the machine is ready: it can then open no file, start no program and connect nowhere. off is to look for a
    /// failure; --devices inline means off
    #[arg(long, value_enum, default_value_t = SandboxChoice::On, hide_short_help = true)]
    pub sandbox: SandboxChoice,
    /// Further arguments of the guest's kernel, such as initcall_debug
    #[arg(long, value_name = "STRING")]
    pub append: Option<String>,
    /// Show what the guest's kernel prints, on standard error
    #[arg(long, short = 'v')]
    pub verbose: bool,
    /// Print counters to standard error at the end
    #[arg(long)]
    pub stats: bool,
    /// What `ring3 ps` and the others call it; the number of its process if none is given
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The machine stands still until the `ring3 trace` or `ring3 profile` that started it looks at it
    #[arg(long, hide = true)]
    pub watched: bool,
    /// How long the command may go on after SIGTERM; then its machine is ended, and the exit status is 143
    ///
    /// The same goes for SIGINT, SIGHUP and SIGQUIT if the guest stands still and does not take them. A second SIGTERM, a second
    /// or more after the first, ends the machine at once.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "10")]
    pub grace: Duration,
    /// Give up after this long, with exit status 124
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
}

impl Default for Guest {
    fn default() -> Self {
        let command = Self::augment_args(clap::Command::new("guest").no_binary_name(true));
        let made = command.try_get_matches_from([""; 0]);
        let made = made.and_then(|matches| Self::from_arg_matches(&matches));
        made.expect("no option is required")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_without_options_is_the_command_lines() {
        let guest = Guest::default();
        assert_eq!((guest.kernel.as_str(), guest.memory), ("debian-13", MemorySize(1 << 30)));
        assert_eq!((guest.cpus, guest.grace), (values::usual_cpus(), Duration::from_secs(10)));
    }
}
