//! A folder of the host for a guest, served without privileges.
//!
//! fuse-backend-rs decodes requests and encodes answers (`messages`, `answers`); what is behind them is ours (`tree`), because the library's
//! own file system holds a descriptor for each file the guest knows, and a tree may have more files than a process may have
//! descriptors. `nodes` keeps a bounded number of them and finds the other files again. `leases` knows what the guest relies on until
//! `withdrawal` tells somebody there that the host has changed it. No name and no symbolic link leads out of the folder,
//! and devices and sockets of the host cannot be opened. `readonly` and `privilege` decide which requests may pass, `atime` what an
//! ordinary user may not ask the host for.
//!
//! Files are created as the user that runs ring3. As root, they belong to the guest's user.

mod answers;
mod atime;
mod closing;
mod habit;
mod identity;
mod leases;
mod listing;
mod messages;
mod nodes;
mod open_files;
mod privilege;
mod readonly;
mod rights;
mod tally;
mod tree;
mod watches;
mod withdrawal;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustix::{
    fs::{CWD, Mode, OFlags, openat},
    process::{Resource, Rlimit, getegid, geteuid, getrlimit, setrlimit, umask},
};
use virtio::FileServer;

use answers::Answers;
use messages::{Messages, REFUSAL, refusal};
use tally::Tally;
use tree::Tree;
pub use watches::watches_allowed;
pub use withdrawal::Withdrawals;

/// How long the guest may rely on what it was told of a folder that both write. What the host changes is to be seen within 100 ms, and Linux counts
/// in ticks of 4 ms: it rounds up, and is up to a tick behind when it compares.
const SHARED_TRUST: Duration = Duration::from_millis(90);
/// The same of a folder that is only read and asked for again and again.
const TRUST: Duration = Duration::from_secs(1);
/// The same for a folder that is only read: long enough to start programs without asking again.
const READONLY_TRUST: Duration = Duration::from_secs(60);
/// For as long as the guest runs: ten years.
const LASTING_TRUST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How long the guest may rely on what it was told of a folder that is only read, and what it is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keeping {
    /// No longer than of a folder that is written.
    Fresh,
    /// A minute.
    #[default]
    Usual,
    /// For as long as it runs, and it opens files without a word. A folder that is written is kept until the host changes it, where somebody
    /// listens to that ([`Withdrawals`]). Extended attributes are not there in either, so that the guest does not ask for a file's capabilities
    /// before it writes to it first.
    Lasting,
}

/// What to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder {
    /// The folder.
    pub path: PathBuf,
    /// The guest may not change anything.
    pub readonly: bool,
    /// How long it may rely on what it was told, if it may not.
    pub keeping: Keeping,
    /// The guest may make device nodes, and programs that run with the rights of their owner, even if we are root.
    pub privileged: bool,
}

/// How long the guest may rely on what it is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trust {
    /// Of names and attributes.
    held: Duration,
    /// Of names that are not there. The host must be able to make a file that the guest waits for, unless it is to see nothing new.
    absent: Duration,
    lasting: bool,
    /// There are no extended attributes.
    plain: bool,
    /// Folders whose entries are all looked up are listed anew ([`habit`]).
    lists_anew: bool,
}

impl Folder {
    /// A folder whose changes the guest and the host see of each other soon.
    pub fn new(path: impl Into<PathBuf>, readonly: bool) -> Self {
        Self { path: path.into(), readonly, keeping: Keeping::Usual, privileged: false }
    }

    /// Where it really is, if it is a folder that can be listed.
    ///
    /// # Errors
    /// It is not.
    pub fn find(&self) -> Result<String, ShareError> {
        checked(&self.path).map_err(|error| ShareError::Folder { path: self.path.clone(), error })
    }

    fn trust(&self) -> Trust {
        let (held, lasting) = match self.keeping {
            _ if !self.readonly => (SHARED_TRUST, false),
            Keeping::Fresh => (TRUST, false),
            Keeping::Usual => (READONLY_TRUST, false),
            Keeping::Lasting => (LASTING_TRUST, true),
        };
        let absent = if lasting { held } else { held.min(TRUST) };
        let plain = self.keeping == Keeping::Lasting;
        Trust { held, absent, lasting, plain, lists_anew: self.keeping != Keeping::Fresh }
    }
}

/// Why a folder cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// It is not there, or is not a folder, or may not be read.
    #[error("cannot share {}: {error}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the host said.
        error: io::Error,
    },
    /// A part of the server could not be made.
    #[error("cannot serve files: {0}")]
    Host(String),
}

/// A server of one folder.
pub struct FolderServer {
    messages: Messages,
    readonly: bool,
    /// As root, the guest may make what gives others rights.
    privileged: bool,
    is_root: bool,
    refusal: [u8; REFUSAL],
    /// If somebody is going to read it.
    tally: Option<Tally>,
    tree: Arc<Mutex<Tree>>,
}

impl FolderServer {
    /// Opens the folder.
    ///
    /// # Errors
    /// See [`ShareError`].
    pub fn open(folder: &Folder) -> Result<Self, ShareError> {
        let refused = |error| ShareError::Folder { path: folder.path.clone(), error };
        let path = folder.find()?;
        let limit = raise_file_limit();
        let place = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |path: &str| openat(CWD, path, place, Mode::empty());
        let (root, descriptors) = (open(&path), open("/proc/self/fd"));
        let (root, descriptors) = (
            root.map_err(|error| refused(error.into()))?,
            descriptors.map_err(|error| ShareError::Host(format!("/proc/self/fd: {error}")))?,
        );
        // The guest's programs have their own, which requests have in them.
        umask(Mode::empty());
        let tree = Tree::new(root, descriptors, folder.trust(), limit).map_err(refused)?;
        let answers = Answers::new(tree).map_err(refused)?;
        let (is_root, tree) = (geteuid().is_root(), answers.shared());
        let messages = Messages::new(answers, (!is_root).then(own)).map_err(ShareError::Host)?;
        let Folder { readonly, privileged, .. } = *folder;
        let (refusal, tally) = ([0; REFUSAL], Tally::wanted());
        Ok(Self { messages, readonly, privileged, is_root, refusal, tally, tree })
    }

    /// What tells somebody in the guest of the host's changes, so that the guest need not ask for them. Of a folder that is
    /// [kept](Keeping::Lasting), and is written.
    pub fn withdrawals(&self) -> Withdrawals {
        Withdrawals::of(Arc::clone(&self.tree))
    }
}

impl FileServer for FolderServer {
    fn answer(&mut self, request: &[u8], room: usize) -> &[u8] {
        let start = self.tally.as_ref().map(|_| Instant::now());
        let answer = match self.error_of(request) {
            Some(error) => {
                self.refusal = refusal(request, error);
                &self.refusal[..self.refusal.len().min(room)]
            }
            None => match atime::without_wish(request).filter(|_| !self.is_root) {
                Some(plain) => self.messages.exchange(&plain, room),
                None => self.messages.exchange(request, room),
            },
        };
        if let (Some(tally), Some(start)) = (&mut self.tally, start) {
            tally.note(request, start.elapsed());
        }
        answer
    }
}

impl FolderServer {
    /// Why a request is not passed on.
    fn error_of(&mut self, request: &[u8]) -> Option<i32> {
        if self.readonly && !readonly::may_pass(request) {
            return Some(readonly::error_of(request));
        }
        let refused = self.is_root && !self.privileged && self.gives_rights(request);
        refused.then_some(privilege::EPERM)
    }

    /// Whether a request would make what gives others rights.
    fn gives_rights(&mut self, request: &[u8]) -> bool {
        let messages = &mut self.messages;
        privilege::is_wanted(request, |node| {
            privilege::kind_in(messages.exchange(&privilege::question(node), privilege::ANSWER))
        })
    }
}

/// Who we are, as a request's header has it.
fn own() -> [u8; 8] {
    let numbers = [geteuid().as_raw(), getegid().as_raw()].map(u32::to_le_bytes);
    numbers.concat().try_into().unwrap_or_default()
}

/// The folder's real path, if it is one that can be listed.
fn checked(path: &Path) -> io::Result<String> {
    let real = path.canonicalize()?;
    std::fs::read_dir(&real)?;
    let text = real.into_os_string().into_string();
    text.map_err(|_| io::Error::other("its name is not UTF-8; rename it or share its parent"))
}

/// Has this process be allowed as many descriptors as it may; returns how many.
fn raise_file_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum.unwrap_or(u64::MAX),
        Err(error) => {
            tracing::warn!(%error, "few files can be open at once");
            limit.current.unwrap_or(u64::MAX)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::MetadataExt};

    const EROFS: i32 = 30;
    const ENOSYS: i32 = 38;
    const IOCTL: u32 = 39;
    const SYNCFS: u32 = 50;
    const STATX: u32 = 52;
    const LOOKUP: u32 = 1;
    const INIT: u32 = 26;
    const MKDIR: u32 = 9;
    const OPENDIR: u32 = 27;
    const ROOT: u64 = 1;

    fn request(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = (40 + body.len() as u32).to_le_bytes().to_vec();
        bytes.extend(opcode.to_le_bytes());
        bytes.extend(7_u64.to_le_bytes());
        bytes.extend(node.to_le_bytes());
        bytes.extend([0; 16]);
        bytes.extend(body);
        bytes
    }

    /// The error and the body of the answer.
    fn ask(server: &mut FolderServer, request: &[u8]) -> (i32, Vec<u8>) {
        let answer = server.answer(request, 4096);
        assert!(answer.len() >= REFUSAL, "a header");
        assert_eq!(answer[8..16], 7_u64.to_le_bytes(), "of this request");
        let error = i32::from_le_bytes(answer[4..8].try_into().expect("four bytes"));
        (error, answer[16..].to_vec())
    }

    fn served(readonly: bool) -> (tempfile::TempDir, FolderServer) {
        kept(readonly, Keeping::Usual)
    }

    fn kept(readonly: bool, keeping: Keeping) -> (tempfile::TempDir, FolderServer) {
        let directory = tempfile::tempdir().expect("a folder");
        fs::create_dir(directory.path().join("shared")).expect("made");
        fs::write(directory.path().join("secret"), "s").expect("written");
        fs::write(directory.path().join("shared/file"), "hello").expect("written");
        std::os::unix::fs::symlink("../secret", directory.path().join("shared/link"))
            .expect("linked");
        let path = directory.path().join("shared");
        let folder = Folder { keeping, ..Folder::new(path, readonly) };
        let mut server = FolderServer::open(&folder).expect("served");
        let mut init = 7_u32.to_le_bytes().to_vec();
        init.extend(31_u32.to_le_bytes());
        init.extend([0; 8]);
        assert_eq!(ask(&mut server, &request(INIT, 0, &init)).0, 0);
        (directory, server)
    }

    fn mode(entry: &[u8]) -> u32 {
        // nodeid 8, generation 8, validities 24, then attr: ino 8, size 8, blocks 8, times 36, mode.
        u32::from_le_bytes(entry[100..104].try_into().expect("four bytes"))
    }

    #[test]
    fn names_stay_inside() {
        let (_directory, mut server) = served(false);
        assert_eq!(ask(&mut server, &request(LOOKUP, ROOT, b"file\0")).0, 0);
        for name in [&b"../secret\0"[..], b"..\0", b"a/b\0", b"/etc\0", b"\0", b"no end"] {
            let (error, body) = ask(&mut server, &request(LOOKUP, ROOT, name));
            assert!(error != 0 && body.is_empty() || name == b"..\0", "{name:?}: {error}");
        }
        // A link is told as a link; following it is the guest's business, in the guest's tree.
        let (error, entry) = ask(&mut server, &request(LOOKUP, ROOT, b"link\0"));
        assert_eq!((error, mode(&entry) & 0o170_000), (0, 0o120_000));
    }

    /// The guest asks again 90 ms after it was told of a name, of attributes, or that there is nothing.
    #[test]
    fn what_the_host_changes_in_a_written_folder_is_seen_soon() {
        let (_directory, mut server) = served(false);
        for name in [&b"file\0"[..], b"nothing\0"] {
            let (error, entry) = ask(&mut server, &request(LOOKUP, ROOT, name));
            assert_eq!(error, 0);
            // nodeid 8, generation 8, seconds of the entry and of the attributes 8 each, ns 4 each.
            assert_eq!(entry[16..24], [0; 8]);
            assert_eq!(entry[32..36], 90_000_000_u32.to_le_bytes());
            if entry[..8] != [0; 8] {
                assert_eq!((&entry[24..32], &entry[36..40]), (&[0; 8][..], &entry[32..36]));
            }
        }
    }

    /// What an OPENDIR says of the guest's cache, and as many LOOKUPs as make a difference.
    fn lists_and_looks_up(server: &mut FolderServer) -> bool {
        const CACHE_DIR: u8 = 8;
        let (error, opened) = ask(server, &request(OPENDIR, ROOT, &[0; 8]));
        assert_eq!(error, 0);
        for _ in 0..8 {
            assert_eq!(ask(server, &request(LOOKUP, ROOT, b"file\0")).0, 0);
        }
        opened[8] & CACHE_DIR != 0
    }

    #[test]
    fn what_is_looked_up_after_each_listing_comes_with_it_unless_the_folder_is_to_be_fresh() {
        for (keeping, cached) in [(Keeping::Usual, false), (Keeping::Fresh, true)] {
            let (_directory, mut server) = kept(false, keeping);
            assert!(lists_and_looks_up(&mut server));
            assert_eq!(lists_and_looks_up(&mut server), cached, "{keeping:?}");
        }
    }

    #[test]
    fn a_readonly_folder_does_not_change() {
        let (directory, mut server) = served(true);
        let mut mkdir = vec![0; 8];
        mkdir.extend(b"new\0");
        assert_eq!(ask(&mut server, &request(MKDIR, ROOT, &mkdir)).0, -EROFS);
        assert!(!directory.path().join("shared/new").exists());
        for not_known in [IOCTL, SYNCFS, STATX, u32::MAX] {
            assert_eq!(ask(&mut server, &request(not_known, ROOT, &[0; 32])).0, -ENOSYS);
        }
        assert_eq!(ask(&mut server, &request(LOOKUP, ROOT, b"file\0")).0, 0);
        let (directory, mut server) = served(false);
        assert_eq!(ask(&mut server, &request(MKDIR, ROOT, &mkdir)).0, 0);
        assert!(directory.path().join("shared/new").exists());
    }

    /// Body of a SETATTR that sets the mode.
    fn chmod(mode: u32) -> Vec<u8> {
        let mut body = vec![0; 88];
        body[0] = 1;
        body[68..72].copy_from_slice(&mode.to_le_bytes());
        body
    }

    /// Bodies of MKNOD, by mode and device number, and of CREATE.
    fn mknod(mode: u32, number: u32) -> Vec<u8> {
        [&mode.to_le_bytes()[..], &number.to_le_bytes(), &[0; 8], b"node\0"].concat()
    }
    fn create(mode: u32) -> Vec<u8> {
        [&2_u32.to_le_bytes()[..], &mode.to_le_bytes(), &[0; 8], b"made\0"].concat()
    }

    /// As root, which is who these tests are run by where it matters.
    #[test]
    fn programs_and_nodes_with_rights_of_their_own_are_not_made() {
        const EPERM: i32 = 1;
        let [setattr, mknod_, create_, setxattr] = [4, 8, 35, 21];
        let (directory, mut server) = served(false);
        server.is_root = true;
        let node = |server: &mut FolderServer, name: &[u8]| {
            let (error, entry) = ask(server, &request(LOOKUP, ROOT, name));
            assert_eq!(error, 0);
            u64::from_le_bytes(entry[..8].try_into().expect("eight bytes"))
        };
        fs::create_dir(directory.path().join("shared/folder")).expect("made");
        let (file, folder) = (node(&mut server, b"file\0"), node(&mut server, b"folder\0"));
        let capability = [&[0; 8][..], b"security.capability\0", &[0; 20]].concat();
        for (opcode, node, body) in [
            (setattr, file, chmod(0o104_755)),
            (setattr, file, chmod(0o102_755)),
            // It says of itself that it is a folder.
            (setattr, file, chmod(0o042_755)),
            (mknod_, ROOT, mknod(0o020_600, 0x103)),
            (mknod_, ROOT, mknod(0o060_600, 0)),
            (mknod_, ROOT, mknod(0o104_755, 0)),
            (create_, ROOT, create(0o104_755)),
            (setxattr, file, capability),
        ] {
            let asked = request(opcode, node, &body);
            assert_eq!(ask(&mut server, &asked).0, -EPERM, "{opcode} {body:?}");
        }
        assert!(!directory.path().join("shared/node").exists());
        assert!(!directory.path().join("shared/made").exists());
        let mode = fs::metadata(directory.path().join("shared/file")).expect("there").mode();
        assert_eq!(mode & 0o7000, 0);
        for (opcode, node, body) in [
            (setattr, file, chmod(0o100_700)),
            (setattr, folder, chmod(0o042_755)),
            (mknod_, ROOT, mknod(0o100_600, 0)),
        ] {
            assert_eq!(ask(&mut server, &request(opcode, node, &body)).0, 0, "{opcode} {body:?}");
        }
        server.privileged = true;
        assert_eq!(ask(&mut server, &request(setattr, file, &chmod(0o104_755))).0, 0);
    }

    #[test]
    fn damaged_requests_are_survived() {
        let (_directory, mut server) = served(false);
        server.answer(&[], 100);
        server.answer(&[0xff; 39], 100);
        server.answer(&[0xff; 4000], 16);
        for opcode in 0..60 {
            server.answer(&request(opcode, 0x1234, &[0xff; 100]), 64);
            server.answer(&request(opcode, ROOT, &[]), 0);
        }
        assert_eq!(ask(&mut server, &request(LOOKUP, ROOT, b"file\0")).0, 0, "still there");
    }

    #[test]
    fn what_cannot_be_shared_is_named() {
        for path in ["/nonexistent/folder", "/etc/passwd"] {
            let folder = Folder::new(path, false);
            let error = FolderServer::open(&folder).err().expect("refused").to_string();
            assert!(error.contains(path), "{error}");
        }
    }
}
