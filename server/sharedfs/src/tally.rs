//! How many requests of each kind there were, for developers: told when a server ends (`RING3_LOG=debug`).

use std::{cmp::Reverse, collections::BTreeMap, fmt};

/// Requests by number. The library's enumeration does not take every number.
const NAMES: [&str; 50] = [
    "0",
    "lookup",
    "forget",
    "getattr",
    "setattr",
    "readlink",
    "symlink",
    "7",
    "mknod",
    "mkdir",
    "unlink",
    "rmdir",
    "rename",
    "link",
    "open",
    "read",
    "write",
    "statfs",
    "release",
    "19",
    "fsync",
    "setxattr",
    "getxattr",
    "listxattr",
    "removexattr",
    "flush",
    "init",
    "opendir",
    "readdir",
    "releasedir",
    "fsyncdir",
    "getlk",
    "setlk",
    "setlkw",
    "access",
    "create",
    "interrupt",
    "bmap",
    "destroy",
    "ioctl",
    "poll",
    "notify reply",
    "batch forget",
    "fallocate",
    "readdirplus",
    "rename2",
    "lseek",
    "copy_file_range",
    "setupmapping",
    "removemapping",
];

#[derive(Default)]
pub(crate) struct Tally(BTreeMap<u32, u64>);

impl Tally {
    /// A request has come.
    pub(crate) fn note(&mut self, request: &[u8]) {
        let opcode = request.get(4..8).and_then(|bytes| bytes.try_into().ok());
        let opcode = opcode.map_or(u32::MAX, u32::from_le_bytes).min(NAMES.len() as u32);
        *self.0.entry(opcode).or_default() += 1;
    }
}

/// Those that came most often first.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} requests", self.0.values().sum::<u64>())?;
        let mut kinds: Vec<_> = self.0.iter().collect();
        kinds.sort_by_key(|(_, count)| Reverse(*count));
        kinds.into_iter().try_for_each(|(opcode, count)| {
            let name = NAMES.get(*opcode as usize).unwrap_or(&"unknown");
            write!(f, ", {name} {count}")
        })
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        tracing::debug!("{self}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_come_first_and_odd_ones_are_counted_too() {
        let mut tally = Tally::default();
        for opcode in [16u32, 1, 16, 0xffff, 7, 19] {
            tally.note(&[[0; 4], opcode.to_le_bytes()].concat());
        }
        tally.note(&[0; 3]);
        let text = tally.to_string();
        assert_eq!(text, "7 requests, write 2, unknown 2, lookup 1, 7 1, 19 1");
    }
}
