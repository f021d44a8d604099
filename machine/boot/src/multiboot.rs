//! Multiboot 1 (the GNU Multiboot Specification 0.6.96): 32-bit protected mode, EAX the magic, EBX
//! the information structure. Xen and the small test kernels of this world use it.
//!
//! There is no BIOS to call: a kernel that would (Xen) must be told not to (`no-real-mode`).

use crate::entry::{protected_mode, with};
use crate::image::{self, Image, Segment};
use crate::place::{Loader, PAGE};
use crate::unpacked::Bytes;
use crate::{BootProtocol, BootRequest, Error, bytes, layout};
use x86::{Vcpu, reg};

const FILE: &str = "multiboot kernel";
/// The header lies wholly in the first 8 KiB, 4-byte aligned.
const SEARCH: usize = 8192;
const HEADER_MAGIC: u32 = 0x1bad_b002;
const LOADER_MAGIC: u64 = 0x2bad_b002;
/// Header flags: the loader must refuse those of the low half it does not know. Page-aligned
/// modules (0) and memory information (1) we always give; of a video mode (2) we say that none is.
const KNOWN_REQUIREMENTS: u32 = 0b111;
const REQUIREMENTS: u32 = 0xffff;
/// Header flag: the address fields are valid and count, whatever the file format.
const HAS_ADDRESSES: u32 = 1 << 16;

/// Information flags: what is valid.
mod info {
    pub(super) const MEMORY: u32 = 1 << 0;
    pub(super) const CMDLINE: u32 = 1 << 2;
    pub(super) const MODULES: u32 = 1 << 3;
    pub(super) const MEMORY_MAP: u32 = 1 << 6;
    pub(super) const LOADER_NAME: u32 = 1 << 9;
    /// Bytes of the structure up to the VBE fields, 32-bit words.
    pub(super) const WORDS: usize = 22;
}

/// Longest command line we pass, in bytes without the terminating zero.
const CMDLINE_MAX: usize = 4095;
/// Loaders put the name of the file first in the command line; kernels skip the first word.
const KERNEL_NAME: &str = "kernel";

/// A multiboot header in a kernel file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    /// Where in the file.
    offset: usize,
    flags: u32,
}

impl Header {
    /// Finds the header.
    pub(crate) fn find(file: &[u8]) -> Option<Self> {
        (0..SEARCH.min(file.len())).step_by(4).find_map(|offset| {
            let word =
                |i: usize| bytes::u32(file, offset + 4 * i).filter(|_| offset + 12 <= SEARCH);
            let (magic, flags, checksum) = (word(0)?, word(1)?, word(2)?);
            let valid =
                magic == HEADER_MAGIC && magic.wrapping_add(flags).wrapping_add(checksum) == 0;
            valid.then_some(Self { offset, flags })
        })
    }

    /// The image, by the header's address fields if it has them, else as ELF. Second, its entry.
    fn image<'a>(&self, file: &'a [u8]) -> Result<(Image<'a>, u64), Error> {
        let image = if self.flags & HAS_ADDRESSES != 0 {
            self.flat_image(file)?
        } else if image::is_elf(file) {
            Image::parse_elf(file)?
        } else {
            return Err(malformed("it is not ELF and its header gives no addresses"));
        };
        let entry = image.entry_through_segments()?;
        Ok((image, entry))
    }

    /// The address fields (3.1.3): one segment, so many bytes before the header as the addresses
    /// say.
    fn flat_image<'a>(&self, file: &'a [u8]) -> Result<Image<'a>, Error> {
        let field = |i: usize| bytes::u32(file, self.offset + 12 + 4 * i).map(u64::from);
        let fields = [0, 1, 2, 3, 4].map(field);
        let [Some(header), Some(load), Some(load_end), Some(bss_end), Some(entry)] = fields else {
            return Err(Error::Truncated { file: FILE, part: "header" });
        };
        let before = header.checked_sub(load).ok_or(malformed("it loads after its header"))?;
        let start = (self.offset as u64).checked_sub(before);
        let start = start.ok_or(malformed("it starts before the file"))?;
        let filled = match load_end {
            0 => file.len() as u64 - start,
            end => end.checked_sub(load).ok_or(malformed("it ends before it starts"))?,
        };
        let data = bytes::slice(file, start, filled)
            .ok_or(Error::Truncated { file: FILE, part: "load range" })?;
        let len = filled.max(bss_end.saturating_sub(load));
        let segment =
            Segment { physical: load, virtual_address: load, data: Bytes::Read(data), len };
        Ok(Image { is_64bit: false, entry, segments: vec![segment], pvh_entry: None })
    }
}

/// Places a multiboot kernel, its modules and its information structure.
pub(crate) fn load(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    file: &[u8],
    header: Header,
) -> Result<Vcpu, Error> {
    if header.flags & REQUIREMENTS & !KNOWN_REQUIREMENTS != 0 {
        let why = "its header requires features no loader of this version has";
        return Err(Error::WrongProtocol { file: FILE, protocol: BootProtocol::Multiboot, why });
    }
    let (image, entry) = header.image(file)?;
    let entry = u32::try_from(entry).map_err(|_| malformed("it starts above 4 GiB"))?;
    image.place(loader)?;
    let end = image.segments.iter().map(|s| s.physical + s.len).max().unwrap_or(0);
    let info = place_info(loader, request, end)?;
    let vcpu = protected_mode(loader, entry)?;
    Ok(with(vcpu, &[(reg::RAX, LOADER_MAGIC), (reg::RBX, info)]))
}

/// Builds the information structure (3.3) and what it points to; returns its GPA.
fn place_info(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    kernel_end: u64,
) -> Result<u64, Error> {
    let line = format!("{KERNEL_NAME} {}", request.cmdline);
    let cmdline = place_string(loader, "kernel", &line)?;
    let modules = place_modules(loader, request, kernel_end)?;
    let (map_len, map) = place_memory_map(loader)?;
    let name = place_string(loader, "loader", "ring3")?;
    let extended = (loader.memory().low_len() - layout::EXTENDED) >> 10;
    let mut words = [0_u32; info::WORDS];
    words[0] = info::MEMORY | info::CMDLINE | info::MODULES | info::MEMORY_MAP | info::LOADER_NAME;
    words[1] = (layout::EBDA >> 10) as u32;
    words[2] = extended as u32;
    words[4] = cmdline;
    words[5] = request.modules.len() as u32;
    words[6] = modules;
    words[11] = map_len;
    words[12] = map;
    words[16] = name;
    loader.place_info("multiboot information", &words.map(u32::to_le_bytes).concat())
}

/// Places the modules on page boundaries above the kernel, where kernels expect them; returns the
/// GPA of the list of start, end, string, reserved.
fn place_modules(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    kernel_end: u64,
) -> Result<u32, Error> {
    let mut list = Vec::new();
    let from = kernel_end.max(layout::EXTENDED);
    for module in request.modules {
        let len = module.data.len() as u64;
        let start = loader.reserve_low("module", len, PAGE, from)?;
        loader.memory().write_gpa(start, module.data)?;
        let cmdline = place_string(loader, "module", module.cmdline)?;
        let end = (start + len) as u32;
        list.extend([start as u32, end, cmdline, 0].map(u32::to_le_bytes).concat());
    }
    if list.is_empty() {
        return Ok(0);
    }
    Ok(loader.place_info("module list", &list)? as u32)
}

/// The memory map: entries of base, length, kind, each preceded by its size. Returns bytes and GPA.
fn place_memory_map(loader: &mut Loader<'_>) -> Result<(u32, u32), Error> {
    let mut table = Vec::new();
    for entry in layout::memory_map(loader.memory()) {
        table.extend(20_u32.to_le_bytes());
        table.extend(entry.range.start.to_le_bytes());
        table.extend((entry.range.end - entry.range.start).to_le_bytes());
        table.extend((entry.kind as u32).to_le_bytes());
    }
    let at = loader.place_info("memory map", &table)?;
    Ok((table.len() as u32, at as u32))
}

fn place_string(loader: &mut Loader<'_>, of: &'static str, line: &str) -> Result<u32, Error> {
    if line.len() > CMDLINE_MAX {
        return Err(Error::CommandLineTooLong { len: line.len(), max: CMDLINE_MAX });
    }
    Ok(loader.place_info("command line", &crate::zero_terminated(of, line)?)? as u32)
}

fn malformed(what: &'static str) -> Error {
    Error::Malformed { file: FILE, what }
}
