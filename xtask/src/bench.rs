//! `cargo xtask bench`: gets everything ready for the harness and shows what it measured.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use harness::{
    peers::{self, Setup},
    program,
    record::{self, Machine, Report},
    schedule,
    seat::Pace,
    table,
};

use crate::{
    assets::{Assets, Kernel},
    checks::{build_ring3, root},
    cpio::Archive,
};

const EXAMPLES: &str = "\
Examples:
  Where ring3 stands, in three minutes:
    cargo xtask bench --quick

  Some rows, in some environments (native is always measured):
    cargo xtask bench --quick --peers ring3:direct,qemu --rows getppid,fork

  The same guest by hand; type `run getppid 100` and `quit`:
    cargo xtask bench --initramfs bench.cpio
    ring3 run --kernel VMLINUZ --initrd bench.cpio --append 'console=ttyS0 quiet'
";

/// What to measure.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Environments to measure, separated by commas: ring3, ring3:ENGINE, qemu, uml, gvisor [default: all there are]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    peers: Vec<String>,
    /// Rows to measure, or groups of them, separated by commas [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    rows: Vec<String>,
    /// Under three minutes: short batches, five of each
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// Long batches, and many
    #[arg(long)]
    full: bool,
    /// Write the result
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// A ring3 that is built already [default: build the release]
    #[arg(long, value_name = "FILE")]
    ring3: Option<PathBuf>,
    /// The kernel that machines boot
    #[arg(long, value_enum, default_value_t = Kernel::BookwormCloud)]
    kernel: Kernel,
    /// Further words of every machine's kernel command line
    #[arg(long, value_name = "STRING", default_value = "")]
    append: String,
    /// Only write the root file system that machines boot, and say how to boot it
    #[arg(long, value_name = "FILE")]
    initramfs: Option<PathBuf>,
}

/// Does what is asked.
///
/// # Errors
/// Something cannot be built or fetched, or the arguments name what is not there.
pub fn bench(arguments: &Arguments) -> Result<()> {
    let files = Files::prepare(arguments.kernel)?;
    if let Some(output) = &arguments.initramfs {
        return files.write_initramfs(output);
    }
    let directory = tempfile::Builder::new().prefix("ring3-bench-").tempdir()?;
    let setup = files.setup(directory.path(), arguments)?;
    let report = measure(arguments, &setup)?;
    print!("{}", table::render(&report));
    if let Some(file) = &arguments.json {
        report.write(file)?;
    }
    Ok(())
}

fn ring3(arguments: &Arguments) -> Result<PathBuf> {
    let Some(program) = &arguments.ring3 else { return build_ring3() };
    ensure!(program.exists(), "{} does not exist: --ring3 names a built ring3", program.display());
    Ok(program.canonicalize()?)
}

fn measure(arguments: &Arguments, setup: &Setup) -> Result<Report> {
    let (mut machine, date) = (Machine::here(), record::now());
    let mut missing = Vec::new();
    let found = peers::find(&arguments.peers, setup)?.into_iter();
    let peers: Vec<_> = found.filter_map(|found| found.map_err(|m| missing.push(m)).ok()).collect();
    let rows = schedule::rows(&peers[0], &arguments.rows)?;
    let pace = arguments.pace();
    let (environments, rows) = schedule::measure(&peers, &rows, &pace);
    machine.load.1 = record::load();
    let revision = record::revision(&root());
    let effort = record::Effort { batches: pace.batches, batch: pace.batch.as_millis() as u64 };
    let schema = record::SCHEMA;
    Ok(Report { schema, date, revision, machine, effort, environments, missing, rows })
}

impl Arguments {
    fn pace(&self) -> Pace {
        let (batches, batch, row, answer) = match (self.quick, self.full) {
            (true, _) => (5, 20, 3, 30),
            (_, true) => (15, 200, 120, 300),
            _ => (7, 50, 20, 120),
        };
        Pace {
            batches,
            batch: Duration::from_millis(batch),
            row: Duration::from_secs(row),
            answer: Duration::from_secs(answer),
            start: Duration::from_secs(120),
        }
    }
}

/// What machines are made of.
struct Files {
    program: PathBuf,
    busybox: Vec<u8>,
    kernel: PathBuf,
}

impl Files {
    fn prepare(kernel: Kernel) -> Result<Self> {
        let target =
            env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), Into::into);
        let assets = Assets::open()?;
        let (busybox, kernel) = (assets.busybox()?, assets.kernel(kernel)?.image);
        Ok(Self { program: program::build(&target.join("bench"))?, busybox, kernel })
    }

    fn setup(&self, directory: &Path, arguments: &Arguments) -> Result<Setup> {
        let (busybox, initrd) = (directory.join("sh"), directory.join("initrd.cpio"));
        fs::write(&busybox, &self.busybox)?;
        make_executable(&busybox)?;
        fs::write(&initrd, self.initramfs()?)?;
        let (program, kernel) = (self.program.clone(), self.kernel.clone());
        let (append, ring3) = (arguments.append.clone(), vec![(String::new(), ring3(arguments)?)]);
        Ok(Setup { program, busybox, kernel, initrd, append, ring3 })
    }

    /// The program as the first process, and busybox as its shell.
    fn initramfs(&self) -> Result<Vec<u8>> {
        let program = fs::read(&self.program)?;
        let mut archive = Archive::new();
        for directory in ["bin", "dev", "proc", "sys", "tmp"] {
            archive.directory(directory);
        }
        archive.character_device("dev/console", 5, 1);
        archive.file("bin/sh", 0o755, &self.busybox);
        archive.file("init", 0o755, &program);
        Ok(archive.finish())
    }

    fn write_initramfs(&self, output: &Path) -> Result<()> {
        fs::write(output, self.initramfs()?)
            .with_context(|| format!("cannot write {}", output.display()))?;
        println!(
            "ring3 run --kernel {} --initrd {} --append 'console=ttyS0 quiet'",
            self.kernel.display(),
            output.display()
        );
        Ok(())
    }
}

fn make_executable(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(file, fs::Permissions::from_mode(0o755))?)
}
