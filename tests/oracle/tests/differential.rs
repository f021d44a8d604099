//! The interpreter against the host CPU: a bounded campaign, and every case that once failed.

use std::path::{Path, PathBuf};

use oracle::campaign::{self, Plan};
use oracle::{CaseFile, Checker, Vendor, compare, forms};

host::choose!(host_linux::Linux);

/// Enough for every form to run alone several times.
const CASES: u64 = 60_000;

#[test]
fn random_sequences() {
    run(64);
}

#[test]
fn random_sequences_of_32_bit_code() {
    run(32);
}

fn run(bits: u32) {
    let plan = Plan {
        seed: 2026,
        first: 0,
        count: CASES,
        bits,
        forms: forms::tested(bits),
        jobs: 1,
        most_failures: 20,
    };
    let missing = forms::missing();
    if !missing.is_empty() {
        eprintln!("SKIPPED IN PART: this CPU lacks {missing:?}");
    }
    let summary = campaign::run(&plan, &|_| ()).unwrap();
    for (kind, failure) in &summary.failures {
        println!("{kind}, number {}:", failure.number);
        failure.report.differences.iter().for_each(|line| println!("    {line}"));
    }
    assert_eq!(summary.failed, 0, "oracle --seed {} shows them", plan.seed);
    assert_eq!(summary.cases, CASES);
    let open = |of_amd: bool| -> u64 {
        let reasons = summary.open.iter();
        reasons.filter(|(why, _)| why.starts_with("AMD: ") == of_amd).map(|(_, count)| count).sum()
    };
    assert!(open(false) < CASES / 50, "without verdict: {:?}", summary.open);
    assert!(open(true) < CASES / 15, "without verdict, host CPU: {:?}", summary.open);
    let vendor = Vendor::of_host();
    let untried = plan.forms.iter().filter(|form| !summary.runs.contains_key(form));
    let untried: Vec<_> = untried.filter(|form| !vendor.lacks(**form)).collect();
    assert!(untried.is_empty(), "never ran: {untried:?}");
}

/// Where the makers of CPUs differ, each is right: no outcome is recorded, and none is a difference.
#[test]
fn cases_the_makers_differ_on() {
    let mut checker = Checker::new().unwrap();
    let files = case_files("cases/makers");
    for (name, file) in &files {
        let report = checker.check(&file.case).unwrap();
        assert!(report.differences.is_empty(), "{name}: {:#?}", report.differences);
    }
    assert!(!files.is_empty(), "the case files are gone");
}

/// The native outcome in the file is from the CPU the case was found on; others may differ in what
/// the architecture leaves open, so it is compared like any other outcome.
#[test]
fn cases_that_once_failed() {
    let mut checker = Checker::new().unwrap();
    let files = case_files("cases");
    for (name, file) in &files {
        let report = checker.check(&file.case).unwrap();
        assert!(report.differences.is_empty(), "{name}: {:#?}", report.differences);
        let expected = file.expected.as_ref().unwrap_or_else(|| panic!("{name}: no outcome"));
        let interpreted = &report.interpreted;
        let lines = compare::differences(expected, &interpreted.outcome, &interpreted.ignored);
        assert!(lines.is_empty(), "{name}: as recorded: {lines:#?}");
    }
    assert!(!files.is_empty(), "the case files are gone");
}

/// The case files of a folder, by name.
fn case_files(folder: &str) -> Vec<(String, CaseFile)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let cases = paths.filter(|path| path.extension().is_some_and(|extension| extension == "case"));
    let read = |path: PathBuf| {
        let name = path.display().to_string();
        let file = CaseFile::parse(&std::fs::read_to_string(path).unwrap());
        let file = file.unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, file)
    };
    cases.map(read).collect()
}
