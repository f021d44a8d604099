//! How many requests of each kind there were, and how long they took, for developers: told when a server ends (`RING3_LOG=debug`).

use std::{cmp::Reverse, collections::BTreeMap, fmt, time::Duration};

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

/// Requests of a kind, and how long answering them took.
#[derive(Clone, Copy, Default)]
struct Kind {
    count: u64,
    time: Duration,
}

#[derive(Default)]
pub(crate) struct Tally(BTreeMap<u32, Kind>);

impl Tally {
    /// Counts, if somebody is going to read it.
    pub(crate) fn wanted() -> Option<Self> {
        tracing::enabled!(tracing::Level::DEBUG).then(Self::default)
    }

    /// A request has been answered.
    pub(crate) fn note(&mut self, request: &[u8], took: Duration) {
        let opcode = request.get(4..8).and_then(|bytes| bytes.try_into().ok());
        let opcode = opcode.map_or(u32::MAX, u32::from_le_bytes).min(NAMES.len() as u32);
        let kind = self.0.entry(opcode).or_default();
        kind.count += 1;
        kind.time += took;
    }
}

/// Those that came most often first, with the time that one takes on average.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} requests", self.0.values().map(|kind| kind.count).sum::<u64>())?;
        let mut kinds: Vec<_> = self.0.iter().collect();
        kinds.sort_by_key(|(_, kind)| Reverse(kind.count));
        kinds.into_iter().try_for_each(|(opcode, Kind { count, time })| {
            let name = NAMES.get(*opcode as usize).unwrap_or(&"unknown");
            let us = time.as_secs_f64() * 1e6 / *count as f64;
            write!(f, ", {name} {count} ({us:.1} us)")
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
            let took = Duration::from_micros(opcode.into());
            tally.note(&[[0; 4], opcode.to_le_bytes()].concat(), took);
        }
        tally.note(&[0; 3], Duration::ZERO);
        let text = tally.to_string();
        let most = "7 requests, write 2 (16.0 us), unknown 2 (32767.5 us), lookup 1 (1.0 us)";
        assert_eq!(text, [most, "7 1 (7.0 us)", "19 1 (19.0 us)"].join(", "));
    }
}
