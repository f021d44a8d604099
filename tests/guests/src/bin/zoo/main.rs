//! Runs the program zoo: `zoo --help`. docs/zoo.md is its table.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Parser;
use guests::zoo::{Compared, Program, programs};

/// The page as it is: what stands before its table stays.
const PAGE: &str = include_str!("../../../../../docs/zoo.md");
/// The table's head.
const TABLE: &str = "| program | version | does | in a guest |\n|---|---|---|---|\n";

/// Runs programs as they ship on the host and in ring3, and compares what they print
#[derive(Debug, Parser)]
struct Arguments {
    /// Only programs whose names are these
    names: Vec<String>,
    /// Write the results to this file, as a table
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Say which programs there are
    #[arg(long)]
    list: bool,
}

/// What became of a program.
enum Outcome {
    Same(Compared),
    /// As its script says it would, and why.
    Differs(String),
    /// Otherwise than its script says.
    Wrong(String),
    /// What it needs is not installed.
    Missing(String),
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let mut chosen = programs()?;
    chosen.retain(|program| arguments.names.is_empty() || arguments.names.contains(&program.name));
    if arguments.list {
        chosen.iter().for_each(|program| println!("{}: {}", program.name, program.does));
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = Vec::new();
    let mut counts = [0; 4];
    for program in &chosen {
        let outcome = run(program)?;
        println!("{}: {}", program.name, outcome.words());
        counts[outcome.index()] += 1;
        rows.push(row(program, &outcome));
    }
    let [same, differ, wrong, missing] = counts;
    println!(
        "zoo: {same} the same, {differ} differ as known, {wrong} wrong, {missing} not installed"
    );
    if let Some(path) = arguments.table {
        fs::write(path, page(&rows))?;
    }
    let passed = wrong == 0 && same + differ > 0;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run(program: &Program) -> Result<Outcome> {
    let missing = program.missing();
    if !missing.is_empty() {
        return Ok(Outcome::Missing(missing.join(", ")));
    }
    let compared = program.compare()?;
    let fails = program.fails.as_ref().filter(|_| compared.fails_on_the_host());
    Ok(match (program.differs.as_ref().or(fails), compared.is_same()) {
        (None, true) if compared.is_hardly_interpreted() => Outcome::Same(compared),
        (None, true) => Outcome::Wrong(format!("too much is interpreted, {}", rate(&compared))),
        (Some(why), false) => Outcome::Differs(why.clone()),
        (Some(_), true) => Outcome::Wrong("the same, though its script says it differs".into()),
        (None, false) => {
            let said = compared.said.lines().next().unwrap_or_default().trim();
            Outcome::Wrong(format!("{} {said}", compared.difference()))
        }
    })
}

impl Outcome {
    fn index(&self) -> usize {
        match self {
            Self::Same(_) => 0,
            Self::Differs(_) => 1,
            Self::Wrong(_) => 2,
            Self::Missing(_) => 3,
        }
    }

    fn words(&self) -> String {
        match self {
            Self::Same(compared) => {
                let [host, guest] = compared.took.map(|took| took.as_secs_f64());
                let rate = rate(compared);
                format!("the same ({host:.1} s, {guest:.1} s in the guest, {rate})")
            }
            Self::Differs(why) => format!("differs: {why}"),
            Self::Wrong(how) => format!("WRONG: {how}"),
            Self::Missing(what) => format!("not installed: {what}"),
        }
    }

    fn cell(&self) -> String {
        match self {
            Self::Same(_) => "the same".into(),
            other => other.words(),
        }
    }
}

/// How much a guest's machine interpreted, in words.
fn rate(compared: &Compared) -> String {
    match compared.interpreted() {
        Some(rate) => format!("{:.3} million interpreted/s", rate / 1e6),
        None => "not said how much".into(),
    }
}

fn row(program: &Program, outcome: &Outcome) -> String {
    let version = match outcome {
        Outcome::Missing(_) => String::new(),
        _ => program.its_version(),
    };
    let cells = [&program.program, &version, &program.does, &outcome.cell()];
    let cells: Vec<_> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    format!("| {} |\n", cells.join(" | "))
}

fn page(rows: &[String]) -> String {
    let (head, _) = PAGE.split_once(TABLE).unwrap_or((PAGE, ""));
    [head, TABLE, &rows.concat()].concat()
}
