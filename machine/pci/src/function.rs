//! What a function on the bus is to the host bridge, and the part all endpoints share.

use crate::config::COMMAND;
use crate::{Bar, ConfigSpace, Identity, Intx, MsiTable, Msix, PciError};
use bus::{Bell, InterruptLine, MsiSink};
use std::sync::Arc;

/// A type-0 function. Behind its own lock, held for one access.
pub trait Function: Send {
    /// Its configuration space.
    fn config(&self) -> &ConfigSpace;
    /// Its configuration space.
    fn config_mut(&mut self) -> &mut ConfigSpace;
    /// Reads `data.len()` (1 to 4) bytes of configuration space inside one dword.
    fn config_read(&mut self, offset: usize, data: &mut [u8]) {
        self.config().read(offset, data);
    }
    /// Writes `data.len()` (1 to 4) bytes of configuration space inside one dword.
    fn config_write(&mut self, offset: usize, data: &[u8]) {
        self.config_mut().write(offset, data);
    }
    /// Reads `data.len()` (1, 2, 4, 8) bytes wholly inside a BAR, of any alignment.
    fn bar_read(&mut self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    /// Writes `data.len()` (1, 2, 4, 8) bytes wholly inside a BAR, of any alignment.
    fn bar_write(&mut self, _bar: u8, _offset: u64, _data: &[u8]) {}
    /// What the doorbell at an offset into a BAR does, if somebody else may ring it.
    fn bell(&mut self, _bar: u8, _offset: u64) -> Option<Bell> {
        None
    }
    /// Power-on state; BARs where [`crate::PciHost::add`] put them.
    fn reset(&mut self) {
        self.config_mut().reset();
    }
}

/// Configuration space, MSI-X and INTx of one function, kept consistent: what an endpoint's
/// [`Function`] delegates its configuration accesses to.
pub struct Endpoint {
    config: ConfigSpace,
    msix: Arc<Msix>,
    msix_offset: usize,
    intx: Arc<Intx>,
    place: MsiTable,
}

impl Endpoint {
    /// An endpoint with one BAR, which also holds the MSI-X table at `place`, and pin INTA#.
    ///
    /// # Errors
    /// The BAR or the vector count cannot be expressed.
    pub fn new(
        identity: Identity,
        bar: Bar,
        place: MsiTable,
        vectors: usize,
        wires: (Arc<dyn MsiSink>, Arc<dyn InterruptLine>),
    ) -> Result<Self, PciError> {
        let msix = Msix::new(vectors, wires.0)?;
        let mut config = ConfigSpace::new(identity);
        config.add_bar(place.bar, bar)?;
        config.set_interrupt_pin(1);
        let msix_offset = config.add_capability(&msix.capability(place))?;
        Ok(Self { config, msix, msix_offset, intx: Intx::new(wires.1), place })
    }

    /// Configuration space.
    pub fn config(&self) -> &ConfigSpace {
        &self.config
    }

    /// Configuration space, to add capabilities.
    pub fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    /// Its MSI-X vectors.
    pub fn msix(&self) -> &Arc<Msix> {
        &self.msix
    }

    /// Its interrupt pin.
    pub fn intx(&self) -> &Arc<Intx> {
        &self.intx
    }

    /// Reads configuration space.
    pub fn config_read(&mut self, offset: usize, data: &mut [u8]) {
        self.config.set_interrupt_status(self.intx.pending());
        self.config.read(offset, data);
    }

    /// Writes configuration space and tells the interrupts.
    pub fn config_write(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
        let touches = |register: usize| offset < register + 2 && offset + data.len() > register;
        if touches(COMMAND) || touches(self.msix_offset + 2) {
            self.update_interrupts();
        }
    }

    fn update_interrupts(&mut self) {
        let control = self.config.word(self.msix_offset + 2);
        self.msix.set_control(control, self.config.bus_master());
        self.intx.set_disabled(self.config.intx_disabled() || self.msix.enabled());
    }

    /// Reads the MSI-X table or pending bits if `offset` into `bar` is theirs; says whether it was.
    pub fn msix_read(&self, bar: u8, offset: u64, data: &mut [u8]) -> bool {
        let table = self.inside(bar, offset, self.place.table, self.msix.table_len());
        let pending = self.inside(bar, offset, self.place.pending, self.msix.pending_len());
        match (table, pending) {
            (Some(at), _) => self.msix.table_read(at, data),
            (None, Some(at)) => self.msix.pending_read(at, data),
            (None, None) => return false,
        }
        true
    }

    /// Writes the MSI-X table or pending bits if `offset` into `bar` is theirs; says whether it was.
    pub fn msix_write(&self, bar: u8, offset: u64, data: &[u8]) -> bool {
        if let Some(at) = self.inside(bar, offset, self.place.table, self.msix.table_len()) {
            self.msix.table_write(at, data);
            return true;
        }
        self.inside(bar, offset, self.place.pending, self.msix.pending_len()).is_some()
    }

    fn inside(&self, bar: u8, offset: u64, base: u32, len: u64) -> Option<u64> {
        let at = offset.checked_sub(u64::from(base))?;
        (bar == self.place.bar && at < len).then_some(at)
    }

    /// Power-on state.
    pub fn reset(&mut self) {
        self.config.reset();
        self.msix.reset();
        self.intx.set_pending(false);
        self.update_interrupts();
    }
}
