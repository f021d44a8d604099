//! Why a machine could not be built or started.

use engine::{Failure, Whose};
use pci::PciError;
use ram::RamError;

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
    /// The engine cannot start.
    #[error("{0}")]
    Engine(Failure),
    /// The host gives no thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// Parts of the machine do not fit together: our bug.
    #[error("the machine does not fit together: {0}")]
    Assembly(String),
}

impl Error {
    /// Whose doing it is.
    pub fn whose(&self) -> Whose {
        match self {
            Self::Boot(boot::Error::OutsideRam(_)) | Self::Assembly(_) => Whose::Ours,
            Self::Boot(_) | Self::Memory(RamError::BadSize { .. }) => Whose::User,
            Self::Memory(RamError::Host { .. }) | Self::VectorUnit(_) | Self::Thread(_) => {
                Whose::Host
            }
            Self::Pci(PciError::NoSlot | PciError::NoRoom(_)) => Whose::User,
            Self::Pci(
                PciError::BadBar(_) | PciError::NoCapabilityRoom(_) | PciError::BadVectorCount(_),
            ) => Whose::Ours,
            Self::Engine(failure) => failure.whose,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// A variant that is added comes to `whose` by the compiler, and here by whoever adds it.
    #[test]
    fn each_error_says_whose_it_is() {
        let refused = || io::Error::from(io::ErrorKind::OutOfMemory);
        let engine = |whose| Error::Engine(Failure { whose, what: "it does not start".to_owned() });
        let host = RamError::Host { len: 1 << 30, step: "mmap", error: refused() };
        let outside = ram::OutOfRam { gpa: 0, len: 1 };
        for (error, whose) in [
            (Error::Boot(boot::Error::EmptyKernel), Whose::User),
            (Error::Boot(outside.into()), Whose::Ours),
            (Error::Memory(RamError::BadSize { len: 1 }), Whose::User),
            (Error::Memory(host), Whose::Host),
            (Error::Pci(PciError::NoSlot), Whose::User),
            (Error::Pci(PciError::NoRoom(1 << 40)), Whose::User),
            (Error::Pci(PciError::BadBar(7)), Whose::Ours),
            (Error::Pci(PciError::NoCapabilityRoom(300)), Whose::Ours),
            (Error::Pci(PciError::BadVectorCount(0)), Whose::Ours),
            (Error::VectorUnit("no AVX".to_owned()), Whose::Host),
            (engine(Whose::Host), Whose::Host),
            (engine(Whose::Ours), Whose::Ours),
            (Error::Thread(refused()), Whose::Host),
            (Error::Assembly("two devices at a port".to_owned()), Whose::Ours),
        ] {
            assert_eq!(error.whose(), whose, "{error}");
        }
    }
}
