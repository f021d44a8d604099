//! The lists of a folder of modules, as depmod writes them, for hosts without depmod: `modules.dep`, `modules.alias`, `modules.devname`.
//!
//! kmod reads other forms of them, which only depmod makes. The guest's agent reads these.

use std::{collections::BTreeMap, fmt::Write, path::PathBuf};

use anyhow::Result;

use crate::modules::{ModuleInfo, ModuleTree};

/// Modules by name: their files and what they say of themselves.
type Known = BTreeMap<String, (PathBuf, ModuleInfo)>;

/// The lists: their names and their text.
pub(crate) fn of(tree: &ModuleTree) -> Result<[(&'static str, String); 3]> {
    let known =
        tree.files().map(|(name, file)| Ok((name.to_owned(), (file.to_owned(), tree.says(file)?))));
    let known = known.collect::<Result<Known>>()?;
    let (mut depends, mut aliases, mut devices) = (String::new(), String::new(), String::new());
    for (name, (file, info)) in &known {
        let needed: String = needs(&known, name).iter().map(|path| format!(" {path}")).collect();
        // Writing to a string does not fail.
        let _ = writeln!(depends, "{}:{needed}", file.display());
        for alias in &info.aliases {
            let _ = writeln!(aliases, "alias {alias} {name}");
        }
        devices.extend(device(info).map(|device| format!("{name} {device}\n")));
    }
    Ok([("modules.dep", depends), ("modules.alias", aliases), ("modules.devname", devices)])
}

/// The files of all that a module needs; what comes later is loaded earlier.
fn needs(known: &Known, name: &str) -> Vec<String> {
    let (mut order, mut pending) = (Vec::<&str>::new(), vec![name]);
    while let Some(name) = pending.pop() {
        let Some((_, info)) = known.get(name) else { continue };
        for needed in &info.depends {
            // Whoever is needed again has to come before this one, too.
            order.retain(|earlier| earlier != needed);
            order.push(needed);
            pending.push(needed);
        }
    }
    let file = |name: &&str| Some(known.get(*name)?.0.display().to_string());
    order.iter().filter_map(file).collect()
}

/// The device that a module's driver makes once it is opened: its name below /dev, its kind and numbers.
fn device(info: &ModuleInfo) -> Option<String> {
    let find = |prefix| info.aliases.iter().find_map(|alias| alias.strip_prefix(prefix));
    let name = find("devname:")?;
    let numbers = |kind, prefix| {
        let (major, minor) = find(prefix)?.split_once('-')?;
        Some(format!("{name} {kind}{major}:{minor}"))
    };
    numbers('c', "char-major-").or_else(|| numbers('b', "block-major-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(depends: &[&str], aliases: &[&str]) -> (PathBuf, ModuleInfo) {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        (PathBuf::new(), ModuleInfo { depends: owned(depends), aliases: owned(aliases) })
    }

    #[test]
    fn what_is_needed_by_others_comes_after_them() {
        let names = [("a", &["b", "d"][..]), ("b", &["c"]), ("c", &["d"]), ("d", &[])];
        let known: Known = names
            .into_iter()
            .map(|(name, depends)| {
                let (_, info) = module(depends, &[]);
                (name.to_owned(), (PathBuf::from(format!("kernel/{name}.ko")), info))
            })
            .collect();
        assert_eq!(needs(&known, "a"), ["kernel/b.ko", "kernel/c.ko", "kernel/d.ko"]);
        assert!(needs(&known, "d").is_empty());
    }

    #[test]
    fn a_device_has_a_name_and_numbers() {
        let (_, tun) = module(&[], &["devname:net/tun", "char-major-10-200"]);
        assert_eq!(device(&tun).as_deref(), Some("net/tun c10:200"));
        let (_, plain) = module(&[], &["fs-ext4"]);
        assert_eq!(device(&plain), None);
    }
}
