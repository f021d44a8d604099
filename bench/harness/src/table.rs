//! A report as text.

use std::collections::BTreeMap;

use crate::{
    record::{Measurement, NATIVE, Report, Row},
    stats,
};

/// The whole report: machine, table, failures.
pub fn render(report: &Report) -> String {
    let mut text = heading(report);
    text += &grid(&cells(report));
    text += &notes(report);
    text
}

fn heading(report: &Report) -> String {
    let machine = &report.machine;
    let mut text = format!(
        "{}, {} CPUs, {} MiB, Linux {}, load {:.1} to {:.1}\nring3 {}, {}, {} batches of {} ms\n",
        machine.cpu,
        machine.cpus,
        machine.memory,
        machine.kernel,
        machine.load.0,
        machine.load.1,
        report.revision,
        report.date,
        report.effort.batches,
        report.effort.batch
    );
    for environment in report.environments.iter().filter(|e| e.name != NATIVE) {
        let (name, version, kernel) =
            (&environment.name, &environment.version, &environment.kernel);
        text += &format!("{name}: {version}; {kernel}\n");
    }
    text += "Multiples of native (medians; \u{b1} half the range of the middle half of the batches); * is the best\n\n";
    text
}

fn cells(report: &Report) -> Vec<Vec<String>> {
    let names: Vec<_> = report.environments.iter().map(|e| e.name.as_str()).collect();
    let mut lines = vec![vec!["row".to_owned()]];
    lines[0].extend(names.iter().map(|name| (*name).to_owned()));
    for row in &report.rows {
        let mut line = vec![row.name.clone()];
        line.extend(names.iter().map(|name| cell(row, name)));
        lines.push(line);
    }
    lines
}

/// A duration for native, a multiple for others.
fn cell(row: &Row, environment: &str) -> String {
    let Some(measurement) = row.results.get(environment) else { return "-".to_owned() };
    if measurement.samples.is_empty() {
        return if measurement.skipped.is_some() { "skipped" } else { "failed" }.to_owned();
    }
    let absolute = || measurement.median().map(|m| quantity(m, &row.unit)).unwrap_or_default();
    let figure = match row.multiple(environment) {
        Some(multiple) if environment != NATIVE && row.is_relative() => multiple_text(multiple),
        _ => absolute(),
    };
    let best = if row.best() == Some(environment) { "*" } else { " " };
    let doubt = if measurement.error.is_some() { "!" } else { "" };
    format!("{figure}{best}{doubt}{}", spread(measurement))
}

/// Empty where it means nothing: of one batch, or around zero.
fn spread(measurement: &Measurement) -> String {
    let spread = stats::spread(&measurement.samples) * 100.0;
    if measurement.samples.len() > 1 && spread.is_finite() {
        format!(" \u{b1}{spread:>3.0}%")
    } else {
        " ".repeat(6)
    }
}

/// Three significant digits or so.
pub fn multiple_text(multiple: f64) -> String {
    match multiple {
        large if large >= 99.95 => format!("{large:.0}"),
        small if small < 9.995 => format!("{small:.2}"),
        middle => format!("{middle:.1}"),
    }
}

/// A figure with its unit; `x` is that of multiples.
pub fn quantity(value: f64, unit: &str) -> String {
    match unit {
        "ns" => duration(value),
        "x" => multiple_text(value),
        unit => format!("{value:.1} {unit}"),
    }
}

/// Nanoseconds in a readable unit.
pub fn duration(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.3} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.3} ms", ns / 1e6),
        ns => format!("{:.3} s", ns / 1e9),
    }
}

/// The first column to the left, all others to the right.
pub fn grid(lines: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let widths = lines.iter().filter_map(|line| line.get(column)).map(|c| c.chars().count());
        widths.max().unwrap_or(0)
    };
    let mut text = String::new();
    for line in lines {
        for (column, cell) in line.iter().enumerate() {
            let width = width(column);
            let padded =
                if column == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") };
            text += &padded;
        }
        text += "\n";
    }
    text
}

/// What is missing, and what went wrong.
fn notes(report: &Report) -> String {
    let mut text = String::new();
    for missing in &report.missing {
        text += &format!("\n{} was not measured: {}", missing.name, missing.why);
    }
    for ((environment, error), rows) in rows_by(report, |m| m.error.as_deref()) {
        text += &format!("\n{environment} failed in {}: {error}", rows.join(", "));
    }
    for ((environment, why), rows) in rows_by(report, |m| m.skipped.as_deref()) {
        text += &format!("\n{environment} skipped {}: {why}", rows.join(", "));
    }
    if !report.left.is_empty() {
        text += &format!("\nthe run was ended before it came to {}", report.left.join(", "));
    }
    let few = few(report);
    if few > 0 {
        text += &format!("\n{few} figures are of fewer batches, to save time; the JSON has all.");
    }
    if !text.is_empty() {
        text += "\n";
    }
    text
}

/// Figures of fewer batches than were asked for, though nothing went wrong.
fn few(report: &Report) -> usize {
    let figures = report.rows.iter().flat_map(|row| row.results.values());
    let whole = figures.filter(|m| !m.is_stopped());
    whole.filter(|measurement| measurement.samples.len() < report.effort.batches).count()
}

/// Rows by environment and what went wrong with them, or why they were skipped: what does not start
/// fails in all rows alike.
fn rows_by(
    report: &Report,
    why: impl Fn(&Measurement) -> Option<&str>,
) -> BTreeMap<(&str, &str), Vec<&str>> {
    let mut failures = BTreeMap::new();
    for row in &report.rows {
        for (environment, measurement) in &row.results {
            if let Some(error) = why(measurement) {
                let rows: &mut Vec<_> = failures.entry((&environment[..], error)).or_default();
                rows.push(&row.name[..]);
            }
        }
    }
    failures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        let texts = [0.9, 1.0, 9.99, 10.04, 143.6].map(multiple_text);
        assert_eq!(texts, ["0.90", "1.00", "9.99", "10.0", "144"]);
        let texts = [35.2, 1490.0, 6_200_000.0, 2.5e9].map(duration);
        assert_eq!(texts, ["35 ns", "1.490 us", "6.200 ms", "2.500 s"]);
    }

    #[test]
    fn columns_are_aligned() {
        let line = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        let text = grid(&[line(["row", "x"]), line(["a", "long"])]);
        assert_eq!(text, "row     x\na    long\n");
    }
}
