//! A device that breaks virtio's rules: what it gives back is not what its driver may expect.
//!
//! Its body does what it always does. Only what the driver is told of a request, in the used ring and in the status, is another thing
//! than the body said.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ram::DmaMemory;
use virtio::{Answer, BlockRequest, Chain, Queue, RingError, Tamper, VirtioDevice, device_id};

use crate::{
    Effect, ProtocolAction, Schedule,
    forward::forward_rest,
    schedule::{DeviceRequest, Op},
};

/// The faults of a device that answers its driver against virtio's rules.
#[derive(Clone)]
pub struct Rogue(Arc<Mutex<Schedule<ProtocolAction>>>);

impl Rogue {
    /// Faults that strike as `schedule` says.
    pub fn new(schedule: Schedule<ProtocolAction>) -> Self {
        Self(Arc::new(Mutex::new(schedule)))
    }

    /// The cue of a fault has come.
    pub fn arm(&self, fault: &str) {
        self.schedule().arm(fault);
    }

    /// Wraps `device`, a disk or a network interface, so that it has these faults.
    pub fn spoil(self, device: Box<dyn VirtioDevice>) -> Box<dyn VirtioDevice> {
        Box::new(RogueDevice { device, rogue: self })
    }

    fn schedule(&self) -> MutexGuard<'_, Schedule<ProtocolAction>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The function that falsifies answers to requests of this kind.
    fn tamper(&self, kind: Kind) -> Tamper {
        let own = self.clone();
        Arc::new(move |chain, memory, answer| {
            if let Some(request) = kind.request(chain, memory, answer) {
                own.falsify(&request, chain, memory, answer);
            }
        })
    }

    fn falsify(
        &self,
        request: &DeviceRequest,
        chain: &Chain,
        memory: &DmaMemory,
        answer: &mut Answer,
    ) {
        let mut schedule = self.schedule();
        for strike in schedule.strikes(request) {
            let effect = match strike.action {
                ProtocolAction::UsedIndex(ahead) => {
                    answer.ahead = ahead;
                    Effect::UsedIndex(ahead)
                }
                ProtocolAction::UsedId(id) => {
                    let before = std::mem::replace(&mut answer.id, id);
                    Effect::UsedId(before, id)
                }
                ProtocolAction::UsedLength(len) => {
                    let before = std::mem::replace(&mut answer.len, len);
                    Effect::UsedLength(before, len)
                }
                ProtocolAction::Status(status) => {
                    // A request without room for one is never answered.
                    let last = chain.writable.len().saturating_sub(1);
                    let _ = chain.writable.write(memory, last, &[status]);
                    Effect::Status(status)
                }
                ProtocolAction::Spurious => {
                    answer.is_spurious = true;
                    Effect::Interrupted
                }
            };
            schedule.record(strike, effect);
        }
    }
}

/// What a queue's requests are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Disk,
    Receive,
    Send,
    /// None that a fault strikes.
    Other,
}

impl Kind {
    fn of(device: &dyn VirtioDevice, index: usize) -> Self {
        let queues = device.queue_sizes().len();
        match device.device_type() {
            device_id::BLOCK => Self::Disk,
            // Behind the pairs there may be a queue for orders.
            device_id::NET if index < queues / 2 * 2 => [Self::Receive, Self::Send][index % 2],
            _ => Self::Other,
        }
    }

    fn request(self, chain: &Chain, memory: &DmaMemory, answer: &Answer) -> Option<DeviceRequest> {
        match self {
            Self::Disk => of_disk(BlockRequest::parse(chain, memory).ok()?),
            Self::Receive => frame(Op::Receive, answer.len.into()),
            Self::Send => frame(Op::Send, chain.readable.len()),
            Self::Other => None,
        }
    }
}

fn frame(op: Op, len: u64) -> Option<DeviceRequest> {
    Some(DeviceRequest { op, bytes: 0..len })
}

/// Of a range that is discarded or zeroed it is not known here where it is.
fn of_disk(request: BlockRequest) -> Option<DeviceRequest> {
    let (op, offset, len) = match request {
        BlockRequest::In { offset, len } => (Op::Read, offset, len),
        BlockRequest::Out { offset, len } => (Op::Write, offset, len),
        BlockRequest::Ranges { zeroes: true } => (Op::Write, 0, 0),
        BlockRequest::Ranges { zeroes: false } => (Op::Discard, 0, 0),
        BlockRequest::Flush => (Op::Flush, 0, 0),
        BlockRequest::GetId | BlockRequest::Unknown | BlockRequest::Malformed => return None,
    };
    Some(DeviceRequest { op, bytes: offset..offset.saturating_add(len) })
}

/// A device with such faults.
struct RogueDevice {
    device: Box<dyn VirtioDevice>,
    rogue: Rogue,
}

impl VirtioDevice for RogueDevice {
    fn config(&self) -> Vec<u8> {
        self.device.config()
    }

    fn process(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        queue.tamper_with(|| self.rogue.tamper(Kind::of(&*self.device, index)));
        self.device.process(index, queue)
    }

    forward_rest!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_apart() {
        let read = of_disk(BlockRequest::In { offset: 512, len: 1024 }).expect("struck");
        assert_eq!((read.op, read.bytes), (Op::Read, 512..1536));
        let flush = of_disk(BlockRequest::Flush).expect("struck");
        assert_eq!((flush.op, flush.bytes), (Op::Flush, 0..0));
        assert!(of_disk(BlockRequest::GetId).is_none());
    }
}
