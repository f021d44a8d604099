//! A kernel as its file describes it: pieces with physical addresses, and where to start.
//!
//! ELF program headers give both (System V gABI, chapter 5); section headers are never looked at.
//! Every range is checked against the file when the image is parsed and against guest RAM when it
//! is placed, so a damaged file ends in an error and not in memory.

use crate::place::{Loader, zero};
use crate::unpacked::{self, Bytes, Unpacked};
use crate::{Error, bytes};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{LittleEndian, elf};

const FILE: &str = "ELF kernel";
/// Loadable segments we put up with; real kernels have at most a handful.
const MAX_SEGMENTS: usize = 128;
/// `XEN_ELFNOTE_PHYS32_ENTRY`, the PVH entry point (Xen public/elfnote.h).
const PHYS32_ENTRY: u32 = 18;

/// Contiguous guest memory an image fills.
#[derive(Debug)]
pub(crate) struct Segment<'a> {
    /// Where it is to lie, a GPA.
    pub(crate) physical: u64,
    /// Where the kernel will map it, a GVA.
    pub(crate) virtual_address: u64,
    /// Its first bytes.
    pub(crate) data: Bytes<'a>,
    /// All its bytes; zeros follow the data.
    pub(crate) len: u64,
}

/// A kernel ready to be placed.
#[derive(Debug)]
pub(crate) struct Image<'a> {
    /// The file is ELF64.
    pub(crate) is_64bit: bool,
    /// Entry point as the file gives it.
    pub(crate) entry: u64,
    /// What to place, none empty.
    pub(crate) segments: Vec<Segment<'a>>,
    /// 32-bit PVH entry point, a GPA, if the kernel has one.
    pub(crate) pvh_entry: Option<u32>,
}

/// Whether `file` starts like an ELF file.
pub(crate) fn is_elf(file: &[u8]) -> bool {
    file.starts_with(&elf::ELFMAG)
}

impl<'a> Image<'a> {
    /// Reads an ELF kernel for i386 or x86-64.
    pub(crate) fn parse_elf(file: &'a [u8]) -> Result<Self, Error> {
        let part = |offset, len| bytes::slice(file, offset, len).map(Bytes::Read);
        let truncated = Error::Truncated { file: FILE, part: "header" };
        let class = bytes::u8(file, 4).ok_or(truncated)?;
        if bytes::u8(file, 5) == Some(elf::ELFDATA2MSB) {
            return Err(Error::WrongArchitecture { found: "a big-endian CPU" });
        }
        match class {
            elf::ELFCLASS32 => Self::parse::<elf::FileHeader32<LittleEndian>>(file, part),
            elf::ELFCLASS64 => Self::parse::<elf::FileHeader64<LittleEndian>>(file, part),
            _ => Err(Error::Malformed { file: FILE, what: "its class is neither 32 nor 64 bits" }),
        }
    }

    /// Reads the headers of an ELF kernel for x86-64 that an earlier machine has unpacked. A PVH entry point is not looked for.
    pub(crate) fn parse_unpacked(file: &'a dyn Unpacked) -> Result<Self, Error> {
        let mut head = Vec::new();
        unpacked::read(file, 0, &mut head)?;
        let part = |offset: u64, len| {
            let inside = offset.checked_add(len).is_some_and(|end| end <= file.size());
            inside.then_some(Bytes::Kept { file, offset, len })
        };
        let image = Self::parse::<elf::FileHeader64<LittleEndian>>(&head, part);
        image.map_err(|_| Error::NotAsUnpacked)
    }

    /// Reads the headers in `file`. Of what they describe `part` has the bytes, by offset and length.
    fn parse<H: FileHeader<Endian = LittleEndian>>(
        file: &[u8],
        part: impl Fn(u64, u64) -> Option<Bytes<'a>>,
    ) -> Result<Self, Error> {
        let header = H::parse(file).map_err(|_| malformed("its file header is not valid"))?;
        check_machine(header.e_machine(LittleEndian))?;
        if !matches!(header.e_type(LittleEndian), elf::ET_EXEC | elf::ET_DYN) {
            return Err(malformed("it is not an executable (an object file, a module or a core)"));
        }
        let program_headers = header
            .program_headers(LittleEndian, file)
            .map_err(|_| Error::Truncated { file: FILE, part: "program header table" })?;
        Ok(Self {
            is_64bit: header.is_class_64(),
            entry: header.e_entry(LittleEndian).into(),
            segments: segments(program_headers, part)?,
            pvh_entry: program_headers.iter().find_map(|p| pvh_note(p, file)),
        })
    }

    /// Entry point as a GPA, of a kernel whose entry point is a GVA of one of its segments (or
    /// already a GPA, where the segments lie at their own addresses).
    pub(crate) fn entry_through_segments(&self) -> Result<u64, Error> {
        let inside = |s: &&Segment<'_>| contains(s.virtual_address, s.len, self.entry);
        match self.segments.iter().find(inside) {
            Some(s) => Ok(s.physical.wrapping_add(self.entry - s.virtual_address)),
            None => self.check_entry(self.entry),
        }
    }

    /// `entry` if it is a GPA inside the image.
    pub(crate) fn check_entry(&self, entry: u64) -> Result<u64, Error> {
        let known = self.segments.iter().any(|s| contains(s.physical, s.len, entry));
        known.then_some(entry).ok_or(malformed("its entry point lies outside its segments"))
    }

    /// Puts the segments where they belong.
    pub(crate) fn place(&self, loader: &mut Loader<'_>) -> Result<(), Error> {
        for segment in &self.segments {
            loader.claim("kernel", segment.physical, segment.len)?;
            let filled = segment.data.len();
            segment.data.write(loader.memory(), segment.physical)?;
            zero(loader.memory(), segment.physical + filled, segment.len - filled)?;
        }
        Ok(())
    }
}

/// The loadable segments, each no longer in the file than in memory.
fn segments<'a, P: ProgramHeader<Endian = LittleEndian>>(
    headers: &[P],
    part: impl Fn(u64, u64) -> Option<Bytes<'a>>,
) -> Result<Vec<Segment<'a>>, Error> {
    let e = LittleEndian;
    let mut segments = Vec::new();
    for header in headers.iter().filter(|h| h.p_type(e) == elf::PT_LOAD) {
        let (offset, filled) = (header.p_offset(e).into(), header.p_filesz(e).into());
        let data = part(offset, filled)
            .ok_or(Error::Truncated { file: FILE, part: "loadable segment" })?;
        let (physical, len) = (header.p_paddr(e).into(), header.p_memsz(e).into());
        if filled > len {
            return Err(malformed("a segment is larger in the file than in memory"));
        }
        if len > 0 {
            let virtual_address = header.p_vaddr(e).into();
            segments.push(Segment { physical, virtual_address, data, len });
        }
    }
    match segments.len() {
        0 => Err(malformed("it has nothing to load")),
        n if n > MAX_SEGMENTS => Err(malformed("it has more segments than any kernel")),
        _ => Ok(segments),
    }
}

/// The PVH entry point in a note segment. Damaged notes count as none: they are optional.
fn pvh_note<P: ProgramHeader<Endian = LittleEndian>>(header: &P, file: &[u8]) -> Option<u32> {
    let mut notes = header.notes(LittleEndian, file).ok()??;
    while let Ok(Some(note)) = notes.next() {
        if note.name() == b"Xen" && note.n_type(LittleEndian) == PHYS32_ENTRY {
            return bytes::u32(note.desc(), 0);
        }
    }
    None
}

fn check_machine(machine: u16) -> Result<(), Error> {
    let found = match machine {
        elf::EM_386 | elf::EM_X86_64 => return Ok(()),
        elf::EM_AARCH64 => "64-bit Arm",
        elf::EM_ARM => "32-bit Arm",
        elf::EM_RISCV => "RISC-V",
        elf::EM_PPC | elf::EM_PPC64 => "PowerPC",
        elf::EM_S390 => "IBM Z",
        elf::EM_MIPS => "MIPS",
        elf::EM_LOONGARCH => "LoongArch",
        _ => "another architecture",
    };
    Err(Error::WrongArchitecture { found })
}

fn contains(start: u64, len: u64, address: u64) -> bool {
    address.checked_sub(start).is_some_and(|offset| offset < len)
}

fn malformed(what: &'static str) -> Error {
    Error::Malformed { file: FILE, what }
}
