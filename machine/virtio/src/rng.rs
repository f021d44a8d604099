//! Entropy source (virtio 1.2 section 5.4): fills buffers with random bytes.

use crate::{Queue, RingError, VirtioDevice};
use std::io;
use std::sync::Arc;

/// Bytes given for one request at most; the specification allows fewer than asked for.
const MAX_BYTES: u64 = 4096;
const QUEUES: [u16; 1] = [64];

/// Where random bytes come from.
pub trait Entropy: Send {
    /// Fills `data`.
    ///
    /// # Errors
    /// The host has no randomness.
    fn fill(&mut self, data: &mut [u8]) -> io::Result<()>;
}

/// The host's randomness.
#[derive(Clone)]
pub struct HostEntropy(pub Arc<dyn host::Entropy>);

impl Entropy for HostEntropy {
    fn fill(&mut self, data: &mut [u8]) -> io::Result<()> {
        match self.0.fill(data) {
            true => Ok(()),
            false => Err(io::Error::other("the host has no randomness")),
        }
    }
}

/// The device body.
pub struct Rng {
    entropy: Box<dyn Entropy>,
}

impl Rng {
    /// A device that hands out `entropy`.
    pub fn new(entropy: Box<dyn Entropy>) -> Self {
        Self { entropy }
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u16 {
        virtio_bindings::virtio_ids::VIRTIO_ID_RNG as u16
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
            if let Err(error) = self.entropy.fill(&mut bytes) {
                tracing::error!(%error, "no entropy for the guest");
                bytes.clear();
            }
            chain.writable.write(queue.memory(), 0, &bytes)?;
            queue.complete(chain, bytes.len() as u32)?;
        }
        Ok(())
    }
}
