//! Public types of a layer that share a name: part of `cargo xtask layers`.
//!
//! Looked at are all sources of a layer, its tests included. A type is public to its layer with `pub` and with `pub(...)`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::layers::folder;

/// Folders whose types have names of their own.
const LAYERS: [&str; 6] = ["guest", "host", "engine", "machine", "server", "app"];
/// What declares a type.
const KEYWORDS: [&str; 5] = ["struct", "enum", "union", "trait", "type"];
/// What may stand before that.
const MODIFIERS: [&str; 2] = ["unsafe", "auto"];

/// Types by name, and the file of each.
type Types = BTreeMap<String, Vec<PathBuf>>;

/// Names that two types of a layer have, with their files.
pub fn in_all(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for layer in LAYERS {
        let mut types = Types::new();
        add_types(&root.join(layer), &mut types)?;
        found.extend(shared(types, root).map(|line| format!("{layer}: types of one name: {line}")));
    }
    Ok(found)
}

/// Names of more than one type, each with its files.
fn shared(types: Types, root: &Path) -> impl Iterator<Item = String> {
    types.into_iter().filter(|(_, files)| files.len() > 1).map(move |(name, mut files)| {
        files.sort();
        let short = |file: &PathBuf| file.strip_prefix(root).unwrap_or(file).display().to_string();
        format!("{name}: {}", files.iter().map(short).collect::<Vec<_>>().join(", "))
    })
}

fn add_types(path: &Path, types: &mut Types) -> Result<()> {
    if path.is_dir() {
        return folder(path)?.iter().try_for_each(|inside| add_types(inside, types));
    }
    if path.extension().is_some_and(|extension| extension == "rs") {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        for name in text.lines().filter_map(declared) {
            types.entry(name.to_owned()).or_default().push(path.to_owned());
        }
    }
    Ok(())
}

/// The public type that a line declares.
fn declared(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(restricted) => restricted.split_once(')')?.1,
        None => rest,
    };
    let mut rest = rest.strip_prefix(' ')?;
    while let Some(after) = MODIFIERS.into_iter().find_map(|word| behind(rest, word)) {
        rest = after;
    }
    let rest = KEYWORDS.into_iter().find_map(|word| behind(rest, word))?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    (end > 0).then(|| &rest[..end])
}

/// What follows a word and a space.
fn behind<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.strip_prefix(word)?.strip_prefix(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_read_from_source() {
        let found = |line| declared(line);
        assert_eq!(found("pub struct Frame {"), Some("Frame"));
        assert_eq!(found("    pub(crate) struct Outlet(Arc<Pipe>);"), Some("Outlet"));
        assert_eq!(found("pub(in crate::trace) enum Item {"), Some("Item"));
        assert_eq!(found("pub unsafe trait Plain: Copy {"), Some("Plain"));
        assert_eq!(found("pub type Answer<T> = Result<T, i32>;"), Some("Answer"));
        assert_eq!(found("pub struct Nothing;"), Some("Nothing"));
        assert_eq!(found("pub union Word_2 {"), Some("Word_2"));
    }

    #[test]
    fn what_is_no_public_type_is_passed_over() {
        for line in [
            "struct Private {",
            "// pub struct Comment {",
            "pub fn structure() {}",
            "pub structure: u8,",
            "public struct X",
            "pub use wedge_abi::Frame;",
            "pub const TYPE: u8 = 0;",
            "pub struct $name {",
            "    type Error = io::Error;",
        ] {
            assert_eq!(declared(line), None, "{line}");
        }
    }

    #[test]
    fn shared_names_are_told_with_their_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let (source, tests) = (folder.path().join("one/src"), folder.path().join("two/tests"));
        for place in [&source, &tests] {
            fs::create_dir_all(place).expect("made");
        }
        let text = "pub struct Once;\npub struct Frame;\n";
        fs::write(source.join("lib.rs"), text).expect("written");
        fs::write(tests.join("help.rs"), "pub(crate) enum Frame {}\n").expect("written");
        fs::write(tests.join("notes.md"), "pub struct Once;\n").expect("written");
        let mut types = Types::new();
        add_types(folder.path(), &mut types).expect("read");
        let found: Vec<_> = shared(types, folder.path()).collect();
        assert_eq!(found, ["Frame: one/src/lib.rs, two/tests/help.rs"]);
    }
}
