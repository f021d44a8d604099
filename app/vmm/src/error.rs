//! Why a machine could not be built or started.

/// Why there is no machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel, or what comes with it, cannot be booted.
    #[error(transparent)]
    Boot(#[from] boot::Error),
    /// The host does not give the memory.
    #[error(transparent)]
    Memory(#[from] ram::RamError),
    /// More devices than the PCI bus has room for.
    #[error("too many devices: {0}")]
    Pci(#[from] pci::PciError),
    /// The host CPU cannot do the floating point and SIMD of the guest.
    #[error("floating point: {0}")]
    VectorUnit(String),
    /// The host does not give what the engine needs.
    #[error("{0}")]
    Engine(String),
    /// The host gives no thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// Parts of the machine do not fit together: our bug.
    #[error("the machine does not fit together: {0}; this is a bug in ring3")]
    Assembly(String),
}

impl Error {
    /// Whether what was asked for is at fault, rather than the host or ourselves.
    pub fn is_users(&self) -> bool {
        matches!(self, Self::Boot(_) | Self::Pci(_))
            || matches!(self, Self::Memory(ram::RamError::BadSize { .. }))
    }
}
