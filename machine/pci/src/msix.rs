//! MSI-X: interrupts as messages, with a table of messages and pending bits in a BAR
//! (PCI 3.0 section 6.8.2).
//!
//! A vector signalled while it may not send is remembered in its pending bit and sent when the last
//! of its obstacles goes: function mask, vector mask, bus mastering. So no interrupt is lost, and
//! two that coincide while masked become one, as in hardware.

use crate::{Capability, PciError, lock};
use bus::MsiSink;
use std::sync::{Arc, Mutex};

const ENTRY: usize = 16;
const CAPABILITY_ID: u8 = 0x11;
const CONTROL_ENABLE: u16 = 1 << 15;
const CONTROL_MASK: u16 = 1 << 14;
/// Where messages reach local APICs. A message elsewhere would be a plain memory write by the
/// device; no driver wants that, and it is dropped.
const APIC_MESSAGES: std::ops::Range<u64> = 0xfee0_0000..0xfef0_0000;

/// Where the table and the pending bits are: BAR and byte offset, 8-byte aligned.
#[derive(Clone, Copy, Debug)]
pub struct MsiTable {
    /// BAR that holds both.
    pub bar: u8,
    /// Byte offset of the table in the BAR.
    pub table: u32,
    /// Byte offset of the pending bits in the BAR.
    pub pending: u32,
}

/// The MSI-X state of one function. Signalled from any thread.
pub struct Msix {
    sink: Arc<dyn MsiSink>,
    vectors: u16,
    state: Mutex<MsixState>,
}

struct MsixState {
    /// As the guest sees it: per vector 8 bytes address, 4 data, 4 control (bit 0 masks).
    table: Vec<u8>,
    pending: Vec<u8>,
    enabled: bool,
    masked: bool,
    bus_master: bool,
}

impl Msix {
    /// `vectors` masked vectors, MSI-X off.
    ///
    /// # Errors
    /// [`PciError::BadVectorCount`].
    pub fn new(vectors: usize, sink: Arc<dyn MsiSink>) -> Result<Arc<Self>, PciError> {
        if !(1..=2048).contains(&vectors) {
            return Err(PciError::BadVectorCount(vectors));
        }
        let state = Mutex::new(MsixState::new(vectors));
        Ok(Arc::new(Self { sink, vectors: vectors as u16, state }))
    }

    /// Number of vectors.
    pub fn vectors(&self) -> u16 {
        self.vectors
    }

    /// Bytes of the table.
    pub fn table_len(&self) -> u64 {
        u64::from(self.vectors) * ENTRY as u64
    }

    /// Bytes of the pending bit array.
    pub fn pending_len(&self) -> u64 {
        u64::from(self.vectors).div_ceil(64) * 8
    }

    /// The capability that announces this table.
    pub fn capability(&self, place: MsiTable) -> Capability {
        let mut body = (self.vectors - 1).to_le_bytes().to_vec();
        body.extend((place.table & !7 | u32::from(place.bar)).to_le_bytes());
        body.extend((place.pending & !7 | u32::from(place.bar)).to_le_bytes());
        let writable = (CONTROL_ENABLE | CONTROL_MASK).to_le_bytes().to_vec();
        Capability { id: CAPABILITY_ID, body, writable }
    }

    /// Takes the guest's Message Control register and the command register's bus master bit.
    pub fn set_control(&self, control: u16, bus_master: bool) {
        let mut state = lock(&self.state);
        state.enabled = control & CONTROL_ENABLE != 0;
        state.masked = control & CONTROL_MASK != 0;
        state.bus_master = bus_master;
        self.send_pending(&mut state, 0..self.vectors);
    }

    /// Whether the function interrupts by MSI-X rather than INTx.
    pub fn enabled(&self) -> bool {
        lock(&self.state).enabled
    }

    /// Sends `vector`'s message, or remembers it while masked. Nothing happens while MSI-X is off
    /// or for a vector that does not exist.
    pub fn signal(&self, vector: u16) {
        let mut state = lock(&self.state);
        if !state.enabled || vector >= self.vectors {
            return;
        }
        state.set_pending(vector, true);
        self.send_pending(&mut state, vector..vector + 1);
    }

    fn send_pending(&self, state: &mut MsixState, vectors: std::ops::Range<u16>) {
        for vector in vectors {
            if state.is_pending(vector) && state.may_send(vector) {
                state.set_pending(vector, false);
                let (address, data) = state.message(vector);
                if APIC_MESSAGES.contains(&address) {
                    self.sink.send(address, data);
                }
            }
        }
    }

    /// The message of a vector (its GPA and data), if it would be sent now.
    pub fn message(&self, vector: u16) -> Option<(u64, u32)> {
        let state = lock(&self.state);
        let may = vector < self.vectors && state.may_send(vector);
        may.then(|| state.message(vector)).filter(|(address, _)| APIC_MESSAGES.contains(address))
    }

    /// Reads the table at byte `offset`; all ones beyond it.
    pub fn table_read(&self, offset: u64, data: &mut [u8]) {
        read_bytes(&lock(&self.state).table, offset, data);
    }

    /// Writes the table at byte `offset`. Unmasking a pending vector sends it.
    pub fn table_write(&self, offset: u64, data: &[u8]) {
        let mut state = lock(&self.state);
        let Ok(start) = usize::try_from(offset) else { return };
        let Some(bytes) = state.table.get_mut(start..start.saturating_add(data.len())) else {
            return;
        };
        bytes.copy_from_slice(data);
        let first = start / ENTRY;
        let end = (start + data.len()).div_ceil(ENTRY);
        (first..end).for_each(|entry| state.clear_reserved(entry));
        self.send_pending(&mut state, first as u16..end as u16);
    }

    /// Reads the pending bits at byte `offset`; all ones beyond them. They are read-only.
    pub fn pending_read(&self, offset: u64, data: &mut [u8]) {
        read_bytes(&lock(&self.state).pending, offset, data);
    }

    /// Power-on state.
    pub fn reset(&self) {
        *lock(&self.state) = MsixState::new(usize::from(self.vectors));
    }
}

fn read_bytes(from: &[u8], offset: u64, data: &mut [u8]) {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    for (i, byte) in data.iter_mut().enumerate() {
        *byte = from.get(start.saturating_add(i)).copied().unwrap_or(0xff);
    }
}

impl MsixState {
    fn new(vectors: usize) -> Self {
        let mut table = vec![0; vectors * ENTRY];
        table.iter_mut().skip(12).step_by(ENTRY).for_each(|control| *control = 1);
        let pending = vec![0; vectors.div_ceil(64) * 8];
        Self { table, pending, enabled: false, masked: false, bus_master: false }
    }

    fn is_pending(&self, vector: u16) -> bool {
        self.pending[usize::from(vector / 8)] & 1 << (vector % 8) != 0
    }

    fn set_pending(&mut self, vector: u16, pending: bool) {
        let byte = &mut self.pending[usize::from(vector / 8)];
        let bit = 1 << (vector % 8);
        *byte = if pending { *byte | bit } else { *byte & !bit };
    }

    fn may_send(&self, vector: u16) -> bool {
        let masked = self.table[usize::from(vector) * ENTRY + 12] & 1 != 0;
        self.enabled && self.bus_master && !self.masked && !masked
    }

    fn message(&self, vector: u16) -> (u64, u32) {
        let at = usize::from(vector) * ENTRY;
        let mut entry = [0; 12];
        entry.copy_from_slice(&self.table[at..at + 12]);
        let [a0, a1, a2, a3, a4, a5, a6, a7, d0, d1, d2, d3] = entry;
        let address = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
        (address, u32::from_le_bytes([d0, d1, d2, d3]))
    }

    /// Address bits 1:0 and control bits 31:1 read as zero.
    fn clear_reserved(&mut self, entry: usize) {
        let at = entry * ENTRY;
        self.table[at] &= !3;
        self.table[at + 12] &= 1;
        self.table[at + 13..at + 16].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Sent(Mutex<Vec<(u64, u32)>>);
    impl MsiSink for Sent {
        fn send(&self, address: u64, data: u32) {
            lock(&self.0).push((address, data));
        }
    }

    fn two_vectors() -> (Arc<Sent>, Arc<Msix>) {
        let sent = Arc::new(Sent::default());
        let msix = Msix::new(2, sent.clone()).unwrap();
        msix.table_write(16, &0xfee0_1000_u64.to_le_bytes());
        msix.table_write(24, &0x41_u64.to_le_bytes()); // data, and control: unmasked
        (sent, msix)
    }

    #[test]
    fn masked_vectors_become_pending_and_coalesce() {
        let (sent, msix) = two_vectors();
        msix.set_control(CONTROL_ENABLE, true);
        msix.table_write(28, &1_u32.to_le_bytes());
        msix.signal(1);
        msix.signal(1);
        let mut pending = [0; 8];
        msix.pending_read(0, &mut pending);
        assert_eq!(pending[0], 2);
        assert!(lock(&sent.0).is_empty());
        msix.table_write(28, &0_u32.to_le_bytes());
        assert_eq!(*lock(&sent.0), [(0xfee0_1000, 0x41)]);
        msix.pending_read(0, &mut pending);
        assert_eq!(pending, [0; 8]);
    }

    #[test]
    fn function_mask_and_bus_master_hold_messages_back() {
        let (sent, msix) = two_vectors();
        msix.signal(1);
        assert!(lock(&sent.0).is_empty(), "off: no message, none remembered");
        msix.set_control(CONTROL_ENABLE | CONTROL_MASK, true);
        msix.signal(1);
        msix.set_control(CONTROL_ENABLE, false);
        assert!(lock(&sent.0).is_empty());
        msix.set_control(CONTROL_ENABLE, true);
        assert_eq!(lock(&sent.0).len(), 1);
    }

    #[test]
    fn odd_accesses_and_vectors() {
        let (sent, msix) = two_vectors();
        msix.set_control(CONTROL_ENABLE, true);
        msix.signal(0); // masked since power-on
        msix.signal(2);
        msix.signal(0xffff);
        assert!(lock(&sent.0).is_empty());
        let mut data = [0; 8];
        msix.table_read(u64::MAX - 3, &mut data);
        assert_eq!(data, [0xff; 8]);
        msix.table_write(30, &[0xff; 8]);
        msix.table_read(24, &mut data);
        assert_eq!(data, [0x41, 0, 0, 0, 0, 0, 0, 0], "a write across the end is lost");
        msix.table_write(14, &[0xff; 8]);
        msix.table_read(8, &mut data);
        assert_eq!(data, [0, 0, 0, 0, 1, 0, 0, 0], "reserved bits stay zero");
    }

    #[test]
    fn messages_outside_the_apic_window_go_nowhere() {
        let (sent, msix) = two_vectors();
        msix.table_write(16, &0x1000_u64.to_le_bytes());
        msix.set_control(CONTROL_ENABLE, true);
        msix.signal(1);
        assert!(lock(&sent.0).is_empty());
    }
}
