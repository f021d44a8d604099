//! Modules of a crate that depend on each other in a cycle: part of `cargo xtask layers`.
//!
//! Looked at are the modules just below a crate's root, each with all that is inside it, and the paths that begin with `crate::`.
//! Tests may name anything.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result};

use crate::layers::folder;

/// Crates whose modules may use each other in a cycle.
const CYCLES_ALLOWED: [&str; 9] = [
    "bench/harness",
    "app/vmm",
    "engine/fast",
    "engine/wedge_abi",
    "engine/jit",
    "engine/stub",
    "engine/wedge",
    "guest/x86_interp",
    "host/host_linux",
];

/// The modules of a crate, and which others each uses.
type ModuleUses = BTreeMap<String, BTreeSet<String>>;

/// Folders of crates.
const LAYERS: [&str; 7] = ["guest", "host", "machine", "engine", "server", "app", "bench"];

/// Cycles in all crates, in words.
pub fn in_all(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for layer in LAYERS {
        for package in folder(&root.join(layer))? {
            let name = package.strip_prefix(root).unwrap_or(&package).display().to_string();
            let source = package.join("src");
            if !CYCLES_ALLOWED.contains(&name.as_str()) && source.is_dir() {
                let cycle = cycle(module_uses(&source)?);
                if !cycle.is_empty() {
                    found.push(format!("{name}: cycle of modules: {}", cycle.join(", ")));
                }
            }
        }
    }
    Ok(found)
}

/// Which modules of a crate use which others.
fn module_uses(source: &Path) -> Result<ModuleUses> {
    let mut module_uses = ModuleUses::new();
    for path in folder(source)? {
        let module = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if !matches!(module.as_str(), "lib" | "main") {
            add_named(&path, module_uses.entry(module).or_default())?;
        }
    }
    let modules: BTreeSet<_> = module_uses.keys().cloned().collect();
    for (module, modules_used) in &mut module_uses {
        modules_used.retain(|name| name != module && modules.contains(name));
    }
    Ok(module_uses)
}

fn add_named(path: &Path, all: &mut BTreeSet<String>) -> Result<()> {
    if path.is_dir() {
        return folder(path)?.iter().try_for_each(|inside| add_named(inside, all));
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    if path.extension().is_some_and(|extension| extension == "rs") && !stem.ends_with("tests") {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        all.extend(modules_used(&text));
    }
    Ok(())
}

/// The names after `crate::` in a source, tests and comments left out.
fn modules_used(text: &str) -> BTreeSet<String> {
    let own = text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = own.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    code.split("crate::").skip(1).flat_map(first_names).filter(|name| !name.is_empty()).collect()
}

/// The first name of a path, or of each path of a list in braces.
fn first_names(rest: &str) -> Vec<String> {
    let name = |text: &str| {
        let text = text.trim_start();
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        text[..end].to_owned()
    };
    let Some(list) = rest.strip_prefix('{') else { return vec![name(rest)] };
    let (mut depth, mut names, mut from) = (0, Vec::new(), 0);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.push(name(&list[from..at]));
                from = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names
}

/// The modules in cycles, and those between two cycles.
fn cycle(mut module_uses: ModuleUses) -> Vec<String> {
    loop {
        let needed: BTreeSet<_> = module_uses.values().flatten().cloned().collect();
        let before = module_uses.len();
        module_uses
            .retain(|module, modules_used| !modules_used.is_empty() && needed.contains(module));
        if module_uses.len() == before {
            return module_uses.into_keys().collect();
        }
        let left: BTreeSet<_> = module_uses.keys().cloned().collect();
        module_uses
            .values_mut()
            .for_each(|modules_used| modules_used.retain(|name| left.contains(name)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module_uses(all: &[(&str, &[&str])]) -> ModuleUses {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        all.iter()
            .map(|(module, modules_used)| ((*module).to_owned(), owned(modules_used)))
            .collect()
    }

    #[test]
    fn cycles_are_found() {
        let line = module_uses(&[("run", &["disk", "net"]), ("disk", &["net"]), ("net", &[])]);
        assert!(cycle(line).is_empty());
        let ring = module_uses(&[
            ("main", &["run"]),
            ("run", &["disk"]),
            ("disk", &["net", "values"]),
            ("net", &["run"]),
            ("values", &[]),
        ]);
        assert_eq!(cycle(ring), ["disk", "net", "run"]);
    }

    #[test]
    fn names_are_read_from_source() {
        let text = "// crate::comment\nuse crate::{\n    disk::{self, Disk},\n    net,\n};\n\
                    fn f() { crate::run::run(); }\n#[cfg(test)]\nmod tests {\n    use crate::cli;\n}\n";
        let names: Vec<_> = modules_used(text).into_iter().collect();
        assert_eq!(names, ["disk", "net", "run"]);
    }
}
