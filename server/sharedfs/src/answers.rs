//! The tree behind the library's interface: it decodes requests and encodes answers.

use std::{
    ffi::CStr,
    fs::File,
    io,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use fuse_backend_rs::{
    abi::fuse_abi::{
        CreateIn, FOPEN_IN_KILL_SUIDGID, FsOptions, OpenOptions, SetattrValid, WRITE_KILL_PRIV,
        stat64, statvfs64,
    },
    api::filesystem::{
        Context, DirEntry, Entry, FileSystem, GetxattrReply, ListxattrReply, ZeroCopyReader,
        ZeroCopyWriter,
    },
};
use rustix::{
    fs::{
        AtFlags, FallocateFlags, Gid, Mode, OFlags, RenameFlags, SeekFrom, Timespec, Timestamps,
        UTIME_NOW, UTIME_OMIT, Uid, XattrFlags, chmodat, chownat, fallocate, fchmod, fdatasync,
        fstatfs, fstatvfs, fsync, ftruncate, futimens, getxattr, getxattr_query, listxattr,
        listxattr_query, removexattr, seek, setxattr, utimensat,
    },
    io::{Errno, fcntl_dupfd_cloexec},
    time::Nsecs,
};

use crate::{
    closing::close,
    identity::entry_type,
    leases::{CLOSED, CONTENT},
    listing::Listed,
    rights::without_keeping_bits,
    tree::{EntryPlace, Tree, directory_entry, lock},
};

/// Bytes of an extended attribute or of a list of their names at the most: Linux's limit.
const ATTRIBUTE: u32 = 64 << 10;
/// File systems that may learn only when a file is closed that it could not be written: NFS, SMB (three), 9p, Ceph, FUSE, AFS.
const REMOTE: [i64; 8] =
    [0x6969, 0x517b, 0xfe53_4d42, 0xff53_4d42, 0x0102_1997, 0x00c3_6400, 0x6573_5546, 0x5346_414f];

/// The tree with its lock.
pub(crate) struct Answers {
    tree: Arc<Mutex<Tree>>,
    /// The guest tells the host of a file that is closed.
    tells_of_closing: bool,
}

impl Answers {
    pub(crate) fn new(mut tree: Tree) -> io::Result<Self> {
        let system = fstatfs(tree.root()?)?.f_type & 0xffff_ffff;
        let tells_of_closing = REMOTE.contains(&system);
        Ok(Self { tree: Arc::new(Mutex::new(tree)), tells_of_closing })
    }

    /// The tree, for another thread to use, too.
    pub(crate) fn shared(&self) -> Arc<Mutex<Tree>> {
        Arc::clone(&self.tree)
    }

    fn tree(&self) -> MutexGuard<'_, Tree> {
        lock(&self.tree)
    }

    /// Does something with a file by its name among our descriptors, as extended attributes want it.
    fn by_path<T>(&self, node: u64, what: impl FnOnce(&str) -> Result<T, Errno>) -> io::Result<T> {
        let mut tree = self.tree();
        if tree.trust.plain {
            // The guest does not ask again.
            return Err(Errno::NOSYS.into());
        }
        let fd = tree.fd(node)?;
        Ok(what(&format!("/proc/self/fd/{}", Tree::name_of(&fd).as_str()))?)
    }
}

fn flags(bits: u32) -> OFlags {
    OFlags::from_bits_retain(bits)
}

/// Which of a file's times are to be set, and to what.
fn times(wish: &stat64, valid: SetattrValid) -> Timestamps {
    let time = |given: bool, now: bool, seconds: i64, ns: i64| Timespec {
        tv_sec: if given && !now { seconds } else { 0 },
        tv_nsec: match (given, now) {
            (_, true) => UTIME_NOW,
            (true, _) => ns as Nsecs,
            _ => UTIME_OMIT,
        },
    };
    let has = |what| valid.contains(what);
    use SetattrValid as V;
    Timestamps {
        last_access: time(has(V::ATIME), has(V::ATIME_NOW), wish.st_atime, wish.st_atime_nsec),
        last_modification: time(
            has(V::MTIME),
            has(V::MTIME_NOW),
            wish.st_mtime,
            wish.st_mtime_nsec,
        ),
    }
}

impl Tree {
    fn set_mode(&mut self, node: u64, handle: Option<u64>, mode: u32) -> Result<(), Errno> {
        let mode = Mode::from_raw_mode(mode);
        if let Some(Ok(opened)) = handle.map(|handle| self.files.get(handle, node)) {
            return fchmod(&opened.file, mode);
        }
        let fd = self.fd(node)?;
        chmodat(&self.descriptors, Self::name_of(&fd).as_c_str(), mode, AtFlags::empty())
    }

    fn set_owner(&mut self, node: u64, wish: &stat64, valid: SetattrValid) -> Result<(), Errno> {
        let given =
            |flag, number: u32| (valid.contains(flag) && number != u32::MAX).then_some(number);
        let user = given(SetattrValid::UID, wish.st_uid).map(Uid::from_raw);
        let group = given(SetattrValid::GID, wish.st_gid).map(Gid::from_raw);
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
        chownat(self.fd(node)?, c"", user, group, flags)
    }

    fn set_size(
        &mut self,
        node: u64,
        handle: Option<u64>,
        size: i64,
        kill: bool,
    ) -> Result<(), Errno> {
        let size = u64::try_from(size).map_err(|_| Errno::INVAL)?;
        without_keeping_bits(kill, || {
            if let Some(Ok(opened)) = handle.map(|handle| self.files.get(handle, node)) {
                return ftruncate(&opened.file, size);
            }
            ftruncate(self.writable(node)?, size)
        })
    }

    fn set_times(
        &mut self,
        node: u64,
        handle: Option<u64>,
        times: &Timestamps,
    ) -> Result<(), Errno> {
        if let Some(Ok(opened)) = handle.map(|handle| self.files.get(handle, node)) {
            return futimens(&opened.file, times);
        }
        let fd = self.fd(node)?;
        utimensat(&self.descriptors, Self::name_of(&fd).as_c_str(), times, AtFlags::empty())
    }

    fn set_attributes(
        &mut self,
        node: u64,
        handle: Option<u64>,
        wish: &stat64,
        valid: SetattrValid,
    ) -> Result<(), Errno> {
        if valid.contains(SetattrValid::MODE) {
            self.set_mode(node, handle, wish.st_mode)?;
        }
        if valid.intersects(SetattrValid::UID | SetattrValid::GID) {
            self.set_owner(node, wish, valid)?;
        }
        if valid.contains(SetattrValid::SIZE) {
            let kill = valid.contains(SetattrValid::KILL_SUIDGID);
            self.set_size(node, handle, wish.st_size, kill)?;
        }
        if valid.intersects(SetattrValid::ATIME | SetattrValid::MTIME) {
            self.set_times(node, handle, &times(wish, valid))?;
        }
        Ok(())
    }
}

impl FileSystem for Answers {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, _capable: FsOptions) -> io::Result<FsOptions> {
        let mut tree = self.tree();
        tree.clear();
        let mut wanted = FsOptions::ASYNC_READ
            | FsOptions::BIG_WRITES
            | FsOptions::MAX_PAGES
            | FsOptions::AUTO_INVAL_DATA
            | FsOptions::DO_READDIRPLUS
            | FsOptions::PARALLEL_DIROPS
            | FsOptions::ASYNC_DIO
            | FsOptions::CACHE_SYMLINKS;
        // Written or truncated by a request that says so, a file loses its set-user-ID bit without the guest asking for its attributes first.
        wanted.set(FsOptions::HANDLE_KILLPRIV_V2, !tree.trust.lasting);
        wanted.set(FsOptions::ATOMIC_O_TRUNC, !tree.trust.lasting);
        Ok(wanted)
    }

    fn destroy(&self) {
        self.tree().clear();
    }

    fn lookup(&self, _: &Context, folder: u64, name: &CStr) -> io::Result<Entry> {
        Ok(self.tree().lookup(EntryPlace { folder, name })?)
    }

    fn forget(&self, _: &Context, node: u64, count: u64) {
        self.tree().forget(node, count);
    }

    fn batch_forget(&self, _: &Context, forgotten: Vec<(u64, u64)>) {
        let mut tree = self.tree();
        forgotten.iter().for_each(|(node, count)| tree.forget(*node, *count));
    }

    fn getattr(
        &self,
        _: &Context,
        node: u64,
        handle: Option<u64>,
    ) -> io::Result<(stat64, Duration)> {
        let mut tree = self.tree();
        tree.note_question(node);
        Ok(tree.attributes(node, handle)?)
    }

    fn setattr(
        &self,
        _: &Context,
        node: u64,
        wish: stat64,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(stat64, Duration)> {
        let mut tree = self.tree();
        let done = tree.set_attributes(node, handle, &wish, valid);
        tree.take_own_of(node, CONTENT | CLOSED);
        done?;
        Ok(tree.attributes(node, handle)?)
    }

    fn readlink(&self, _: &Context, node: u64) -> io::Result<Vec<u8>> {
        Ok(self.tree().link_target(node)?)
    }

    fn symlink(
        &self,
        context: &Context,
        target: &CStr,
        folder: u64,
        name: &CStr,
    ) -> io::Result<Entry> {
        Ok(self.tree().make_link(context, EntryPlace { folder, name }, target)?)
    }

    fn mknod(
        &self,
        context: &Context,
        folder: u64,
        name: &CStr,
        mode: u32,
        device: u32,
        umask: u32,
    ) -> io::Result<Entry> {
        Ok(self.tree().make_node(context, EntryPlace { folder, name }, mode & !umask, device)?)
    }

    fn mkdir(
        &self,
        context: &Context,
        folder: u64,
        name: &CStr,
        mode: u32,
        umask: u32,
    ) -> io::Result<Entry> {
        Ok(self.tree().make_folder(context, EntryPlace { folder, name }, mode & !umask)?)
    }

    fn unlink(&self, _: &Context, folder: u64, name: &CStr) -> io::Result<()> {
        Ok(self.tree().remove(EntryPlace { folder, name }, false)?)
    }

    fn rmdir(&self, _: &Context, folder: u64, name: &CStr) -> io::Result<()> {
        Ok(self.tree().remove(EntryPlace { folder, name }, true)?)
    }

    fn rename(
        &self,
        _: &Context,
        from: u64,
        old: &CStr,
        to: u64,
        new: &CStr,
        how: u32,
    ) -> io::Result<()> {
        let (from, to) =
            (EntryPlace { folder: from, name: old }, EntryPlace { folder: to, name: new });
        Ok(self.tree().rename(from, to, RenameFlags::from_bits_retain(how))?)
    }

    fn link(&self, _: &Context, node: u64, folder: u64, name: &CStr) -> io::Result<Entry> {
        Ok(self.tree().link(node, EntryPlace { folder, name })?)
    }

    fn open(
        &self,
        _: &Context,
        node: u64,
        how: u32,
        fuse_flags: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        let mut tree = self.tree();
        if tree.trust.lasting {
            // The guest opens files without asking from now on.
            return Err(Errno::NOSYS.into());
        }
        let kill = fuse_flags & FOPEN_IN_KILL_SUIDGID != 0;
        let (handle, options) = tree.open(node, flags(how), kill)?;
        Ok((Some(handle), options, None))
    }

    fn create(
        &self,
        context: &Context,
        folder: u64,
        name: &CStr,
        wish: CreateIn,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions, Option<u32>)> {
        let made = self.tree().create(context, EntryPlace { folder, name }, wish);
        let (entry, handle, options) = made?;
        Ok((entry, Some(handle), options, None))
    }

    fn read(
        &self,
        _: &Context,
        node: u64,
        handle: u64,
        to: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _owner: Option<u64>,
        _flags: u32,
    ) -> io::Result<usize> {
        let mut tree = self.tree();
        let opened = tree.reader(node, handle)?;
        to.write_from(&mut opened.file, size as usize, offset)
    }

    fn write(
        &self,
        _: &Context,
        node: u64,
        handle: u64,
        from: &mut dyn ZeroCopyReader,
        size: u32,
        offset: u64,
        _owner: Option<u64>,
        _delayed: bool,
        how: u32,
        fuse_flags: u32,
    ) -> io::Result<usize> {
        let mut tree = self.tree();
        let opened = tree.files.get(handle, node)?;
        opened.set_append(flags(how))?;
        let file: &mut File = &mut opened.file;
        let kill = fuse_flags & WRITE_KILL_PRIV != 0;
        let written = without_keeping_bits(kill, || Ok(from.read_to(file, size as usize, offset)))?;
        tree.take_own_of(node, CONTENT);
        written
    }

    fn flush(&self, _: &Context, node: u64, handle: u64, _owner: u64) -> io::Result<()> {
        if !self.tells_of_closing {
            return Err(Errno::NOSYS.into());
        }
        let mut tree = self.tree();
        let opened = tree.reader(node, handle)?;
        let again = fcntl_dupfd_cloexec(&opened.file, 0)?;
        drop(tree);
        close(again)
    }

    fn fsync(&self, _: &Context, node: u64, data_only: bool, handle: u64) -> io::Result<()> {
        let mut tree = self.tree();
        let file = &tree.reader(node, handle)?.file;
        Ok(if data_only { fdatasync(file) } else { fsync(file) }?)
    }

    fn fsyncdir(&self, context: &Context, node: u64, data: bool, handle: u64) -> io::Result<()> {
        self.fsync(context, node, data, handle)
    }

    fn fallocate(
        &self,
        _: &Context,
        node: u64,
        handle: u64,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        let mut tree = self.tree();
        let opened = tree.files.get(handle, node)?;
        fallocate(&opened.file, FallocateFlags::from_bits_retain(mode), offset, length)?;
        tree.take_own_of(node, CONTENT);
        Ok(())
    }

    fn lseek(
        &self,
        _: &Context,
        node: u64,
        handle: u64,
        offset: u64,
        whence: u32,
    ) -> io::Result<u64> {
        const DATA: u32 = 3;
        const HOLE: u32 = 4;
        let place = match whence {
            DATA => SeekFrom::Data(offset),
            HOLE => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL.into()),
        };
        Ok(seek(&self.tree().reader(node, handle)?.file, place)?)
    }

    fn release(
        &self,
        _: &Context,
        node: u64,
        _flags: u32,
        handle: u64,
        _flush: bool,
        _flock: bool,
        _owner: Option<u64>,
    ) -> io::Result<()> {
        let mut tree = self.tree();
        if tree.files.remove(handle, node)? {
            tree.take_own_of(node, CLOSED);
        }
        Ok(())
    }

    fn statfs(&self, _: &Context, node: u64) -> io::Result<statvfs64> {
        let mut tree = self.tree();
        let host = fstatvfs(tree.fd(node)?)?;
        // The structure has private fields; this is one with nothing in it.
        let mut to = Blank.statfs(&Context::default(), node)?;
        (to.f_bsize, to.f_frsize, to.f_namemax) = (host.f_bsize, host.f_frsize, host.f_namemax);
        (to.f_blocks, to.f_bfree, to.f_bavail) = (host.f_blocks, host.f_bfree, host.f_bavail);
        (to.f_files, to.f_ffree, to.f_favail) = (host.f_files, host.f_ffree, host.f_favail);
        Ok(to)
    }

    fn setxattr(
        &self,
        _: &Context,
        node: u64,
        name: &CStr,
        value: &[u8],
        how: u32,
    ) -> io::Result<()> {
        let how = XattrFlags::from_bits_retain(how);
        self.by_path(node, |path| setxattr(path, name, value, how))
    }

    fn getxattr(
        &self,
        _: &Context,
        node: u64,
        name: &CStr,
        size: u32,
    ) -> io::Result<GetxattrReply> {
        self.by_path(node, |path| {
            if size == 0 {
                return Ok(GetxattrReply::Count(getxattr_query(path, name)? as u32));
            }
            let mut value = vec![0; size.min(ATTRIBUTE) as usize];
            let len = getxattr(path, name, &mut value[..])?;
            value.truncate(len);
            Ok(GetxattrReply::Value(value))
        })
    }

    fn listxattr(&self, _: &Context, node: u64, size: u32) -> io::Result<ListxattrReply> {
        self.by_path(node, |path| {
            if size == 0 {
                return Ok(ListxattrReply::Count(listxattr_query(path)? as u32));
            }
            let mut names = vec![0; size.min(ATTRIBUTE) as usize];
            let len = listxattr(path, &mut names[..])?;
            names.truncate(len);
            Ok(ListxattrReply::Names(names))
        })
    }

    fn removexattr(&self, _: &Context, node: u64, name: &CStr) -> io::Result<()> {
        self.by_path(node, |path| removexattr(path, name))
    }

    fn opendir(&self, _: &Context, node: u64, how: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        let mut tree = self.tree();
        if tree.trust.lasting {
            return Err(Errno::NOSYS.into());
        }
        let (handle, options) = tree.open(node, flags(how) | OFlags::DIRECTORY, false)?;
        Ok((Some(handle), options))
    }

    fn readdir(
        &self,
        _: &Context,
        node: u64,
        handle: u64,
        _size: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut take = |tree: &mut Tree, listed: &Listed| {
            let number = tree.number(node, listed)?;
            let kind = entry_type(listed.kind);
            Ok(taken(add(directory_entry(listed, number, kind)))? > 0)
        };
        Ok(self.tree().list((node, handle), offset, &mut take)?)
    }

    fn readdirplus(
        &self,
        _: &Context,
        node: u64,
        handle: u64,
        _size: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>, Entry) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut take = |tree: &mut Tree, listed: &Listed| {
            let Some((kind, entry)) = tree.full(node, listed)? else { return Ok(true) };
            let entry_of = directory_entry(listed, entry.attr.st_ino, kind);
            let added = taken(add(entry_of, entry));
            if !matches!(added, Ok(1..)) && entry.inode != 0 {
                // The guest will not hear of it.
                tree.forget(entry.inode, 1);
            }
            Ok(added? > 0)
        };
        Ok(self.tree().list((node, handle), offset, &mut take)?)
    }

    fn releasedir(&self, _: &Context, node: u64, _flags: u32, handle: u64) -> io::Result<()> {
        self.tree().files.remove(handle, node)?;
        Ok(())
    }
}

/// The library's error when it has no room, as ours.
fn taken(added: io::Result<usize>) -> Result<usize, Errno> {
    added.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// The library's own answers.
struct Blank;

impl FileSystem for Blank {
    type Inode = u64;
    type Handle = u64;
}
