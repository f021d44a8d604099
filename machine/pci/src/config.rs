//! The configuration space of a type-0 function as bytes with write masks.
//!
//! Every register's behaviour is which of its bits a write changes. BAR sizing needs no code: the
//! low bits of a BAR are not writable, so writing all ones and reading back gives the size.

use crate::{Bar, Capability, PciError};

/// Bytes of configuration space a conventional function has. Beyond is extended space, which only
/// Express functions have: all ones.
pub(crate) const SIZE: usize = 256;
/// Command register.
pub(crate) const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BARS: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const INTERRUPT_PIN: usize = 0x3d;
const FIRST_CAPABILITY: usize = 0x40;

const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// Memory, bus master, parity error response, SERR# and INTx disable. No I/O BARs, so no I/O bit.
const COMMAND_WRITABLE: u16 =
    COMMAND_MEMORY | COMMAND_BUS_MASTER | 1 << 6 | 1 << 8 | COMMAND_INTX_DISABLE;
const STATUS_INTERRUPT: u8 = 1 << 3;
const STATUS_CAPABILITIES: u8 = 1 << 4;

/// Who a function is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Revision ID.
    pub revision: u8,
    /// Base class, subclass and programming interface, as 0xbbsspp.
    pub class: u32,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
}

/// Configuration space of one type-0 function (PCI 3.0 chapter 6).
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: [u8; SIZE],
    /// Bits a guest's write changes.
    writable: [u8; SIZE],
    /// What a reset restores.
    initial: [u8; SIZE],
    bars: [Option<Bar>; 6],
    /// Where the next capability goes, and which byte shall point to it.
    next_capability: (usize, usize),
}

impl ConfigSpace {
    /// A function without BARs, capabilities or interrupt pin.
    pub fn new(identity: Identity) -> Self {
        let mut space = Self {
            bytes: [0; SIZE],
            writable: [0; SIZE],
            initial: [0; SIZE],
            bars: [None; 6],
            next_capability: (FIRST_CAPABILITY, CAPABILITIES),
        };
        space.put(0x00, &identity.vendor.to_le_bytes());
        space.put(0x02, &identity.device.to_le_bytes());
        let class = identity.class << 8 | u32::from(identity.revision);
        space.put(0x08, &class.to_le_bytes());
        space.put(0x2c, &identity.subsystem_vendor.to_le_bytes());
        space.put(0x2e, &identity.subsystem.to_le_bytes());
        space.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        space.allow(0x0c, &[0xff]); // cache line size: software's scratch on modern hardware
        space
    }

    /// Sets bytes now and after reset.
    fn put(&mut self, offset: usize, data: &[u8]) {
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
        self.initial[offset..offset + data.len()].copy_from_slice(data);
    }

    fn allow(&mut self, offset: usize, mask: &[u8]) {
        self.writable[offset..offset + mask.len()].copy_from_slice(mask);
    }

    /// Declares an INTx pin: 1 is INTA#. The line register becomes the guest's scratch byte.
    pub fn set_interrupt_pin(&mut self, pin: u8) {
        self.put(INTERRUPT_PIN, &[pin]);
        self.allow(INTERRUPT_LINE, &[0xff]);
    }

    /// What firmware would leave in the interrupt line register: the 8259 input, for systems that know no better.
    pub(crate) fn set_interrupt_line(&mut self, irq: u8) {
        self.put(INTERRUPT_LINE, &[irq]);
    }

    /// The declared INTx pin, 0 for none.
    pub fn interrupt_pin(&self) -> u8 {
        self.bytes[INTERRUPT_PIN]
    }

    /// Declares BAR `index`.
    ///
    /// # Errors
    /// [`PciError::BadBar`].
    pub fn add_bar(&mut self, index: u8, bar: Bar) -> Result<(), PciError> {
        let first = usize::from(index);
        let end = first + bar.registers();
        if !bar.is_valid() || end > 6 || (first..end).any(|i| self.register_taken(i)) {
            return Err(PciError::BadBar(index));
        }
        let mask = (!(bar.size - 1)).to_le_bytes();
        self.put(BARS + 4 * first, &bar.kind_bits().to_le_bytes());
        self.allow(BARS + 4 * first, &mask[..4 * bar.registers()]);
        self.bars[first] = Some(bar);
        Ok(())
    }

    fn register_taken(&self, index: usize) -> bool {
        let high_half = index > 0 && self.bars[index - 1].is_some_and(|b| b.registers() == 2);
        high_half || self.bars[index].is_some()
    }

    /// Appends a capability; returns its offset.
    ///
    /// # Errors
    /// [`PciError::NoCapabilityRoom`].
    pub fn add_capability(&mut self, capability: &Capability) -> Result<usize, PciError> {
        let (offset, pointer) = self.next_capability;
        let len = 2 + capability.body.len();
        let end = (offset + len).next_multiple_of(4);
        if end > SIZE || capability.writable.len() > capability.body.len() {
            return Err(PciError::NoCapabilityRoom(len));
        }
        self.put(pointer, &[offset as u8]);
        self.put(offset, &[capability.id, 0]);
        self.put(offset + 2, &capability.body);
        self.allow(offset + 2, &capability.writable);
        self.put(STATUS, &[STATUS_CAPABILITIES]);
        self.next_capability = (end, offset + 1);
        Ok(offset)
    }

    /// Declared BARs with their indices.
    pub fn bars(&self) -> impl Iterator<Item = (u8, Bar)> + '_ {
        self.bars.iter().enumerate().filter_map(|(i, bar)| Some((i as u8, (*bar)?)))
    }

    /// The address in BAR `index`, whether or not memory decoding is on. `None` for no such BAR.
    pub fn bar_address(&self, index: u8) -> Option<u64> {
        let bar = self.bars.get(usize::from(index)).copied().flatten()?;
        let at = BARS + 4 * usize::from(index);
        let low = u64::from(self.dword(at) & !0xf);
        let high = if bar.registers() == 2 { u64::from(self.dword(at + 4)) } else { 0 };
        Some(high << 32 | low)
    }

    /// Places BAR `index` at `address`, now and after reset, as firmware would.
    pub(crate) fn assign_bar(&mut self, index: u8, address: u64) {
        if let Some(bar) = self.bars.get(usize::from(index)).copied().flatten() {
            let value = (address | u64::from(bar.kind_bits())).to_le_bytes();
            self.put(BARS + 4 * usize::from(index), &value[..4 * bar.registers()]);
        }
    }

    /// Memory decoding as firmware leaves it, now and after reset.
    pub(crate) fn set_memory_enabled(&mut self) {
        self.put(COMMAND, &COMMAND_MEMORY.to_le_bytes());
    }

    /// Reads; beyond conventional space, all ones.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = self.bytes.get(offset.saturating_add(i)).copied().unwrap_or(0xff);
        }
    }

    /// Writes the writable bits; beyond conventional space, lost.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        for (i, value) in data.iter().enumerate() {
            let at = offset.saturating_add(i);
            if let (Some(byte), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *byte = *byte & !mask | value & mask;
            }
        }
    }

    /// Back to what [`ConfigSpace`] was when built.
    pub fn reset(&mut self) {
        self.bytes = self.initial;
    }

    /// The 2 bytes at `offset`; all ones outside.
    pub fn word(&self, offset: usize) -> u16 {
        let mut bytes = [0; 2];
        self.read(offset, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// The 4 bytes at `offset`; all ones outside.
    pub fn dword(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Sets the Interrupt Status bit, which the function drives and the guest only reads.
    pub fn set_interrupt_status(&mut self, pending: bool) {
        let status = &mut self.bytes[STATUS];
        *status = *status & !STATUS_INTERRUPT | if pending { STATUS_INTERRUPT } else { 0 };
    }

    /// Whether the function answers at its memory BARs.
    pub fn memory_enabled(&self) -> bool {
        self.word(COMMAND) & COMMAND_MEMORY != 0
    }

    /// Whether the function may access memory and send messages.
    pub fn bus_master(&self) -> bool {
        self.word(COMMAND) & COMMAND_BUS_MASTER != 0
    }

    /// Whether the function must not assert INTx.
    pub fn intx_disabled(&self) -> bool {
        self.word(COMMAND) & COMMAND_INTX_DISABLE != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        let identity = Identity { vendor: 0x1af4, device: 0x1042, ..Identity::default() };
        ConfigSpace::new(identity)
    }

    #[test]
    fn sizing_a_64_bit_bar() {
        let mut space = space();
        space.add_bar(2, Bar::memory64(0x4000)).unwrap();
        space.assign_bar(2, 0x1_c000_4000);
        assert_eq!(space.dword(0x18), 0xc000_4004);
        space.write(0x18, &[0xff; 4]);
        space.write(0x1c, &[0xff; 4]);
        assert_eq!((space.dword(0x18), space.dword(0x1c)), (0xffff_c004, 0xffff_ffff));
        space.reset();
        assert_eq!(space.bar_address(2), Some(0x1_c000_4000));
    }

    #[test]
    fn malformed_bars_are_refused() {
        let mut space = space();
        assert_eq!(space.add_bar(5, Bar::memory64(0x1000)), Err(PciError::BadBar(5)));
        assert_eq!(space.add_bar(0, Bar::memory32(0x1800)), Err(PciError::BadBar(0)));
        assert_eq!(space.add_bar(0, Bar::memory32(1 << 32)), Err(PciError::BadBar(0)));
        space.add_bar(0, Bar::memory64(0x1000)).unwrap();
        assert_eq!(space.add_bar(1, Bar::memory32(0x1000)), Err(PciError::BadBar(1)));
    }

    #[test]
    fn read_only_registers_stay() {
        let mut space = space();
        for offset in 0..300 {
            space.write(offset, &[0xff; 8]);
        }
        assert_eq!(space.dword(0), 0x1042_1af4);
        assert_eq!(space.word(COMMAND), COMMAND_WRITABLE);
        assert_eq!(space.dword(0x10), 0, "no BAR, no writable bits");
        assert_eq!(space.dword(SIZE), 0xffff_ffff, "no extended space");
    }

    #[test]
    fn capabilities_are_linked() {
        let mut space = space();
        let first = space.add_capability(&Capability::read_only(9, vec![1; 15])).unwrap();
        let second = space.add_capability(&Capability::read_only(0x11, vec![2; 10])).unwrap();
        assert_eq!((first, second), (0x40, 0x54));
        assert_eq!(space.dword(0x34) & 0xff, 0x40);
        assert_eq!(space.word(0x40), 0x5409);
        assert_eq!(space.word(0x54), 0x0011);
        assert_eq!(space.word(STATUS) & 0x10, 0x10);
        let huge = Capability::read_only(9, vec![0; 200]);
        assert_eq!(space.add_capability(&huge), Err(PciError::NoCapabilityRoom(202)));
    }
}
