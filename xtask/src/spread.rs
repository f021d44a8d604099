//! Types whose methods are spread over many files: part of `cargo xtask layers`.
//!
//! What a type may do is told by its methods, and they are read together. Counted are files with inherent methods; traits that a
//! type has, and tests, are not.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::layers::folder;

/// Folders whose crates are looked at.
const LAYERS: [&str; 6] = ["guest", "host", "engine", "machine", "server", "app"];
/// The most files that may have methods of one type.
const MOST: usize = 4;
/// One operation over one state, with a file for each group of instructions; ARCHITECTURE.md says why.
const BY_INSTRUCTION: [(&str, &str); 2] = [("guest/x86_interp", "Cpu"), ("engine/jit", "Emitter")];

/// The files with methods of a type, by crate and type.
type Methods = BTreeMap<(PathBuf, String), BTreeSet<PathBuf>>;

/// Types with methods in too many files.
pub fn in_all(root: &Path) -> Result<Vec<String>> {
    let mut methods = Methods::new();
    for layer in LAYERS {
        for package in folder(&root.join(layer))? {
            add_methods(&package, &package.join("src"), &mut methods)?;
        }
    }
    Ok(spread(&methods, root).collect())
}

fn spread(methods: &Methods, root: &Path) -> impl Iterator<Item = String> {
    methods.iter().filter(|(_, files)| files.len() > MOST).filter_map(move |(of, files)| {
        let (package, name) = (of.0.strip_prefix(root).unwrap_or(&of.0), &of.1);
        let excepted = BY_INSTRUCTION.iter().any(|(a, b)| Path::new(a) == package && b == name);
        let count = files.len();
        (!excepted).then(|| format!("{}: {name} has methods in {count} files", package.display()))
    })
}

fn add_methods(package: &Path, path: &Path, methods: &mut Methods) -> Result<()> {
    if path.is_dir() {
        return folder(path)?.iter().try_for_each(|inside| add_methods(package, inside, methods));
    }
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let is_test = name == "tests" || name.ends_with("_tests");
    if is_test || path.extension().is_none_or(|extension| extension != "rs") {
        return Ok(());
    }
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    for name in text.lines().filter_map(type_with_methods) {
        let of = (package.to_owned(), name.to_owned());
        methods.entry(of).or_default().insert(path.to_owned());
    }
    Ok(())
}

/// The type that has methods from this line on.
fn type_with_methods(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("impl")?;
    let rest = if rest.starts_with('<') { behind_parameters(rest)? } else { rest };
    let rest = rest.strip_prefix(' ')?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    (end > 0 && !rest.contains(" for ")).then(|| &rest[..end])
}

/// What follows the parameters that a text begins with.
fn behind_parameters(text: &str) -> Option<&str> {
    let mut open = 0_usize;
    let end = text.find(|c| {
        open = match c {
            '<' => open + 1,
            '>' => open.saturating_sub(1),
            _ => open,
        };
        c == '>' && open == 0
    })?;
    Some(&text[end + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_with_methods_are_read_from_source() {
        assert_eq!(type_with_methods("impl Frame {"), Some("Frame"));
        assert_eq!(type_with_methods("impl<S: System> Cpu<S> {"), Some("Cpu"));
        assert_eq!(type_with_methods("impl<T: Into<Vec<u8>>> Pipe<T> {"), Some("Pipe"));
        assert_eq!(type_with_methods("impl Emitter<'_> {"), Some("Emitter"));
        for line in
            ["impl Drop for Frame {", "impl<T> From<T> for X<T> {", "    impl Inner {", "implied("]
        {
            assert_eq!(type_with_methods(line), None, "{line}");
        }
    }

    #[test]
    fn a_type_in_too_many_files_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let package = folder.path().join("engine/one");
        fs::create_dir_all(package.join("src")).expect("made");
        for number in 0..=MOST {
            let text = if number == 0 { "impl Wide {}\n" } else { "impl Wide {}\nimpl Few {}\n" };
            fs::write(package.join(format!("src/f{number}.rs")), text).expect("written");
        }
        fs::write(package.join("src/few_tests.rs"), "impl Few {}\n").expect("written");
        let mut methods = Methods::new();
        add_methods(&package, &package.join("src"), &mut methods).expect("read");
        let found: Vec<_> = spread(&methods, folder.path()).collect();
        assert_eq!(found, ["engine/one: Wide has methods in 5 files"]);
    }
}
