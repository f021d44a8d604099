//! Disk images that somebody else has made, read. Not written: imago allocates a damaged image's reference counts without end, which
//! ends the disk's process by its stack (CAVEATS.md).

use std::{cell::RefCell, fs, path::PathBuf};

use images::{Cache, Creation, Format, Image};
use tempfile::TempDir;

use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "qcow2", seeds, run };

const DISK: u64 = 1 << 20;

thread_local! {
    static FOLDER: RefCell<Option<TempDir>> = const { RefCell::new(None) };
}

/// A folder in memory, if the host has one.
fn folder() -> PathBuf {
    FOLDER.with_borrow_mut(|folder| {
        let folder = folder.get_or_insert_with(|| {
            let memory = TempDir::new_in("/dev/shm");
            memory.or_else(|_| TempDir::new()).expect("a folder")
        });
        folder.path().to_owned()
    })
}

fn image(path: PathBuf, readonly: bool) -> Image {
    Image { path, format: Some(Format::Qcow2), readonly, cache: Cache::Writeback }
}

/// An empty image, and one with some data.
fn seeds() -> Vec<Vec<u8>> {
    let made = |name: &str, data: bool| {
        let path = folder().join(name);
        let creation =
            Creation { path: path.clone(), format: Format::Qcow2, size: Some(DISK), backing: None };
        images::create(&creation).expect("an image");
        if data {
            let mut disk = images::open(&image(path.clone(), false)).expect("opened");
            disk.write_at(0, &[1; 4096]).expect("written");
            disk.write_at(DISK / 2, &[2; 512]).expect("written");
            disk.flush().expect("flushed");
        }
        let mut bytes = fs::read(path).expect("read");
        // What is behind is empty.
        bytes.truncate(60 << 10);
        bytes
    };
    vec![made("empty", false), made("used", true)]
}

fn run(bytes: &[u8]) {
    let path = folder().join("image");
    fs::write(&path, bytes).expect("written");
    // That it is refused is no failure.
    let Ok(mut disk) = images::open(&image(path, true)) else { return };
    let len = disk.len();
    let mut data = vec![0; 4096];
    for at in [0, len / 2 / 512 * 512, len.saturating_sub(4096) / 512 * 512] {
        if at.checked_add(4096).is_some_and(|end| end <= len) {
            // Damage shows as an error here, too.
            let _ = disk.read_at(at, &mut data);
        }
    }
}
