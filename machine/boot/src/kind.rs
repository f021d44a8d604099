//! What kind of file we were given, by its first bytes.

use crate::{Error, bzimage, image, multiboot::Header};

/// The kinds that can be booted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// A Linux bzImage.
    BzImage,
    /// Anything with a multiboot header.
    Multiboot(Header),
    /// ELF without a multiboot header.
    Elf,
}

impl Kind {
    /// Looks at the content only: names say nothing.
    pub(crate) fn detect(file: &[u8]) -> Result<Self, Error> {
        if file.is_empty() {
            return Err(Error::EmptyKernel);
        }
        if bzimage::is_bzimage(file) {
            return Ok(Self::BzImage);
        }
        if let Some(header) = Header::find(file) {
            return Ok(Self::Multiboot(header));
        }
        if image::is_elf(file) {
            return Ok(Self::Elf);
        }
        Err(refuse(file))
    }
}

/// Names what people hand over by mistake.
fn refuse(file: &[u8]) -> Error {
    const KNOWN: [(usize, &[u8], &str); 10] = [
        (0, b"070701", "a cpio archive (an initrd?)"),
        (0, b"070702", "a cpio archive (an initrd?)"),
        (0, b"QFI\xfb", "a qcow2 disk image"),
        (0, b"hsqs", "a squashfs file system"),
        (0, b"#!", "a script"),
        (0, b"!<arch>\n", "an archive (a Debian package?)"),
        (0x8001, b"CD001", "a CD image"),
        (0, b"MZ", "an EFI program without a bzImage header"),
        (0x1fe, b"\x55\xaa", "a disk image or boot sector"),
        (0, b"\x27\x05\x19\x56", "a U-Boot image"),
    ];
    if file.get(0x38..0x3c) == Some(b"ARM\x64") {
        return Error::WrongArchitecture { found: "64-bit Arm" };
    }
    let matches = |(at, magic, _): &&(usize, &[u8], _)| {
        file.get(*at..).is_some_and(|rest| rest.starts_with(magic))
    };
    let found = KNOWN.iter().find(matches).map_or("of a kind we do not know", |known| known.2);
    Error::NotAKernel { found }
}
