//! Values that options of several commands take. Nothing here knows a command.

use std::{num::NonZero, str::FromStr, sync::Arc, thread::available_parallelism, time::Duration};

use crate::{
    known_blocks::{KernelBlocks, Kind, StartedFor},
    unpacked,
};
use clap::{Args, ValueEnum};
use vhost_user::Nearness;
use vmm::{GuestClock, LockStep, Scattered, Switches, kvm_features, unpacked::Unpacked};

/// What becomes of flushed mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Flushed {
    /// They stay, without rights, until the next flush
    Close,
    /// They are taken away
    Unmap,
}

/// How processes are run that have just begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum YoungChoice {
    /// Translated, with look-ups, for some milliseconds
    Lookup,
    /// Directly
    Map,
}

/// Whether processes share copies of the code that they execute, where the host has protection keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CodeCopies {
    /// They share those of pages in which nothing is changed
    Shared,
    /// Each process has copies of its own
    Own,
}

/// How programs are run that have more scattered pages than the host allows mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScatteredChoice {
    /// Directly on the CPU; each access to a page that is not mapped has it mapped in another's place
    Map,
    /// Translated, with each access looked up in a table, as long as they need it
    Lookup,
    /// All programs are run so, whatever they need (for tests)
    Always,
}

/// How the guest's 32-bit programs are run under a 64-bit kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum User32 {
    /// Directly on the CPU, where the host runs 32-bit programs itself
    Direct,
    /// By the interpreter
    Interpret,
}

/// How 32-bit kernels and their programs are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Guest32 {
    /// Translated, under PAE paging
    Translate,
    /// The same, and pages that a kernel maps only for a moment are not looked up but mapped
    Map,
    /// By the interpreter
    Interpret,
}

/// Whose the translated kernel code is where there are several virtual CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Translations {
    /// The machine's: what one virtual CPU has translated, all run
    Shared,
    /// Each virtual CPU's own
    Own,
}

/// What keeps the guest's programs from its kernel's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GuestIsolation {
    /// The host's protection keys: closed
    Keys,
    /// Programs run in processes of their own: closed, and slower
    Strict,
    /// Nothing: a program that knows where to look reaches the kernel's memory
    Fast,
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
    /// code ("wedge turns" of --stats), every=N compares all blocks anew after so many. cpu=N is the virtual CPU whose code is compared
    /// (0 if none is given); the others run meanwhile, and what they may have caused is a difference only if it comes 16 times in a row.
    #[arg(
        long,
        value_name = "runs=N|all,from=N,every=N,cpu=N",
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
    /// What becomes of host mappings that the guest's page tables do not say any more
    ///
    /// For comparison. What is closed is shown again at a third of the price, when the guest comes back to it.
    #[arg(long, value_enum, default_value_t = Flushed::Close, hide_short_help = true)]
    pub flushed: Flushed,
    /// How programs are run whose scattered pages are more than the host allows mappings (vm.max_map_count)
    #[arg(long, value_enum, default_value_t = ScatteredChoice::Lookup, hide_short_help = true)]
    pub scattered: ScatteredChoice,
    /// How processes are run that have just begun
    ///
    /// For comparison. Most processes end before mappings pay. So a process whose program has been started often is translated for its
    /// first milliseconds, with a look-up for each access. Not with --guest-isolation strict.
    #[arg(long, value_enum, default_value_t = YoungChoice::Lookup, hide_short_help = true)]
    pub young: YoungChoice,
    /// Who rings the doorbells of devices and takes the interrupts of their answers
    ///
    /// For comparison, and to narrow down a failure. With `wedge`, the process that runs the guest waits for a device's answer itself
    /// while the device's server looks for requests. With `monitor`, each request takes a turn of the monitor.
    #[arg(long, value_enum, default_value_t = Doorbells::Wedge, hide_short_help = true)]
    pub doorbells: Doorbells,
    /// Whether processes share copies of the code that they execute, where the host has protection keys
    ///
    /// For comparison, and to narrow down a failure.
    #[arg(long, value_enum, default_value_t = CodeCopies::Shared, hide_short_help = true)]
    pub code_copies: CodeCopies,
    /// How 32-bit programs are run under a 64-bit kernel
    ///
    /// For comparison. They are interpreted in any case with --guest-isolation strict, and where the host runs none itself.
    #[arg(long, value_enum, default_value_t = User32::Direct, hide_short_help = true)]
    pub user32: User32,
    /// How 32-bit kernels and their programs are run
    ///
    /// For comparison, and to narrow down a failure. They are interpreted in any case without PAE paging, and on several virtual CPUs.
    #[arg(long, value_enum, default_value_t = Guest32::Translate, hide_short_help = true)]
    pub guest32: Guest32,
    /// Whose the translated kernel code is where there are several virtual CPUs
    ///
    /// For comparison, and to narrow down a failure.
    #[arg(long, value_enum, default_value_t = Translations::Shared, hide_short_help = true)]
    pub translations: Translations,
    /// How translated kernel code finds the targets of returns and indirect jumps
    ///
    /// For comparison, and to narrow down a failure.
    #[arg(long, value_enum, default_value_t = ComputedJumps::Land, hide_short_help = true)]
    pub computed_jumps: ComputedJumps,
    /// Where the translated code of programs can be executed
    ///
    /// For comparison, and to narrow down a failure.
    #[arg(long, value_enum, default_value_t = ProgramCode::Anywhere, hide_short_help = true)]
    pub program_code: ProgramCode,
    /// Whether the blocks of the kernel's code that an earlier machine with the same kernel has run are translated before
    /// they are asked for
    ///
    /// For comparison.
    #[arg(long, value_enum, default_value_t = KnownBlocksChoice::Keep, hide_short_help = true)]
    pub known_blocks: KnownBlocksChoice,
    /// Whether a kernel is unpacked once and for all machines
    ///
    /// For comparison.
    #[arg(long, value_enum, default_value_t = UnpackedKernels::Keep, hide_short_help = true)]
    pub unpacked_kernels: UnpackedKernels,
    /// How machines of one user share a host CPU that several of them want
    ///
    /// For comparison. A machine with more virtual CPUs than the host has CPUs takes no turns.
    #[arg(long, value_enum, default_value_t = Crowded::Turns, hide_short_help = true)]
    pub crowded: Crowded,
    /// What a virtual CPU does that has nothing to do, if the machine has several
    ///
    /// For comparison.
    #[arg(long, value_enum, default_value_t = Halted::Look, hide_short_help = true)]
    pub halted: Halted,
    /// How ring3 learns, at a switch among many processes, which mappings of a process are still right
    ///
    /// For comparison, and to narrow down a failure. With more processes than Linux has identifiers of address spaces each switch is a
    /// flush. Linux counts what it has taken back of a process's memory. What was right at the same count is right still.
    #[arg(long, value_enum, default_value_t = SwitchesChoice::Counted, hide_short_help = true)]
    pub switches: SwitchesChoice,
    /// What keeps the guest's programs from its kernel's memory
    ///
    /// For the fast engine; the host is closed to both in any case. Without this option it is keys where the host has them; elsewhere
    /// strict for `run` where the host can, and fast for `exec` and `shell`.
    #[arg(long, value_enum)]
    pub guest_isolation: Option<GuestIsolation>,
    /// Mappings that a process with guest code may have, in place of what the host allows
    ///
    /// For tests.
    #[arg(long, value_name = "N", hide = true, value_parser = clap::value_parser!(u32).range(1000..))]
    pub most_mappings: Option<u32>,
    /// What of KVM's interface the guest is offered beside the clock
    ///
    /// Linux knows it as KVM's: steal-time (it is told who has to wait), tlb-flush (a CPU that waits is left a note
    /// instead of an interrupt), send-ipi, yield, unhalt (locks are waited for by halting), eoi (the end of an interrupt is
    /// told in memory), and dedicated (each virtual CPU has one of the host's to itself, so an idle one looks for work for a while
    /// before it halts). all leaves dedicated out. auto is all where virtual CPUs outnumber those that ring3 may use. Elsewhere
    /// auto is eoi for one virtual CPU, and eoi and dedicated for several.
    #[arg(
        long,
        value_name = "auto|all|none|FEATURE[,FEATURE]",
        default_value = "auto",
        hide_short_help = true
    )]
    pub paravirt: ParavirtChoice,
}

/// What of KVM's interface a guest is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParavirtChoice(pub Option<u64>);

impl FromStr for ParavirtChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let features = match text {
            "auto" => return Ok(Self(None)),
            "all" => kvm_features::ALL,
            "none" => 0,
            list => {
                list.split(',').try_fold(0, |all, name| Ok::<_, String>(all | feature(name)?))?
            }
        };
        Ok(Self(Some(features)))
    }
}

fn feature(name: &str) -> Result<u64, String> {
    let known = kvm_features::NAMES.iter().find(|(known, _)| *known == name);
    known.map(|(_, bit)| *bit).ok_or_else(|| {
        let names = kvm_features::NAMES.map(|(name, _)| name).join(", ");
        format!("`{name}` is none of {names}")
    })
}

impl EngineArguments {
    /// System calls come by syscall user dispatch.
    pub fn user_dispatch(&self) -> bool {
        self.system_calls == SystemCalls::Dispatch
    }

    /// System calls come by trap each time.
    pub fn unpatched(&self) -> bool {
        matches!(self.system_calls, SystemCalls::Trap | SystemCalls::Ptrace)
    }

    /// Processes with guest code have a tracer.
    pub fn traced(&self) -> bool {
        self.system_calls == SystemCalls::Ptrace
    }

    /// How programs with many scattered pages are run.
    pub fn scattered(&self) -> Scattered {
        match self.scattered {
            ScatteredChoice::Map => Scattered::Map,
            ScatteredChoice::Lookup => Scattered::Lookup,
            ScatteredChoice::Always => Scattered::Always,
        }
    }

    /// How the engine learns, at a switch to a process, which of its mappings are still right.
    pub fn switches(&self) -> Switches {
        match self.switches {
            SwitchesChoice::Counted => Switches::Counted,
            SwitchesChoice::Compared => Switches::Compared,
            SwitchesChoice::Checked => Switches::Checked,
        }
    }

    /// Processes that have just begun run directly.
    pub fn young_directly(&self) -> bool {
        self.young == YoungChoice::Map
    }

    /// Processes share no copies of the code that they execute.
    pub fn copies_apart(&self) -> bool {
        self.code_copies == CodeCopies::Own
    }

    /// Flushed mappings are taken away.
    pub fn unmap_flushed(&self) -> bool {
        self.flushed == Flushed::Unmap
    }
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
    /// By the filter's trap each time, however often a program makes them
    Trap,
    /// The same, and a tracer hears of each first (ptrace; needs --sandbox off)
    Ptrace,
}

/// Who rings doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Doorbells {
    /// The processes that run the guest, where they can
    Wedge,
    /// The monitor
    Monitor,
}

/// Where translations of programs' code can be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProgramCode {
    /// Wherever the program or library is loaded: each process loads it elsewhere
    Anywhere,
    /// At the address that the code was translated at
    Fixed,
}

/// How computed jumps find where they lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ComputedJumps {
    /// A table by some bits of the address leads to the block, which asks whether it is meant
    Land,
    /// They search a table of all blocks, and no known blocks are used
    Search,
}

/// What becomes of the blocks of a kernel's code that machines run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KnownBlocksChoice {
    /// The first machine with a kernel leaves them in the cache, translated, and later ones use them
    Keep,
    /// The cache is left alone
    Off,
}

impl KnownBlocksChoice {
    /// The blocks of a kernel image, for a machine of so many vCPUs.
    pub fn of(self, kernel: &[u8], started_for: StartedFor, vcpus: u32) -> KernelBlocks {
        let kind = Kind { started_for, several: vcpus > 1 };
        if self == Self::Off { KernelBlocks::default() } else { KernelBlocks::of(kernel, kind) }
    }
}

/// What becomes of a kernel that has been unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UnpackedKernels {
    /// The first machine with a kernel leaves it in the cache, unpacked, and later ones read it there
    Keep,
    /// The cache is left alone
    Off,
}

impl UnpackedKernels {
    /// What the image of a kernel unpacks to, if that is in the cache or can be kept there. `digest` is the image's SHA-256 in
    /// hexadecimal digits, if it is known.
    pub fn of(self, image: &[u8], digest: Option<&str>) -> Option<Arc<dyn Unpacked>> {
        if self == Self::Off { None } else { unpacked::of(image, digest) }
    }
}

/// How machines of one user share a host CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Crowded {
    /// They take turns of some milliseconds
    Turns,
    /// The host's scheduler decides
    Free,
}

/// What a virtual CPU does that has nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Halted {
    /// It looks for a moment whether something comes, if that has been worth it lately, and sleeps then
    Look,
    /// It sleeps at once
    Sleep,
}

/// How ring3 learns, at a switch to a process, which of its mappings are still right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SwitchesChoice {
    /// From the count of flushes that the guest's kernel keeps, if the kernel has symbols and types to find the count by
    Counted,
    /// By comparing all that is mapped with page tables at each switch
    Compared,
    /// By comparing at each switch, and the machine fails if the kernel's count was wrong
    Checked,
}

/// The most virtual CPUs that a command's machine has where no option says how many.
const MOST_USUAL_CPUS: usize = 8;

/// The number of virtual CPUs where no option says it: as many CPUs as the host lets this process use, up to a number
/// that can be started in less time than most commands take.
pub fn usual_cpus() -> u32 {
    host_cpus().min(MOST_USUAL_CPUS) as u32
}

/// How many of its CPUs the host lets this process use.
fn host_cpus() -> usize {
    available_parallelism().map_or(1, NonZero::get)
}

/// Where devices are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DevicesChoice {
    /// Each in a process of its own; disks and folders watch for requests beside the vCPU while the guest waits for small answers, or come to its CPU
    Processes,
    /// The same, and disks and folders only come to the vCPU's CPU: for a host whose other CPUs are wanted
    Near,
    /// Each in a process of its own, on whatever CPU is free
    Apart,
    /// By threads of the machine's process
    Inline,
}

impl DevicesChoice {
    /// The choice as it is carried out for a machine of so many vCPUs: where these outnumber the host's CPUs, no server looks for
    /// requests beside a vCPU.
    pub fn beside(self, vcpus: u32) -> Self {
        if self == Self::Processes && host_cpus() < vcpus as usize { Self::Near } else { self }
    }

    /// Where a disk's or folder's process runs, if it has one.
    pub fn nearness(self) -> Nearness {
        match self {
            Self::Processes => Nearness::Near,
            Self::Near => Nearness::SameCpu,
            Self::Apart | Self::Inline => Nearness::Apart,
        }
    }
}

/// How near to the host's the guest's time of day is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClockChoice {
    /// Set by the CMOS clock: up to half a second off
    Rtc,
    /// The host's, to the millisecond
    Exact,
}

impl From<ClockChoice> for GuestClock {
    fn from(choice: ClockChoice) -> Self {
        match choice {
            ClockChoice::Rtc => Self::Rtc,
            ClockChoice::Exact => Self::Exact,
        }
    }
}

/// Whether a machine's process shuts itself in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SandboxChoice {
    /// Once the machine is ready
    On,
    /// Not at all
    Off,
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

    #[test]
    fn paravirtual_features() {
        use kvm_features::feature::{SEND_IPI, TLB_FLUSH};
        let features = |text: &str| text.parse().map(|ParavirtChoice(bits)| bits);
        assert_eq!(features("auto"), Ok(None));
        assert_eq!(features("none"), Ok(Some(0)));
        assert_eq!(features("all"), Ok(Some(kvm_features::ALL)));
        assert_eq!(features("tlb-flush,send-ipi"), Ok(Some(TLB_FLUSH | SEND_IPI)));
        assert!(features("tlb-flush,").is_err() && features("magic").is_err());
    }

    #[test]
    fn a_host_without_a_cpu_to_spare_has_no_server_beside_the_vcpus() {
        use DevicesChoice::{Apart, Near, Processes};
        assert_eq!(
            [Processes, Near, Apart].map(|choice| choice.beside(u32::MAX)),
            [Near, Near, Apart]
        );
        assert_eq!(Processes.beside(0), Processes);
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
}
