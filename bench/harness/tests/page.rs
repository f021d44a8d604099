//! Opens the page in a real browser and compares what it shows with the JSON it was made from.

use std::{collections::BTreeMap, process::Command};

use harness::{
    page,
    record::{Effort, Environment, Machine, Measurement, Missing, NATIVE, Report, Row, SCHEMA},
    startup, table,
};
use regex_lite::Regex;

const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

fn measurement(samples: &[f64], error: Option<&str>) -> Measurement {
    Measurement {
        samples: samples.to_vec(),
        iterations: 7,
        error: error.map(str::to_owned),
        skipped: None,
    }
}

fn skipped(why: &str) -> Measurement {
    Measurement { skipped: Some(why.to_owned()), ..Measurement::default() }
}

fn row(name: &str, group: &str, unit: &str, results: &[(&str, Measurement)]) -> Row {
    let results = results.iter().map(|(name, m)| ((*name).to_owned(), m.clone())).collect();
    let (name, group, unit) = (name.to_owned(), group.to_owned(), unit.to_owned());
    Row { name, group, about: "with <markup> & \"quotes\"".to_owned(), unit, results }
}

/// Everything a page may have to show: multiples of every size, failures, text that looks like HTML.
fn report(revision: &str, scale: f64) -> Report {
    let environment = |name: &str| Environment {
        name: name.to_owned(),
        version: "1 </script><b>".to_owned(),
        kernel: "Linux 6.1".to_owned(),
    };
    let times = |factor: f64| [97.0, 100.0, 104.5, 99.0].map(|ns| ns * factor * scale).to_vec();
    let rows = vec![
        row(
            "start",
            startup::GROUP,
            "ns",
            &[
                (NATIVE, measurement(&[1e6], None)),
                ("ring3:direct", measurement(&[2.5e9, 2.7e9], None)),
                ("qemu", measurement(&[1.5e9], None)),
            ],
        ),
        row(
            "idle",
            startup::GROUP,
            "%",
            &[
                (NATIVE, measurement(&[0.0], None)),
                ("ring3:direct", measurement(&[0.4, 0.6], None)),
            ],
        ),
        row(
            "getppid",
            "system calls",
            "ns",
            &[
                (NATIVE, measurement(&times(1.0), None)),
                ("ring3:direct", measurement(&times(143.6), None)),
                ("qemu", measurement(&times(7.5), Some("no answer in 3 s"))),
            ],
        ),
        row(
            "fib",
            "compute",
            "ns",
            &[
                (NATIVE, measurement(&times(1e4), None)),
                ("ring3:direct", measurement(&times(0.9e4), None)),
                ("qemu", measurement(&[], Some("wrong result"))),
                ("uml", skipped("too slow")),
            ],
        ),
    ];
    Report {
        schema: SCHEMA,
        date: "2026-01-02T03:04:05Z".to_owned(),
        revision: revision.to_owned(),
        machine: Machine::here(),
        effort: Effort { batches: 4, batch: 20 },
        environments: [NATIVE, "ring3:direct", "qemu", "uml"].map(environment).to_vec(),
        missing: vec![Missing { name: "uml".to_owned(), why: "not <here>".to_owned() }],
        rows,
        left: vec!["lua".to_owned(), "netin".to_owned()],
    }
}

/// The document after its scripts have run; `None` without a browser.
fn opened(html: &str) -> Option<String> {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("page.html");
    std::fs::write(&file, html).expect("written");
    let profile = format!("--user-data-dir={}", directory.path().join("profile").display());
    let options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", &profile];
    for browser in BROWSERS {
        let mut command = Command::new(browser);
        let Ok(done) = command.args(options).arg(&file).output() else { continue };
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success(), "{browser}: {}", String::from_utf8_lossy(&done.stderr));
        return Some(text);
    }
    eprintln!("SKIPPED: there is no browser; install the package chromium");
    None
}

/// What the page shows of a row in an environment.
#[derive(Debug, PartialEq)]
struct Shown {
    width: Option<f64>,
    samples: Vec<f64>,
    figure: String,
}

fn shown(document: &str) -> BTreeMap<(String, String), Shown> {
    let result = Regex::new(
        r#"<div class="result[^"]*" data-row="([^"]*)" data-environment="([^"]*)".*?<span class="figure[^"]*">([^<]*)</span></div>"#,
    );
    let number = |pattern: &str, text: &str| -> Vec<f64> {
        let pattern = Regex::new(pattern).expect("valid");
        pattern.captures_iter(text).map(|found| found[1].parse().expect("a number")).collect()
    };
    let found = result.expect("valid");
    let found = found.captures_iter(document).map(|found| {
        let width = number(r#"class="bar" style="width: ([0-9.e-]+)%"#, &found[0]).first().copied();
        let samples = number(r#"class="sample" style="left: ([0-9.e-]+)%"#, &found[0]);
        let figure = found[3].to_owned();
        ((found[1].to_owned(), found[2].to_owned()), Shown { width, samples, figure })
    });
    found.collect()
}

/// What it ought to show: scale from 0.1 to 1000 around everything in `report`.
fn expected(row: &Row, environment: &str, measurement: &Measurement) -> Shown {
    let Some(median) = measurement.median() else {
        let figure = if measurement.skipped.is_some() { "skipped" } else { "failed" };
        return Shown { width: None, samples: vec![], figure: figure.to_owned() };
    };
    let base = match row.is_relative() {
        true => row.results[NATIVE].median().expect("measured"),
        false => row.results[row.best().expect("measured")].median().expect("measured"),
    };
    let position = |value: f64| (((value / base).log10() + 4.0) / 7.0 * 100.0).clamp(0.0, 100.0);
    let mut figure = match environment {
        NATIVE => table::quantity(median, &row.unit),
        _ if row.is_relative() => format!("{}\u{d7}", table::multiple_text(median / base)),
        _ => table::quantity(median, &row.unit),
    };
    if measurement.error.is_some() {
        figure += " (not all batches)";
    }
    let samples = measurement.samples.iter().map(|sample| position(*sample)).collect();
    Shown { width: Some(position(median)), samples, figure }
}

fn is_close(a: f64, b: f64) -> bool {
    (a - b).abs() < 0.001
}

#[test]
fn the_page_shows_what_the_json_says() {
    let report = report("abc", 1.0);
    let Some(document) = opened(&page::render(std::slice::from_ref(&report))) else { return };
    let shown = shown(&document);
    let results = report.rows.iter().flat_map(|row| row.results.iter().map(move |r| (row, r)));
    let mut count = 0;
    for (row, (environment, measurement)) in results {
        let at = (row.name.clone(), environment.clone());
        let (found, expected) = (&shown[&at], expected(row, environment, measurement));
        assert_eq!(found.figure, expected.figure, "{at:?}");
        assert_eq!(found.width.is_some(), expected.width.is_some(), "{at:?}");
        let pairs = found.width.iter().zip(&expected.width);
        let mut pairs = pairs.chain(found.samples.iter().zip(&expected.samples));
        assert_eq!(found.samples.len(), expected.samples.len(), "{at:?}");
        assert!(pairs.all(|(a, b)| is_close(*a, *b)), "{at:?}: {found:?}, not {expected:?}");
        count += 1;
    }
    assert_eq!(shown.len(), count, "and nothing else");
    assert!(document.contains("uml was not measured: not &lt;here&gt;"), "{document}");
    assert!(document.contains("ended before it came to lua, netin"), "{document}");
    assert!(!document.contains("class=\"history\""), "one report has no history");
}

#[test]
fn several_reports_are_history() {
    let reports = [report("one", 1.0), report("two", 2.0), report("three", 3.0)];
    let Some(document) = opened(&page::render(&reports)) else { return };
    let history = Regex::new(r#"<details class="history" data-row="fib">.*?</details>"#);
    let history = history.expect("valid").find(&document).expect("there is one").as_str();
    assert_eq!(history.matches("<circle").count(), 6, "three of native, three of ring3: {history}");
    for revision in ["one", "two", "three"] {
        assert!(history.contains(&format!(">{revision}</text>")), "{history}");
    }
}
