//! The firmware configuration device, as far as guests that run without firmware ask it (QEMU
//! specification "fw_cfg", without its file directory and DMA).

use bus::Device;

/// Selector port; the data port follows.
pub const BASE: u64 = 0x510;

const SIGNATURE: u16 = 0x00;
const ID: u16 = 0x01;
const RAM_SIZE: u16 = 0x03;
const CPUS: u16 = 0x05;
const MAX_CPUS: u16 = 0x0f;
const FILE_DIRECTORY: u16 = 0x19;

pub(crate) struct FwCfg {
    ram: u64,
    cpus: u16,
    item: Vec<u8>,
    position: usize,
}

impl FwCfg {
    pub(crate) fn new(ram: u64, cpus: u16) -> Self {
        Self { ram, cpus, item: Vec::new(), position: 0 }
    }

    fn select(&mut self, key: u16) {
        self.position = 0;
        self.item = match key {
            SIGNATURE => b"QEMU".to_vec(),
            ID => 1_u32.to_le_bytes().to_vec(), // the traditional interface
            RAM_SIZE => self.ram.to_le_bytes().to_vec(),
            CPUS | MAX_CPUS => self.cpus.to_le_bytes().to_vec(),
            FILE_DIRECTORY => 0_u32.to_be_bytes().to_vec(),
            _ => Vec::new(),
        };
    }

    /// Past the end of an item are zeros.
    fn next(&mut self) -> u8 {
        let byte = self.item.get(self.position).copied().unwrap_or(0);
        self.position = self.position.saturating_add(1);
        byte
    }
}

impl Device for FwCfg {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        if offset == 1 {
            data.fill_with(|| self.next());
        } else {
            data.fill(0);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let (0, Some(key)) = (offset, data.first_chunk()) {
            self.select(u16::from_le_bytes(*key));
        }
    }
}
