//! Leases on files, and the paths by which the guest is told of changes.

use std::{ffi::CStr, iter};

use super::{Node, Nodes, ROOT};
use crate::leases::OwnedPlace;

/// How often the guest asks for files in a folder before we watch that folder. A watch makes each change by the guest dearer, and pays only where
/// the guest reads.
const QUESTIONS: u32 = 2;
/// Bytes of a path at the most. The guest's agent cannot name a longer one in one call.
const LONGEST: usize = 3800;

impl Node {
    /// The folder that it is in, and its name there.
    fn place(&self) -> OwnedPlace {
        (self.parent, self.name.clone().into_c_string())
    }
}

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

    /// Ends the lease on a file. Returns where the file was, if there was a lease.
    pub(super) fn take_lease(&mut self, id: u64) -> Option<OwnedPlace> {
        let node = self.nodes.get_mut(&id)?;
        node.lease.take().map(|_| node.place())
    }

    /// The guest gets a lease on a file. `version`: of the attributes that it is told.
    pub(crate) fn lease(&mut self, id: u64, version: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.lease = Some(version);
        }
    }

    /// The version of a file's attributes that the guest may rely on by a lease. `None` if there is no lease, or if the file is known by
    /// another name.
    pub(crate) fn leased(&self, id: u64, parent: u64, name: &CStr) -> Option<u64> {
        let node = self.nodes.get(&id).filter(|_| self.is_at(id, parent, name))?;
        node.lease
    }

    /// The folder that a file is in, and its name there.
    pub(crate) fn place(&self, id: u64) -> Option<OwnedPlace> {
        self.nodes.get(&id).map(Node::place)
    }

    /// The places of all files that the guest has a lease on.
    pub(crate) fn leased_places(&self) -> Vec<OwnedPlace> {
        self.nodes.values().filter(|node| node.lease.is_some()).map(Node::place).collect()
    }

    /// The path of a name in a folder, from the shared folder on. `None` if the path is too long, as it is without end where the host has moved
    /// folders into one another in turns.
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
