//! Runs code on hostile inputs for a time: a small fuzzer without coverage, for every test run and any toolchain.
//!
//! A [`Target`] has a few sound inputs. Each round makes another one out of them, or out of nothing ([`mutate`]), and has the target
//! take it. The target's part is to panic if anything is wrong; debug assertions, which tests are built with, make overflows such
//! panics. What fails is written to a file, and the same file run again fails again. A round's input follows from its seed alone.
//!
//! How long a target has is [`time`]: two seconds, or what `RING3_FUZZ_SECONDS` says. The same targets are run with coverage and for hours by the
//! folder `fuzz/`.

pub mod mutate;

use std::{
    env, fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use fastrand::Rng;

/// Seconds that a target runs in a test, unless [`VARIABLE`] is set.
const SECONDS: f64 = 2.0;
const VARIABLE: &str = "RING3_FUZZ_SECONDS";
/// Where what has failed is written, if it is to go elsewhere than to the folder for temporary files.
const FOLDER: &str = "RING3_FUZZ_FOLDER";
/// One input must not take longer than this.
const LONGEST: Duration = Duration::from_secs(30);
/// How often it is looked at whether one does.
const GLANCE: Duration = Duration::from_millis(200);

/// Code that takes hostile bytes.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// Sound inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Takes an input; panics if something is wrong.
    pub run: fn(&[u8]),
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Inputs taken.
    pub inputs: u64,
}

/// How long a target has in tests.
pub fn time() -> Duration {
    let seconds = env::var(VARIABLE).ok().and_then(|text| text.parse().ok());
    Duration::try_from_secs_f64(seconds.unwrap_or(SECONDS)).unwrap_or_default()
}

/// Runs a target in a test.
///
/// # Panics
/// An input has failed.
pub fn test(target: Target) {
    if let Err(failure) = spend(target, time(), 1) {
        panic!("{failure}");
    }
}

/// An input on which a target failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    target: &'static str,
    problem: String,
    /// Where the input is.
    pub file: PathBuf,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { target, problem, file } = self;
        write!(f, "{target}: {problem}; its input is {}", file.display())
    }
}

/// Runs a target for so long, with inputs that follow from `seed`.
///
/// # Errors
/// One has failed.
pub fn spend(target: Target, time: Duration, seed: u64) -> Result<Report, Failure> {
    let pool = (target.seeds)();
    let (started, watched) = (Instant::now(), Watched::start(target.name));
    let mut inputs = 0;
    for seed_input in &pool {
        attempt(target, seed_input, &watched)?;
        inputs += 1;
    }
    while started.elapsed() < time {
        let mut random = Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ inputs);
        attempt(target, &mutate::next(&pool, &mut random), &watched)?;
        inputs += 1;
    }
    Ok(Report { inputs })
}

fn attempt(target: Target, input: &[u8], watched: &Watched) -> Result<(), Failure> {
    watched.set(input);
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    outcome.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        let problem = text.unwrap_or_else(|| "it panicked".to_owned());
        Failure { target: target.name, problem, file: keep(target.name, input) }
    })
}

/// Writes an input to a file; where.
fn keep(name: &str, input: &[u8]) -> PathBuf {
    let folder = env::var_os(FOLDER).map_or_else(env::temp_dir, PathBuf::from);
    let sum = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    let file = folder.join(format!("ring3-fuzz-{name}-{sum:016x}"));
    // The failure itself is told in any case.
    let _ = fs::write(&file, input);
    file
}

/// The input under way: one that takes too long ends the process, having said which it is.
struct Watched(Arc<Current>);

/// Since when, and which.
type Current = Mutex<Option<(Instant, Vec<u8>)>>;

impl Watched {
    fn start(name: &'static str) -> Self {
        let current = Arc::new(Mutex::new(None));
        let watched = Arc::downgrade(&current);
        thread::spawn(move || {
            while let Some(current) = watched.upgrade() {
                Self::look(&current, name);
                drop(current);
                thread::sleep(GLANCE);
            }
        });
        Self(current)
    }

    fn look(current: &Current, name: &str) {
        let current = current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, input)) = current.as_ref().filter(|(since, _)| since.elapsed() > LONGEST) {
            eprintln!(
                "{name}: no end after {LONGEST:?}; its input is {}",
                keep(name, input).display()
            );
            std::process::abort();
        }
    }

    fn set(&self, input: &[u8]) {
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *current = Some((Instant::now(), input.to_vec()));
    }
}

/// The files of a folder, by name: sound inputs, and some that have failed once.
///
/// # Panics
/// The folder cannot be read.
pub fn corpus(folder: &Path) -> Vec<Vec<u8>> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("a file").path())
        .collect();
    files.sort();
    files.iter().map(|file| fs::read(file).expect("read")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_words() -> Vec<Vec<u8>> {
        vec![b"hello".to_vec(), b"world".to_vec()]
    }

    #[test]
    fn a_rare_input_is_found_kept_and_fails_again() {
        fn run(input: &[u8]) {
            assert!(!input.starts_with(b"wo") || input.len() != 7, "seven");
        }
        let target = Target { name: "seven", seeds: two_words, run };
        let failure = spend(target, Duration::from_secs(20), 1).expect_err("it is found");
        assert_eq!(failure.problem, "seven");
        let input = fs::read(&failure.file).expect("kept");
        assert!(catch_unwind(|| run(&input)).is_err(), "fails again");
        fs::remove_file(&failure.file).expect("removed");
        let again = spend(target, Duration::from_secs(20), 1).expect_err("found again");
        assert_eq!(again.file, failure.file, "a seed says all");
        fs::remove_file(&again.file).expect("removed");
    }

    #[test]
    fn overflow_is_a_failure() {
        fn run(input: &[u8]) {
            let sum: u8 = input.iter().sum();
            assert!(u32::from(sum) < 256);
        }
        let target = Target { name: "overflow", seeds: two_words, run };
        let failure = spend(target, Duration::from_secs(20), 1).expect_err("it is found");
        fs::remove_file(&failure.file).expect("removed");
        assert!(failure.problem.contains("overflow"), "{failure}");
    }
}
