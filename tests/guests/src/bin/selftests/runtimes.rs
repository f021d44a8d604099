//! Python's own regression tests, and programs for Node and Java that make their compilers work: what
//! they print on the host they have to print in a guest.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::{
    in_guest::{self, Ended},
    machine::Limits,
};

const NODE: &str = include_str!("../../../programs/runtimes/selfcheck.js");
const JAVA: &str = include_str!("../../../programs/runtimes/Selfcheck.java");

/// Modules of Python's regression tests: arithmetic, memory, files, processes, threads and signals.
const PYTHON: [&str; 46] = [
    "test_array",
    "test_ast",
    "test_binascii",
    "test_bytes",
    "test_bz2",
    "test_cmath",
    "test_compile",
    "test_complex",
    "test_ctypes",
    "test_decimal",
    "test_dict",
    "test_exceptions",
    "test_fcntl",
    "test_float",
    "test_fork1",
    "test_fractions",
    "test_generators",
    "test_grammar",
    "test_hashlib",
    "test_int",
    "test_itertools",
    "test_json",
    "test_list",
    "test_long",
    "test_lzma",
    "test_math",
    "test_memoryview",
    "test_mmap",
    "test_opcodes",
    "test_pickle",
    "test_pipes",
    "test_poll",
    "test_queue",
    "test_random",
    "test_re",
    "test_select",
    "test_set",
    "test_signal",
    "test_statistics",
    "test_strtod",
    "test_struct",
    "test_subprocess",
    "test_thread",
    "test_threading",
    "test_unicode",
    "test_zlib",
];

/// Programs, and what runs each.
const PROGRAMS: [(&str, &[&str]); 5] = [
    ("node", &["node", "selfcheck.js"]),
    // Every function is compiled by every compiler, the first time it runs.
    ("node, all optimised", &["node", "--always-sparkplug", "--always-turbofan", "selfcheck.js"]),
    ("java", &["java", "Selfcheck.java"]),
    ("java, all compiled", &["java", "-Xcomp", "Selfcheck.java"]),
    ("java, small heap", &["java", "-Xmx48m", "-XX:+UseParallelGC", "Selfcheck.java"]),
];

/// Runs all that the host has.
///
/// # Errors
/// A check came out otherwise than on the host.
pub fn run(limits: Limits<'_>) -> Result<String> {
    let directory = TempDir::new()?;
    fs::write(directory.path().join("selfcheck.js"), NODE)?;
    fs::write(directory.path().join("Selfcheck.java"), JAVA)?;
    let mut figures = Vec::new();
    for (name, words) in PROGRAMS {
        let host = in_guest::on_the_host(directory.path(), limits, words);
        let Ok(host) = host else {
            println!("runtimes: {name}: not on this host");
            continue;
        };
        let guest = in_guest::run(directory.path(), limits, words)?;
        figures.push(format!("{name} {}", same(name, &host, &guest)?));
    }
    figures.push(python(limits)?);
    Ok(figures.join("; "))
}

/// Every line the same.
fn same(name: &str, host: &Ended, guest: &Ended) -> Result<String> {
    ensure!(host.code == Some(0), "{name} fails on the host itself:\n{}", host.tail());
    let equal = guest.code == Some(0) && guest.said == host.said;
    ensure!(equal, "{name}: {:?}: {}\non the host: {}", guest.code, guest.tail(), host.tail());
    Ok(format!("{} checks", host.said.lines().count()))
}

fn python(limits: Limits<'_>) -> Result<String> {
    let directory = TempDir::new()?;
    let words = [&["python3", "-m", "test"][..], &PYTHON].concat();
    let host = in_guest::on_the_host(directory.path(), limits, &words)?;
    let guest = in_guest::run(directory.path(), limits, &words)?;
    as_good(&host, &guest)
}

/// Every module that passes on the host passes.
fn as_good(host: &Ended, guest: &Ended) -> Result<String> {
    let (good, failed) = (failures(host)?, failures(guest)?);
    let worse: Vec<_> = failed.iter().filter(|module| !good.contains(module)).collect();
    ensure!(worse.is_empty(), "pass on the host: {worse:?}\n{}", guest.tail());
    let passed = PYTHON.len() - failed.len();
    Ok(format!(
        "python {passed} of {} modules, {} on the host",
        PYTHON.len(),
        PYTHON.len() - good.len()
    ))
}

/// The modules that failed, from the list behind `N tests failed:`.
fn failures(ended: &Ended) -> Result<Vec<&str>> {
    if !ended.said.lines().any(is_result) {
        bail!("Python's tests have no result:\n{}", ended.tail());
    }
    let mut lines = ended.said.lines().skip_while(|line| !is_heading(line));
    let Some(_) = lines.next() else { return Ok(Vec::new()) };
    let listed = lines.take_while(|line| line.starts_with(' '));
    let names: Vec<_> = listed.flat_map(str::split_whitespace).collect();
    names.first().context("failures without names")?;
    Ok(names)
}

/// `Tests result: SUCCESS` in Python 3.11.2, `Result: SUCCESS` in 3.11.7.
fn is_result(line: &str) -> bool {
    line.starts_with("Result: ") || line.starts_with("Tests result: ")
}

/// `1 test failed:`, `2 tests failed:`.
fn is_heading(line: &str) -> bool {
    line.ends_with(" test failed:") || line.ends_with(" tests failed:")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(said: &str) -> Ended {
        Ended { code: Some(0), said: said.to_owned() }
    }

    #[test]
    fn a_module_that_fails_on_the_host_is_not_asked() {
        let good = ended("All 46 tests OK.\nTests result: SUCCESS\n");
        let bad = ended(
            "2 tests failed:\n    test_a test_b\n\n1 test skipped:\n    test_c\nTests result: FAILURE\n",
        );
        as_good(&good, &good).expect("none failed");
        as_good(&bad, &bad).expect("the same");
        as_good(&bad, &good).expect("better");
        let error = as_good(&good, &bad).expect_err("worse").to_string();
        assert!(error.contains("test_a") && !error.contains("test_c\","), "{error}");
        as_good(&good, &ended("Killed\n")).expect_err("no result");
        let newer = ended("1 test failed:\n    test_a\n\nResult: FAILURE\n");
        as_good(&newer, &newer).expect("the same");
        as_good(&good, &newer).expect_err("worse");
    }

    #[test]
    fn programs_must_print_the_same() {
        same("node", &ended("a 1\nb 2\n"), &ended("a 1\nb 2\n")).expect("the same");
        same("node", &ended("a 1\n"), &ended("a 2\n")).expect_err("another result");
        let killed = Ended { code: None, said: "a 1\n".to_owned() };
        same("node", &ended("a 1\n"), &killed).expect_err("killed");
    }
}
