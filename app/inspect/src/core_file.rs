//! A machine as an ELF core: a segment for each range of RAM, by physical address, the registers of each vCPU as
//! `NT_PRSTATUS`, and the kernel's `VMCOREINFO`. It is what `makedumpfile` and QEMU's `dump-guest-memory` write.

use std::io::{self, Write};

use ram::{HIGH_BASE, PAGE, Ram};
use vmm::Inspector;
use x86::{Vcpu, seg};

use crate::{backing::Backing, stopped::StoppedVcpus, vmcoreinfo::VmCoreInfo};

/// Bytes of the file's header, and of that of each segment.
const FILE_HEADER: usize = 64;
const SEGMENT_HEADER: usize = 56;
/// Bytes of `struct elf_prstatus`.
const PRSTATUS: usize = 336;
/// Where it has the process number, and the registers.
const PID: usize = 32;
const REGISTERS: usize = 112;
const NT_PRSTATUS: u32 = 1;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
/// Where the kernel's image is mapped (GVA), and its bytes at the most. Every Linux of this architecture has it there.
const IMAGE: u64 = 0xffff_ffff_8000_0000;
const IMAGE_LEN: u64 = 128 << 20;
/// Where modules begin (GVA): an image that is placed at random can be right before them.
const MODULES: u64 = 0xffff_ffff_c000_0000;
/// An image begins at a multiple of so many bytes, and `_stext` lies less than that behind its beginning.
const STEP: u64 = 2 << 20;
/// Bytes copied at a time.
const PIECE: u64 = 1 << 20;

/// A core that is to be written; the machine stands until it is dropped.
pub struct Core {
    ram: Ram,
    backing: Backing,
    head: Vec<u8>,
    info: Option<VmCoreInfo>,
    _stopped: StoppedVcpus,
}

impl Core {
    /// Has the machine stand, and takes its registers.
    ///
    /// # Errors
    /// The host gives no descriptor.
    pub fn new(inspector: &Inspector) -> io::Result<Self> {
        let stopped = StoppedVcpus::new(inspector);
        let state = |vcpu| inspector.run_on_vcpu(vcpu, |access| access.engine.vcpu().clone());
        let vcpus: Vec<Vcpu> = (0..inspector.vcpus()).filter_map(state).collect();
        let ram = inspector.ram().clone();
        let info = VmCoreInfo::find(&ram);
        let head = head(&vcpus, info.as_ref(), &ranges(&ram));
        let backing = Backing::new(&ram)?;
        Ok(Self { ram, backing, head, info, _stopped: stopped })
    }

    /// Bytes of the file.
    #[allow(clippy::len_without_is_empty)] // there is always RAM
    pub fn len(&self) -> u64 {
        self.head.len() as u64 + self.ram.len()
    }

    /// What crash and drgn will miss, in words.
    pub fn missing(&self) -> Option<&'static str> {
        self.info.is_none().then_some(
            "there is no VMCOREINFO in the guest's memory: no Linux kernel, or not booted so far, or one without \
             CONFIG_CRASH_CORE; crash and drgn will not know what they see",
        )
    }

    /// Writes all of it.
    ///
    /// # Errors
    /// `output` fails.
    pub fn write(&self, output: &mut impl Write) -> io::Result<()> {
        output.write_all(&self.head)?;
        let mut bytes = vec![0; PIECE as usize];
        for at in (0..self.ram.len()).step_by(PIECE as usize) {
            let part = &mut bytes[..PIECE.min(self.ram.len() - at) as usize];
            // Ranges of RAM follow each other in the file as in the memory object.
            self.backing.read(at, part)?;
            output.write_all(part)?;
        }
        output.flush()
    }
}

/// Memory in a core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its first byte (GVA); zero if the core names this memory by its GPA only.
    pub gva: u64,
    /// Its first byte (GPA).
    pub gpa: u64,
    /// Bytes.
    pub len: u64,
    /// Byte offset of its first byte in the file that is the machine's RAM.
    pub at: u64,
}

/// Where the memory in a core begins: a byte offset in the core's file.
pub fn head_len(core: &[u8]) -> Option<usize> {
    loads(core).map(|[at, ..]| at).min().and_then(|at| at.try_into().ok())
}

/// The memory in a core of ours, of which `core` is the beginning.
pub fn segments(core: &[u8]) -> Vec<Segment> {
    let begins = head_len(core).unwrap_or(0) as u64;
    let segment = |[at, gva, gpa, len]: [u64; 4]| Segment { gva, gpa, len, at: at - begins };
    loads(core).map(segment).collect()
}

/// The memory in a core, by its `PT_LOAD` headers: of each the offset in the file, the GVA, the GPA, and the length in
/// bytes.
fn loads(core: &[u8]) -> impl Iterator<Item = [u64; 4]> {
    let word = |at: usize| Some(u64::from_le_bytes(core.get(at..at + 8)?.try_into().ok()?));
    let count = core.get(56..58).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    let load = move |n: u16| {
        let header = FILE_HEADER + SEGMENT_HEADER * usize::from(n);
        (u64::from(PT_LOAD) == word(header)? & 0xffff_ffff).then_some(())?;
        let [at, gva, gpa, len] = [8, 16, 24, 32].map(|more| word(header + more));
        Some([at?, gva?, gpa?, len?])
    };
    (0..count).filter_map(load)
}

/// RAM: GPA and bytes of each range.
fn ranges(ram: &Ram) -> Vec<(u64, u64)> {
    let all = [(0, ram.low_len()), (HIGH_BASE, ram.high_len())];
    all.into_iter().filter(|range| range.1 != 0).collect()
}

/// The kernel's image as it is mapped: GVA, GPA and bytes. drgn finds the page tables there, with which it finds all else.
fn image(info: &VmCoreInfo, low: u64) -> Option<[u64; 3]> {
    let first = info.symbol("_stext")? / STEP * STEP;
    let gpa = first.checked_sub(IMAGE)?.checked_add_signed(info.number("phys_base")?)?;
    let len = low.checked_sub(gpa)?.min(IMAGE_LEN).min(MODULES.checked_sub(first)?);
    Some([first, gpa, len])
}

/// Everything before RAM: whole pages.
fn head(vcpus: &[Vcpu], info: Option<&VmCoreInfo>, ranges: &[(u64, u64)]) -> Vec<u8> {
    let mut notes = Vec::new();
    for (number, vcpu) in vcpus.iter().enumerate() {
        notes.extend(note(b"CORE\0", NT_PRSTATUS, &status(vcpu, number as u32 + 1)));
    }
    let text = info.map(|info| note(b"VMCOREINFO\0", 0, info.text().as_bytes()));
    notes.extend(text.unwrap_or_default());
    let image = info.and_then(|info| image(info, ranges.first()?.1));
    let segments = ranges.len() + 1 + usize::from(image.is_some());
    let start = FILE_HEADER + SEGMENT_HEADER * segments;
    let end = (start + notes.len()).next_multiple_of(PAGE as usize);
    let mut head = file_header(segments as u16);
    head.extend(segment(PT_NOTE, start as u64, [0, 0, notes.len() as u64]));
    let mut at = end as u64;
    if let Some(image) = image {
        head.extend(segment(PT_LOAD, at + image[1], image));
    }
    for (gpa, len) in ranges {
        head.extend(segment(PT_LOAD, at, [0, *gpa, *len]));
        at += len;
    }
    head.extend(notes);
    head.resize(end, 0);
    head
}

fn file_header(segments: u16) -> Vec<u8> {
    const CORE: u16 = 4;
    const X86_64: u16 = 62;
    let mut head = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    head.extend([CORE.to_le_bytes(), X86_64.to_le_bytes()].concat());
    head.extend(1u32.to_le_bytes()); // version
    head.extend([0, FILE_HEADER as u64, 0].map(u64::to_le_bytes).concat()); // entry, segments, sections
    head.extend(0u32.to_le_bytes()); // flags
    let sizes = [FILE_HEADER as u16, SEGMENT_HEADER as u16, segments, 0, 0, 0];
    head.extend(sizes.map(u16::to_le_bytes).concat());
    head
}

fn segment(kind: u32, offset: u64, [gva, gpa, len]: [u64; 3]) -> Vec<u8> {
    let flags = if kind == PT_LOAD { 7 } else { 0 };
    let mut header = [kind, flags].map(u32::to_le_bytes).concat();
    header.extend([offset, gva, gpa, len, len, 0].map(u64::to_le_bytes).concat());
    header
}

fn note(name: &[u8], kind: u32, content: &[u8]) -> Vec<u8> {
    let sizes = [name.len() as u32, content.len() as u32, kind];
    let mut note = sizes.map(u32::to_le_bytes).concat();
    for part in [name, content] {
        note.extend(part);
        note.resize(note.len().next_multiple_of(4), 0);
    }
    note
}

/// `struct elf_prstatus`.
fn status(vcpu: &Vcpu, pid: u32) -> Vec<u8> {
    let mut status = vec![0; PRSTATUS];
    status[PID..PID + 4].copy_from_slice(&pid.to_le_bytes());
    let registers = registers(vcpu).map(u64::to_le_bytes).concat();
    status[REGISTERS..REGISTERS + registers.len()].copy_from_slice(&registers);
    status
}

/// `struct user_regs_struct`.
fn registers(vcpu: &Vcpu) -> [u64; 27] {
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15] = vcpu.gpr;
    let selector = |segment: usize| u64::from(vcpu.seg[segment].selector);
    let [cs, ss, ds] = [seg::CS, seg::SS, seg::DS].map(selector);
    let [es, fs, gs] = [seg::ES, seg::FS, seg::GS].map(selector);
    let (fs_base, gs_base) = (vcpu.seg[seg::FS].base, vcpu.seg[seg::GS].base);
    let none = u64::MAX; // no system call
    [
        r15,
        r14,
        r13,
        r12,
        rbp,
        rbx,
        r11,
        r10,
        r9,
        r8,
        rax,
        rcx,
        rdx,
        rsi,
        rdi,
        none,
        vcpu.rip,
        cs,
        vcpu.rflags,
        rsp,
        ss,
        fs_base,
        gs_base,
        ds,
        es,
        fs,
        gs,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("inside"))
    }

    #[test]
    fn the_kernels_image_is_where_it_is_mapped() {
        let text = b"OSRELEASE=6\nSYMBOL(_stext)=ffffffff81e00040\nNUMBER(phys_base)=-1048576\n";
        let info = VmCoreInfo::of_text(text).expect("sound");
        let placed = image(&info, 64 << 20);
        assert_eq!(placed, Some([0xffff_ffff_81e0_0000, 0x1d0_0000, (64 << 20) - 0x1d0_0000]));
        let head = head(&[], Some(&info), &[(0, 64 << 20)]);
        let image = &head[FILE_HEADER + SEGMENT_HEADER..];
        let [offset, gva, gpa] = [8, 16, 24].map(|at| u64_at(image, at));
        assert_eq!((offset, gva), (head.len() as u64 + gpa, 0xffff_ffff_81e0_0000));
        assert_eq!(super::image(&info, 1 << 20), None, "it is not in this memory");
        let text = b"OSRELEASE=6\nSYMBOL(_stext)=ffffffffbfe00000\nNUMBER(phys_base)=-1048576\n";
        let last = VmCoreInfo::of_text(text).expect("sound");
        let before_modules = super::image(&last, 2 << 30).map(|[.., len]| len);
        assert_eq!(before_modules, Some(2 << 20));
    }

    #[test]
    fn segments_begin_where_the_head_says() {
        let vcpu = Vcpu { rip: 0x1234, ..Vcpu::default() };
        let head = head(&[vcpu.clone(), vcpu], None, &[(0, 0x3000), (HIGH_BASE, 0x1000)]);
        assert_eq!((head.len(), &head[..4]), (4096, &b"\x7fELF"[..]));
        assert_eq!(head_len(&head), Some(4096));
        let headers: Vec<_> = head[FILE_HEADER..]
            .chunks(SEGMENT_HEADER)
            .take(3)
            .map(|h| [8, 24, 32].map(|at| u64_at(h, at)))
            .collect();
        assert_eq!(headers[1], [4096, 0, 0x3000]);
        assert_eq!(headers[2], [4096 + 0x3000, HIGH_BASE, 0x1000]);
        let [at, _, len] = headers[0];
        assert_eq!(len as usize, 2 * (12 + 8 + PRSTATUS));
        let second = at as usize + 2 * 20 + PRSTATUS;
        assert_eq!(head[second + PID], 2, "its number");
        assert_eq!(u64_at(&head, second + REGISTERS + 16 * 8), 0x1234, "RIP");
    }
}
