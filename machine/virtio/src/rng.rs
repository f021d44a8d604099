//! Entropy source (virtio 1.2 section 5.4): fills buffers with random bytes.

use crate::{Queue, RingError, VirtioDevice};
use std::sync::Arc;

use host::Entropy;

/// Bytes given for one request at most; the specification allows fewer than asked for.
const MAX_BYTES: u64 = 4096;
const QUEUES: [u16; 1] = [64];

/// The device body.
pub struct Rng {
    entropy: Arc<dyn Entropy>,
}

impl Rng {
    /// A device that hands out `entropy`.
    pub fn new(entropy: Arc<dyn Entropy>) -> Self {
        Self { entropy }
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u16 {
        crate::device_id::RNG
    }

    fn class(&self) -> u32 {
        0x10_00_00 // encryption controller, network and computing
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }

    fn process(&mut self, _: usize, queue: &mut Queue) -> Result<(), RingError> {
        while let Some(chain) = queue.pop()? {
            if chain.writable.is_empty() {
                return Err(RingError::NoRoom);
            }
            let mut bytes = vec![0; chain.writable.len().min(MAX_BYTES) as usize];
            if !self.entropy.fill(&mut bytes) {
                tracing::error!("the host has no randomness for the guest");
                bytes.clear();
            }
            chain.writable.write(queue.memory(), 0, &bytes)?;
            queue.complete(chain, bytes.len() as u32)?;
        }
        Ok(())
    }
}
