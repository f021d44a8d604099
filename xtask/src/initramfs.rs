//! A first root file system: busybox, some kernel modules and an `/init` that gets a guest to a
//! shell, or through a script.

use crate::{cpio::CpioArchive, modules::Module};

/// What `/init` does once the file systems are mounted and the modules loaded.
#[derive(Clone, Copy, Debug)]
pub enum Purpose<'a> {
    /// An interactive shell on the console; leaving it powers off.
    Shell,
    /// Runs a shell script, then powers off.
    Script(&'a str),
}

/// A file of the root file system.
#[derive(Clone, Debug)]
pub struct File {
    /// Its path without a leading slash, in a directory that is there (`root/test`).
    pub path: String,
    /// Permission bits.
    pub permissions: u32,
    /// What is in it.
    pub content: Vec<u8>,
}

const DIRECTORIES: [&str; 10] =
    ["bin", "dev", "etc", "mnt", "modules", "proc", "root", "run", "sys", "tmp"];

const INIT: &str = include_str!("init.sh");

/// Packs the archive. `modules` are loaded in the order given.
pub fn build(busybox: &[u8], modules: &[Module], purpose: Purpose<'_>) -> Vec<u8> {
    build_with(busybox, modules, &[], purpose)
}

/// As [`build`], with further files.
pub fn build_with(
    busybox: &[u8],
    modules: &[Module],
    files: &[File],
    purpose: Purpose<'_>,
) -> Vec<u8> {
    let mut archive = CpioArchive::new();
    for directory in DIRECTORIES {
        archive.directory(directory);
    }
    archive.character_device("dev/console", 5, 1);
    archive.file("bin/busybox", 0o755, busybox);
    archive.symlink("bin/sh", "busybox");
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("etc/passwd", 0o644, b"root::0:0:root:/root:/bin/sh\n");
    archive.file("etc/group", 0o644, b"root:x:0:\n");
    for module in modules {
        archive.file(&format!("modules/{}.ko", module.name), 0o644, &module.content);
    }
    let order: String = modules.iter().map(|module| format!("{}\n", module.name)).collect();
    archive.file("modules/order", 0o644, order.as_bytes());
    for file in files {
        archive.file(&file.path, file.permissions, &file.content);
    }
    if let Purpose::Script(script) = purpose {
        archive.file("script", 0o755, script.as_bytes());
    }
    archive.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contains(haystack: &[u8], needle: &[u8]) -> bool {
        haystack.windows(needle.len()).any(|window| window == needle)
    }

    #[test]
    fn modules_are_listed_in_load_order() {
        let module = |name: &str| Module { name: name.to_owned(), content: vec![1, 2, 3] };
        let archive = build(b"busybox", &[module("virtio"), module("virtio_blk")], Purpose::Shell);
        assert!(contains(&archive, b"virtio\nvirtio_blk\n"));
        assert!(contains(&archive, b"modules/virtio_blk.ko\0"));
        assert!(!contains(&archive, b"script\0"));
    }

    #[test]
    fn further_files_are_packed() {
        let (path, content) = ("root/test".to_owned(), b"a program".to_vec());
        let file = File { path, permissions: 0o755, content };
        let archive = build_with(b"busybox", &[], &[file], Purpose::Shell);
        assert!(contains(&archive, b"root/test\0"));
        assert!(contains(&archive, b"a program"));
    }

    #[test]
    fn a_script_is_packed() {
        let archive = build(b"busybox", &[], Purpose::Script("echo hello\n"));
        assert!(contains(&archive, b"echo hello\n"));
    }
}
