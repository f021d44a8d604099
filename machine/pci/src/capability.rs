//! One entry of the capabilities list (PCI 3.0 section 6.7).

/// A capability before it has a place in configuration space.
#[derive(Clone, Debug)]
pub struct Capability {
    /// Capability ID (0x09 vendor-specific, 0x11 MSI-X).
    pub id: u8,
    /// Everything after the ID and next-pointer bytes.
    pub body: Vec<u8>,
    /// Which bits of `body` the guest may write; missing bytes are read-only.
    pub writable: Vec<u8>,
}

impl Capability {
    /// A read-only capability.
    pub fn read_only(id: u8, body: Vec<u8>) -> Self {
        Self { id, body, writable: Vec::new() }
    }
}
