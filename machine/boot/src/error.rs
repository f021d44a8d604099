//! Why a machine could not be made ready to run. All of these are the user's to mend: wrong file,
//! damaged file, or too little memory; each text says what the file is and what to do.

use crate::BootProtocol;

/// Why [`load`](crate::load) gave up. Guest RAM may have been partly written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel file has no bytes.
    #[error("the kernel file is empty: give a bzImage (vmlinuz) or an ELF kernel")]
    EmptyKernel,
    /// The content is of no kind we boot.
    #[error("the kernel file is {found}, not a kernel: give a bzImage (vmlinuz), or an ELF kernel")]
    NotAKernel {
        /// What the first bytes look like.
        found: &'static str,
    },
    /// What [`Unpacked`](crate::unpacked::Unpacked) gives is not what was unpacked. [`load`](crate::load) unpacks the kernel anew.
    #[error("the kernel that was kept unpacked cannot be read")]
    NotAsUnpacked,
    /// A part the file itself announces lies beyond its end.
    #[error("the {file} is truncated or damaged: its {part} lies outside the file; copy it again")]
    Truncated {
        /// The kind of file.
        file: &'static str,
        /// The part that is not there.
        part: &'static str,
    },
    /// A field holds a value its format forbids.
    #[error("the {file} is damaged or not valid: {what}")]
    Malformed {
        /// The kind of file.
        file: &'static str,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A kernel for another CPU.
    #[error("the kernel is built for {found}, this machine is x86-64: give an amd64 kernel")]
    WrongArchitecture {
        /// The architecture it is for.
        found: &'static str,
    },
    /// A bzImage from before the boot protocol had what we need.
    #[error(
        "the bzImage speaks boot protocol {}.{:02}, too old for {needed}: use a newer kernel",
        version >> 8, version & 0xff
    )]
    ProtocolTooOld {
        /// Version in the setup header, major in the high byte.
        version: u16,
        /// What needs a later one.
        needed: &'static str,
    },
    /// The 64-bit Linux protocol was asked of a 32-bit kernel.
    #[error(
        "the bzImage holds a 32-bit kernel: give an amd64 kernel, or ask for boot protocol \
         \"bzimage\" or \"auto\" to enter it in 32-bit mode"
    )]
    ThirtyTwoBitOnly,
    /// The kernel does not support the boot protocol that was asked for.
    #[error("the {file} cannot be booted by protocol \"{protocol}\": {why}")]
    WrongProtocol {
        /// The kind of file.
        file: &'static str,
        /// The protocol asked for.
        protocol: BootProtocol,
        /// What it lacks.
        why: &'static str,
    },
    /// Compressed in a way we cannot undo.
    #[error(
        "the kernel is compressed with {0}, which is not supported: give its uncompressed \
         vmlinux, ask for boot protocol \"bzimage\" to let it unpack itself, or use a kernel \
         packed with gzip, lz4, zstd, xz or lzma"
    )]
    UnsupportedCompression(&'static str),
    /// The compressed kernel does not decompress.
    #[error("the {format} data of the kernel is damaged, copy the file again: {why}")]
    Decompress {
        /// Compression format.
        format: &'static str,
        /// What the decompressor says.
        why: String,
    },
    /// Something wants memory that is not RAM, or that something else has.
    #[error(
        "the {what} wants {start:#x}..{end:#x}, which is {taken}: the image is damaged, or the \
         machine needs more memory"
    )]
    NoRoomAt {
        /// What was to be placed.
        what: &'static str,
        /// First GPA.
        start: u64,
        /// GPA after the last byte.
        end: u64,
        /// What is there instead.
        taken: &'static str,
    },
    /// No free range is large enough.
    #[error("the {what} of {len} bytes does not fit into guest memory: give the machine more")]
    DoesNotFit {
        /// What was to be placed.
        what: &'static str,
        /// Its size in bytes.
        len: u64,
    },
    /// Less RAM than any protocol can start with.
    #[error("{have} bytes of memory are too few to boot anything: give at least {need}")]
    RamTooSmall {
        /// RAM of the machine, in bytes.
        have: u64,
        /// Least that works, in bytes.
        need: u64,
    },
    /// The command line is longer than the kernel reads.
    #[error("the command line of {len} bytes is longer than the {max} this kernel accepts")]
    CommandLineTooLong {
        /// Bytes given.
        len: usize,
        /// Bytes accepted, without the terminating zero.
        max: usize,
    },
    /// A command line cannot hold a zero byte.
    #[error("the command line of the {0} contains a zero byte")]
    CommandLineNul(&'static str),
    /// A number of CPUs no table can describe.
    #[error("{0} CPUs cannot be described to the guest: choose 1 to {max}", max = crate::acpi::MAX_CPUS)]
    CpuCount(u32),
    /// Guest memory refused a write the layout allowed.
    #[error(transparent)]
    OutsideRam(#[from] ram::OutOfRam),
}

impl Error {
    /// It is about the kernel's file, not about what comes with it or the machine.
    pub fn is_of_kernel(&self) -> bool {
        match self {
            Self::NoRoomAt { what, .. } | Self::DoesNotFit { what, .. } => what.contains("kernel"),
            Self::RamTooSmall { .. } | Self::CommandLineNul(_) | Self::CpuCount(_) => false,
            Self::OutsideRam(_) => false,
            _ => true,
        }
    }
}
