//! Programs that test the machine they run on, run in ring3: `selftests --help`.
//!
//! Others wrote them to find broken processors, memory and kernels, so they know nothing of us and
//! forgive nothing. A test here boots one, reads the verdict from its console, and holds it to the
//! exact figures a sound machine gives.

mod bpf;
mod compile;
mod console;
mod crypto;
mod debian;
mod in_guest;
mod in_kernel;
mod keys;
mod kselftests;
mod ltp;
mod machine;
mod memtest;
mod outcome;
mod runtimes;
mod screen;
mod static_keys;
mod stress;
mod xen;

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::{Parser, ValueEnum};
use xtask::assets::Assets;

/// Runs self-tests of kernels, memory and processor in ring3
#[derive(Debug, Parser)]
struct Arguments {
    /// Which to run
    #[arg(value_enum, default_values_t = [Which::All])]
    which: Vec<Which>,
    /// Seconds each guest may take
    #[arg(long, default_value_t = 3600)]
    timeout: u64,
    /// Guest memory for memtest86+, in MiB; what the tests take grows with it
    #[arg(long, default_value_t = 16)]
    memtest_memory: u32,
    /// Run only the kselftests, LTP tests and workloads of debian whose name contains this; can be repeated
    #[arg(long, value_name = "PART")]
    filter: Vec<String>,
    /// Seconds stress-ng takes, over all its classes
    #[arg(long, default_value_t = 600)]
    stress_seconds: u64,
    /// How many times compile builds each project in a guest, as many files at once as that has CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    builds: u32,
    /// Where the Linux Test Project is installed
    #[arg(long, value_name = "DIR")]
    ltp: Option<PathBuf>,
    /// How ring3 runs guest code, see `ring3 run --help`
    #[arg(long, default_value = "auto")]
    engine: String,

    /// What keeps programs from their kernel's memory, see `ring3 run --help` [default: that of ring3]
    #[arg(long)]
    guest_isolation: Option<String>,
    /// Virtual CPUs of the guests; of stress-ng's stressors as many run at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: u32,
    /// Have QEMU run the guests instead, translating them (not memtest86+, Xen and what uses `ring3 exec`)
    #[arg(long)]
    qemu: bool,
    /// Print what the guests' consoles print
    #[arg(long, short)]
    verbose: bool,
}

/// A suite of tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Linux's test_bpf: 1049 programs through the kernel's own just-in-time compiler
    Bpf,
    /// Linux's test_static_keys: a kernel that patches its own code
    StaticKeys,
    /// Linux's tests of its cryptographic algorithms, most of them vector code
    Crypto,
    /// memtest86+, its tests 0 to 9
    Memtest,
    /// Xen 4.20 and a stock kernel as its paravirtualized first domain
    Xen,
    /// Linux's kselftests for x86, compared with the same programs on the host
    Kselftests,
    /// stress-ng --verify: processor, memory, processes, signals, futexes, pipes
    Stress,
    /// C projects, compiled to the same bytes as on the host
    Compile,
    /// Python's regression tests; programs for Node and Java
    Runtimes,
    /// What programs get at on a host with protection keys, which is a machine of QEMU's
    Keys,
    /// The Linux Test Project's system calls, compared with QEMU; needs --ltp
    Ltp,
    /// A Debian with systemd that installs packages and runs servers, containers, rules, modules
    Debian,
    /// All of them but ltp
    All,
}

const EACH: [Which; 11] = [
    Which::StaticKeys,
    Which::Bpf,
    Which::Crypto,
    Which::Memtest,
    Which::Xen,
    Which::Kselftests,
    Which::Compile,
    Which::Runtimes,
    Which::Stress,
    Which::Keys,
    Which::Debian,
];

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let all = arguments.which.contains(&Which::All);
    let known = EACH.into_iter().chain([Which::Ltp]);
    let asked = |which: &Which| arguments.which.contains(which) || all && *which != Which::Ltp;
    let chosen = known.filter(asked);
    let outcomes: Vec<bool> = chosen.map(|which| report(which, &arguments)).collect();
    let passed = outcomes.iter().filter(|passed| **passed).count();
    println!("self-tests: {passed} passed, {} failed", outcomes.len() - passed);
    if passed == outcomes.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one suite and prints a line about it; whether it passed.
fn report(which: Which, arguments: &Arguments) -> bool {
    let name = which.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned());
    let start = Instant::now();
    let result = run(which, arguments);
    let seconds = start.elapsed().as_secs();
    match &result {
        Ok(figures) => println!("{name}: passed in {seconds} s: {figures}"),
        Err(error) => println!("{name}: FAILED after {seconds} s: {error:#}"),
    }
    result.is_ok()
}

/// Whether a test's name has one of the wanted parts; any has if none is asked for.
fn is_wanted(name: &str, parts: &[String]) -> bool {
    parts.is_empty() || parts.iter().any(|part| name.contains(part))
}

/// Runs one suite; the figures it reports, or an error if it is not what a sound machine reports.
fn run(which: Which, arguments: &Arguments) -> Result<String> {
    let assets = Assets::open()?;
    let limits = machine::Limits {
        timeout: Duration::from_secs(arguments.timeout),
        engine: &arguments.engine,
        isolation: arguments.guest_isolation.as_deref(),
        cpus: arguments.cpus,
        qemu: arguments.qemu,
        verbose: arguments.verbose,
    };
    match which {
        Which::Bpf => bpf::run(&assets, limits),
        Which::StaticKeys => static_keys::run(&assets, limits),
        Which::Crypto => crypto::run(&assets, limits),
        Which::Memtest => memtest::run(&assets, arguments.memtest_memory, limits),
        Which::Xen => xen::run(&assets, limits),
        Which::Kselftests => kselftests::run(&assets, &arguments.filter, limits),
        Which::Stress => stress::run(arguments.stress_seconds, limits),
        Which::Compile => compile::run(&assets, arguments.builds, limits),
        Which::Runtimes => runtimes::run(limits),
        Which::Keys => keys::run(&assets, limits),
        Which::Ltp => ltp::run(&assets, arguments.ltp.as_deref(), &arguments.filter, limits),
        Which::Debian => debian::run(&assets, &arguments.filter, limits),
        Which::All => Ok(String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_add_up() {
        let wanted = |parts: &[&str]| {
            let parts: Vec<_> = parts.iter().map(|&part| part.to_owned()).collect();
            ["fork01", "vfork02", "mmap01"].map(|name| is_wanted(name, &parts))
        };
        assert_eq!(wanted(&[]), [true, true, true]);
        assert_eq!(wanted(&["fork"]), [true, true, false]);
        assert_eq!(wanted(&["vfork", "mmap"]), [false, true, true]);
    }
}
