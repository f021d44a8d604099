//! `cargo xtask markdown`: documents that people can read. No line is over [`COLUMNS`] wide but those of tables,
//! and no cell of a table is longer than two short sentences.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{checks::root, command::output};

/// Columns of a line that is not in a table.
const COLUMNS: usize = 110;
/// Columns of a cell.
const CELL: usize = 160;
/// Sentences of a cell.
const SENTENCES: usize = 2;

/// Checks all documents that git knows.
///
/// # Errors
/// Lists what is too long, or git could not be run.
pub fn check() -> Result<()> {
    let mut wrong = Vec::new();
    for path in documents()? {
        let file = root().join(&path);
        // The file was removed, and that is not committed yet.
        if !file.exists() {
            continue;
        }
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        wrong.extend(violations(&path, &text));
    }
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("docs/style.md asks for shorter ones:\n  {}", wrong.join("\n  "))
}

fn documents() -> Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]);
    let names = output(git.current_dir(root()))?;
    Ok(names.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect())
}

fn violations(path: &Path, text: &str) -> Vec<String> {
    let lines = text.lines().enumerate();
    let found = lines.filter_map(|(index, line)| Some((index + 1, fault(line)?)));
    found.map(|(line, fault)| format!("{}:{line}: {fault}", path.display())).collect()
}

/// What is wrong with a line.
fn fault(line: &str) -> Option<String> {
    let columns = line.chars().count();
    if !line.starts_with('|') {
        return (columns > COLUMNS).then(|| format!("{columns} columns"));
    }
    // Inside a cell the bar is written as an entity.
    line.split('|').map(str::trim).find_map(|cell| {
        let (columns, sentences) = (cell.chars().count(), sentences(cell));
        let long = columns > CELL || sentences > SENTENCES;
        long.then(|| format!("a cell of {columns} columns and {sentences} sentences"))
    })
}

/// The number of sentences; the last one may have no full stop.
fn sentences(cell: &str) -> usize {
    cell.split(". ").filter(|sentence| !sentence.trim().is_empty()).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_tree_can_be_read() {
        check().expect("short lines, short cells");
    }

    #[test]
    fn what_is_too_long_is_named() {
        let long = "x".repeat(COLUMNS + 1);
        let text =
            format!("fine\n{long}\n| a | {long} |\n| a | b. c. d |\n| {} |", "y".repeat(161));
        let found = violations(Path::new("a.md"), &text);
        let expected = [
            "a.md:2: 111 columns",
            "a.md:4: a cell of 7 columns and 3 sentences",
            "a.md:5: a cell of 161 columns and 1 sentences",
        ];
        assert_eq!(found, expected);
    }
}
