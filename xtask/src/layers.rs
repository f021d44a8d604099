//! `cargo xtask layers`: folders are layers, and arrows between them point one way.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::{Result, bail};
use serde::Deserialize;

use crate::{checks::root, command::output};

/// Which layers, or single crates, each layer may depend on; itself always. Tests may use anything
/// (dev-dependencies are not looked at), and so may tools.
const ALLOWED: [(&str, &[&str]); 7] = [
    ("guest", &[]),
    ("host", &[]),
    ("machine", &["guest", "host:host"]),
    ("engine", &["guest", "host:host", "machine:ram", "machine:bus"]),
    ("server", &["guest", "host:host", "machine"]),
    ("app:vmm", &["guest", "host:host", "machine", "engine"]),
    ("app", &["guest", "host", "machine", "engine", "server"]),
];
/// Layers that may depend on anything.
const FREE: [&str; 4] = ["tests", "bench", "xtask", "fuzz"];
/// Crates of the host layer that all others of it stand on, and that stand on nothing.
const FOUNDATIONS: [(&str, &str); 2] = [("host", "host"), ("guest", "x86")];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
}

/// Checks the workspace.
///
/// # Errors
/// Lists every arrow that may not be, or cargo could not be run.
pub fn check() -> Result<()> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["metadata", "--no-deps", "--format-version=1"]).current_dir(root());
    let metadata: Metadata = serde_json::from_str(&output(&mut command)?)?;
    let wrong = violations(&metadata, &root());
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("dependencies that ARCHITECTURE.md does not allow:\n  {}", wrong.join("\n  "))
}

fn violations(metadata: &Metadata, root: &Path) -> Vec<String> {
    let layer = |package: &Package| {
        let path = Path::new(&package.manifest_path).strip_prefix(root).ok()?;
        Some(path.components().next()?.as_os_str().to_string_lossy().into_owned())
    };
    let layers: BTreeMap<_, _> =
        metadata.packages.iter().filter_map(|p| Some((p.name.as_str(), layer(p)?))).collect();
    let mut wrong = Vec::new();
    for package in &metadata.packages {
        let Some(from) = layers.get(package.name.as_str()) else { continue };
        for dependency in package.dependencies.iter().filter(|d| d.kind.is_none()) {
            let Some(to) = layers.get(dependency.name.as_str()) else { continue };
            if !allowed((from, &package.name), (to, &dependency.name)) {
                wrong.push(format!("{from}/{} -> {to}/{}", package.name, dependency.name));
            }
        }
    }
    wrong
}

/// Whether a crate (its layer and name) may depend on another.
fn allowed((from, name): (&str, &str), (to, target): (&str, &str)) -> bool {
    if FREE.contains(&from) {
        return true;
    }
    if from == to {
        return !FOUNDATIONS.contains(&(from, name));
    }
    let exact = format!("{from}:{name}");
    let rule = ALLOWED.iter().find(|(key, _)| *key == exact);
    let rule = rule.or_else(|| ALLOWED.iter().find(|(key, _)| *key == from));
    let Some((_, targets)) = rule else { return false };
    targets.contains(&to) || targets.contains(&format!("{to}:{target}").as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_workspace_keeps_to_them() {
        check().expect("only arrows that ARCHITECTURE.md allows");
    }

    #[test]
    fn arrows_point_down() {
        assert!(allowed(("machine", "chipset"), ("guest", "x86")));
        assert!(allowed(("machine", "virtio"), ("machine", "pci")));
        assert!(allowed(("engine", "engine"), ("machine", "ram")));
        assert!(allowed(("app", "ring3"), ("host", "host_linux")));
        assert!(!allowed(("engine", "engine"), ("machine", "chipset")));
        assert!(!allowed(("app", "vmm"), ("host", "host_linux")));
        assert!(!allowed(("machine", "ram"), ("host", "host_linux")));
        assert!(!allowed(("guest", "x86"), ("guest", "x86_interp")));
        assert!(!allowed(("somewhere", "new"), ("guest", "x86")), "a new layer needs a rule");
    }

    #[test]
    fn violations_are_found_in_metadata() {
        let json = r#"{"packages": [
            {"name": "x86", "manifest_path": "/r/guest/x86/Cargo.toml", "dependencies": [
                {"name": "bus", "kind": null}, {"name": "serde", "kind": null}]},
            {"name": "bus", "manifest_path": "/r/machine/bus/Cargo.toml", "dependencies": [
                {"name": "host_linux", "kind": "dev"}]},
            {"name": "host_linux", "manifest_path": "/r/host/host_linux/Cargo.toml",
             "dependencies": []}]}"#;
        let metadata = serde_json::from_str(json).expect("valid");
        assert_eq!(violations(&metadata, Path::new("/r")), ["guest/x86 -> machine/bus"]);
    }
}
