//! What changed between two results, as far as it is more than noise.
//!
//! Batches of both are compared by the Mann-Whitney U test, which asks nothing of their
//! distribution. In one run both were interleaved, so their times are compared as they are;
//! between runs, each batch is first divided by the native one of its own round, which takes out
//! what the machine did meanwhile.

use crate::{
    record::{NATIVE, Report, Row},
    stats, table,
};

/// A difference counts if chance makes one like it less often than this.
const SIGNIFICANT: f64 = 0.01;
/// And if it is at least this large: less is true perhaps, but of no interest.
const NOTABLE: f64 = 0.03;

/// A row in an environment, before and after.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The row.
    pub row: String,
    /// The environment.
    pub environment: String,
    /// Medians before and after, in `unit`.
    pub medians: (f64, f64),
    /// `x` for multiples of native, or the row's unit.
    pub unit: String,
    /// How often chance makes such a difference.
    pub p: f64,
}

/// What became of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It takes less.
    Faster,
    /// It takes more.
    Slower,
    /// No difference can be told.
    Same,
}

impl Change {
    fn between(
        row: &str,
        environment: &str,
        unit: &str,
        before: &[f64],
        after: &[f64],
    ) -> Option<Self> {
        if before.is_empty() || after.is_empty() {
            return None;
        }
        let p = stats::mann_whitney(before, after);
        let medians = (stats::median(before), stats::median(after));
        let (row, environment) = (row.to_owned(), environment.to_owned());
        Some(Self { row, environment, medians, unit: unit.to_owned(), p })
    }

    /// After divided by before.
    pub fn ratio(&self) -> f64 {
        self.medians.1 / self.medians.0
    }

    /// What became of it.
    pub fn verdict(&self) -> Verdict {
        match self.ratio() {
            _ if self.p >= SIGNIFICANT => Verdict::Same,
            ratio if ratio >= 1.0 + NOTABLE => Verdict::Slower,
            ratio if ratio <= 1.0 - NOTABLE => Verdict::Faster,
            _ => Verdict::Same,
        }
    }
}

/// Every row and environment that both reports have.
pub fn reports(before: &Report, after: &Report) -> Vec<Change> {
    let pairs = before.rows.iter().filter_map(|old| {
        let new = after.rows.iter().find(|new| new.name == old.name)?;
        Some((old, new))
    });
    let of_row = |(old, new): (&Row, &Row)| -> Vec<Change> {
        let names = old.results.keys().filter(|name| *name != NATIVE);
        let change = |name: &String| {
            let (unit, before) = normal(old, name)?;
            let (same_unit, after) = normal(new, name)?;
            (unit == same_unit).then(|| Change::between(&old.name, name, &unit, &before, &after))?
        };
        names.filter_map(change).collect()
    };
    pairs.flat_map(of_row).collect()
}

/// Samples that can be compared between runs, and their unit.
fn normal(row: &Row, environment: &str) -> Option<(String, Vec<f64>)> {
    let samples = &row.results.get(environment)?.samples;
    let native = row.results.get(NATIVE).map(|native| &native.samples);
    match native.filter(|native| row.is_relative() && !native.is_empty()) {
        None => Some((row.unit.clone(), samples.clone())),
        Some(native) => {
            let ratios = samples.iter().zip(native).map(|(sample, native)| sample / native);
            Some(("x".to_owned(), ratios.collect()))
        }
    }
}

/// Environments of one report whose names differ only by `suffix`: those with it are "before".
pub fn suffixed(report: &Report, suffix: &str) -> Vec<Change> {
    let of_row = |row: &Row| -> Vec<Change> {
        let change = |name: &String| {
            let after = &row.results.get(name.strip_suffix(suffix)?)?.samples;
            let before = &row.results.get(name)?.samples;
            Change::between(&row.name, name.strip_suffix(suffix)?, &row.unit, before, after)
        };
        row.results.keys().filter_map(change).collect()
    };
    report.rows.iter().flat_map(of_row).collect()
}

/// Rows that changed, and how many did not.
pub fn render(changes: &[Change]) -> String {
    let mut lines = vec![
        ["row", "environment", "before", "after", "after/before", "p"].map(str::to_owned).to_vec(),
    ];
    for change in changes.iter().filter(|change| change.verdict() != Verdict::Same) {
        let show = |value| table::quantity(value, &change.unit);
        let (before, after) = (show(change.medians.0), show(change.medians.1));
        let ratio = format!("{:.2} {:?}", change.ratio(), change.verdict()).to_lowercase();
        let (row, environment) = (change.row.clone(), change.environment.clone());
        lines.push(vec![row, environment, before, after, ratio, format!("{:.4}", change.p)]);
    }
    let count = |verdict| changes.iter().filter(|change| change.verdict() == verdict).count();
    let (faster, slower, same) =
        (count(Verdict::Faster), count(Verdict::Slower), count(Verdict::Same));
    let table = if lines.len() > 1 { table::grid(&lines) } else { String::new() };
    format!(
        "{table}{faster} faster, {slower} slower, {same} the same (p < {SIGNIFICANT}, at least {:.0} %)\n",
        NOTABLE * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(before: &[f64], after: &[f64]) -> Change {
        Change::between("row", "ring3", "ns", before, after).expect("samples")
    }

    #[test]
    fn five_batches_suffice_if_they_do_not_overlap() {
        let before = [10.0, 10.1, 10.2, 10.3, 10.4];
        let after = before.map(|sample| sample * 1.1);
        assert_eq!(change(&before, &after).verdict(), Verdict::Slower);
        assert_eq!(change(&after, &before).verdict(), Verdict::Faster);
    }

    #[test]
    fn noise_is_no_change() {
        let same = change(&[10.0, 11.0, 12.0, 13.0, 14.0], &[10.5, 11.6, 12.7, 13.8, 13.9]);
        assert_eq!(same.verdict(), Verdict::Same);
        let small =
            change(&[10.0, 10.01, 10.02, 10.03, 10.04], &[10.1, 10.11, 10.12, 10.13, 10.14]);
        assert!(small.p < SIGNIFICANT && small.verdict() == Verdict::Same, "{small:?}");
    }

    #[test]
    fn nothing_is_no_change() {
        assert_eq!(Change::between("row", "ring3", "ns", &[], &[1.0]), None);
    }
}
