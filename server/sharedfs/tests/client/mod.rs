//! A guest's kernel, as far as a folder's server can tell: it asks and forgets.

// Each test uses a part of it.
#![allow(dead_code)]

use std::{os::unix::net::UnixStream, path::Path};

use sharedfs::{Folder, FolderServer, Keeping};
use virtio::FileServer;

pub const ROOT: u64 = 1;
const ROOM: usize = 1 << 16;

/// What a guest is told of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub node: u64,
    pub ino: u64,
    pub size: u64,
    pub mode: u32,
    /// When its content was changed: seconds, ns.
    pub changed: (u64, u32),
    /// Seconds the name and the attributes hold.
    pub valid: (u64, u64),
}

impl Found {
    pub fn is_folder(&self) -> bool {
        self.mode & 0o170_000 == 0o040_000
    }
}

/// An entry of a folder: its name, its inode number there, and what READDIRPLUS says of it.
pub struct ListedEntry {
    pub name: Vec<u8>,
    pub ino: u64,
    pub found: Option<Found>,
}

pub struct Client {
    server: FolderServer,
    unique: u64,
}

/// `Err` is the number of an error.
pub type Answer<T> = Result<T, i32>;

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// `struct fuse_attr` at the beginning of `attr`.
fn found(node: u64, attr: &[u8], valid: (u64, u64)) -> Found {
    let changed = (u64_at(attr, 32), u32_at(attr, 52));
    let (ino, size, mode) = (u64_at(attr, 0), u64_at(attr, 8), u32_at(attr, 60));
    Found { node, ino, size, mode, changed, valid }
}

/// `struct fuse_entry_out`.
fn entry(bytes: &[u8]) -> Found {
    found(u64_at(bytes, 0), &bytes[40..], (u64_at(bytes, 16), u64_at(bytes, 24)))
}

fn with_name(fixed: &[u8], names: &[&[u8]]) -> Vec<u8> {
    let mut body = fixed.to_vec();
    names.iter().for_each(|name| {
        body.extend_from_slice(name);
        body.push(0);
    });
    body
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl Client {
    pub fn new(path: &Path, readonly: bool, keeping: Keeping) -> Self {
        let folder = Folder { keeping, ..Folder::new(path, readonly) };
        Self::of(FolderServer::open(&folder).expect("served"))
    }

    /// A folder that is written, and what its listener hears.
    pub fn with_listener(path: &Path) -> (Self, UnixStream) {
        let folder = Folder { keeping: Keeping::Lasting, ..Folder::new(path, false) };
        let server = FolderServer::open(&folder).expect("served");
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        server.withdrawals().start(theirs, 1000).expect("started");
        (Self::of(server), ours)
    }

    fn of(server: FolderServer) -> Self {
        let mut client = Self { server, unique: 0 };
        client.ask(26, 0, &words(&[7, 31, 1 << 20, !(1 << 30)])).expect("begun");
        client
    }

    pub fn set_mode(&mut self, node: u64, mode: u32) -> Answer<Found> {
        let mut body = [0; 88];
        body[0] = 1;
        body[68..72].copy_from_slice(&mode.to_le_bytes());
        let answer = self.ask(4, node, &body)?;
        Ok(found(node, &answer[16..], (0, u64_at(&answer, 0))))
    }

    pub fn write(&mut self, node: u64, handle: u64, at: u64, bytes: &[u8]) -> Answer<()> {
        let mut body = handle.to_le_bytes().to_vec();
        body.extend(at.to_le_bytes());
        body.extend(words(&[bytes.len() as u32, 0, 0, 0, 0, 0]));
        body.extend(bytes);
        self.ask(16, node, &body).map(drop)
    }

    pub fn ask(&mut self, opcode: u32, node: u64, body: &[u8]) -> Answer<Vec<u8>> {
        self.unique += 2;
        let mut request = words(&[40 + body.len() as u32, opcode]);
        request.extend(self.unique.to_le_bytes());
        request.extend(node.to_le_bytes());
        request.extend([0; 16]);
        request.extend(body);
        let answer = self.server.answer(&request, ROOM);
        assert!(answer.len() >= 16, "an answer to {opcode}");
        assert_eq!(u64_at(answer, 8), self.unique);
        match u32_at(answer, 4) as i32 {
            0 => Ok(answer[16..].to_vec()),
            error => Err(-error),
        }
    }

    pub fn lookup(&mut self, folder: u64, name: &[u8]) -> Answer<Found> {
        self.ask(1, folder, &with_name(&[], &[name])).map(|answer| entry(&answer))
    }

    pub fn attributes(&mut self, node: u64) -> Answer<Found> {
        let answer = self.ask(3, node, &[0; 16])?;
        Ok(found(node, &answer[16..], (0, u64_at(&answer, 0))))
    }

    pub fn forget(&mut self, node: u64, times: u64) {
        self.unique += 2;
        let mut request = words(&[48, 2]);
        request.extend(self.unique.to_le_bytes());
        request.extend(node.to_le_bytes());
        request.extend([0; 16]);
        request.extend(times.to_le_bytes());
        assert!(self.server.answer(&request, 0).is_empty(), "nobody waits for an answer");
    }

    pub fn forget_all(&mut self, nodes: &[u64]) {
        for some in nodes.chunks(200) {
            self.unique += 2;
            let mut request = words(&[40 + 8 + 16 * some.len() as u32, 42]);
            request.extend(self.unique.to_le_bytes());
            request.extend([0; 24]);
            request.extend(words(&[some.len() as u32, 0]));
            some.iter().for_each(|node| {
                request.extend(node.to_le_bytes());
                request.extend(1_u64.to_le_bytes());
            });
            assert!(self.server.answer(&request, 0).is_empty(), "nobody waits for an answer");
        }
    }

    /// The handle and the options of a file that is opened.
    pub fn open(&mut self, node: u64, flags: u32) -> Answer<(u64, u32)> {
        let answer = self.ask(14, node, &words(&[flags, 0]))?;
        Ok((u64_at(&answer, 0), u32_at(&answer, 8)))
    }

    pub fn create(&mut self, folder: u64, name: &[u8]) -> Answer<(Found, u64)> {
        const RDWR_CREATE: u32 = 0o102;
        let body = with_name(&words(&[RDWR_CREATE, 0o644, 0, 0]), &[name]);
        let answer = self.ask(35, folder, &body)?;
        Ok((entry(&answer), u64_at(&answer, 128)))
    }

    pub fn release(&mut self, node: u64, handle: u64) -> Answer<()> {
        let mut body = handle.to_le_bytes().to_vec();
        body.extend([0; 16]);
        self.ask(18, node, &body).map(drop)
    }

    pub fn read(&mut self, node: u64, handle: u64, size: u32) -> Answer<Vec<u8>> {
        self.ask(15, node, &reading(handle, 0, size))
    }

    pub fn rename(&mut self, from: (u64, &[u8]), to: (u64, &[u8])) -> Answer<()> {
        let body = with_name(&to.0.to_le_bytes(), &[from.1, to.1]);
        self.ask(12, from.0, &body).map(drop)
    }

    pub fn remove(&mut self, folder: u64, name: &[u8]) -> Answer<()> {
        self.ask(10, folder, &with_name(&[], &[name])).map(drop)
    }

    pub fn make_folder(&mut self, folder: u64, name: &[u8]) -> Answer<Found> {
        let body = with_name(&words(&[0o755, 0]), &[name]);
        self.ask(9, folder, &body).map(|answer| entry(&answer))
    }

    pub fn remove_folder(&mut self, folder: u64, name: &[u8]) -> Answer<()> {
        self.ask(11, folder, &with_name(&[], &[name])).map(drop)
    }

    pub fn link(&mut self, node: u64, folder: u64, name: &[u8]) -> Answer<Found> {
        self.ask(13, folder, &with_name(&node.to_le_bytes(), &[name])).map(|answer| entry(&answer))
    }

    /// Everything in a folder, in answers as short as Linux 6.1 asks for.
    pub fn list(&mut self, node: u64, plus: bool) -> Answer<Vec<ListedEntry>> {
        self.list_by(node, plus, &mut || {})
    }

    /// The same, while something happens between questions.
    pub fn list_meanwhile(
        &mut self,
        node: u64,
        what: &mut dyn FnMut(),
    ) -> Answer<Vec<ListedEntry>> {
        self.list_by(node, true, what)
    }

    fn list_by(
        &mut self,
        node: u64,
        plus: bool,
        meanwhile: &mut dyn FnMut(),
    ) -> Answer<Vec<ListedEntry>> {
        let opened = self.ask(27, node, &words(&[0o200_000, 0]));
        let handle = match &opened {
            Ok(answer) => u64_at(answer, 0),
            Err(38) => 0,
            Err(error) => return Err(*error),
        };
        let (mut all, mut offset) = (Vec::new(), 0);
        loop {
            meanwhile();
            let body = reading(handle, offset, 4096);
            let answer = self.ask(if plus { 44 } else { 28 }, node, &body)?;
            if answer.is_empty() {
                break;
            }
            offset = collect(&answer, plus, &mut all);
        }
        if opened.is_ok() {
            let mut body = handle.to_le_bytes().to_vec();
            body.extend([0; 16]);
            self.ask(29, node, &body)?;
        }
        Ok(all)
    }
}

fn reading(handle: u64, offset: u64, size: u32) -> Vec<u8> {
    let mut body = handle.to_le_bytes().to_vec();
    body.extend(offset.to_le_bytes());
    body.extend(words(&[size, 0, 0, 0, 0, 0]));
    body
}

/// Takes an answer apart; returns where the next begins.
fn collect(mut answer: &[u8], plus: bool, all: &mut Vec<ListedEntry>) -> u64 {
    let before = if plus { 128 } else { 0 };
    let mut offset = 0;
    while !answer.is_empty() {
        let found = plus.then(|| entry(answer)).filter(|found| found.node != 0);
        let dirent = &answer[before..];
        offset = u64_at(dirent, 8);
        let len = u32_at(dirent, 16) as usize;
        let name = dirent[24..24 + len].to_vec();
        all.push(ListedEntry { name, ino: u64_at(dirent, 0), found });
        answer = &answer[before + (24 + len).next_multiple_of(8)..];
    }
    offset
}
