//! How a device tells the driver: the ISR byte, and MSI-X vectors or INTx (virtio 1.2 sections
//! 4.1.4.5 and 4.1.5).

use crate::lock;
use pci::{Intx, Msix};
use std::sync::{Arc, Mutex};

/// "No vector": the event raises no interrupt while MSI-X is on.
pub(crate) const NO_VECTOR: u16 = 0xffff;

const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// Signalled from any thread.
pub(crate) struct DeviceInterrupts {
    msix: Arc<Msix>,
    intx: Arc<Intx>,
    state: Mutex<InterruptState>,
}

struct InterruptState {
    isr: u8,
    config_vector: u16,
    queue_vectors: Vec<u16>,
}

impl InterruptState {
    fn new(queues: usize) -> Self {
        Self { isr: 0, config_vector: NO_VECTOR, queue_vectors: vec![NO_VECTOR; queues] }
    }
}

impl DeviceInterrupts {
    /// No vector assigned, nothing pending.
    pub(crate) fn new(msix: Arc<Msix>, intx: Arc<Intx>, queues: usize) -> Self {
        Self { msix, intx, state: Mutex::new(InterruptState::new(queues)) }
    }

    /// Queue `index` has used buffers.
    pub(crate) fn queue(&self, index: usize) {
        let mut state = lock(&self.state);
        let vector = state.queue_vectors.get(index).copied().unwrap_or(NO_VECTOR);
        self.raise(&mut state, ISR_QUEUE, vector);
    }

    /// The device's configuration or its NEEDS_RESET status changed.
    pub(crate) fn config(&self) {
        let mut state = lock(&self.state);
        let vector = state.config_vector;
        self.raise(&mut state, ISR_CONFIG, vector);
    }

    fn raise(&self, state: &mut InterruptState, cause: u8, vector: u16) {
        state.isr |= cause;
        if self.msix.enabled() {
            self.msix.signal(vector);
        } else {
            self.intx.set_pending(true);
        }
    }

    /// The message that tells the driver of a queue's used buffers, if one would be sent now.
    pub(crate) fn message(&self, index: usize) -> Option<(u64, u32)> {
        self.msix.message(self.queue_vector(index))
    }

    /// The ISR byte. Reading clears it and lowers INTx.
    pub(crate) fn take_isr(&self) -> u8 {
        let mut state = lock(&self.state);
        self.intx.set_pending(false);
        std::mem::take(&mut state.isr)
    }

    /// The vector of configuration changes.
    pub(crate) fn config_vector(&self) -> u16 {
        lock(&self.state).config_vector
    }

    /// The vector of a queue; [`NO_VECTOR`] for a queue that does not exist.
    pub(crate) fn queue_vector(&self, index: usize) -> u16 {
        lock(&self.state).queue_vectors.get(index).copied().unwrap_or(NO_VECTOR)
    }

    /// Sets the vector of configuration changes; one that does not exist becomes [`NO_VECTOR`].
    pub(crate) fn set_config_vector(&self, vector: u16) {
        lock(&self.state).config_vector = self.existing(vector);
    }

    /// Sets a queue's vector; one that does not exist becomes [`NO_VECTOR`].
    pub(crate) fn set_queue_vector(&self, index: usize, vector: u16) {
        let vector = self.existing(vector);
        if let Some(slot) = lock(&self.state).queue_vectors.get_mut(index) {
            *slot = vector;
        }
    }

    fn existing(&self, vector: u16) -> u16 {
        if vector < self.msix.vectors() { vector } else { NO_VECTOR }
    }

    /// Device reset: vectors unassigned, nothing pending.
    pub(crate) fn reset(&self) {
        let mut state = lock(&self.state);
        *state = InterruptState::new(state.queue_vectors.len());
        self.intx.set_pending(false);
    }
}
