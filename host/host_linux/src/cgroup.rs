//! Limits of the cgroups that this process is in, of either version.

use std::{
    fs,
    path::{Path, PathBuf},
};

const ROOT: &str = "/sys/fs/cgroup";

/// A limit, with the file it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What may not be exceeded.
    pub amount: u64,
    /// The file's name.
    pub file: &'static str,
}

/// Processes and threads.
pub fn processes() -> Option<Limit> {
    least("pids", ["pids.max", "pids.max"])
}

/// Bytes of memory.
pub fn memory() -> Option<Limit> {
    least("memory", ["memory.max", "memory.limit_in_bytes"])
}

/// The least limit of a controller, by the file's names in the second and in the first version.
fn least(controller: &str, files: [&'static str; 2]) -> Option<Limit> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let limits = groups.lines().filter_map(|line| limit(Path::new(ROOT), line, controller, files));
    limits.min_by_key(|limit| limit.amount)
}

/// The least limit of one line of `/proc/self/cgroup`: of the group it names, and of those around it.
fn limit(root: &Path, line: &str, controller: &str, files: [&'static str; 2]) -> Option<Limit> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, group) = (parts.next()?, parts.next()?.trim_start_matches('/'));
    let (folder, file): (PathBuf, _) = match controllers {
        "" => (root.to_owned(), files[0]),
        _ if controllers.split(',').any(|name| name == controller) => {
            (root.join(controllers), files[1])
        }
        _ => return None,
    };
    let group = folder.join(group);
    let around = group.ancestors().take_while(|group| group.starts_with(&folder));
    let amounts = around
        .filter_map(|group| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok());
    amounts.min().map(|amount| Limit { amount, file })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_all_groups_around_counts() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, text).expect("written");
        };
        write("a/b/pids.max", "max\n");
        write("a/pids.max", "70\n");
        write("pids/c/d/pids.max", "50\n");
        write("pids/c/pids.max", "60\n");
        write("memory/e/memory.limit_in_bytes", "9223372036854771712\n");
        let files = ["pids.max", "pids.max"];
        let at = |line| limit(root.path(), line, "pids", files).map(|limit| limit.amount);
        assert_eq!(at("0::/a/b"), Some(70));
        assert_eq!(at("8:pids:/c/d"), Some(50));
        assert_eq!(at("8:pids:/elsewhere"), None);
        assert_eq!(at("4:memory:/e"), None);
        assert_eq!(at("nonsense"), None);
        let memory = ["memory.max", "memory.limit_in_bytes"];
        let limit = limit(root.path(), "4:memory:/e", "memory", memory).expect("a limit");
        assert_eq!((limit.amount >> 40, limit.file), (8_388_607, "memory.limit_in_bytes"));
    }
}
