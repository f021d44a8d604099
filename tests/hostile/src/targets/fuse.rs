//! Requests of a guest's kernel to a shared folder. As root the guest can be anybody, so this is done as it is in a jail: a secret lies
//! outside of the folder, and must be as it was.

use std::{
    cell::RefCell,
    fs,
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
};

use sharedfs::{Folder, FolderServer};
use tempfile::TempDir;
use virtio::FileServer;

use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "fuse", seeds, run };

const HEADER: usize = 40;
const INIT: u32 = 26;
const FALLOCATE: u32 = 43;
/// SETATTR, WRITE, FALLOCATE and where each has sizes and offsets that take room on the disk.
const SIZES: [(u32, &[usize]); 4] =
    [(4, &[56]), (16, &[48]), (FALLOCATE, &[48, 56]), (47, &[56, 72, 80])];
/// Requests of one input.
const MOST: usize = 60;
/// Inputs that a folder is used for.
const USES: u32 = 500;

struct Shared {
    directory: TempDir,
    server: FolderServer,
    /// Whoever is told what the host changes.
    listener: UnixStream,
    uses: u32,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The thread that tells of changes ends with it.
        let _ = self.listener.shutdown(Shutdown::Both);
    }
}

/// Plays the listener in the guest: says that it listens, and acknowledges each list of changes.
fn listen(mut stream: &UnixStream) -> io::Result<()> {
    stream.write_all(&[0])?;
    let (mut byte, mut is_empty) = ([0], false);
    loop {
        stream.read_exact(&mut byte)?;
        let is_end = byte[0] == 0;
        if is_end && is_empty {
            stream.write_all(&[0])?;
        }
        is_empty = is_end && !is_empty;
    }
}

thread_local! {
    static SHARED: RefCell<Option<Shared>> = const { RefCell::new(None) };
}

fn request(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = ((HEADER + body.len()) as u32).to_le_bytes().to_vec();
    bytes.extend(opcode.to_le_bytes());
    bytes.extend(7_u64.to_le_bytes());
    bytes.extend(node.to_le_bytes());
    bytes.extend([0; 16]);
    bytes.extend(body);
    bytes
}

impl Shared {
    fn new() -> Self {
        let directory = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a folder");
        let path = directory.path().join("shared");
        fs::create_dir_all(path.join("folder")).expect("made");
        fs::write(directory.path().join("secret"), "secret").expect("written");
        fs::write(path.join("file"), "hello").expect("written");
        std::os::unix::fs::symlink("../secret", path.join("link")).expect("linked");
        let folder = Folder::new(path, false);
        let mut server = FolderServer::open(&folder).expect("served");
        let init = [7_u32, 31, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
        server.answer(&request(INIT, 0, &init), 4096);
        let (listener, theirs) = UnixStream::pair().expect("a pair");
        server.withdrawals().start(theirs, 100).expect("a thread");
        let told = listener.try_clone().expect("a descriptor");
        thread::spawn(move || drop(listen(&told)));
        Self { directory, server, listener, uses: 0 }
    }

    fn is_untouched(&self) -> bool {
        let names = |path: &Path| fs::read_dir(path).expect("listed").count();
        let secret: PathBuf = self.directory.path().join("secret");
        names(self.directory.path()) == 2 && fs::read(secret).is_ok_and(|text| text == b"secret")
    }
}

/// Requests of all kinds, one after the other in each input.
fn seeds() -> Vec<Vec<u8>> {
    let words =
        |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let one = [
        request(1, 1, b"file\0"),
        request(1, 1, b"../secret\0"),
        request(3, 1, &words(&[0, 0])),
        request(14, 2, &words(&[2])),
        request(15, 2, &words(&[0, 0, 100, 0, 0])),
        request(16, 2, &[words(&[0, 0, 5, 0, 0]), b"hello".to_vec()].concat()),
        request(27, 1, &words(&[0])),
        request(28, 1, &words(&[0, 0, 4096, 0, 0])),
        request(35, 1, &[words(&[0o644 << 32 | 0o102, 0]), b"new\0".to_vec()].concat()),
        request(9, 1, &[words(&[0o755]), b"made\0".to_vec()].concat()),
        request(8, 1, &[words(&[0o100_644, 0]), b"node\0".to_vec()].concat()),
        request(12, 1, &[words(&[1]), b"new\0newer\0".to_vec()].concat()),
        request(13, 1, &[words(&[2]), b"hard\0".to_vec()].concat()),
        request(6, 1, b"symbolic\0../secret\0"),
        request(21, 2, &[words(&[1]), b"user.x\0v".to_vec()].concat()),
        request(22, 2, &[words(&[64]), b"user.x\0".to_vec()].concat()),
        request(4, 2, &words(&[1 | 8, 0, 3, 0, 0, 0, 0, 0, 0o644 << 32, 0, 0])),
        request(10, 1, b"newer\0"),
        request(17, 1, &[]),
        request(2, 2, &words(&[1])),
    ];
    let all = one.concat();
    one.into_iter().chain([all]).collect()
}

/// No request has the host's disk filled.
fn tame(request: &mut [u8]) {
    let opcode =
        request.get(4..8).and_then(|word| word.try_into().ok()).map_or(0, u32::from_le_bytes);
    let Some((_, fields)) = SIZES.iter().find(|(known, _)| *known == opcode) else { return };
    for at in *fields {
        if let Some(field) = request.get_mut(at + 3..at + 8) {
            field.fill(0);
        }
    }
}

fn run(bytes: &[u8]) {
    SHARED.with_borrow_mut(|shared| {
        shared.take_if(|shared| shared.uses >= USES);
        let shared = shared.get_or_insert_with(Shared::new);
        shared.uses += 1;
        let mut rest = bytes;
        for _ in 0..MOST {
            let Some(len) = rest.first_chunk().map(|word| u32::from_le_bytes(*word)) else { break };
            let (one, behind) = rest.split_at((len as usize).clamp(4, rest.len()));
            rest = behind;
            let mut one = one.to_vec();
            tame(&mut one);
            let room = if len % 5 == 0 { len as usize % 200 } else { 8192 };
            let answer = shared.server.answer(&one, room);
            assert!(answer.len() <= room, "an answer of {} bytes in {room}", answer.len());
        }
        assert!(shared.is_untouched(), "something outside has changed");
    });
}
