//! The folder's tree, as requests see it: what is looked up, opened, read and changed, each by one function.
//!
//! Names are taken one at a time, relative to a descriptor of the folder they are in, and links are never followed, so no name leads out.
//! Only regular files and folders are ever opened for more than finding them.

mod relied_on;

use std::{
    ffi::CStr,
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use fuse_backend_rs::{
    abi::fuse_abi::{CreateIn, OpenOptions, stat64},
    api::filesystem::{Context, DirEntry, Entry},
};
use rustix::{
    fs::{
        AtFlags, Dev, FileType, Mode, OFlags, RenameFlags, Statx, inotify::ReadFlags, linkat,
        mkdirat, mknodat, openat, readlinkat, renameat_with, symlinkat, unlinkat,
    },
    io::Errno,
    path::DecInt,
    time::{ClockId, clock_gettime},
};

use crate::{
    Trust,
    identity::{FileIdentity, Numbers, attributes, entry_type, look, look_at},
    leases::{CONTENT, Leases},
    listing::Listed,
    nodes::{Nodes, ROOT},
    open_files::{OpenFiles, Opened},
    rights::{as_user, without_keeping_bits},
};

/// Flags of open(2) that mean nothing here, or were settled by the guest's kernel. O_DIRECT would have the host refuse what is not aligned.
const SETTLED: OFlags = OFlags::CREATE
    .union(OFlags::EXCL)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NOCTTY)
    .union(OFlags::DIRECT)
    .union(OFlags::TMPFILE.difference(OFlags::DIRECTORY));
/// A file that was changed less than this long ago may change again without a sign of it: time stamps have steps. In ns.
const STEP: i128 = 20_000_000;

pub(crate) struct Tree {
    pub(crate) nodes: Nodes,
    pub(crate) files: OpenFiles,
    /// Our descriptors, by name.
    pub(crate) descriptors: OwnedFd,
    pub(crate) trust: Trust,
    pub(crate) leases: Leases,
    numbers: Numbers,
}

/// The numbers of what a request names.
#[derive(Clone, Copy)]
pub(crate) struct EntryPlace<'a> {
    pub(crate) folder: u64,
    pub(crate) name: &'a CStr,
}

impl EntryPlace<'_> {
    /// A name that stands for an entry of its folder.
    fn check(&self) -> Result<(), Errno> {
        match self.name.to_bytes() {
            b"" | b"." | b".." => Err(Errno::INVAL),
            name if name.contains(&b'/') => Err(Errno::INVAL),
            _ => Ok(()),
        }
    }
}

/// Takes the tree. Whoever has failed with it has left it whole.
pub(crate) fn lock(tree: &Mutex<Tree>) -> MutexGuard<'_, Tree> {
    tree.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tree {
    pub(crate) fn new(
        root: OwnedFd,
        descriptors: OwnedFd,
        trust: Trust,
        limit: u64,
    ) -> io::Result<Self> {
        let status = look_at(&root)?;
        let (nodes, numbers) = (Nodes::new(root, &status, limit), Numbers::new(&status));
        let (files, leases) = Default::default();
        Ok(Self { nodes, files, descriptors, trust, leases, numbers })
    }

    /// A descriptor of a file, for finding it.
    pub(crate) fn fd(&mut self, node: u64) -> Result<Arc<OwnedFd>, Errno> {
        match self.nodes.fd(node) {
            Err(Errno::STALE) => {
                // One that the guest has open is there, whatever has become of its names.
                let fd = self.files.another(node).ok_or(Errno::STALE)?;
                Ok(self.nodes.hold(node, fd))
            }
            other => other,
        }
    }

    /// The name of a descriptor among our descriptors.
    pub(crate) fn name_of(fd: &OwnedFd) -> DecInt {
        DecInt::from_fd(fd)
    }

    fn entry(&mut self, at: EntryPlace<'_>, status: &Statx) -> Entry {
        let (inode, other) = self.nodes.known(at.folder, at.name, FileIdentity::of(status));
        other.into_iter().for_each(|place| self.leases.note_entry(place));
        let (entry_timeout, attr_timeout) = self.held(inode, status);
        Entry {
            inode,
            attr: attributes(status, self.numbers.of(status)),
            attr_timeout,
            entry_timeout,
            ..Entry::default()
        }
    }

    /// What a name stands for; an entry without a number, for the guest to rely on a while, if there is nothing.
    pub(crate) fn lookup(&mut self, at: EntryPlace<'_>) -> Result<Entry, Errno> {
        at.check()?;
        let folder = self.watched(at.folder)?;
        match look(&folder, at.name) {
            Ok(status) => {
                if let Some(habit) = self.nodes.habit(at.folder) {
                    habit.looks_up(Instant::now());
                }
                if !FileIdentity::of(&status).is_folder() {
                    self.nodes.note_question(at.folder);
                }
                Ok(self.entry(at, &status))
            }
            Err(Errno::NOENT) => Ok(Entry { entry_timeout: self.trust.absent, ..Entry::default() }),
            Err(error) => Err(error),
        }
    }

    /// What a name stands for that was just made.
    fn made(&mut self, at: EntryPlace<'_>) -> Result<Entry, Errno> {
        self.take_own(ReadFlags::CREATE, &[at]);
        let entry = self.lookup(at)?;
        if entry.inode == 0 { Err(Errno::NOENT) } else { Ok(entry) }
    }

    /// A file's attributes, and how long the guest may rely on them.
    pub(crate) fn attributes(
        &mut self,
        node: u64,
        handle: Option<u64>,
    ) -> Result<(stat64, Duration), Errno> {
        let status = match handle.map(|handle| self.files.get(handle, node)) {
            Some(Ok(opened)) => look_at(&opened.file)?,
            _ => match self.nodes.status(node) {
                Err(Errno::STALE) => look_at(self.fd(node)?)?,
                other => other?,
            },
        };
        let held = match self.is_in_place(node) {
            true => self.held(node, &status).1,
            false => self.trust.held,
        };
        Ok((attributes(&status, self.numbers.of(&status)), held))
    }

    pub(crate) fn link_target(&mut self, node: u64) -> Result<Vec<u8>, Errno> {
        let fd = self.fd(node)?;
        Ok(readlinkat(fd, c"", Vec::new())?.into_bytes())
    }

    /// Opens a file or folder as such.
    fn reopen(&mut self, node: u64, flags: OFlags) -> Result<File, Errno> {
        let kind = self.nodes.identity(node)?.kind();
        if !matches!(kind, FileType::RegularFile | FileType::Directory) {
            return Err(Errno::BADF);
        }
        let fd = self.fd(node)?;
        let (name, descriptors) = (Self::name_of(&fd), &self.descriptors);
        let flags = flags.difference(SETTLED) | OFlags::CLOEXEC;
        let open = || openat(descriptors, name.as_c_str(), flags, Mode::empty());
        Ok(self.nodes.with_room(open)?.into())
    }

    /// A file to be truncated by a program that has not opened it.
    pub(crate) fn writable(&mut self, node: u64) -> Result<File, Errno> {
        self.reopen(node, OFlags::WRONLY | OFlags::NONBLOCK)
    }

    pub(crate) fn open(
        &mut self,
        node: u64,
        flags: OFlags,
        kill: bool,
    ) -> Result<(u64, OpenOptions), Errno> {
        let file = without_keeping_bits(kill, || self.reopen(node, flags))?;
        if flags.contains(OFlags::TRUNC) {
            self.take_own_of(node, CONTENT);
        }
        let options = self.caching(node, &file)?;
        Ok((self.files.add(Opened::new(node, file, flags)), options))
    }

    /// What the guest may keep of the content it has in its cache: all of it, if nobody has changed it since it was opened before.
    fn caching(&mut self, node: u64, file: &File) -> Result<OpenOptions, Errno> {
        let status = look_at(file)?;
        let is_seen = self.nodes.is_seen(node, version(&status));
        let mut options = OpenOptions::empty();
        options.set(OpenOptions::KEEP_CACHE, is_seen);
        if FileIdentity::of(&status).is_folder() {
            let habit = self.nodes.habit(node).filter(|_| self.trust.lists_anew);
            let may_cache = habit.is_none_or(|habit| habit.opens(Instant::now()));
            options.set(OpenOptions::CACHE_DIR, may_cache);
        }
        Ok(options)
    }

    /// A file for reading, opened by this number or, where the guest opens without a word, now.
    pub(crate) fn reader(&mut self, node: u64, handle: u64) -> Result<&mut Opened, Errno> {
        if !self.trust.lasting {
            return self.files.get(handle, node);
        }
        if self.files.reused(node).is_none() {
            let file = self.reopen(node, OFlags::RDONLY)?;
            self.files.keep(Opened::new(node, file, OFlags::RDONLY));
        }
        self.files.reused(node).ok_or(Errno::BADF)
    }

    pub(crate) fn create(
        &mut self,
        context: &Context,
        at: EntryPlace<'_>,
        wish: CreateIn,
    ) -> Result<(Entry, u64, OpenOptions), Errno> {
        at.check()?;
        let flags = OFlags::from_bits_retain(wish.flags);
        let mode = Mode::from_raw_mode(wish.mode & !wish.umask);
        let folder = self.watched(at.folder)?;
        let new = flags.difference(SETTLED) | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let open = || openat(&folder, at.name, new | OFlags::CLOEXEC, mode);
        let (user, group) = (context.uid, context.gid);
        match as_user(user, group, || self.nodes.with_room(open)) {
            Ok(fd) => {
                self.take_own(ReadFlags::CREATE, &[at]);
                let entry = self.entry(at, &look_at(&fd)?);
                let opened = Opened::new(entry.inode, fd.into(), flags);
                Ok((entry, self.files.add(opened), OpenOptions::empty()))
            }
            Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => {
                let entry = self.made(at)?;
                let kill = wish.fuse_flags & fuse_backend_rs::abi::fuse_abi::FOPEN_IN_KILL_SUIDGID;
                let opened = as_user(user, group, || self.open(entry.inode, flags, kill != 0));
                let opened = opened.inspect_err(|_| self.forget(entry.inode, 1));
                opened.map(|(handle, options)| (entry, handle, options))
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn make_folder(
        &mut self,
        context: &Context,
        at: EntryPlace<'_>,
        mode: u32,
    ) -> Result<Entry, Errno> {
        at.check()?;
        let folder = self.fd(at.folder)?;
        let mode = Mode::from_raw_mode(mode);
        as_user(context.uid, context.gid, || mkdirat(&folder, at.name, mode))?;
        self.made(at)
    }

    pub(crate) fn make_node(
        &mut self,
        context: &Context,
        at: EntryPlace<'_>,
        mode: u32,
        device: u32,
    ) -> Result<Entry, Errno> {
        at.check()?;
        let folder = self.fd(at.folder)?;
        let (kind, mode) = (FileType::from_raw_mode(mode), Mode::from_raw_mode(mode));
        as_user(context.uid, context.gid, || {
            mknodat(&folder, at.name, kind, mode, Dev::from(device))
        })?;
        self.made(at)
    }

    pub(crate) fn make_link(
        &mut self,
        context: &Context,
        at: EntryPlace<'_>,
        target: &CStr,
    ) -> Result<Entry, Errno> {
        at.check()?;
        let folder = self.fd(at.folder)?;
        as_user(context.uid, context.gid, || symlinkat(target, &folder, at.name))?;
        self.made(at)
    }

    /// Another name for a file.
    pub(crate) fn link(&mut self, node: u64, at: EntryPlace<'_>) -> Result<Entry, Errno> {
        at.check()?;
        let (fd, folder) = (self.fd(node)?, self.fd(at.folder)?);
        let name = Self::name_of(&fd);
        // By our descriptor's name: by the descriptor itself older hosts allow it to root only.
        let follow = AtFlags::SYMLINK_FOLLOW;
        linkat(&self.descriptors, name.as_c_str(), &folder, at.name, follow)?;
        self.made(at)
    }

    /// The node of what is about to lose a name, held by a descriptor from now on, and whether it is the last name.
    fn losing(&mut self, folder: &OwnedFd, name: &CStr) -> Option<(u64, bool)> {
        let status = look(folder, name).ok()?;
        let identity = FileIdentity::of(&status);
        let node = self.nodes.same(identity)?;
        self.nodes.pin(node, folder, name);
        Some((node, status.stx_nlink < 2 || identity.is_folder()))
    }

    pub(crate) fn remove(&mut self, at: EntryPlace<'_>, is_folder: bool) -> Result<(), Errno> {
        at.check()?;
        let folder = self.fd(at.folder)?;
        let losing = self.losing(&folder, at.name);
        let flags = if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        unlinkat(&folder, at.name, flags)?;
        self.take_own(ReadFlags::DELETE, &[at]);
        if let Some((node, true)) = losing {
            self.nodes.detach(node);
        }
        Ok(())
    }

    pub(crate) fn rename(
        &mut self,
        from: EntryPlace<'_>,
        to: EntryPlace<'_>,
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        from.check()?;
        to.check()?;
        let (old, new) = (self.fd(from.folder)?, self.fd(to.folder)?);
        let moved = look(&old, from.name).ok().map(|status| FileIdentity::of(&status));
        let moved = moved.and_then(|identity| self.nodes.same(identity));
        let replaced = self.losing(&new, to.name);
        renameat_with(&old, from.name, &new, to.name, flags)?;
        self.take_own(ReadFlags::MOVED_FROM | ReadFlags::MOVED_TO, &[from, to]);
        match replaced.filter(|(node, _)| Some(*node) != moved) {
            Some((node, _)) if flags.contains(RenameFlags::EXCHANGE) => {
                self.nodes.put(node, from.folder, from.name);
            }
            Some((node, true)) => self.nodes.detach(node),
            _ => {}
        }
        if let Some(node) = moved {
            self.nodes.put(node, to.folder, to.name);
        }
        Ok(())
    }

    /// Passes on entries of a folder from a place on, for as long as they are taken.
    pub(crate) fn list(
        &mut self,
        (node, handle): (u64, u64),
        from: u64,
        take: &mut dyn FnMut(&mut Self, &Listed) -> Result<bool, Errno>,
    ) -> Result<(), Errno> {
        let opened = self.reader(node, handle)?;
        opened.listing.go_to(&opened.file, from)?;
        let mut is_first = true;
        loop {
            let opened = self.reader(node, handle)?;
            let at = opened.listing.place();
            let Some(listed) = opened.listing.next(&opened.file)? else { return Ok(()) };
            match take(self, &listed) {
                Ok(true) => is_first = false,
                Err(error) if is_first => return Err(error),
                // What was taken must arrive: the guest was told of files.
                Ok(false) | Err(_) => {
                    let opened = self.reader(node, handle)?;
                    opened.listing.take_back(listed, at);
                    return Ok(());
                }
            }
        }
    }

    /// The guest's inode number of an entry, as stat(2) has it.
    pub(crate) fn number(&mut self, folder: u64, listed: &Listed) -> Result<u64, Errno> {
        let is_other = match listed.name.to_bytes() {
            b"." => Some(folder),
            b".." => Some(self.nodes.parent(folder)),
            _ => None,
        };
        if let Some(node) = is_other {
            let status = self.nodes.status(node)?;
            return Ok(self.numbers.of(&status));
        }
        // A file system may be mounted on it.
        if matches!(listed.kind, FileType::Directory | FileType::Unknown)
            && let Ok(fd) = self.fd(folder)
            && let Ok(status) = look(&fd, &listed.name)
        {
            return Ok(self.numbers.of(&status));
        }
        Ok(self.numbers.beside(self.nodes.identity(folder)?, listed.number))
    }

    /// An entry with all that is known of it; `None` if it is gone by now.
    pub(crate) fn full(
        &mut self,
        folder: u64,
        listed: &Listed,
    ) -> Result<Option<(u32, Entry)>, Errno> {
        let at = EntryPlace { folder, name: &listed.name };
        if at.check().is_err() {
            let mut entry = Entry::default();
            entry.attr.st_ino = self.number(folder, listed)?;
            return Ok(Some((entry_type(listed.kind), entry)));
        }
        let fd = self.watched(folder)?;
        match look(&fd, at.name) {
            Ok(status) => {
                let entry = self.entry(at, &status);
                Ok(Some((entry_type(FileType::from_raw_mode(status.stx_mode.into())), entry)))
            }
            Err(Errno::NOENT) => Ok(None),
            Err(_) => {
                let mut entry = Entry::default();
                entry.attr.st_ino = self.number(folder, listed)?;
                Ok(Some((entry_type(listed.kind), entry)))
            }
        }
    }

    pub(crate) fn clear(&mut self) {
        self.files.clear();
        self.nodes.clear();
        self.leases.clear();
    }

    /// The root's descriptor is there for as long as we are.
    pub(crate) fn root(&mut self) -> Result<Arc<OwnedFd>, Errno> {
        self.nodes.fd(ROOT)
    }
}

/// An entry of a folder as the library passes it on.
pub(crate) fn directory_entry(listed: &Listed, ino: u64, type_: u32) -> DirEntry<'_> {
    DirEntry { ino, offset: listed.next, type_, name: listed.name.to_bytes() }
}

/// A number for a file's content as it is; 0 if it may change without getting another number.
fn version(status: &Statx) -> u64 {
    let ns = |time: rustix::fs::StatxTimestamp| {
        i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
    };
    let now = clock_gettime(ClockId::Realtime);
    let now = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
    let (changed, modified) = (ns(status.stx_ctime), ns(status.stx_mtime));
    if now - changed < STEP {
        return 0;
    }
    // Times of different files need not be told apart, nor every multiple of a power of two.
    let mix = |sum: u64, word: i128| {
        (sum ^ word as u64 ^ (word >> 64) as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    };
    let words = [changed, modified, i128::from(status.stx_size)];
    words.into_iter().fold(1, mix).max(1)
}
