//! What a device body is: the contract between bodies and whatever transport carries them.

use std::sync::Arc;

use crate::{Queue, RequestLog, RingError};

/// How soon a driver is told of the requests that a queue has given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Telling {
    /// At once.
    AtOnce,
    /// Of the first answer at once, of others in the same queue that follow within a moment all together: an interrupt costs more
    /// than an answer.
    Spaced,
    /// A little later: nobody waits for the answers, and a driver that is interrupted for others mostly finds these, too.
    Late,
}

/// The body of a virtio device.
///
/// Calls never overlap, and come from whichever thread the transport chose. A body may take as
/// long as its host I/O does.
pub trait VirtioDevice: Send {
    /// Device ID (virtio 1.2 chapter 5): 2 block, 3 console, 4 entropy source.
    fn device_type(&self) -> u16;
    /// PCI class code as 0xbbsspp.
    fn class(&self) -> u32;
    /// Feature bits of this device type, on top of which the transport offers its own.
    fn features(&self) -> u64 {
        0
    }
    /// The largest size of each queue, powers of two.
    fn queue_sizes(&self) -> &[u16];
    /// The device configuration structure as it reads now, at most 4096 bytes.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
    /// The driver wrote `data` at byte `offset` of the configuration structure.
    fn config_write(&mut self, _offset: usize, _data: &[u8]) {}
    /// Feature negotiation ended with these bits.
    fn negotiated(&mut self, _features: u64) {}
    /// Serves queue `index` as far as it can: the driver made buffers available, or the host has
    /// something new to put into them. Spurious calls are allowed.
    ///
    /// # Errors
    /// The driver broke the ring or a request in a way no status can tell; the device will need a
    /// reset.
    fn process(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError>;
    /// A queue for which something has come while another one was served. It is asked after each, and told of each once.
    fn take_due(&mut self) -> Option<usize> {
        None
    }
    /// Where its requests are noted, before any of its queues is processed. For bodies that have them served elsewhere.
    fn log_to(&mut self, _log: &Arc<RequestLog>) {}
    /// Queue `index` may not be touched any more until it is to be processed again. For bodies that have it served
    /// elsewhere.
    fn stop(&mut self, _index: usize) {}
    /// Queue `index`, which was stopped, will begin at its beginning if it is processed again.
    fn forget(&mut self, _index: usize) {}
    /// Whether another body, made as this one was, could take its place at any moment and nothing that the driver was told
    /// would be untrue: all state is with the driver, or where the next one finds it.
    fn is_replaceable(&self) -> bool {
        false
    }
    /// Whether nobody waits for what queue `index` is asked. Its requests may be looked at with those of another queue, or a little later.
    fn is_patient(&self, _index: usize) -> bool {
        false
    }
    /// Offset in RAM's memory object of the words by which a server of queue `index` tells of answers, while somebody else may ring
    /// for it.
    fn words(&self, _index: usize) -> Option<u64> {
        None
    }
    /// How soon the driver is to be told of the requests that queue `index` has just given back.
    fn telling(&mut self, _index: usize) -> Telling {
        Telling::AtOnce
    }
    /// The driver reset the device: everything negotiated is void. Host resources stay.
    fn reset(&mut self) {}
}
