//! A report as one page that needs nothing else: bars on a log scale, every batch as a dot, and
//! history where there are several reports.
//!
//! The page computes what it shows from the JSON it carries; `tests/page.rs` opens it in a browser
//! and compares.

use std::{fs, path::Path};

use crate::{Error, record::Report};

const TEMPLATE: &str = include_str!("page.html");
const PLACE: &str = "@DATA@";

/// The page. The last report is shown, those before it are its history.
pub fn render(reports: &[Report]) -> String {
    let json = serde_json::to_string(reports).unwrap_or_default();
    // Inside a script element only `</` and `<!--` could end or disturb it.
    TEMPLATE.replacen(PLACE, &json.replace('<', "\\u003c"), 1)
}

/// Writes the page.
///
/// # Errors
/// The file cannot be written.
pub fn write(reports: &[Report], file: &Path) -> Result<(), Error> {
    fs::write(file, render(reports)).map_err(Error::file(file))
}
