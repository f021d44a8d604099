//! The Linux boot protocol (Documentation/arch/x86/boot.rst): zero page, initrd, and the entry in
//! 64-bit or 32-bit mode.
//!
//! Normally the compressed kernel is unpacked here and entered at its `startup_64`, or `startup_32`, as the image's
//! own decompressor would after its work. Images without a payload we know (memtest86+) are placed whole
//! and entered at their own entry point.

use crate::bzimage::{self, BzImage};
use crate::entry::{long_mode, protected_mode, with};
use crate::image::Image;
use crate::layout;
use crate::place::{Loader, PAGE, zero};
use crate::{BootProtocol, BootRequest, Error};
use x86::{Vcpu, reg};

/// Offsets in `struct boot_params`, the zero page.
mod zero_page {
    pub(super) const LEN: usize = 4096;
    pub(super) const ACPI_RSDP: usize = 0x070;
    pub(super) const E820_ENTRIES: usize = 0x1e8;
    pub(super) const BOOT_FLAG: usize = 0x1fe;
    pub(super) const HEADER_MAGIC: usize = 0x202;
    pub(super) const VERSION: usize = 0x206;
    pub(super) const LOADER_TYPE: usize = 0x210;
    pub(super) const LOAD_FLAGS: usize = 0x211;
    pub(super) const CODE32_START: usize = 0x214;
    pub(super) const RAMDISK_IMAGE: usize = 0x218;
    pub(super) const RAMDISK_SIZE: usize = 0x21c;
    pub(super) const CMDLINE: usize = 0x228;
    pub(super) const INITRD_MAX: usize = 0x22c;
    pub(super) const KERNEL_ALIGNMENT: usize = 0x230;
    pub(super) const XLOAD_FLAGS: usize = 0x236;
    pub(super) const CMDLINE_SIZE: usize = 0x238;
    pub(super) const SETUP_DATA: usize = 0x250;
    pub(super) const E820_TABLE: usize = 0x2d0;
}

/// `type_of_loader` of a loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
/// `initrd_addr_max` of every 64-bit kernel.
const VMLINUX_INITRD_MAX: u32 = 0x7fff_ffff;
/// `cmdline_size` of every 64-bit kernel.
const VMLINUX_CMDLINE_SIZE: u32 = 2047;
/// The 64-bit entry lies this far into the protected-mode part.
const ENTRY_64: u64 = 0x200;

/// What the zero page is made from.
struct Setup<'a> {
    header: &'a [u8],
    initrd_max: u64,
    cmdline_size: usize,
}

impl<'a> Setup<'a> {
    fn of_bzimage(image: &BzImage<'a>) -> Self {
        Self {
            header: image.header(),
            initrd_max: image.initrd_max(),
            cmdline_size: image.cmdline_size(),
        }
    }

    /// For an ELF vmlinux, which has no setup header; [`header_of_vmlinux`] supplies one.
    const VMLINUX: Setup<'static> = Setup {
        header: &[],
        initrd_max: VMLINUX_INITRD_MAX as u64,
        cmdline_size: VMLINUX_CMDLINE_SIZE as usize,
    };
}

/// Enters the kernel unpacked from a bzImage, in the mode that the kernel is made for.
pub(crate) fn load_unpacked(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    rsdp: u64,
    bzimage: &BzImage<'_>,
    vmlinux: &Image<'_>,
) -> Result<Vcpu, Error> {
    load_elf(loader, request, rsdp, vmlinux, &Setup::of_bzimage(bzimage))
}

/// Enters an ELF vmlinux in 64-bit mode.
pub(crate) fn load_vmlinux(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    rsdp: u64,
    vmlinux: &Image<'_>,
) -> Result<Vcpu, Error> {
    if !vmlinux.is_64bit {
        let why = "it is a 32-bit ELF file, and the Linux entry of a vmlinux is 64-bit";
        let protocol = BootProtocol::Linux;
        return Err(Error::WrongProtocol { file: "ELF kernel", protocol, why });
    }
    load_elf(loader, request, rsdp, vmlinux, &Setup::VMLINUX)
}

fn load_elf(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    rsdp: u64,
    vmlinux: &Image<'_>,
    setup: &Setup<'_>,
) -> Result<Vcpu, Error> {
    vmlinux.place(loader)?;
    let entry = vmlinux.check_entry(vmlinux.entry)?;
    let zero_page = place_zero_page(loader, request, rsdp, setup, None)?;
    let vcpu = match u32::try_from(entry) {
        Ok(entry) if !vmlinux.is_64bit => protected_mode(loader, entry)?,
        _ => long_mode(loader, entry)?,
    };
    Ok(with(vcpu, &[(reg::RSI, zero_page)]))
}

/// Enters a bzImage at its own entry point, in 64-bit mode if it has one.
pub(crate) fn load_whole(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    rsdp: u64,
    image: &BzImage<'_>,
) -> Result<Vcpu, Error> {
    let start = claim_whole(loader, image)?;
    loader.memory().write_gpa(start, image.protected)?;
    let setup = Setup::of_bzimage(image);
    let zero_page = place_zero_page(loader, request, rsdp, &setup, Some(start))?;
    let vcpu = if image.has_64bit_entry() {
        long_mode(loader, start + ENTRY_64)?
    } else {
        protected_mode(loader, start as u32)?
    };
    Ok(with(vcpu, &[(reg::RSI, zero_page)]))
}

/// Takes the memory a bzImage runs in: where it prefers, or anywhere it can be moved to.
fn claim_whole(loader: &mut Loader<'_>, image: &BzImage<'_>) -> Result<u64, Error> {
    let (start, len) = (image.preferred_load(), image.init_size());
    match loader.claim("kernel", start, len) {
        Ok(()) => Ok(start),
        Err(e) if !image.is_relocatable() => Err(e),
        Err(_) => loader.reserve_low("kernel", len, image.alignment(), layout::EXTENDED),
    }
}

/// Builds and places the zero page and what it points to; returns its GPA.
fn place_zero_page(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    rsdp: u64,
    setup: &Setup<'_>,
    code32_start: Option<u64>,
) -> Result<u64, Error> {
    use zero_page::*;
    let mut page = ZeroPage::new(setup.header);
    page.put(LOADER_TYPE, &[LOADER_UNDEFINED]);
    page.put(ACPI_RSDP, &rsdp.to_le_bytes());
    page.put(SETUP_DATA, &0_u64.to_le_bytes());
    page.put_memory_map(loader);
    if let Some(start) = code32_start {
        page.put(CODE32_START, &(start as u32).to_le_bytes());
    }
    let cmdline = place_command_line(loader, request.cmdline, setup.cmdline_size)?;
    page.put(CMDLINE, &cmdline.to_le_bytes());
    let (initrd, len) = place_initrd(loader, request, setup.initrd_max)?;
    page.put(RAMDISK_IMAGE, &initrd.to_le_bytes());
    page.put(RAMDISK_SIZE, &len.to_le_bytes());
    loader.place_info("zero page", &page.0)
}

/// Places the command line with its terminating zero.
fn place_command_line(loader: &mut Loader<'_>, line: &str, max: usize) -> Result<u32, Error> {
    if line.len() > max {
        return Err(Error::CommandLineTooLong { len: line.len(), max });
    }
    let bytes = crate::zero_terminated("kernel", line)?;
    Ok(loader.place_info("command line", &bytes)? as u32)
}

/// Places the modules one after the other, each 4-byte aligned: the kernel unpacks an initrd of
/// several archives in order. Returns GPA and bytes, both zero without modules.
fn place_initrd(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    max: u64,
) -> Result<(u32, u32), Error> {
    let aligned = |data: &[u8]| (data.len() as u64).next_multiple_of(4);
    let len = request.modules.iter().map(|m| aligned(m.data)).sum();
    if len == 0 {
        return Ok((0, 0));
    }
    let start = loader.reserve_high("initrd", len, PAGE, max.saturating_add(1))?;
    let mut at = start;
    for module in request.modules {
        loader.memory().write_untouched(at, module.data)?;
        let next = at + aligned(module.data);
        at += module.data.len() as u64;
        zero(loader.memory(), at, next - at)?;
        at = next;
    }
    Ok((start as u32, len as u32))
}

/// The page being filled.
struct ZeroPage(Vec<u8>);

impl ZeroPage {
    fn new(header: &[u8]) -> Self {
        let mut page = Self(vec![0; zero_page::LEN]);
        if header.is_empty() {
            page.put_vmlinux_header()
        } else {
            page.put(bzimage::HEADER, header)
        }
        page
    }

    /// The setup header a vmlinux would have had: protocol 2.15, loaded high, 64-bit.
    fn put_vmlinux_header(&mut self) {
        use zero_page::*;
        self.put(BOOT_FLAG, &0xaa55_u16.to_le_bytes());
        self.put(HEADER_MAGIC, b"HdrS");
        self.put(VERSION, &0x020f_u16.to_le_bytes());
        self.put(LOAD_FLAGS, &[1]);
        self.put(INITRD_MAX, &VMLINUX_INITRD_MAX.to_le_bytes());
        self.put(KERNEL_ALIGNMENT, &0x20_0000_u32.to_le_bytes());
        self.put(XLOAD_FLAGS, &1_u16.to_le_bytes());
        self.put(CMDLINE_SIZE, &VMLINUX_CMDLINE_SIZE.to_le_bytes());
    }

    fn put(&mut self, offset: usize, field: &[u8]) {
        self.0[offset..offset + field.len()].copy_from_slice(field);
    }

    /// E820 entries: base, size (8 bytes each), kind (4 bytes).
    fn put_memory_map(&mut self, loader: &Loader<'_>) {
        let map = layout::memory_map(loader.memory());
        self.put(zero_page::E820_ENTRIES, &[map.len() as u8]);
        for (i, entry) in map.iter().enumerate() {
            let len = entry.range.end - entry.range.start;
            let at = zero_page::E820_TABLE + 20 * i;
            self.put(at, &entry.range.start.to_le_bytes());
            self.put(at + 8, &len.to_le_bytes());
            self.put(at + 16, &(entry.kind as u32).to_le_bytes());
        }
    }
}
