//! Which file a name or a descriptor stands for, and what the guest is told of it.

use std::{collections::HashMap, ffi::CStr, os::fd::AsFd};

use fuse_backend_rs::{abi::fuse_abi::stat64, api::filesystem::Entry};
use rustix::{
    fs::{AtFlags, FileType, Statx, StatxFlags, makedev, statx},
    io::Errno,
};

/// The file type bits of a mode.
const TYPE: u16 = 0o170_000;
/// Bits of an inode number that are the host's own if the file is not on the folder's own file system.
const HOST_BITS: u32 = 48;

/// A place for one file at a time: host inode numbers are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    device: u64,
    pub(crate) number: u64,
    /// The mount it was found in: the same folder may be mounted for reading and for writing.
    mount: u64,
}

/// A file: its place, and what tells it from an earlier or later file in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    pub(crate) key: Key,
    kind: u16,
    born: Option<(i64, u32)>,
}

impl FileIdentity {
    pub(crate) fn of(status: &Statx) -> Self {
        let has = |what: StatxFlags| status.stx_mask & what.bits() != 0;
        let born = (status.stx_btime.tv_sec, status.stx_btime.tv_nsec);
        let mount = if has(StatxFlags::MNT_ID) { status.stx_mnt_id } else { 0 };
        let key = Key { device: device(status), number: status.stx_ino, mount };
        let born = has(StatxFlags::BTIME).then_some(born);
        Self { key, kind: status.stx_mode & TYPE, born }
    }

    pub(crate) fn kind(self) -> FileType {
        FileType::from_raw_mode(self.kind.into())
    }

    pub(crate) fn is_folder(self) -> bool {
        self.kind() == FileType::Directory
    }
}

fn device(status: &Statx) -> u64 {
    u64::from(status.stx_dev_major) << 32 | u64::from(status.stx_dev_minor)
}

/// What a name in a folder stands for. Links are not followed.
pub(crate) fn look(folder: impl AsFd, name: &CStr) -> Result<Statx, Errno> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID;
    statx(folder, name, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT, mask)
}

/// What a descriptor stands for.
pub(crate) fn look_at(file: impl AsFd) -> Result<Statx, Errno> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID;
    statx(file, c"", AtFlags::EMPTY_PATH, mask)
}

/// Inode numbers of a tree that may span several file systems of the host, in a guest that sees one.
///
/// Files of the folder's own file system keep theirs. Those of another are told from them by high bits that host file systems leave alone.
#[derive(Default)]
pub(crate) struct Numbers {
    others: HashMap<u64, u64>,
    own: u64,
}

impl Numbers {
    pub(crate) fn new(root: &Statx) -> Self {
        Self { others: HashMap::new(), own: device(root) }
    }

    /// The guest's inode number of a file.
    pub(crate) fn of(&mut self, status: &Statx) -> u64 {
        self.on(device(status), status.stx_ino)
    }

    /// The guest's inode number of an entry that is on the same file system as its folder.
    pub(crate) fn beside(&mut self, folder: FileIdentity, number: u64) -> u64 {
        self.on(folder.key.device, number)
    }

    fn on(&mut self, device: u64, number: u64) -> u64 {
        if device == self.own {
            return number;
        }
        let next = self.others.len() as u64 + 1;
        number ^ *self.others.entry(device).or_insert(next) << HOST_BITS
    }
}

/// A file's attributes as the library wants them, with the guest's inode number.
pub(crate) fn attributes(status: &Statx, number: u64) -> stat64 {
    let mut to = Entry::default().attr;
    to.st_ino = number;
    to.st_mode = status.stx_mode.into();
    to.st_nlink = status.stx_nlink.into();
    (to.st_uid, to.st_gid) = (status.stx_uid, status.stx_gid);
    to.st_rdev = makedev(status.stx_rdev_major, status.stx_rdev_minor);
    to.st_size = status.stx_size as i64;
    to.st_blksize = status.stx_blksize.into();
    to.st_blocks = status.stx_blocks as i64;
    let time = |time: rustix::fs::StatxTimestamp| (time.tv_sec, i64::from(time.tv_nsec));
    (to.st_atime, to.st_atime_nsec) = time(status.stx_atime);
    (to.st_mtime, to.st_mtime_nsec) = time(status.stx_mtime);
    (to.st_ctime, to.st_ctime_nsec) = time(status.stx_ctime);
    to
}

/// The type of a file as directory entries have it.
pub(crate) fn entry_type(kind: FileType) -> u32 {
    kind.as_raw_mode() >> 12
}
