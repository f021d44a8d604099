//! The "newc" cpio format, which Linux unpacks as its first root file system
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

/// Mode bits of the file kinds.
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive being written.
#[derive(Debug, Default)]
pub struct CpioArchive {
    bytes: Vec<u8>,
    inode: u32,
}

struct Entry<'a> {
    name: &'a str,
    mode: u32,
    device: (u32, u32),
    content: &'a [u8],
}

impl CpioArchive {
    /// An empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory; its parent must have been added before.
    pub fn directory(&mut self, name: &str) {
        self.entry(&Entry { name, mode: DIRECTORY | 0o755, device: (0, 0), content: &[] });
    }

    /// Adds a regular file with the given permission bits.
    pub fn file(&mut self, name: &str, permissions: u32, content: &[u8]) {
        self.entry(&Entry { name, mode: REGULAR | permissions, device: (0, 0), content });
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, name: &str, target: &str) {
        let content = target.as_bytes();
        self.entry(&Entry { name, mode: SYMLINK | 0o777, device: (0, 0), content });
    }

    /// Adds a character device.
    pub fn character_device(&mut self, name: &str, major: u32, minor: u32) {
        let mode = CHARACTER_DEVICE | 0o600;
        self.entry(&Entry { name, mode, device: (major, minor), content: &[] });
    }

    /// Ends the archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(&Entry { name: "TRAILER!!!", mode: 0, device: (0, 0), content: &[] });
        self.bytes
    }

    fn entry(&mut self, entry: &Entry<'_>) {
        self.inode += 1;
        let name_len = entry.name.len() as u32 + 1;
        let fields = [
            self.inode,
            entry.mode,
            0, // owner
            0, // group
            1, // links
            0, // modification time: none, so that equal content gives equal archives
            entry.content.len() as u32,
            0, // device the file is on, major
            0, // and minor
            entry.device.0,
            entry.device.1,
            name_len,
            0, // checksum, unused in this variant
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(entry.name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(entry.content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_of_one_file() {
        let mut archive = CpioArchive::new();
        archive.file("init", 0o755, b"hello");
        let bytes = archive.finish();
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[14..22], b"000081ED", "mode");
        assert_eq!(&bytes[54..62], b"00000005", "size");
        assert_eq!(&bytes[94..102], b"00000005", "length of the name with its zero");
        assert_eq!(&bytes[110..115], b"init\0");
        assert_eq!(&bytes[116..124], b"hello\0\0\0", "name and content padded to 4");
        assert_eq!(&bytes[124..130], b"070701", "the trailer follows");
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn the_same_content_gives_the_same_bytes() {
        let make = || {
            let mut archive = CpioArchive::new();
            archive.directory("dev");
            archive.character_device("dev/console", 5, 1);
            archive.symlink("bin", "usr/bin");
            archive.finish()
        };
        assert_eq!(make(), make());
    }
}
