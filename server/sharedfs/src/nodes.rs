//! The files that the guest knows, each under a number of ours that is never used twice.
//!
//! A file is kept as its folder, its name there and its [`FileIdentity`]. A descriptor of it (`O_PATH`) is opened when it is needed and
//! kept for as long as there is room: the guest may know more files than a process may have descriptors. A file without one is found again by its
//! name, one step at a time from the nearest folder that has one, never following a link. What is found there counts only if it is
//! the same file. If it is not, the folder is searched for the file, which the host may have renamed. A file that is not found is stale
//! (ESTALE): the guest's kernel then asks for the path anew.
//!
//! What the guest renames is renamed here. What it removes keeps its descriptor for as long as the guest knows it, since nothing else leads there.
//! A folder is kept while a file in it is known, even if the guest has forgotten the folder.

mod relied_on;

use std::{
    collections::{HashMap, VecDeque},
    ffi::{CStr, CString},
    os::fd::OwnedFd,
    sync::Arc,
};

use rustix::{
    fs::{Mode, OFlags, Statx, openat},
    io::Errno,
};

use crate::{
    habit::Habit,
    identity::{FileIdentity, Key, look, look_at},
    leases::OwnedPlace,
    listing::Listing,
};

/// The number of the shared folder itself, by the protocol.
pub(crate) const ROOT: u64 = 1;
/// Descriptors kept at the most, and their share of what the process may have.
const MOST: u64 = 4096;
const SHARE: u64 = 2;
const PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

struct Node {
    identity: FileIdentity,
    parent: u64,
    name: Box<CStr>,
    /// How often the guest was told of it and has not forgotten it.
    lookups: u64,
    /// Nodes whose parent it is.
    children: u32,
    /// It has lost its last name.
    detached: bool,
    /// The version of the content that the guest may have in its cache; 0 for none.
    seen: u64,
    /// Of a folder: how the guest goes about it.
    habit: Habit,
    /// Of a folder: how often the guest has asked for a file in it.
    questions: u32,
    /// The lease on this file, if the guest has one: the version of the attributes that the guest was told.
    lease: Option<u64>,
    held: Option<Held>,
}

struct Held {
    fd: Arc<OwnedFd>,
    recent: bool,
}

/// Descriptors by how dear it is to be without them.
#[derive(Clone, Copy)]
enum Kind {
    File,
    /// Files are found by way of it.
    Folder,
    /// There is no way to find it again.
    Detached,
}

impl Node {
    fn new(parent: u64, name: &CStr, identity: FileIdentity) -> Self {
        let name = name.into();
        let (lookups, children, detached, seen, held) = (0, 0, false, 0, None);
        let (habit, questions, lease) = Default::default();
        Self {
            identity,
            parent,
            name,
            lookups,
            children,
            detached,
            seen,
            habit,
            questions,
            lease,
            held,
        }
    }

    fn kind(&self) -> Kind {
        match self.identity.is_folder() {
            _ if self.detached => Kind::Detached,
            true => Kind::Folder,
            false => Kind::File,
        }
    }
}

pub(crate) struct Nodes {
    nodes: HashMap<u64, Node>,
    by_key: HashMap<Key, u64>,
    next: u64,
    /// Nodes with a descriptor, by [`Kind`], those that were opened or found in use last at the end.
    rings: [VecDeque<u64>; 3],
    held: usize,
    limit: usize,
    /// Folders that the guest has forgotten, until somebody takes this list.
    forgotten: Vec<u64>,
    /// A folder has been found under a name that the guest does not know.
    strayed: bool,
}

impl Nodes {
    /// The table of a folder, in a process that may have so many descriptors.
    pub(crate) fn new(root: OwnedFd, status: &Statx, descriptors: u64) -> Self {
        let identity = FileIdentity::of(status);
        let mut node = Node::new(ROOT, c".", identity);
        node.held = Some(Held { fd: Arc::new(root), recent: true });
        Self {
            nodes: HashMap::from([(ROOT, node)]),
            by_key: HashMap::from([(identity.key, ROOT)]),
            next: ROOT + 1,
            rings: Default::default(),
            held: 0,
            limit: (descriptors / SHARE).clamp(8, MOST) as usize,
            forgotten: Vec::new(),
            strayed: false,
        }
    }

    /// The guest starts over: it knows nothing but the folder.
    pub(crate) fn clear(&mut self) {
        self.nodes.retain(|id, _| *id == ROOT);
        self.by_key.retain(|_, id| *id == ROOT);
        self.nodes.values_mut().for_each(|root| root.children = 0);
        (self.rings, self.forgotten) = Default::default();
        self.held = 0;
    }

    /// The node of a file that a name was just found to stand for, and of which the guest is told. If the guest has a lease on the file by another
    /// name, the lease ends, and that name is returned, too.
    pub(crate) fn known(
        &mut self,
        parent: u64,
        name: &CStr,
        identity: FileIdentity,
    ) -> (u64, Option<OwnedPlace>) {
        let (id, other) = match self.same(identity) {
            Some(id) if self.is_at(id, parent, name) => (id, None),
            Some(id) => {
                let other = self.take_lease(id);
                self.put(id, parent, name);
                (id, other)
            }
            None => (self.add(parent, name, identity), None),
        };
        if let Some(node) = self.nodes.get_mut(&id) {
            node.lookups = node.lookups.saturating_add(1);
        }
        (id, other)
    }

    /// Whether this is a file's name, or the folder itself and no name.
    pub(crate) fn is_at(&self, id: u64, parent: u64, name: &CStr) -> bool {
        let is_itself = id == parent && name.is_empty();
        is_itself
            || self.nodes.get(&id).is_some_and(|node| node.parent == parent && *node.name == *name)
    }

    /// The node of a file, if it has one.
    pub(crate) fn same(&mut self, identity: FileIdentity) -> Option<u64> {
        let id = *self.by_key.get(&identity.key)?;
        if self.nodes.get(&id).is_some_and(|node| node.identity == identity) {
            return Some(id);
        }
        // The file that was there is gone; its node is stale.
        self.by_key.remove(&identity.key);
        None
    }

    fn add(&mut self, parent: u64, name: &CStr, identity: FileIdentity) -> u64 {
        let id = self.next;
        self.next += 1;
        self.nodes.insert(id, Node::new(parent, name, identity));
        self.by_key.insert(identity.key, id);
        if let Some(parent) = self.nodes.get_mut(&parent) {
            parent.children += 1;
        }
        id
    }

    /// A file has got this name, in place of the one it is known by.
    pub(crate) fn put(&mut self, id: u64, parent: u64, name: &CStr) {
        let Some(node) = self.nodes.get_mut(&id).filter(|_| id != ROOT) else { return };
        let before = std::mem::replace(&mut node.parent, parent);
        if *node.name != *name {
            node.name = name.into();
        }
        if before != parent {
            if let Some(parent) = self.nodes.get_mut(&parent) {
                parent.children += 1;
            }
            self.child_gone(before);
        }
    }

    /// A file has lost its last name. Another may get its inode number from now on.
    pub(crate) fn detach(&mut self, id: u64) {
        let Some(node) = self.nodes.get_mut(&id).filter(|_| id != ROOT) else { return };
        if self.by_key.get(&node.identity.key) == Some(&id) {
            self.by_key.remove(&node.identity.key);
        }
        node.detached = true;
        if node.held.is_some() {
            self.rings[Kind::Detached as usize].push_back(id);
        }
    }

    /// The guest has forgotten a file so many times.
    pub(crate) fn forget(&mut self, id: u64, count: u64) {
        let Some(node) = self.nodes.get_mut(&id).filter(|_| id != ROOT) else { return };
        node.lookups = node.lookups.saturating_sub(count);
        self.drop_unused(id);
    }

    fn child_gone(&mut self, parent: u64) {
        if let Some(node) = self.nodes.get_mut(&parent) {
            node.children = node.children.saturating_sub(1);
            self.drop_unused(parent);
        }
    }

    fn drop_unused(&mut self, mut id: u64) {
        while id != ROOT
            && self.nodes.get(&id).is_some_and(|node| node.lookups == 0 && node.children == 0)
            && let Some(node) = self.nodes.remove(&id)
        {
            if self.by_key.get(&node.identity.key) == Some(&id) {
                self.by_key.remove(&node.identity.key);
            }
            self.held -= usize::from(node.held.is_some());
            if node.identity.is_folder() {
                self.forgotten.push(id);
            }
            id = node.parent;
            if let Some(parent) = self.nodes.get_mut(&id) {
                parent.children = parent.children.saturating_sub(1);
            }
        }
    }

    fn get(&self, id: u64) -> Result<&Node, Errno> {
        self.nodes.get(&id).ok_or(Errno::STALE)
    }

    /// Which file it is.
    pub(crate) fn identity(&self, id: u64) -> Result<FileIdentity, Errno> {
        Ok(self.get(id)?.identity)
    }

    /// The folder a folder was found in; of the shared folder itself, that one.
    pub(crate) fn parent(&self, id: u64) -> u64 {
        self.nodes.get(&id).map_or(ROOT, |node| node.parent)
    }

    /// Notes the version of a file's content that the guest is about to read; whether it is what it has seen.
    pub(crate) fn is_seen(&mut self, id: u64, version: u64) -> bool {
        let Some(node) = self.nodes.get_mut(&id) else { return false };
        std::mem::replace(&mut node.seen, version) == version && version != 0
    }

    /// How the guest goes about a folder.
    pub(crate) fn habit(&mut self, id: u64) -> Option<&mut Habit> {
        Some(&mut self.nodes.get_mut(&id)?.habit)
    }

    /// The attributes of a file.
    pub(crate) fn status(&mut self, id: u64) -> Result<Statx, Errno> {
        if let Some(fd) = self.open_already(id) {
            return look_at(fd);
        }
        let (parent, identity) = (self.get(id)?.parent, self.get(id)?.identity);
        if !self.get(id)?.detached
            && let Ok(folder) = self.fd(parent)
            && let Ok(status) = look(folder, &self.get(id)?.name)
            && FileIdentity::of(&status) == identity
        {
            return Ok(status);
        }
        look_at(self.fd(id)?)
    }

    /// A descriptor of a file, for finding it (`O_PATH`).
    ///
    /// # Errors
    /// The file is not where it was.
    pub(crate) fn fd(&mut self, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        let (mut missing, mut at) = (Vec::new(), id);
        let mut fd = loop {
            if let Some(fd) = self.open_already(at) {
                break fd;
            }
            let node = self.get(at)?;
            // More steps than files: the host has moved folders into one another in turns.
            if node.detached || missing.len() > self.nodes.len() {
                return Err(Errno::STALE);
            }
            missing.push(at);
            at = node.parent;
        };
        while let Some(id) = missing.pop() {
            fd = self.find(id, &fd)?;
        }
        Ok(fd)
    }

    fn open_already(&mut self, id: u64) -> Option<Arc<OwnedFd>> {
        let held = self.nodes.get_mut(&id)?.held.as_mut()?;
        held.recent = true;
        Some(Arc::clone(&held.fd))
    }

    /// Opens a file that is not open in the folder it should be in.
    fn find(&mut self, id: u64, folder: &OwnedFd) -> Result<Arc<OwnedFd>, Errno> {
        let (name, identity) = (self.get(id)?.name.clone(), self.get(id)?.identity);
        if let Ok(fd) = self.with_room(|| exactly(folder, &name, identity)) {
            return Ok(self.hold(id, fd));
        }
        let (name, fd) = self.with_room(|| search(folder, identity))?;
        let parent = self.get(id)?.parent;
        self.put(id, parent, &name);
        self.strayed |= identity.is_folder();
        Ok(self.hold(id, fd))
    }

    /// Opens a file by a name it is about to lose.
    pub(crate) fn pin(&mut self, id: u64, folder: &OwnedFd, name: &CStr) {
        if self.open_already(id).is_some() {
            return;
        }
        if let Ok(identity) = self.identity(id)
            && let Ok(fd) = self.with_room(|| exactly(folder, name, identity))
        {
            self.hold(id, fd);
        }
    }

    /// Keeps a descriptor of a file.
    pub(crate) fn hold(&mut self, id: u64, fd: OwnedFd) -> Arc<OwnedFd> {
        let fd = Arc::new(fd);
        let Some(node) = self.nodes.get_mut(&id) else { return fd };
        let before = node.held.replace(Held { fd: Arc::clone(&fd), recent: false });
        let kind = node.kind() as usize;
        if before.is_none() {
            self.held += 1;
            self.rings[kind].push_back(id);
            self.close_some(self.limit);
            self.tidy(kind);
        }
        fd
    }

    /// Does something that takes a descriptor, after closing some if there is none left.
    pub(crate) fn with_room<T>(&mut self, what: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
        match what() {
            Err(Errno::MFILE | Errno::NFILE) => {
                self.close_some(self.held / 2);
                what()
            }
            other => other,
        }
    }

    /// Closes what was not used for long, until no more than this are left.
    fn close_some(&mut self, most: usize) {
        let shares = [most / 4, most / 2, most / 4];
        while self.held > most {
            let above = |kind: &usize| self.rings[*kind].len() > shares[*kind];
            let Some(kind) = (0..3).find(above) else { return };
            self.close_one(kind);
        }
    }

    /// Looks at the first of a ring: closes it, or gives it another turn if it was used meanwhile.
    fn close_one(&mut self, kind: usize) {
        let Some(id) = self.rings[kind].pop_front() else { return };
        let Some(node) = self.nodes.get_mut(&id).filter(|node| node.kind() as usize == kind) else {
            return;
        };
        match &mut node.held {
            Some(held) if held.recent => {
                held.recent = false;
                self.rings[kind].push_back(id);
            }
            Some(_) => {
                node.held = None;
                self.held -= 1;
            }
            None => {}
        }
    }

    /// Takes nodes out of a ring that are there no more, before they are most of it.
    fn tidy(&mut self, kind: usize) {
        if self.rings[kind].len() > 2 * self.held + 64 {
            let nodes = &self.nodes;
            self.rings[kind].retain(|id| {
                let node = nodes.get(id);
                node.is_some_and(|node| node.held.is_some() && node.kind() as usize == kind)
            });
        }
    }

    /// Nodes there are, and descriptors they hold.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> (usize, usize) {
        let held = self.nodes.values().filter(|node| node.held.is_some()).count();
        assert_eq!(held, self.held + 1, "the folder's own is not counted");
        (self.nodes.len(), held)
    }
}

/// A descriptor of a file in a folder, if the name stands for that file.
fn exactly(folder: &OwnedFd, name: &CStr, identity: FileIdentity) -> Result<OwnedFd, Errno> {
    let fd = openat(folder, name, PLACE, Mode::empty())?;
    if FileIdentity::of(&look_at(&fd)?) == identity { Ok(fd) } else { Err(Errno::STALE) }
}

/// Looks for a file under another name in a folder.
fn search(folder: &OwnedFd, identity: FileIdentity) -> Result<(CString, OwnedFd), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = openat(folder, c".", flags, Mode::empty())?;
    let mut listing = Listing::default();
    while let Some(listed) = listing.next(&open)? {
        if listed.number == identity.key.number
            && let Ok(fd) = exactly(folder, &listed.name, identity)
        {
            return Ok((listed.name, fd));
        }
    }
    Err(Errno::STALE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::Path};

    fn table(path: &Path, descriptors: u64) -> Nodes {
        let root = fs::File::open(path).expect("a folder");
        let status = look_at(&root).expect("its status");
        Nodes::new(root.into(), &status, descriptors)
    }

    fn know(nodes: &mut Nodes, parent: u64, name: &str) -> u64 {
        let name = CString::new(name).expect("a name");
        let folder = nodes.fd(parent).expect("a folder");
        let status = look(&folder, &name).expect("there");
        nodes.known(parent, &name, FileIdentity::of(&status)).0
    }

    #[test]
    fn a_bounded_number_of_descriptors_is_held() {
        let directory = tempfile::tempdir().expect("a folder");
        let mut nodes = table(directory.path(), 64);
        let mut files = Vec::new();
        for i in 0..40 {
            fs::create_dir(directory.path().join(format!("d{i}"))).expect("made");
            let folder = know(&mut nodes, ROOT, &format!("d{i}"));
            for j in 0..10 {
                fs::write(directory.path().join(format!("d{i}/{j}")), "x").expect("written");
                files.push((know(&mut nodes, folder, &j.to_string()), i, j));
            }
        }
        for (id, i, j) in files.iter().rev().chain(&files) {
            let fd = nodes.fd(*id).expect("found again");
            let there = fs::metadata(directory.path().join(format!("d{i}/{j}"))).expect("there");
            let found = look_at(fd).expect("a status");
            assert_eq!(found.stx_ino, std::os::unix::fs::MetadataExt::ino(&there));
            assert!(nodes.counts().1 <= 33, "{:?}", nodes.counts());
        }
        files.iter().for_each(|(id, ..)| nodes.forget(*id, 1));
        assert_eq!(nodes.counts().0, 41, "the folders");
    }

    #[test]
    fn what_the_host_renames_or_replaces_is_told_apart() {
        let directory = tempfile::tempdir().expect("a folder");
        let at = |name: &str| directory.path().join(name);
        fs::write(at("a"), "a").expect("written");
        fs::create_dir(at("d")).expect("made");
        fs::write(at("d/b"), "b").expect("written");
        let mut nodes = table(directory.path(), 64);
        let (a, d) = (know(&mut nodes, ROOT, "a"), know(&mut nodes, ROOT, "d"));
        let b = know(&mut nodes, d, "b");
        fs::rename(at("a"), at("other")).expect("renamed");
        fs::write(at("a"), "an impostor").expect("written");
        assert_eq!(nodes.status(a).expect("found").stx_size, 1, "under its new name");
        fs::rename(at("d"), at("e")).expect("renamed");
        std::os::unix::fs::symlink("/etc", at("d")).expect("linked");
        nodes.close_some(0);
        assert_eq!(nodes.status(b).expect("found").stx_size, 1, "in a folder of another name");
        fs::remove_file(at("e/b")).expect("removed");
        nodes.close_some(0);
        assert_eq!(nodes.status(b).err(), Some(Errno::STALE));
        assert_ne!(know(&mut nodes, ROOT, "a"), a, "another file");
        assert_eq!(know(&mut nodes, ROOT, "other"), a);
    }

    #[test]
    fn a_removed_file_is_reached_and_its_number_is_free() {
        let directory = tempfile::tempdir().expect("a folder");
        fs::write(directory.path().join("a"), "abc").expect("written");
        let mut nodes = table(directory.path(), 64);
        let a = know(&mut nodes, ROOT, "a");
        let root = nodes.fd(ROOT).expect("the folder");
        nodes.pin(a, &root, c"a");
        fs::remove_file(directory.path().join("a")).expect("removed");
        nodes.detach(a);
        assert_eq!(nodes.status(a).expect("still there").stx_size, 3);
        let identity = nodes.identity(a).expect("known");
        assert_eq!(nodes.same(identity), None, "a new file may have its number");
        nodes.forget(a, 1);
        assert_eq!(nodes.counts(), (1, 1));
    }

    #[test]
    fn folders_moved_into_one_another_in_turns_end() {
        let directory = tempfile::tempdir().expect("a folder");
        let at = |name: &str| directory.path().join(name);
        fs::create_dir_all(at("a/b")).expect("made");
        let mut nodes = table(directory.path(), 64);
        let a = know(&mut nodes, ROOT, "a");
        let b = know(&mut nodes, a, "b");
        let held = nodes.fd(b).expect("found");
        fs::rename(at("a/b"), at("b")).expect("moved");
        fs::rename(at("a"), at("b/a")).expect("moved");
        assert_eq!(know(&mut nodes, b, "a"), a);
        drop(held);
        nodes.close_some(0);
        assert_eq!(nodes.fd(a).err(), Some(Errno::STALE));
        assert_eq!(know(&mut nodes, ROOT, "b"), b);
        assert!(nodes.fd(a).is_ok(), "found by its new way");
    }
}
