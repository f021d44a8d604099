//! `cargo xtask layers`: folders are layers, and arrows between them point one way. Portable layers use the host by
//! the traits of `host` alone. Modules of a crate do not depend on each other in a cycle (`cycles`). Public types of a layer do not
//! share a name (`names`), and the methods of a type are not spread over many files (`spread`).

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{checks::root, command::output, cycles, names, spread};

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
const TOOLS: [&str; 4] = ["tests", "bench", "xtask", "fuzz"];
/// Crates of the host layer that all others of it stand on, and that stand on nothing.
const FOUNDATIONS: [(&str, &str); 2] = [("host", "host"), ("guest", "x86")];

/// Layers that use the host by the traits of `host` only; so do the crates `host` and `host_fake`.
const PORTABLE: [&str; 3] = ["guest", "machine", "engine"];
/// The one crate of the host layer that uses the host directly.
const HOST_CRATE: &str = "host_linux";
/// Crates that give access to the host.
const HOST_LIBRARIES: [&str; 5] = ["libc", "rustix", "nix", "linux-raw-sys", "syscalls"];
/// Text in source that uses the host directly: those crates, a C library's functions, and files of its kernel.
const HOST_NAMES: [&str; 4] = ["libc::", "rustix::", "extern \"C\" {", "\"/proc/"];

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
    let mut wrong = violations(&metadata, &root());
    wrong.extend(host_uses(&root())?);
    wrong.extend(cycles::in_all(&root())?);
    wrong.extend(names::in_all(&root())?);
    wrong.extend(spread::in_all(&root())?);
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("what ARCHITECTURE.md does not allow:\n  {}", wrong.join("\n  "))
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
        let portable = is_portable(from, &package.name);
        for dependency in package.dependencies.iter().filter(|d| d.kind.is_none()) {
            if portable && HOST_LIBRARIES.contains(&dependency.name.as_str()) {
                wrong.push(format!("{from}/{} -> {}", package.name, dependency.name));
            }
            let Some(to) = layers.get(dependency.name.as_str()) else { continue };
            if !allowed((from, &package.name), (to, &dependency.name)) {
                wrong.push(format!("{from}/{} -> {to}/{}", package.name, dependency.name));
            }
        }
    }
    wrong
}

/// Whether a crate may use the host by the traits of `host` only.
fn is_portable(layer: &str, name: &str) -> bool {
    PORTABLE.contains(&layer) || layer == "host" && name != HOST_CRATE
}

/// Lines of portable crates that use the host directly; tests may.
fn host_uses(root: &Path) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for layer in PORTABLE.into_iter().chain(["host"]) {
        for package in folder(&root.join(layer))? {
            let name = package.file_name().unwrap_or_default().to_string_lossy();
            let source = package.join("src");
            if is_portable(layer, &name) && source.is_dir() {
                add_host_uses(&source, &mut wrong)?;
            }
        }
    }
    Ok(wrong)
}

fn add_host_uses(path: &Path, wrong: &mut Vec<String>) -> Result<()> {
    if path.is_dir() {
        return folder(path)?.iter().try_for_each(|inside| add_host_uses(inside, wrong));
    }
    let is_test = path.components().any(|part| part.as_os_str() == "tests")
        || path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"));
    if is_test || path.extension().is_none_or(|extension| extension != "rs") {
        return Ok(());
    }
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    wrong.extend(
        host_uses_of(&text).map(|(line, what)| format!("{}:{line}: {what}", path.display())),
    );
    Ok(())
}

/// Lines of a source that use the host directly: number and text.
fn host_uses_of(text: &str) -> impl Iterator<Item = (usize, &'static str)> {
    let code = text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"));
    code.flat_map(|(index, line)| {
        let said = HOST_NAMES.into_iter().filter(move |word| line.contains(word));
        said.map(move |word| (index + 1, word))
    })
}

pub(crate) fn folder(path: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(path).with_context(|| path.display().to_string())?;
    Ok(entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?)
}

/// Whether a crate (its layer and name) may depend on another.
fn allowed((from, name): (&str, &str), (to, target): (&str, &str)) -> bool {
    if TOOLS.contains(&from) {
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
    fn who_asks_the_host_is_found() {
        let text = "// libc::mmap\nuse rustix::fs;\nlet file = open(\"/proc/stat\");\n";
        let found: Vec<_> = host_uses_of(text).collect();
        assert_eq!(found, [(2, "rustix::"), (3, "\"/proc/")]);
        assert!(is_portable("engine", "wedge") && is_portable("host", "host_fake"));
        assert!(!is_portable("host", "host_linux") && !is_portable("server", "usernet"));
    }

    #[test]
    fn violations_are_found_in_metadata() {
        let json = r#"{"packages": [
            {"name": "x86", "manifest_path": "/r/guest/x86/Cargo.toml", "dependencies": [
                {"name": "bus", "kind": null}, {"name": "serde", "kind": null},
                {"name": "libc", "kind": null}]},
            {"name": "bus", "manifest_path": "/r/machine/bus/Cargo.toml", "dependencies": [
                {"name": "host_linux", "kind": "dev"}]},
            {"name": "host_linux", "manifest_path": "/r/host/host_linux/Cargo.toml",
             "dependencies": []}]}"#;
        let metadata = serde_json::from_str(json).expect("valid");
        assert_eq!(
            violations(&metadata, Path::new("/r")),
            ["guest/x86 -> machine/bus", "guest/x86 -> libc"]
        );
    }
}
