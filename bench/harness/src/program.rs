//! Builds the guest program: one static file that runs on any x86-64 Linux.
//!
//! It is C and not Rust because what is measured should be the system call, not a runtime around
//! it, and because the C library is what most programs' memcpy, qsort and fork come from.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
};

use sha2::{Digest, Sha256};

use crate::Error;

/// No contraction: fused multiply-add would change results between CPUs.
const OPTIONS: [&str; 7] = [
    "-std=gnu11",
    "-O2",
    "-static",
    "-ffp-contract=off",
    "-fno-tree-vectorize",
    "-Wall",
    "-Werror",
];

/// The same of a 32-bit program, which has no C library: there need not be one for such programs.
const NARROW_OPTIONS: [&str; 11] = [
    "-m32",
    "-std=gnu11",
    "-O2",
    "-static",
    "-nostdlib",
    "-ffreestanding",
    "-fno-pie",
    "-no-pie",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-fno-asynchronous-unwind-tables",
];

/// The group of rows that run other programs, and those rows.
pub const ROWS: [&str; 19] = [
    "programs",
    "dynexec",
    "bashfork",
    "perlstart",
    "gcchello",
    "pyimport",
    "pystart",
    "python",
    "nodealloc",
    "sqlite",
    "gzip",
    "zstd",
    "go",
    "povray",
    "compile",
    "lua",
    "lua4",
    "diskrand",
    "diskseq",
];

/// The group of rows that take many pages, and so the time to touch them.
pub const SCATTERED: &str = "scattered memory";

/// The group of rows that need two CPUs.
pub const TWO_CPUS: &str = "two CPUs";
/// The one row of that group that runs other programs.
const PROGRAMS_ON_TWO: &str = "lua2";

/// Whether a row or group of this name runs other programs. Those have to be installed.
pub fn runs_programs(name: &str) -> bool {
    ROWS.contains(&name) || name == PROGRAMS_ON_TWO
}

/// Where the sources are.
pub fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("guest")
}

/// Where the 32-bit program's source is.
fn narrow() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("narrow/narrow.c")
}

/// Where the scripts are that run other programs, and their input.
pub fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("userland")
}

/// The program's file in `directory`, built unless it is there already.
///
/// # Errors
/// There is no C compiler, or no static C library.
pub fn build(directory: &Path) -> Result<PathBuf, Error> {
    let program = directory.join(format!("bench-{}", &digest()?[..16]));
    if program.exists() {
        return Ok(program);
    }
    fs::create_dir_all(directory).map_err(Error::file(directory))?;
    let fresh = directory.join(format!(".bench-{}", std::process::id()));
    compile(&fresh)?;
    fs::rename(&fresh, &program).map_err(Error::file(&program))?;
    Ok(program)
}

/// Sources whose names end in one of `extensions`, sorted.
fn files(extensions: &[&str]) -> Result<Vec<PathBuf>, Error> {
    let directory = sources();
    let entries = fs::read_dir(&directory).map_err(Error::file(&directory))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let known = |path: &PathBuf| {
        path.extension().is_some_and(|ext| extensions.iter().any(|known| ext == *known))
    };
    let mut paths: Vec<_> = paths.filter(known).collect();
    paths.sort();
    Ok(paths)
}

fn compile(output: &Path) -> Result<(), Error> {
    let inner = output.with_extension("narrow");
    run(Command::new("cc").args(NARROW_OPTIONS).arg("-o").arg(&inner).arg(narrow()))?;
    let mut cc = Command::new("cc");
    let page = sources().join("page.s");
    cc.args(OPTIONS)
        .arg(format!("-DNARROW={:?}", inner.display().to_string()))
        .arg("-o")
        .arg(output);
    let made = run(cc.arg(&page).args(files(&["c"])?).arg(&page).arg("-lm"));
    fs::remove_file(&inner).map_err(Error::file(&inner))?;
    made
}

fn run(cc: &mut Command) -> Result<(), Error> {
    match cc.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => Err(Error::NoCompiler),
        Err(error) => Err(Error::file("cc")(error)),
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => Err(Error::DoesNotBuild(String::from_utf8_lossy(&done.stderr).into_owned())),
    }
}

/// Of sources, options and compiler, so that each gets a program of its own.
fn digest() -> Result<String, Error> {
    let mut hash = Sha256::new();
    hash.update(OPTIONS.join(" "));
    hash.update(NARROW_OPTIONS.join(" "));
    if let Ok(version) = Command::new("cc").arg("--version").output() {
        hash.update(version.stdout);
    }
    for path in files(&["c", "h", "s"])?.into_iter().chain([narrow()]) {
        hash.update(fs::read(&path).map_err(Error::file(&path))?);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
