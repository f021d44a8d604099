//! Files and folders that the guest has open.
//!
//! Of a lasting folder the guest opens files without a word: then a few that it reads are kept open here.

use std::{
    collections::{HashMap, VecDeque},
    fs::File,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{OFlags, fcntl_setfl},
    io::{Errno, fcntl_dupfd_cloexec},
};

use crate::listing::Listing;

/// Files kept open that the guest has not opened by a request.
const UNASKED: usize = 32;

/// An open file or folder.
pub(crate) struct Opened {
    pub(crate) node: u64,
    pub(crate) file: File,
    pub(crate) listing: Listing,
    /// It may be written.
    pub(crate) is_writable: bool,
    /// It is written at its end, wherever that is then.
    append: bool,
}

impl Opened {
    pub(crate) fn new(node: u64, file: File, flags: OFlags) -> Self {
        let (listing, append) = (Listing::default(), flags.contains(OFlags::APPEND));
        let is_writable = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        Self { node, file, listing, is_writable, append }
    }

    /// Follows a change that the guest's program has made by fcntl(2).
    pub(crate) fn set_append(&mut self, flags: OFlags) -> Result<(), Errno> {
        let append = flags.contains(OFlags::APPEND);
        if append != self.append {
            fcntl_setfl(&self.file, if append { OFlags::APPEND } else { OFlags::empty() })?;
            self.append = append;
        }
        Ok(())
    }
}

#[derive(Default)]
pub(crate) struct OpenFiles {
    asked: HashMap<u64, Opened>,
    next: u64,
    /// Those used last at the end.
    unasked: VecDeque<Opened>,
}

impl OpenFiles {
    /// A number for an open file.
    pub(crate) fn add(&mut self, opened: Opened) -> u64 {
        self.next += 1;
        self.asked.insert(self.next, opened);
        self.next
    }

    /// The open file of a number; it must be of that node.
    pub(crate) fn get(&mut self, handle: u64, node: u64) -> Result<&mut Opened, Errno> {
        let opened = self.asked.get_mut(&handle).filter(|opened| opened.node == node);
        opened.ok_or(Errno::BADF)
    }

    /// Closes an open file; whether it could be written.
    pub(crate) fn remove(&mut self, handle: u64, node: u64) -> Result<bool, Errno> {
        let is_writable = self.get(handle, node)?.is_writable;
        self.asked.remove(&handle);
        Ok(is_writable)
    }

    /// The nodes of what the guest has open.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = u64> {
        self.asked.values().map(|opened| opened.node)
    }

    /// Another descriptor of a file that is open.
    pub(crate) fn another(&self, node: u64) -> Option<OwnedFd> {
        let opened = self.asked.values().find(|opened| opened.node == node)?;
        fcntl_dupfd_cloexec(opened.file.as_fd(), 0).ok()
    }

    /// A file that was opened for reading without being asked.
    pub(crate) fn reused(&mut self, node: u64) -> Option<&mut Opened> {
        let place = self.unasked.iter().rposition(|opened| opened.node == node)?;
        let opened = self.unasked.remove(place)?;
        self.unasked.push_back(opened);
        self.unasked.back_mut()
    }

    pub(crate) fn keep(&mut self, opened: Opened) -> Option<&mut Opened> {
        if self.unasked.len() >= UNASKED {
            self.unasked.pop_front();
        }
        self.unasked.push_back(opened);
        self.unasked.back_mut()
    }

    pub(crate) fn clear(&mut self) {
        self.asked.clear();
        self.unasked.clear();
    }
}
