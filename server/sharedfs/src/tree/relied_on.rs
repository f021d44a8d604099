//! What the guest may rely on, and what it is told once that is not so any more.

use std::{ffi::CStr, os::fd::OwnedFd, sync::Arc, time::Duration};

use rustix::{
    fs::{Statx, inotify::ReadFlags},
    io::Errno,
};

use super::{EntryPlace, Tree, version};
use crate::{
    identity::{FileIdentity, look, look_at},
    leases::{LEASE, distinct},
    nodes::ROOT,
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

    /// Whether the host tells of changes where a file is. One that the guest has open may have been moved elsewhere.
    pub(super) fn is_in_place(&mut self, node: u64) -> bool {
        let Some((folder, name)) = self.nodes.place(node).filter(|_| node != ROOT) else {
            return node == ROOT;
        };
        if !self.leases.covers(folder) {
            return false;
        }
        let found = self.fd(folder).and_then(|fd| look(&fd, &name));
        let found = found.map(|status| FileIdentity::of(&status));
        found.is_ok() && found == self.nodes.identity(node)
    }

    /// How long the guest may rely on a file's attributes. A folder's change with what is in it, too.
    pub(crate) fn attributes_held(&mut self, node: u64, status: &Statx) -> Duration {
        let is_folder = FileIdentity::of(status).is_folder();
        let is_sure = if is_folder { self.leases.covers(node) } else { status.stx_nlink == 1 };
        if is_sure && (node == ROOT || self.leases.covers(self.nodes.parent(node))) {
            return self.lease(node, status);
        }
        self.trust.held
    }

    /// The guest may rely on what it is told of a file; says for how long.
    pub(super) fn lease(&mut self, node: u64, status: &Statx) -> Duration {
        self.nodes.lease(node, version(status));
        LEASE
    }

    /// A descriptor of a folder in which the host is to tell of changes from now on, if somebody listens.
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

    /// The guest has changed entries in this way itself.
    pub(super) fn take_own(&mut self, how: ReadFlags, places: &[EntryPlace<'_>]) {
        if !places.iter().any(|place| self.leases.covers(place.folder)) {
            return;
        }
        let is_own = |folder, name: &CStr| {
            places.iter().any(|place| place.folder == folder && place.name == name)
        };
        self.leases.take_own(how, is_own);
    }

    /// The guest has changed a file in this way itself.
    pub(crate) fn take_own_of(&mut self, node: u64, how: ReadFlags) {
        let nodes = &self.nodes;
        if !(self.leases.covers(nodes.parent(node)) || self.leases.covers(node)) {
            return;
        }
        self.leases.take_own(how, |folder, name| nodes.is_at(node, folder, name));
    }

    /// The guest has forgotten a file so many times.
    pub(crate) fn forget(&mut self, node: u64, count: u64) {
        self.nodes.forget(node, count);
        self.leases.forget(self.nodes.take_forgotten());
    }

    /// What the host has changed and the guest may rely on, `most` changes at once, and whether there are more: paths, and as `/` with a
    /// number the nodes of files that the guest has open.
    pub(crate) fn take_changes(&mut self, most: usize) -> (Vec<Vec<u8>>, bool) {
        self.leases.look();
        if self.leases.take_all() | self.nodes.take_strayed() {
            self.nodes.leased_places().into_iter().for_each(|place| self.leases.note_entry(place));
        }
        let nodes = &self.nodes;
        let (changes, has_more) = self.leases.take(most, |folder| nodes.depth(folder));
        let mut paths = Vec::new();
        for ((folder, name), is_entry) in changes {
            if is_entry || self.is_relied_on(folder, &name) {
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

    /// Whether the guest relies on something of a file that is not so any more.
    fn is_relied_on(&mut self, folder: u64, name: &CStr) -> bool {
        let status = self.fd(folder).and_then(|fd| match name.is_empty() {
            true => look_at(&fd),
            false => look(&fd, name),
        });
        let Ok(status) = status else { return true };
        let node = match name.is_empty() {
            true => Some(folder),
            false => self.nodes.same(FileIdentity::of(&status)),
        };
        let told = node.and_then(|node| self.nodes.leased(node, folder, name));
        told.is_some_and(|told| told == 0 || told != version(&status))
    }
}
