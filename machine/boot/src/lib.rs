//! Everything between files and a vCPU ready to run: kernel images, boot protocols, ACPI tables.
//!
//! There is no firmware in the guest and no 16-bit code. [`load`] does what firmware and boot
//! loader would have done: it puts the kernel, its modules, the firmware memory map and the ACPI
//! tables into guest RAM and returns the registers the protocol promises the kernel.
//!
//! Files come from users and may be anything. Parsing them never panics and never writes outside
//! usable RAM: every range is checked against the file when parsed (`image`, `bzimage`,
//! `multiboot`) and against everything already placed when written (`place`).

pub mod acpi;
mod bytes;
mod bzimage;
mod crc;
mod decompress;
mod entry;
mod error;
mod image;
mod kind;
mod layout;
mod linux;
mod multiboot;
mod place;
mod pvh;
mod share_out;
pub mod unpacked;

pub use error::Error;
pub use layout::{MapEntry, MemoryKind, memory_map};

use bzimage::BzImage;
use image::Image;
use kind::Kind;
use place::Loader;
use ram::Ram;
use std::{borrow::Cow, fmt, ops::Range, str::FromStr};
use unpacked::Unpacked;
use x86::Vcpu;

/// How a kernel is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BootProtocol {
    /// Chosen by the content of the kernel file: a bzImage by [`BootProtocol::Linux`] if we can
    /// unpack a kernel from it and else by [`BootProtocol::BzImage`]; other files by
    /// multiboot, PVH or Linux, the first of these they support.
    #[default]
    Auto,
    /// The Linux protocol, entering the unpacked kernel, in 64-bit mode if it is a 64-bit kernel and else in 32-bit mode.
    Linux,
    /// The Linux protocol, entering a bzImage at its own entry point (64-bit if it has one, else
    /// 32-bit) to unpack itself.
    BzImage,
    /// PVH, the 32-bit protocol of Xen guests.
    Pvh,
    /// Multiboot version 1.
    Multiboot,
}

impl BootProtocol {
    const NAMES: [(&'static str, Self); 5] = [
        ("auto", Self::Auto),
        ("linux", Self::Linux),
        ("bzimage", Self::BzImage),
        ("pvh", Self::Pvh),
        ("multiboot", Self::Multiboot),
    ];
}

impl fmt::Display for BootProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, protocol)| protocol == self);
        f.write_str(name.map_or("?", |(name, _)| name))
    }
}

/// A name that is no boot protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no boot protocol: choose auto, linux, bzimage, pvh or multiboot")]
pub struct UnknownProtocol(String);

impl FromStr for BootProtocol {
    type Err = UnknownProtocol;

    fn from_str(name: &str) -> Result<Self, UnknownProtocol> {
        let known = Self::NAMES.iter().find(|(known, _)| *known == name);
        known.map(|(_, protocol)| *protocol).ok_or_else(|| UnknownProtocol(name.into()))
    }
}

/// A file handed to the kernel: an initrd, or what multiboot calls a module.
#[derive(Clone, Copy, Debug)]
pub struct Module<'a> {
    /// Its content.
    pub data: &'a [u8],
    /// Its command line (multiboot, PVH), passed as it is; by multiboot's convention the first word
    /// names the file. Linux has no use for it.
    pub cmdline: &'a str,
}

/// What to boot.
#[derive(Clone, Copy, Debug)]
pub struct BootRequest<'a> {
    /// Content of the kernel file.
    pub kernel: &'a [u8],
    /// What [`unpacked_kernel`] has made of it, for a bzImage of a 64-bit kernel. It saves the time to unpack it.
    pub unpacked: Option<&'a dyn Unpacked>,
    /// Modules in order. Linux gets them concatenated as its initrd.
    pub modules: &'a [Module<'a>],
    /// Arguments of the kernel.
    pub cmdline: &'a str,
    /// CPUs, with APIC IDs 0 to `cpus - 1`.
    pub cpus: u32,
    /// How to start it.
    pub protocol: BootProtocol,
}

/// Something put into guest RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// What it is.
    pub what: &'static str,
    /// Its GPAs.
    pub range: Range<u64>,
}

/// A machine ready to run.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// State of the boot CPU. The others wait for their start-up IPI.
    pub vcpu: Vcpu,
    /// The protocol used, never [`BootProtocol::Auto`].
    pub protocol: BootProtocol,
    /// What lies where, in order of placement.
    pub placed: Vec<Placed>,
    /// The ACPI root pointer, a GPA.
    pub rsdp: u64,
}

/// Puts a kernel and all it needs into guest RAM.
///
/// RAM need not be zero beforehand: every byte the kernel may look at is written.
///
/// # Errors
/// The kernel cannot be booted on this machine. RAM may then hold parts of it.
pub fn load(memory: &Ram, request: &BootRequest<'_>) -> Result<Loaded, Error> {
    match load_once(memory, request) {
        Err(Error::NotAsUnpacked) => load_once(memory, &BootRequest { unpacked: None, ..*request }),
        loaded => loaded,
    }
}

fn load_once(memory: &Ram, request: &BootRequest<'_>) -> Result<Loaded, Error> {
    let file = unwrap_file(request.kernel)?;
    let kind = Kind::detect(&file)?;
    let mut loader = Loader::new(memory)?;
    place::write_bios_data(memory)?;
    let rsdp = acpi::place(memory, request.cpus)?;
    let mut boot = Boot { loader: &mut loader, request, rsdp };
    let (vcpu, protocol) = match kind {
        Kind::BzImage => boot.bzimage(&BzImage::parse(&file)?)?,
        Kind::Multiboot(header) => boot.multiboot(&file, header)?,
        Kind::Elf => boot.elf(&Image::parse_elf(&file)?)?,
    };
    Ok(Loaded { vcpu, protocol, placed: loader.into_placed(), rsdp })
}

/// The kernel in a file as an ELF file: a bzImage's, or the file itself.
///
/// # Errors
/// The bzImage holds none that can be unpacked.
pub fn unpacked_kernel(file: &[u8]) -> Result<Cow<'_, [u8]>, Error> {
    if !bzimage::is_bzimage(file) {
        return unwrap_file(file);
    }
    let image = BzImage::parse(file)?;
    let (format, packed) = image.payload()?.ok_or(Error::ThirtyTwoBitOnly)?;
    format.unpack_payload(packed).map(Cow::Owned)
}

/// The kernel file, unpacked if it is compressed as a whole (as Debian's Xen is).
fn unwrap_file(file: &[u8]) -> Result<Cow<'_, [u8]>, Error> {
    match decompress::Format::detect(file) {
        Some(format) => format.unpack(file).map(Cow::Owned),
        None => Ok(Cow::Borrowed(file)),
    }
}

/// The choice of protocol, once the kind of file is known.
struct Boot<'b, 'm> {
    loader: &'b mut Loader<'m>,
    request: &'b BootRequest<'b>,
    rsdp: u64,
}

type Started = (Vcpu, BootProtocol);

impl Boot<'_, '_> {
    fn bzimage(&mut self, image: &BzImage<'_>) -> Result<Started, Error> {
        match self.request.protocol {
            BootProtocol::Auto | BootProtocol::Linux
                if let Some(unpacked) = self.request.unpacked =>
            {
                self.vmlinux(image, &Image::parse_unpacked(unpacked)?)
            }
            BootProtocol::BzImage => self.whole(image),
            BootProtocol::Auto => match image.payload()? {
                Some((format, packed)) if format.is_supported() => {
                    self.unpacked(image, &format.unpack_payload(packed)?)
                }
                _ => self.whole(image),
            },
            BootProtocol::Linux => match image.payload()? {
                Some((format, packed)) => self.unpacked(image, &format.unpack_payload(packed)?),
                None if image.has_64bit_entry() => self.whole(image),
                None => Err(Error::ThirtyTwoBitOnly),
            },
            BootProtocol::Pvh => {
                let (format, packed) = image.payload()?.ok_or(wrong(
                    "bzImage",
                    BootProtocol::Pvh,
                    "it holds no compressed ELF kernel",
                ))?;
                self.pvh(&Image::parse_elf(&format.unpack_payload(packed)?)?)
            }
            protocol @ BootProtocol::Multiboot => {
                Err(wrong("bzImage", protocol, "it has no multiboot header"))
            }
        }
    }

    /// Enters the kernel unpacked from a bzImage.
    fn unpacked(&mut self, image: &BzImage<'_>, payload: &[u8]) -> Result<Started, Error> {
        self.vmlinux(image, &Image::parse_elf(payload)?)
    }

    /// Enters a bzImage's kernel.
    fn vmlinux(&mut self, image: &BzImage<'_>, vmlinux: &Image<'_>) -> Result<Started, Error> {
        let Self { loader, request, rsdp } = self;
        let vcpu = linux::load_unpacked(loader, request, *rsdp, image, vmlinux)?;
        Ok((vcpu, BootProtocol::Linux))
    }

    fn whole(&mut self, image: &BzImage<'_>) -> Result<Started, Error> {
        let vcpu = linux::load_whole(self.loader, self.request, self.rsdp, image)?;
        Ok((vcpu, BootProtocol::BzImage))
    }

    fn multiboot(&mut self, file: &[u8], header: multiboot::Header) -> Result<Started, Error> {
        match self.request.protocol {
            BootProtocol::Auto | BootProtocol::Multiboot => {
                let vcpu = multiboot::load(self.loader, self.request, file, header)?;
                Ok((vcpu, BootProtocol::Multiboot))
            }
            _ => self.elf(&Image::parse_elf(file)?),
        }
    }

    fn elf(&mut self, image: &Image<'_>) -> Result<Started, Error> {
        match self.request.protocol {
            BootProtocol::Pvh => self.pvh(image),
            BootProtocol::Auto if image.pvh_entry.is_some() => self.pvh(image),
            BootProtocol::Auto | BootProtocol::Linux => {
                let vcpu = linux::load_vmlinux(self.loader, self.request, self.rsdp, image)?;
                Ok((vcpu, BootProtocol::Linux))
            }
            protocol @ BootProtocol::Multiboot => {
                Err(wrong("ELF kernel", protocol, "it has no multiboot header in its first 8 KiB"))
            }
            protocol @ BootProtocol::BzImage => {
                Err(wrong("ELF kernel", protocol, "it is no bzImage"))
            }
        }
    }

    fn pvh(&mut self, image: &Image<'_>) -> Result<Started, Error> {
        let vcpu = pvh::load(self.loader, self.request, self.rsdp, image)?;
        Ok((vcpu, BootProtocol::Pvh))
    }
}

fn wrong(file: &'static str, protocol: BootProtocol, why: &'static str) -> Error {
    Error::WrongProtocol { file, protocol, why }
}

/// `line` as the guest reads it.
fn zero_terminated(of: &'static str, line: &str) -> Result<Vec<u8>, Error> {
    match line.contains('\0') {
        true => Err(Error::CommandLineNul(of)),
        false => Ok([line.as_bytes(), b"\0"].concat()),
    }
}
