//! What documents say of tests, targets and crates is so.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).expect(path)
}

/// What stands between backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// All Rust of ours.
fn sources(folder: &Path, found: &mut String) {
    for entry in fs::read_dir(folder).expect("listed").flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_dir() && name != "target" {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            // Names of files stand for the tests in them.
            found.push_str(&path.display().to_string());
            found.push_str(&fs::read_to_string(&path).expect("read"));
        }
    }
}

/// The last column of the tables that have this heading.
fn last_columns<'a>(text: &'a str, heading: &str) -> Vec<&'a str> {
    let tables = text
        .split(heading)
        .skip(1)
        .flat_map(|table| table.lines().skip(1).take_while(|line| line.starts_with('|')));
    let rows = tables.filter(|row| row.starts_with("| "));
    rows.map(|row| row.trim_end_matches('|').rsplit_once(" | ").expect("columns").1).collect()
}

/// The tests in a column exist; its targets.
fn check<'a>(column: &'a str, all: &str) -> Vec<&'a str> {
    let mut targets = Vec::new();
    for part in column.split(';') {
        let names = quoted(part);
        if part.trim().starts_with("fuzz:") {
            targets.extend(names);
            continue;
        }
        for name in names {
            let path = name.replace("::", "/").replace("selftests keys", "selftests");
            let path = path.trim_end_matches(".rs");
            let known = [format!("fn {name}("), format!("{path}.rs"), format!("/{path}/")];
            assert!(known.iter().any(|known| all.contains(known)), "{name} is no test");
        }
    }
    targets
}

#[test]
fn every_attack_that_is_named_exists() {
    let mut all = String::new();
    for folder in ["app", "engine", "guest", "machine", "server", "tests", "host"] {
        sources(&root().join(folder), &mut all);
    }
    let (threats, isolation) = (read("docs/threats.md"), read("docs/isolation.md"));
    let attacks = last_columns(&threats, "| attacked by |");
    let claims = last_columns(&isolation, "| held by |");
    assert!(attacks.len() > 30 && claims.len() > 30, "{} and {}", attacks.len(), claims.len());
    let targets: Vec<_> = attacks.iter().flat_map(|column| check(column, &all)).collect();
    for target in hostile::TARGETS {
        assert!(targets.contains(&target.name), "{} attacks no boundary", target.name);
    }
    let held = claims.iter().flat_map(|column| check(column, &all));
    let mut named = held.chain(targets);
    assert_eq!(named.find(|name| hostile::find(name).is_none()), None, "it is no target");
}

#[test]
fn every_crate_that_is_named_is_argued() {
    let (manifest, page) = (read("Cargo.toml"), read("docs/dependencies.md"));
    let argued = quoted(&page);
    let (_, rest) = manifest.split_once("[workspace.dependencies]").expect("dependencies");
    let lines = rest.split_once("\n[").map_or(rest, |(lines, _)| lines).lines();
    let foreign = lines.filter(|line| line.contains(" = ") && !line.contains("path = "));
    for line in foreign {
        let name = line.split(' ').next().expect("a name");
        assert!(argued.contains(&name), "docs/dependencies.md says nothing of {name}");
    }
}

/// The licences of `deny.toml`.
fn allowed() -> Vec<String> {
    let deny: toml::Table = read("deny.toml").parse().expect("TOML");
    let allowed = deny["licenses"]["allow"].as_array().expect("a list");
    allowed.iter().map(|name| name.as_str().expect("a name").to_owned()).collect()
}

/// Whether one may be used under these licences: alternatives by OR or a slash, of which AND binds tighter.
fn may_be_used(licence: &str, allowed: &[String]) -> bool {
    if let Some(rest) = licence.strip_prefix('(') {
        let (inner, behind) = rest.split_once(')').expect("a pair");
        let behind = behind.trim();
        return may_be_used(inner, allowed)
            && behind.strip_prefix("AND ").is_none_or(|more| may_be_used(more, allowed));
    }
    let alternatives = licence.split(" OR ").flat_map(|part| part.split('/'));
    let is_allowed = |name: &str| allowed.iter().any(|known| known == name.trim());
    alternatives.into_iter().any(|one| one.split(" AND ").all(is_allowed))
}

#[test]
fn licences_are_read_as_they_are_meant() {
    let allowed = ["MIT", "Apache-2.0", "BSD-3-Clause"].map(str::to_owned);
    for sound in ["MIT", "MIT OR GPL-2.0", "GPL-2.0/MIT", "(GPL-2.0 OR MIT) AND BSD-3-Clause"] {
        assert!(may_be_used(sound, &allowed), "{sound}");
    }
    for other in ["GPL-2.0", "MIT AND GPL-2.0", "(MIT OR Apache-2.0) AND GPL-2.0", ""] {
        assert!(!may_be_used(other, &allowed), "{other}");
    }
}

/// What `cargo deny check licenses sources` checks, where that is not installed.
#[test]
fn licences_and_sources_are_those_that_may_come_in() {
    const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--offline", "--locked"]);
    cargo.args(["--filter-platform", "x86_64-unknown-linux-gnu"]).current_dir(root());
    let output = cargo.output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let (foreign, allowed) =
        (packages.iter().filter(|package| !package["source"].is_null()), allowed());
    let mut count = 0;
    for package in foreign {
        let (name, licence) = (&package["name"], package["license"].as_str().unwrap_or_default());
        assert_eq!(package["source"], REGISTRY, "{name}");
        assert!(may_be_used(licence, &allowed), "{name} is under {licence}");
        count += 1;
    }
    assert!(count > 50, "{count} packages");
}
