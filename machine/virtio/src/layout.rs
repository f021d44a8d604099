//! Where the structures of virtio 1.2 section 4.1.4 are in BAR 0, and the capabilities that say so.

use pci::{Capability, MsiTable};

/// Everything is in this BAR.
pub(crate) const BAR: u8 = 0;
/// Bytes of the BAR.
pub(crate) const BAR_SIZE: u64 = 0x8000;
/// Bytes between structures.
const PAGE: u64 = 0x1000;
/// Bytes between queues' doorbells.
const NOTIFY_MULTIPLIER: u32 = 4;
/// Queues a device can have.
pub(crate) const MAX_QUEUES: usize = 64;
/// Bytes of the common configuration structure, including queue_reset.
pub(crate) const COMMON_LEN: u32 = 60;
/// MSI-X table and pending bits.
pub(crate) const MSIX: MsiTable = MsiTable { bar: BAR, table: 0x4000, pending: 0x5000 };

const VENDOR_SPECIFIC: u8 = 0x09;
/// Byte of the access capability that pci_cfg_data starts at.
const WINDOW_DATA: usize = 16;

/// A structure in the BAR, with the offset into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Structure {
    /// Common configuration.
    Common(usize),
    /// ISR status.
    Isr(usize),
    /// Device configuration.
    Device(usize),
    /// The doorbell of this queue.
    Notify(usize),
    /// None of them.
    Other,
}

impl Structure {
    /// The structure at `offset` into the BAR.
    pub(crate) fn at(offset: u64) -> Self {
        let inside = (offset % PAGE) as usize;
        match offset / PAGE {
            0 => Self::Common(inside),
            1 => Self::Isr(inside),
            2 => Self::Device(inside),
            3 => Self::Notify(inside / NOTIFY_MULTIPLIER as usize),
            _ => Self::Other,
        }
    }
}

fn structure(cfg_type: u8, offset: u32, len: u32, extra: &[u8]) -> Capability {
    let mut body = vec![16 + extra.len() as u8, cfg_type, BAR, 0, 0, 0];
    body.extend(offset.to_le_bytes());
    body.extend(len.to_le_bytes());
    body.extend(extra);
    Capability::read_only(VENDOR_SPECIFIC, body)
}

/// Capabilities for a device with these sizes; a device without configuration has no structure for
/// it.
pub(crate) fn capabilities(queues: usize, config_len: usize) -> Vec<Capability> {
    let notify_len = queues as u32 * NOTIFY_MULTIPLIER;
    let mut list = vec![
        structure(1, 0x0000, COMMON_LEN, &[]),
        structure(2, 0x3000, notify_len, &NOTIFY_MULTIPLIER.to_le_bytes()),
        structure(3, 0x1000, 1, &[]),
    ];
    if config_len > 0 {
        list.push(structure(4, 0x2000, config_len as u32, &[]));
    }
    list
}

/// The access capability: a window through configuration space into the BAR. The driver writes
/// which BAR, offset and length, and then reads or writes the data bytes.
pub(crate) fn access_capability() -> Capability {
    let mut capability = structure(5, 0, 0, &[0; 4]);
    capability.writable = vec![0; capability.body.len()];
    capability.writable[2] = 0xff;
    capability.writable[6..].fill(0xff);
    capability
}

/// The access capability at a place in configuration space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessWindow(pub(crate) usize);

impl AccessWindow {
    /// Whether a configuration access touches the data bytes.
    pub(crate) fn touches(self, offset: usize, len: usize) -> bool {
        let data = self.data();
        offset < data + 4 && offset + len > data
    }

    /// Where the data bytes are.
    pub(crate) fn data(self) -> usize {
        self.0 + WINDOW_DATA
    }

    /// Offset into the BAR and length the driver chose; `None` if no access can be like that.
    pub(crate) fn target(self, config: &pci::ConfigSpace) -> Option<(u64, usize)> {
        let bar = config.word(self.0 + 4) & 0xff;
        let offset = u64::from(config.dword(self.0 + 8));
        let len = config.dword(self.0 + 12);
        let sane = bar == u16::from(BAR) && matches!(len, 1 | 2 | 4);
        let inside = offset % u64::from(len.max(1)) == 0 && offset + u64::from(len) <= BAR_SIZE;
        (sane && inside).then_some((offset, len as usize))
    }
}
