//! The Linux bzImage: a real-mode part with the setup header in it, then the protected-mode part
//! (Documentation/arch/x86/boot.rst, "The Real-Mode Kernel Header").
//!
//! The real-mode part never runs here; its header is copied into the zero page.

use crate::{Error, bytes, crc, decompress::Format};
use ram::HIGH_BASE;

const FILE: &str = "bzImage";
const DAMAGED: &str = "its checksum is not that of its bytes; copy it again";
/// Start of the setup header, the same in the file and in the zero page.
pub(crate) const HEADER: usize = 0x1f1;
/// Bytes before the end of the header that `jump` at 0x200 gives the length from.
const JUMP_TARGET_BASE: usize = 0x202;
const MAGIC: &[u8] = b"HdrS";
const SECTOR: u64 = 512;
/// `setup_sects` of files that leave it zero.
const DEFAULT_SETUP_SECTORS: u8 = 4;
/// `loadflags`: the protected-mode part belongs at 1 MiB (a bzImage, not a zImage).
const LOADED_HIGH: u8 = 1 << 0;
/// `xloadflags`: there is a 64-bit entry point at 0x200.
const XLF_KERNEL_64: u16 = 1 << 0;
/// Where the protected-mode part goes unless the header prefers another place, a GPA.
const DEFAULT_LOAD: u64 = 0x10_0000;
/// `initrd_addr_max` of protocols before 2.03.
const OLD_INITRD_MAX: u64 = 0x37ff_ffff;
/// `cmdline_size` of protocols before 2.06.
const OLD_CMDLINE_SIZE: usize = 255;

/// A parsed bzImage.
#[derive(Debug)]
pub(crate) struct BzImage<'a> {
    file: &'a [u8],
    /// Protocol version, major in the high byte.
    pub(crate) version: u16,
    /// What runs.
    pub(crate) protected: &'a [u8],
}

/// Whether `file` starts like a bzImage.
pub(crate) fn is_bzimage(file: &[u8]) -> bool {
    file.get(0x202..0x206) == Some(MAGIC) && bytes::u16(file, 0x1fe) == Some(0xaa55)
}

impl<'a> BzImage<'a> {
    /// Reads the setup header.
    pub(crate) fn parse(file: &'a [u8]) -> Result<Self, Error> {
        let version = bytes::u16(file, 0x206).ok_or(truncated("setup header"))?;
        if version < 0x0202 || bytes::u8(file, 0x211).unwrap_or(0) & LOADED_HIGH == 0 {
            return Err(Error::ProtocolTooOld { version, needed: "a 32-bit entry (2.02)" });
        }
        let sectors = match bytes::u8(file, HEADER) {
            None | Some(0) => DEFAULT_SETUP_SECTORS,
            Some(n) => n,
        };
        let setup_len = (u64::from(sectors) + 1) * SECTOR;
        let protected = usize::try_from(setup_len).ok().and_then(|at| file.get(at..));
        let protected = protected.filter(|p| !p.is_empty()).ok_or(truncated("kernel code"))?;
        let image = Self { file, version, protected };
        image.check_len()?;
        Ok(image)
    }

    /// `syssize` counts the protected-mode part in 16-byte units, rounded up (from 2.04 on).
    fn check_len(&self) -> Result<(), Error> {
        let units = self.field32(0x1f4, 0x0204).unwrap_or(0);
        let complete = self.protected.len().div_ceil(16) as u64 >= u64::from(units);
        if complete { Ok(()) } else { Err(truncated("kernel code")) }
    }

    /// The setup header as it goes into the zero page: up to where its jump leads.
    pub(crate) fn header(&self) -> &'a [u8] {
        let jump = bytes::u8(self.file, JUMP_TARGET_BASE - 1).unwrap_or(0);
        let end = JUMP_TARGET_BASE + usize::from(jump);
        self.file.get(HEADER..end.min(self.file.len())).unwrap_or_default()
    }

    /// The compressed kernel and its format; `None` if the image does not say where it is, or it is
    /// of no known format: such images can only be entered as they are.
    pub(crate) fn payload(&self) -> Result<Option<(Format, &'a [u8])>, Error> {
        let offset = self.field32(0x248, 0x0208).unwrap_or(0);
        let len = self.field32(0x24c, 0x0208).unwrap_or(0);
        if len == 0 {
            return Ok(None);
        }
        let payload = bytes::slice(self.protected, offset.into(), len.into())
            .ok_or(truncated("compressed kernel"))?;
        let format = Format::detect(payload);
        if format.is_some_and(Format::lacks_checksum) && crc::differs(self.without_signature()) {
            return Err(Error::Malformed { file: FILE, what: DAMAGED });
        }
        Ok(format.map(|format| (format, payload)))
    }

    /// The file up to where its header says that it ends: a signature follows there.
    fn without_signature(&self) -> &'a [u8] {
        let units = self.field32(0x1f4, 0x0204).unwrap_or(0) as usize;
        let setup = self.file.len() - self.protected.len();
        self.file.get(..setup + units * 16).unwrap_or(self.file)
    }

    /// The image says it can be entered in 64-bit mode.
    pub(crate) fn has_64bit_entry(&self) -> bool {
        let flags = bytes::u16(self.file, 0x236).filter(|_| self.version >= 0x020c);
        flags.unwrap_or(0) & XLF_KERNEL_64 != 0
    }

    /// The last byte an initrd may occupy, a GPA.
    pub(crate) fn initrd_max(&self) -> u64 {
        self.field32(0x22c, 0x0203).map_or(OLD_INITRD_MAX, u64::from)
    }

    /// Longest command line, in bytes without the terminating zero.
    pub(crate) fn cmdline_size(&self) -> usize {
        self.field32(0x238, 0x0206).map_or(OLD_CMDLINE_SIZE, |n| n as usize)
    }

    /// Where the protected-mode part wants to be loaded, a GPA.
    pub(crate) fn preferred_load(&self) -> u64 {
        let preferred = bytes::u64(self.file, 0x258).filter(|_| self.version >= 0x020a);
        let usable = |at: &u64| self.is_relocatable() && (1..HIGH_BASE).contains(at);
        preferred.filter(usable).unwrap_or(DEFAULT_LOAD)
    }

    /// The protected-mode part runs anywhere that is aligned to [`BzImage::alignment`].
    pub(crate) fn is_relocatable(&self) -> bool {
        self.version >= 0x0205 && bytes::u8(self.file, 0x234).is_some_and(|r| r != 0)
    }

    /// Alignment a relocated kernel needs, in bytes: at least a page.
    pub(crate) fn alignment(&self) -> u64 {
        u64::from(self.field32(0x230, 0x0205).unwrap_or(0)).max(4096)
    }

    /// Bytes of memory the kernel needs from its load address on before it looks at the memory map.
    pub(crate) fn init_size(&self) -> u64 {
        let size = u64::from(self.field32(0x260, 0x020a).unwrap_or(0));
        size.max(self.protected.len() as u64)
    }

    /// A field of the header that exists `since` a version.
    fn field32(&self, offset: usize, since: u16) -> Option<u32> {
        bytes::u32(self.file, offset).filter(|_| self.version >= since)
    }
}

fn truncated(part: &'static str) -> Error {
    Error::Truncated { file: FILE, part }
}
