//! Reading a folder from any place on, as the guest asks.

use std::{collections::VecDeque, ffi::CString, os::fd::AsFd};

use rustix::{
    fs::{FileType, RawDir, SeekFrom, seek},
    io::Errno,
};

/// Bytes of entries taken from the host at once.
const AT_ONCE: usize = 32 << 10;

/// An entry.
pub(crate) struct Listed {
    /// The host's inode number, of what is under a mount if it is a place of one.
    pub(crate) number: u64,
    /// Where the entries behind it begin.
    pub(crate) next: u64,
    pub(crate) kind: FileType,
    pub(crate) name: CString,
}

/// What was taken from the host and is not passed on yet. Each belongs to one open folder.
#[derive(Default)]
pub(crate) struct Listing {
    /// Where the first entry in store begins.
    at: u64,
    store: VecDeque<Listed>,
}

impl Listing {
    /// Goes to where an earlier entry said that the next begins.
    pub(crate) fn go_to(&mut self, folder: impl AsFd, at: u64) -> Result<(), Errno> {
        // The beginning is read anew: the folder may have changed.
        if at != self.at || at == 0 {
            seek(folder, SeekFrom::Start(at))?;
            self.store.clear();
            self.at = at;
        }
        Ok(())
    }

    /// The next entry; `None` at the end.
    pub(crate) fn next(&mut self, folder: impl AsFd) -> Result<Option<Listed>, Errno> {
        if self.store.is_empty() {
            self.fill(folder)?;
        }
        let listed = self.store.pop_front();
        if let Some(listed) = &listed {
            self.at = listed.next;
        }
        Ok(listed)
    }

    /// Takes back the entry that was given last, which began at `at`.
    pub(crate) fn take_back(&mut self, listed: Listed, at: u64) {
        self.store.push_front(listed);
        self.at = at;
    }

    /// Where the next entry begins.
    pub(crate) fn place(&self) -> u64 {
        self.at
    }

    fn fill(&mut self, folder: impl AsFd) -> Result<(), Errno> {
        let mut room = Vec::with_capacity(AT_ONCE);
        let mut entries = RawDir::new(folder, room.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            self.store.push_back(Listed {
                number: entry.ino(),
                next: entry.next_entry_cookie(),
                kind: entry.file_type(),
                name: entry.file_name().into(),
            });
            if entries.is_buffer_empty() {
                break;
            }
        }
        Ok(())
    }
}
