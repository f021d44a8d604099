//! Programs by chance: what they see in a guest is what they see on the host. `chance --count 10000` runs the long
//! form; a program it finds belongs into `programs/chance/kept`, where the test below runs it for good.

use anyhow::{Result, ensure};
use guests::chance::{Place, Program, Runs, Scope, cases};

/// Cases of the oracle to choose from.
const CASES: usize = 4000;
const SEED: u64 = 1;
const KEPT: &str = include_str!("../programs/chance/kept");

/// Programs in which the host's CPU has a choice that the interpreter cannot know: when a string store over its own bytes sees them. Only where
/// that CPU runs them can they be compared.
const CPUS_CHOICE: [&str; 1] = ["itself"];

fn guest(engine: &str) -> Place {
    Place::Guest { engine: engine.to_owned(), kernel: "debian-12".to_owned(), timeout: 400 }
}

fn agree(programs: &[Program], engine: &str) -> Result<()> {
    let runs = Runs::new(&cases(SEED, CASES)?)?;
    let differences = runs.compare(programs, &guest(engine))?;
    let lines: String = differences.iter().map(|found| format!("{}\n", found.program)).collect();
    ensure!(
        differences.is_empty(),
        "{engine}: see `chance --engine {engine} --program LINE`:\n{lines}"
    );
    Ok(())
}

/// The first programs of the list; `open` says that the host's CPU runs their code.
fn first(count: u64, open: bool) -> Vec<Program> {
    let scope = Scope { open, ..Scope::default() };
    (0..count).map(|number| Program::new(SEED, number, scope)).collect()
}

#[test]
fn a_hundred_programs_run_directly() -> Result<()> {
    agree(&first(100, true), "fast")
}

/// What makers of CPUs do differently is left out: what is translated follows Intel.
#[test]
fn a_hundred_programs_run_with_look_ups() -> Result<()> {
    agree(&first(100, false), "look-ups")?;
    agree(&first(100, false), "young")
}

#[test]
fn programs_run_in_the_other_engines() -> Result<()> {
    agree(&first(20, false), "jit")?;
    agree(&first(20, false), "direct")
}

/// What has once been found.
#[test]
fn kept_programs_run_everywhere() -> Result<()> {
    let lines = KEPT.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let programs = lines.map(str::parse).collect::<Result<Vec<Program>>>()?;
    agree(&programs, "fast")?;
    let is_settled = |program: &Program| !CPUS_CHOICE.contains(&program.name.as_str());
    let (settled, open): (Vec<_>, Vec<_>) = programs.into_iter().partition(is_settled);
    ensure!(open.len() == CPUS_CHOICE.len(), "of {CPUS_CHOICE:?} only {open:?} are kept");
    agree(&settled, "jit")
}

/// The comparison can fail: a program that looks at the kernel's version is told from itself.
#[test]
fn a_difference_is_found() -> Result<()> {
    let runs = Runs::new(&cases(SEED, 2)?)?;
    let line = "x 10000000000 20000000000 30000000000 40000000000 peek:0 kernel:0 peek:0";
    let differences = runs.compare(&[line.parse()?], &guest("fast"))?;
    ensure!(differences.len() == 1 && differences[0].step == 1, "{differences:?}");
    Ok(())
}
