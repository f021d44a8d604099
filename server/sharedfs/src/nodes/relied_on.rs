//! What the guest relies on of a file until it is told otherwise, and how it is told of the file: by the way there that it knows.

use std::{ffi::CStr, iter};

use super::{Nodes, ROOT};
use crate::leases::OwnedPlace;

/// So often the guest asks for files in a folder before the host is to tell of changes there: that makes each change of the guest's own
/// dearer.
const QUESTIONS: u32 = 2;
/// Bytes of a path at the most: longer ones the guest's programs cannot name at once.
const LONGEST: usize = 3800;

impl Nodes {
    /// The guest asks for a file in a folder.
    pub(crate) fn note_question(&mut self, folder: u64) {
        if let Some(folder) = self.nodes.get_mut(&folder) {
            folder.questions = folder.questions.saturating_add(1);
        }
    }

    /// Whether the guest asks for files in this folder, and does not only make and remove some.
    pub(crate) fn is_asked(&self, folder: u64) -> bool {
        self.nodes.get(&folder).is_some_and(|node| node.questions >= QUESTIONS)
    }

    /// Where a file is that the guest relies on, which it does no more.
    pub(super) fn take_lease(&mut self, id: u64) -> Option<OwnedPlace> {
        let place = self.leased_place(id);
        self.nodes.get_mut(&id).into_iter().for_each(|node| node.lease = None);
        place
    }

    /// The guest may rely on what it is told of a file until it is told otherwise. That has this version.
    pub(crate) fn lease(&mut self, id: u64, version: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.lease = Some(version);
        }
    }

    /// The version of what the guest relies on of a file, if that is known by this name.
    pub(crate) fn leased(&self, id: u64, parent: u64, name: &CStr) -> Option<u64> {
        let node = self.nodes.get(&id).filter(|_| self.is_at(id, parent, name))?;
        node.lease
    }

    /// Where a file is.
    pub(crate) fn place(&self, id: u64) -> Option<OwnedPlace> {
        let node = self.nodes.get(&id)?;
        Some((node.parent, node.name.clone().into_c_string()))
    }

    /// Where a file is, if the guest relies on something of it until it is told otherwise.
    fn leased_place(&self, id: u64) -> Option<OwnedPlace> {
        self.place(id).filter(|_| self.nodes.get(&id).is_some_and(|node| node.lease.is_some()))
    }

    /// All places that the guest relies on.
    pub(crate) fn leased_places(&self) -> Vec<OwnedPlace> {
        self.nodes.keys().filter_map(|id| self.leased_place(*id)).collect()
    }

    /// The way from the shared folder to a folder and a name in it. It has no end if the host has moved folders into one another in turns.
    pub(crate) fn path(&self, folder: u64, name: &CStr) -> Option<Vec<u8>> {
        let (mut names, mut at, mut len) = (vec![name.to_bytes()], folder, 0);
        while at != ROOT {
            let node = self.nodes.get(&at)?;
            names.push(node.name.to_bytes());
            len += node.name.count_bytes() + 1;
            at = node.parent;
            if len > LONGEST {
                return None;
            }
        }
        names.retain(|name| !name.is_empty());
        names.reverse();
        Some(if names.is_empty() { b".".to_vec() } else { names.join(&b'/') })
    }

    /// How many steps lead from the shared folder to this one.
    pub(crate) fn depth(&self, folder: u64) -> usize {
        let parent = |at: &u64| Some(self.nodes.get(at)?.parent).filter(|_| *at != ROOT);
        // A way without an end leads nowhere.
        iter::successors(Some(folder), parent).take(LONGEST).count()
    }

    /// Whether a folder has been found, since the last time, under a name that the guest does not know.
    pub(crate) fn take_strayed(&mut self) -> bool {
        std::mem::take(&mut self.strayed)
    }

    /// Folders that the guest has forgotten since the last time.
    pub(crate) fn take_forgotten(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.forgotten)
    }
}
