//! A block device whose driver does anything.
#![no_main]

use fuzz::{Deed, Guest};
use libfuzzer_sys::fuzz_target;
use std::io;
use virtio::{Block, BlockBackend};

const SECTORS: usize = 64;

/// A disk that insists on its contract.
struct Disk(Vec<u8>);

impl Disk {
    fn range(&mut self, offset: u64, len: u64) -> &mut [u8] {
        assert!(offset % 512 == 0 && len % 512 == 0, "whole sectors");
        &mut self.0[offset as usize..(offset + len) as usize]
    }
}

impl BlockBackend for Disk {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.copy_from_slice(self.range(offset, data.len() as u64));
        Ok(())
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.range(offset, data.len() as u64).copy_from_slice(data);
        Ok(())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.range(offset, len);
        Ok(())
    }
    fn write_zeroes(&mut self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        self.range(offset, len).fill(0);
        Ok(())
    }
}

fuzz_target!(|deeds: Vec<Deed>| {
    let mut guest = Guest::new(Block::new(Box::new(Disk(vec![7; SECTORS * 512])), "fuzz"));
    guest.start(u64::MAX);
    deeds.iter().for_each(|deed| guest.perform(deed));

    guest.reset();
    guest.start(0);
    assert_eq!(guest.status(), 15, "a reset mends everything");
    guest.header(0x4000, 0, 63);
    guest.set_memory(0x6000, &[0xee]);
    guest.describe(0, 0, 0x4000, 16, 1, 1);
    guest.describe(0, 1, 0x5000, 512, 3, 2);
    guest.describe(0, 2, 0x6000, 1, 2, 0);
    guest.offer(0, 0);
    guest.notify(0);
    assert_eq!((guest.used_index(0), guest.memory::<1>(0x6000)), (1, [0]), "a read succeeds");
});
