//! What the guest may rely on until we say otherwise.
//!
//! A listener in the guest hears from us what the host changes (`withdrawal`). The host tells us of changes in folders that we watch
//! (`watches`). What the guest is told of files in such folders, it may rely on for long. The host tells us of the guest's own changes, too.
//! The guest knows of those, so we forget them right after each request (`take_own`).

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    ffi::{CStr, CString},
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use rustix::{fs::inotify::ReadFlags, io::write};

use crate::watches::Watches;

/// How long the guest may rely on a name and on attributes until we say otherwise. It has an end, because the host does not tell of everything: a
/// file that gets a second name in a folder that is not watched may be changed by that.
pub(crate) const LEASE: Duration = Duration::from_secs(600);

/// How many changes are noted one by one. With more, everything counts as changed.
const MOST: usize = 65_536;

/// An entry comes or goes.
pub(crate) const ENTRY: ReadFlags = ReadFlags::CREATE
    .union(ReadFlags::DELETE)
    .union(ReadFlags::MOVED_FROM)
    .union(ReadFlags::MOVED_TO);
/// Content or attributes change.
pub(crate) const CONTENT: ReadFlags = ReadFlags::MODIFY.union(ReadFlags::ATTRIB);
/// A file that was open for writing is closed.
pub(crate) const CLOSED: ReadFlags = ReadFlags::CLOSE_WRITE;

/// A name in a folder, by its node; an empty one is the folder's own.
pub(crate) type OwnedPlace = (u64, CString);

/// Changes that the guest has not been told of.
#[derive(Default)]
pub(crate) struct Leases {
    /// The folders that we watch; `None` while nobody listens.
    watches: Option<Watches>,
    /// What has changed, by place. True if an entry has come or gone there, false if only content or attributes have changed.
    changed: HashMap<OwnedPlace, bool>,
    /// Changes that are being told, with the depth of their folder, the deepest first.
    due: Vec<(usize, OwnedPlace, bool)>,
    /// Changes have been lost, so everything counts as changed.
    all: bool,
    /// Rung when there are changes, for the thread that tells of them.
    bell: Option<Arc<OwnedFd>>,
}

impl Leases {
    /// Gives leases from now on, since somebody listens. `bell` is an event. A request that has read changes from the watches rings it.
    pub(crate) fn start(&mut self, watches: Watches, bell: Arc<OwnedFd>) {
        (self.watches, self.bell) = (Some(watches), Some(bell));
    }

    /// Nobody listens any more.
    pub(crate) fn stop(&mut self) {
        *self = Self::default();
    }

    /// Has the host tell of changes in a folder. `path` leads to the folder.
    pub(crate) fn watch(
        &mut self,
        folder: u64,
        fd: impl AsFd,
        path: impl FnOnce() -> Option<String>,
    ) {
        if let Some(watches) = &mut self.watches {
            watches.watch(folder, fd, path);
        }
    }

    /// Whether the host tells of changes in a folder, and somebody listens.
    pub(crate) fn covers(&self, folder: u64) -> bool {
        self.watches.as_ref().is_some_and(|watches| watches.has(folder))
    }

    /// The guest has forgotten these folders.
    pub(crate) fn forget(&mut self, folders: impl IntoIterator<Item = u64>) {
        if let Some(watches) = &mut self.watches {
            folders.into_iter().for_each(|folder| watches.unwatch(folder));
        }
    }

    /// The guest starts over.
    pub(crate) fn clear(&mut self) {
        (self.changed, self.due, self.all) = Default::default();
        self.watches.iter_mut().for_each(Watches::clear);
    }

    /// Reads what the host tells of changes, and forgets those of the kinds in `how` at places that `is_own` accepts: the guest has just made them.
    /// If the host has made such a change there at the same time, nothing is lost. The attributes that the guest gets are looked at later than
    /// this, or the guest asks for them.
    pub(crate) fn take_own(&mut self, how: ReadFlags, is_own: impl Fn(u64, &CStr) -> bool) {
        let Some(watches) = &mut self.watches else { return };
        let changed = &mut self.changed;
        let is_whole = watches.read(|change| {
            if !(how.intersects(change.what) && is_own(change.folder, change.name)) {
                note(changed, (change.folder, change.name.into()), change.what);
            }
        });
        if !is_whole || changed.len() > MOST {
            changed.clear();
            self.all = true;
        }
        self.ring();
    }

    /// Wakes the thread that tells of changes, if there are any.
    fn ring(&self) {
        if let Some(bell) = self.bell.as_ref().filter(|_| self.all || !self.changed.is_empty()) {
            // An event that is full has been rung.
            let _ = write(bell, &1_u64.to_ne_bytes());
        }
    }

    /// Notes what the host has changed.
    pub(crate) fn look(&mut self) {
        self.take_own(ReadFlags::empty(), |_, _| false);
    }

    /// Notes that the guest is to look a name up again: the name may stand for another file now, or for none.
    pub(crate) fn note_entry(&mut self, place: OwnedPlace) {
        if self.watches.is_some() {
            self.changed.insert(place, true);
            self.ring();
        }
    }

    /// Whether changes have been lost since the last call.
    pub(crate) fn take_all(&mut self) -> bool {
        std::mem::take(&mut self.all)
    }

    /// Takes out at most `most` changes; says whether there are more. Each is a place, and whether an entry has come or gone there. Changes in
    /// upper folders come first, and those of one call are in folders of one depth. So the guest sees that a folder was renamed before it is
    /// told what has changed in that folder.
    pub(crate) fn take(
        &mut self,
        most: usize,
        depth: impl Fn(u64) -> usize,
    ) -> (Vec<(OwnedPlace, bool)>, bool) {
        if self.due.is_empty() {
            let changed = self.changed.drain();
            self.due = changed.map(|(place, entry)| (depth(place.0), place, entry)).collect();
            self.due.sort_unstable_by_key(|change| Reverse(change.0));
        }
        let mut taken = Vec::new();
        let own = self.due.last().map(|change| change.0);
        while taken.len() < most
            && let Some((_, place, entry)) = self.due.pop_if(|change| Some(change.0) == own)
        {
            taken.push((place, entry));
        }
        (taken, !(self.due.is_empty() && self.changed.is_empty()))
    }
}

fn note(changed: &mut HashMap<OwnedPlace, bool>, place: OwnedPlace, what: ReadFlags) {
    *changed.entry(place).or_default() |= what.intersects(ENTRY);
}

/// Paths without the same one twice, in order.
pub(crate) fn distinct(paths: impl IntoIterator<Item = Vec<u8>>) -> Vec<Vec<u8>> {
    let mut seen = HashSet::new();
    paths.into_iter().filter(|path| seen.insert(path.clone())).collect()
}
