//! Leases: which the guest gets, and which changes of the host's end them.

use std::{ffi::CStr, os::fd::OwnedFd, sync::Arc, time::Duration};

use rustix::{
    fs::{Statx, inotify::ReadFlags},
    io::Errno,
};

use super::{EntryPlace, Tree, version};
use crate::{
    identity::{FileIdentity, look, look_at},
    leases::{LEASE, distinct},
};

/// Where our descriptors have names.
const DESCRIPTORS: &str = "/proc/self/fd";

impl Tree {
    /// The guest asks for a file's attributes.
    pub(crate) fn note_question(&mut self, node: u64) {
        if self.nodes.identity(node).is_ok_and(|identity| !identity.is_folder()) {
            self.nodes.note_question(self.nodes.parent(node));
        }
    }

    /// Whether a file still has the name that we know it by, in a folder in which the host tells us of changes. The host may have moved a
    /// file that the guest has open.
    pub(super) fn is_in_place(&mut self, node: u64) -> bool {
        if !self.leases.covers(self.nodes.parent(node)) {
            return false;
        }
        let Some((folder, name)) = self.nodes.place(node) else { return false };
        let found = self.fd(folder).and_then(|fd| look(&fd, &name));
        let found = found.map(|status| FileIdentity::of(&status));
        found.is_ok() && found == self.nodes.identity(node)
    }

    /// How long the guest may rely on the name of a file, and on its attributes. Notes the lease, if that is one.
    pub(super) fn held(&mut self, node: u64, status: &Statx) -> (Duration, Duration) {
        let held = self.trust.held;
        let is_folder = FileIdentity::of(status).is_folder();
        // A file with several names can be changed by a name in a folder that nobody watches.
        let is_sure = is_folder || status.stx_nlink == 1;
        if !is_sure || !self.leases.covers(self.nodes.parent(node)) {
            return (held, held);
        }
        self.nodes.lease(node, version(status));
        // The times of a folder change with what is in it.
        let covers_attributes = !is_folder || self.leases.covers(node);
        (LEASE, if covers_attributes { LEASE } else { held })
    }

    /// A descriptor of a folder. If the guest asks for files there and somebody listens, the host is to tell of changes there from now on.
    pub(super) fn watched(&mut self, folder: u64) -> Result<Arc<OwnedFd>, Errno> {
        let fd = self.fd(folder)?;
        let nodes = &self.nodes;
        if !nodes.is_asked(folder) {
            return Ok(fd);
        }
        // The listener has to name it.
        let path = || {
            let name = Self::name_of(&fd);
            nodes.path(folder, c"").map(|_| format!("{DESCRIPTORS}/{}", name.as_str()))
        };
        self.leases.watch(folder, &fd, path);
        Ok(fd)
    }

    /// The guest has just changed these entries itself. Forgets what the host tells of that, by the kinds of change in `how`.
    pub(super) fn take_own(&mut self, how: ReadFlags, places: &[EntryPlace<'_>]) {
        if !places.iter().any(|place| self.leases.covers(place.folder)) {
            return;
        }
        let is_own = |folder, name: &CStr| {
            places.iter().any(|place| place.folder == folder && place.name == name)
        };
        self.leases.take_own(how, is_own);
    }

    /// The guest has just changed a file itself. Forgets what the host tells of that, by the kinds of change in `how`.
    pub(crate) fn take_own_of(&mut self, node: u64, how: ReadFlags) {
        let nodes = &self.nodes;
        if !(self.leases.covers(nodes.parent(node)) || self.leases.covers(node)) {
            return;
        }
        self.leases.take_own(how, |folder, name| nodes.is_at(node, folder, name));
    }

    /// The guest forgets `count` look-ups of a file. Folders that it no longer knows are watched no longer.
    pub(crate) fn forget(&mut self, node: u64, count: u64) {
        self.nodes.forget(node, count);
        self.leases.forget(self.nodes.take_forgotten());
    }

    /// What to tell the guest of next: at most `most` changes of the host's, and whether there are more. Each is a path, or `/` and the number
    /// of a node that the guest has open.
    pub(crate) fn take_changes(&mut self, most: usize) -> (Vec<Vec<u8>>, bool) {
        self.leases.look();
        if self.leases.take_all() | self.nodes.take_strayed() {
            self.nodes.leased_places().into_iter().for_each(|place| self.leases.note_entry(place));
        }
        let nodes = &self.nodes;
        let (changes, has_more) = self.leases.take(most, |folder| nodes.depth(folder));
        let mut paths = Vec::new();
        for ((folder, name), is_entry) in changes {
            if is_entry || self.is_outdated(folder, &name) {
                paths.extend(self.nodes.path(folder, &name));
            }
            if is_entry {
                // Its times change, and the guest's cache of its names is as old as they are.
                paths.extend(self.nodes.path(folder, c""));
                // No name may lead there any more.
                let open = self.files.nodes().filter(|node| self.nodes.is_at(*node, folder, &name));
                paths.extend(open.map(|node| format!("/{node}").into_bytes()));
            }
        }
        (distinct(paths), has_more)
    }

    /// Whether the guest has a lease on what a name stands for, and was told something else than is so now.
    fn is_outdated(&mut self, folder: u64, name: &CStr) -> bool {
        let status = self.fd(folder).and_then(|fd| match name.is_empty() {
            true => look_at(&fd),
            false => look(&fd, name),
        });
        let Ok(status) = status else { return true };
        let node = self.nodes.same(FileIdentity::of(&status));
        let told = node.and_then(|node| self.nodes.leased(node, folder, name));
        told.is_some_and(|told| told == 0 || told != version(&status))
    }
}
