//! Folders in which the host tells us of changes (inotify).
//!
//! The host's other programs need watches, too, and all of a user's come out of one number: we take a part of it.

use std::{
    collections::HashMap,
    ffi::{CStr, CString},
    fs,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use rustix::{
    fs::{
        fstatfs,
        inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    },
    io::Errno,
};

/// How many watches a user may have.
const LIMIT: &str = "/proc/sys/fs/inotify/max_user_watches";
/// A server takes at the most one in `SHARE` of them, and no more than `MOST`.
const SHARE: usize = 4;
const MOST: usize = 100_000;
/// File systems whose every change the host sees, by their magic numbers: ext, XFS, Btrfs, tmpfs, overlayfs, F2FS, bcachefs, ZFS.
const LOCAL: [u32; 8] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0x794c_7630,
    0xf2f5_2010,
    0xca45_1a4e,
    0x2fc1_2fc1,
];
/// The changes in a folder that the host reports: entries that come and go, content, attributes, and that a file open for writing is
/// closed. The last is all that shows of a program that writes by a mapping.
const WANTED: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::EXCL_UNLINK);
/// Bytes of changes that are read at once: at least one with the longest name.
const ROOM: usize = 16 << 10;

/// What has happened in a folder.
pub(crate) struct HostChange<'a> {
    /// The folder's node.
    pub(crate) folder: u64,
    /// The name of the entry; empty if the folder itself has changed.
    pub(crate) name: &'a CStr,
    pub(crate) what: ReadFlags,
}

pub(crate) struct Watches {
    inotify: Arc<OwnedFd>,
    folders: HashMap<i32, u64>,
    /// The number of each folder's watch; `None` if the folder cannot be watched.
    numbers: HashMap<u64, Option<i32>>,
    /// How many watches there may be.
    limit: usize,
}

/// How many watches a server may take, by the host's settings. These cannot be read in a server's sandbox.
pub fn watches_allowed() -> usize {
    let limit = fs::read_to_string(LIMIT).ok().and_then(|text| text.trim().parse().ok());
    (limit.unwrap_or(0_usize) / SHARE).min(MOST)
}

impl Watches {
    /// No watches yet, and `limit` at the most.
    ///
    /// # Errors
    /// The host has no more instances of inotify for the user.
    pub(crate) fn new(limit: usize) -> Result<Self, Errno> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let (folders, numbers) = Default::default();
        Ok(Self { inotify: Arc::new(inotify), folders, numbers, limit })
    }

    /// The descriptor that becomes readable when there are changes.
    pub(crate) fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.inotify)
    }

    /// Has the host tell of changes in a folder, if the host can. `path` leads to the folder.
    pub(crate) fn watch(
        &mut self,
        folder: u64,
        fd: impl AsFd,
        path: impl FnOnce() -> Option<String>,
    ) {
        if self.numbers.contains_key(&folder) {
            return;
        }
        let number = self.added(fd, path);
        self.numbers.insert(folder, number);
        if let Some(number) = number {
            self.folders.insert(number, folder);
        }
    }

    fn added(&self, fd: impl AsFd, path: impl FnOnce() -> Option<String>) -> Option<i32> {
        let is_local = fstatfs(fd).is_ok_and(|system| LOCAL.contains(&(system.f_type as u32)));
        if !is_local || self.folders.len() >= self.limit {
            return None;
        }
        // One that the host does not allow is asked for again and again instead.
        let number = inotify::add_watch(&self.inotify, path()?, WANTED).ok()?;
        // Two mounts of one folder have one watch, which is the first one's.
        (!self.folders.contains_key(&number)).then_some(number)
    }

    /// Whether the host tells of changes in this folder.
    pub(crate) fn has(&self, folder: u64) -> bool {
        matches!(self.numbers.get(&folder), Some(Some(_)))
    }

    /// A folder is of no interest any more.
    pub(crate) fn unwatch(&mut self, folder: u64) {
        if let Some(Some(number)) = self.numbers.remove(&folder) {
            self.folders.remove(&number);
            // The host has removed it already if the folder is gone.
            let _ = inotify::remove_watch(&self.inotify, number);
        }
    }

    /// No folder is of interest any more.
    pub(crate) fn clear(&mut self) {
        let all: Vec<_> = self.numbers.keys().copied().collect();
        all.into_iter().for_each(|folder| self.unwatch(folder));
    }

    /// Tells of what has happened since the last time; false if the host has lost some of it.
    pub(crate) fn read(&mut self, mut tell: impl FnMut(HostChange<'_>)) -> bool {
        let mut room = [MaybeUninit::uninit(); ROOM];
        let mut reader = Reader::new(&self.inotify, &mut room);
        let mut is_whole = true;
        // The end is EAGAIN.
        while let Ok(event) = reader.next() {
            let (number, what) = (event.wd(), event.events());
            is_whole &= !what.contains(ReadFlags::QUEUE_OVERFLOW);
            let Some(&folder) = self.folders.get(&number) else { continue };
            if what.contains(ReadFlags::IGNORED) {
                self.folders.remove(&number);
                self.numbers.remove(&folder);
                continue;
            }
            let name: CString = event.file_name().unwrap_or_default().into();
            tell(HostChange { folder, name: &name, what });
        }
        is_whole
    }
}
