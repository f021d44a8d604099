//! Images made, written, opened again; and files that are none.

use super::*;
use std::fs;
use tempfile::TempDir;

const SIZE: u64 = 64 << 20;

fn image(path: &Path) -> Image {
    Image { path: path.into(), format: None, readonly: false, cache: Cache::default() }
}

fn made(directory: &TempDir, name: &str, backing: Option<&Path>) -> PathBuf {
    let path = directory.path().join(name);
    let format = Format::of_name(&path);
    let backing = backing.map(|path| (path.to_owned(), Format::of_name(path)));
    let size = backing.is_none().then_some(SIZE);
    create(&Creation { path: path.clone(), format, size, backing }).expect("made");
    path
}

fn message(image: &Image) -> String {
    open(image).err().expect("it is refused").to_string()
}

#[test]
fn what_was_flushed_is_there_again() {
    let directory = TempDir::new().expect("a folder");
    for name in ["disk.qcow2", "disk.img"] {
        let path = made(&directory, name, None);
        let mut disk = open(&image(&path)).expect("opened");
        assert_eq!(disk.len(), SIZE);
        disk.write_at(SIZE - 1024, &[7; 1024]).expect("written");
        disk.write_at(0, &[9; 512]).expect("written");
        disk.flush().expect("flushed");
        disk.discard(1 << 20, 1 << 20).expect("discarded");
        disk.write_zeroes(SIZE - 512, 512, true).expect("zeroed");
        drop(disk);
        let mut disk = open(&image(&path)).expect("opened again");
        let mut data = [1; 1536];
        disk.read_at(SIZE - 1536, &mut data).expect("read");
        assert_eq!(data[..512], [0; 512]);
        assert_eq!(data[512..1024], [7; 512]);
        assert_eq!(data[1024..], [0; 512]);
        assert!(path.metadata().expect("there").len() <= SIZE);
    }
}

#[test]
fn a_backing_image_shows_through_and_stays_as_it_is() {
    let directory = TempDir::new().expect("a folder");
    let base = made(&directory, "base.qcow2", None);
    open(&image(&base)).expect("opened").write_at(4096, &[5; 4096]).expect("written");
    let over = made(&directory, "over.qcow2", Some(&base));
    let before = fs::read(&base).expect("read");
    let mut disk = open(&image(&over)).expect("opened");
    assert_eq!(disk.len(), SIZE);
    let mut data = [0; 4096];
    disk.read_at(4096, &mut data).expect("read");
    assert_eq!(data, [5; 4096]);
    disk.write_at(4096, &[6; 512]).expect("written");
    disk.flush().expect("flushed");
    disk.read_at(4096, &mut data).expect("read");
    assert_eq!((data[0], data[512]), (6, 5));
    assert!(message(&image(&base)).contains("in use"), "its base must not change meanwhile");
    drop(disk);
    assert!(fs::read(&base).expect("read") == before);
}

#[test]
fn one_writer_or_many_readers() {
    let directory = TempDir::new().expect("a folder");
    let path = made(&directory, "disk.qcow2", None);
    let reader = Image { readonly: true, ..image(&path) };
    let first = open(&reader).expect("a reader");
    let second = open(&reader).expect("another");
    assert!(message(&image(&path)).contains("in use"));
    drop((first, second));
    let _writer = open(&image(&path)).expect("a writer");
    assert!(message(&reader).contains("in use"));
}

#[test]
fn files_that_are_no_images_are_named() {
    let directory = TempDir::new().expect("a folder");
    let path = directory.path().join("bad.qcow2");
    assert!(message(&image(&path)).contains("does not exist"));
    fs::write(&path, "not qcow2 at all").expect("written");
    assert!(message(&image(&path)).contains("no usable qcow2"));
    let good = fs::read(made(&directory, "good.qcow2", None)).expect("read");
    // Header fields damaged one at a time: version, cluster bits, size, table sizes and places.
    for at in [4, 20, 24, 36, 40, 48, 56] {
        let mut bytes = good.clone();
        bytes[at..at + 4].fill(0xff);
        fs::write(&path, bytes).expect("written");
        match open(&image(&path)) {
            Err(error) => assert!(error.to_string().contains("bad.qcow2"), "{at}: {error}"),
            // What can be opened must not panic when used.
            Ok(mut disk) => drop(disk.read_at(0, &mut [0; 512])),
        }
    }
    // A table of feature names that ends in its first name, where extensions begin.
    let mut bytes = good.clone();
    let at = u32::from_be_bytes(bytes[100..104].try_into().expect("four bytes")) as usize;
    bytes[at..at + 8].copy_from_slice(&[0x68, 0x03, 0xf8, 0x57, 0, 0, 0, 1]);
    fs::write(&path, bytes).expect("written");
    assert!(message(&image(&path)).contains("feature names"));
    fs::write(&path, &good[..50]).expect("cut");
    assert!(message(&image(&path)).contains("no usable qcow2"));
    let missing = directory.path().join("missing.img");
    let creation = Creation {
        path: directory.path().join("x.qcow2"),
        format: Format::Qcow2,
        size: None,
        backing: Some((missing, Format::Raw)),
    };
    assert!(create(&creation).expect_err("no base").to_string().contains("missing.img"));
}

#[test]
fn the_format_is_not_taken_from_the_content() {
    let directory = TempDir::new().expect("a folder");
    let path = made(&directory, "disk.qcow2", None);
    let renamed = directory.path().join("disk.img");
    fs::rename(path, &renamed).expect("renamed");
    assert!(message(&image(&renamed)).contains("format=qcow2"));
    let insists = Image { format: Some(Format::Raw), ..image(&renamed) };
    // Raw after all, if its length allows.
    assert!(open(&insists).is_ok_and(|disk| disk.len() < SIZE));
    let qcow2 = Image { format: Some(Format::Qcow2), ..image(&renamed) };
    assert!(open(&qcow2).is_ok_and(|disk| disk.len() == SIZE));
}

#[test]
fn new_images_replace_nothing() {
    let directory = TempDir::new().expect("a folder");
    let path = made(&directory, "disk.qcow2", None);
    let creation = Creation { path, format: Format::Qcow2, size: Some(SIZE), backing: None };
    assert!(matches!(create(&creation), Err(CreateError::Exists(_))));
    let path = directory.path().join("new.img");
    for size in [None, Some(0), Some(100)] {
        let creation = Creation { path: path.clone(), format: Format::Raw, size, backing: None };
        assert!(create(&creation).is_err());
        assert!(!path.exists());
    }
}

/// Bytes the file takes on the host.
fn used(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    path.metadata().expect("there").blocks() * 512
}

#[test]
fn a_raw_disk_gives_what_it_does_not_need_back_to_the_host() {
    let directory = TempDir::new().expect("a folder");
    for cache in [Cache::Writeback, Cache::None] {
        let path = made(&directory, &format!("{cache:?}.img"), None);
        let mut disk = open(&Image { cache, ..image(&path) }).expect("opened");
        disk.write_at(0, &vec![7; 8 << 20]).expect("written");
        disk.flush().expect("flushed");
        let full = used(&path);
        disk.discard(0, 4 << 20).expect("discarded");
        let half = used(&path);
        assert!(half + (3 << 20) < full, "{half} of {full} after a discard");
        disk.write_zeroes(4 << 20, 4 << 20, true).expect("zeroed");
        let least = used(&path);
        assert!(least + (3 << 20) < half, "{least} of {half} after zeroes");
        let mut data = [1; 512];
        disk.read_at((8 << 20) - 512, &mut data).expect("read");
        assert_eq!(data, [0; 512]);
    }
}

#[test]
fn a_qcow2_disk_uses_again_what_was_discarded() {
    let directory = TempDir::new().expect("a folder");
    let path = made(&directory, "disk.qcow2", None);
    let mut disk = open(&image(&path)).expect("opened");
    disk.write_at(0, &vec![7; 8 << 20]).expect("written");
    disk.flush().expect("flushed");
    let full = used(&path);
    for round in 1..4 {
        disk.discard(0, 8 << 20).expect("discarded");
        disk.write_at(0, &vec![round; 8 << 20]).expect("written");
        disk.flush().expect("flushed");
    }
    let again = used(&path);
    assert!(again < full + (1 << 20), "{full} bytes grew to {again}");
}

#[test]
fn without_a_cache_the_page_cache_is_passed_by() {
    let directory = TempDir::new().expect("a folder");
    let path = made(&directory, "disk.img", None);
    let disk = open(&Image { cache: Cache::None, ..image(&path) }).expect("opened");
    assert!(is_open_directly(&path), "O_DIRECT is not set");
    drop(disk);
    let _disk = open(&image(&path)).expect("opened");
    assert!(!is_open_directly(&path), "O_DIRECT is set");
}

/// Whether one of our descriptors of the file has O_DIRECT.
fn is_open_directly(path: &Path) -> bool {
    const O_DIRECT: u32 = 0o40000;
    let descriptors = fs::read_dir("/proc/self/fd").expect("listed").flatten();
    let ours = descriptors.filter(|entry| fs::read_link(entry.path()).is_ok_and(|to| to == path));
    let flags = |name| {
        let info = fs::read_to_string(Path::new("/proc/self/fdinfo").join(name)).expect("read");
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).expect("flags");
        u32::from_str_radix(flags.trim(), 8).expect("octal")
    };
    ours.map(|entry| flags(entry.file_name())).any(|flags| flags & O_DIRECT != 0)
}

/// To open each file takes stack, and it could go on for ever.
#[test]
fn an_image_that_is_its_own_backing_file_is_refused() {
    let directory = TempDir::new().expect("a folder");
    let below = made(&directory, "below.qcow2", None);
    let above = made(&directory, "above.qcow2", Some(&below));
    fs::remove_file(&below).expect("removed");
    std::os::unix::fs::symlink(&above, &below).expect("linked");
    let said = message(&Image { readonly: true, ..image(&above) });
    assert!(said.contains("backing files or more"), "{said}");
}
