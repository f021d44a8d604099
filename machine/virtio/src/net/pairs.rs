//! Several pairs of queues (virtio 1.2 section 5.1.6.5.6): the driver says by a control queue how many it uses, and frames of a connection
//! come in by the pair by which it has sent some last.

use std::collections::VecDeque;

use virtio_bindings::virtio_net as spec;

use crate::{Chain, Queue, RingError};

/// Connections are told apart by so many values.
const FLOWS: usize = 256;
/// Frames that wait for buffers of one pair before no more are taken from the network.
const WAITING: usize = 64;
/// Bytes of a control command's class and number.
const COMMAND: usize = 2;

/// The pairs, and what waits for each.
pub(super) struct Pairs {
    waiting: Vec<VecDeque<Vec<u8>>>,
    /// The pair of each value.
    flows: [u8; FLOWS],
    /// Pairs for which frames have come that nobody has looked at yet: a bit each.
    due: u64,
}

impl Pairs {
    /// So many, at least one.
    pub(super) fn new(count: u16) -> Self {
        let count = count.clamp(1, spec::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_MAX.min(31) as u16);
        let waiting = (0..count).map(|_| VecDeque::new()).collect();
        Self { waiting, flows: [0; FLOWS], due: 0 }
    }

    pub(super) fn count(&self) -> u16 {
        self.waiting.len() as u16
    }

    /// A frame was sent by a pair: answers come in there. A driver that uses a pair has said so, but perhaps to a server before this one.
    pub(super) fn sent(&mut self, pair: usize, frame: &[u8]) {
        if pair < self.waiting.len() {
            self.flows[flow(frame)] = pair as u8;
        }
    }

    /// Whether a further frame can be taken.
    pub(super) fn have_room(&self) -> bool {
        let most = if self.waiting.len() == 1 { 1 } else { WAITING };
        self.waiting.iter().all(|waiting| waiting.len() < most)
    }

    /// A frame has come, while this pair is looked at.
    pub(super) fn came(&mut self, frame: Vec<u8>, now: usize) {
        let pair = usize::from(self.flows[flow(&frame)]);
        self.due |= u64::from(pair != now) << pair;
        self.waiting[pair].push_back(frame);
    }

    /// The next frame for a pair.
    pub(super) fn next(&mut self, pair: usize) -> Option<Vec<u8>> {
        self.waiting.get_mut(pair)?.pop_front()
    }

    /// The frame could not be delivered.
    pub(super) fn put_back(&mut self, pair: usize, frame: Vec<u8>) {
        self.waiting[pair].push_front(frame);
    }

    /// A pair that is to be looked at.
    pub(super) fn take_due(&mut self) -> Option<usize> {
        let pair = self.due.trailing_zeros();
        self.due &= self.due.wrapping_sub(1);
        (pair < u64::BITS).then_some(pair as usize)
    }

    /// Everything is as at the start.
    pub(super) fn reset(&mut self) {
        *self = Self::new(self.count());
    }

    /// Executes what the driver has put into the control queue.
    pub(super) fn obey(&mut self, queue: &mut Queue) -> Result<(), RingError> {
        while let Some(chain) = queue.pop()? {
            let done = self.execute(&chain, queue)?;
            let answer = if done { spec::VIRTIO_NET_OK } else { spec::VIRTIO_NET_ERR };
            if chain.writable.is_empty() {
                return Err(RingError::NoRoom);
            }
            chain.writable.write(queue.memory(), 0, &[answer as u8])?;
            queue.complete(chain, 1)?;
        }
        Ok(())
    }

    fn execute(&mut self, chain: &Chain, queue: &Queue) -> Result<bool, RingError> {
        const SET: [u8; COMMAND] =
            [spec::VIRTIO_NET_CTRL_MQ as u8, spec::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET as u8];
        let mut command = [0; COMMAND + 2];
        if chain.readable.len() < command.len() as u64 {
            return Ok(false);
        }
        chain.readable.read(queue.memory(), 0, &mut command)?;
        let (kind, [low, high]) = ([command[0], command[1]], [command[2], command[3]]);
        let count = u16::from_le_bytes([low, high]);
        let good = kind == SET && (1..=self.count()).contains(&count);
        if good {
            self.use_only(count);
        }
        Ok(good)
    }

    /// The driver uses so many from now on. What waits for others is lost, as on a wire.
    fn use_only(&mut self, count: u16) {
        self.flows.iter_mut().filter(|pair| u16::from(**pair) >= count).for_each(|pair| *pair = 0);
        self.waiting.iter_mut().skip(count.into()).for_each(VecDeque::clear);
    }
}

/// A value that frames of a connection have in common, whichever way they go; 0 where there is none.
fn flow(frame: &[u8]) -> usize {
    let word = |at: usize| {
        let bytes = frame.get(at..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| u32::from_be_bytes(*bytes))
    };
    let byte = |at: usize| frame.get(at).copied().unwrap_or_default();
    const IP: usize = 14;
    let (addresses, protocol, ports) = match (byte(12), byte(13)) {
        (0x08, 0x00) => {
            let is_part = word(IP + 4) & 0x3fff != 0;
            (12..20, if is_part { 0 } else { byte(IP + 9) }, usize::from(byte(IP) & 15) * 4)
        }
        (0x86, 0xdd) => (8..40, byte(IP + 6), 40),
        _ => return 0,
    };
    // Both ways are the same, since the order of source and destination does not count.
    let mut value = addresses.step_by(4).fold(0, |sum, at| sum ^ word(IP + at));
    if matches!(protocol, 6 | 17) {
        let both = word(IP + ports);
        value ^= both >> 16 ^ both & 0xffff;
    }
    (value.wrapping_mul(0x9e37_79b1) >> 24) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(from: [u8; 4], to: [u8; 4], ports: [u16; 2]) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([8, 0, 0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0]);
        frame.extend(from);
        frame.extend(to);
        ports.iter().for_each(|port| frame.extend(port.to_be_bytes()));
        frame.resize(60, 0);
        frame
    }

    #[test]
    fn an_answer_comes_where_the_question_was_asked() {
        let (ours, theirs) = ([10, 0, 2, 15], [192, 0, 2, 1]);
        let mut pairs = Pairs::new(4);
        for port in 1000..1100 {
            let pair = usize::from(port) % 4;
            let question = frame(ours, theirs, [port, 443]);
            let answer = frame(theirs, ours, [443, port]);
            assert_eq!(flow(&question), flow(&answer));
            pairs.sent(pair, &question);
            pairs.came(answer.clone(), 0);
            assert_eq!(pairs.take_due(), Some(pair).filter(|pair| *pair != 0));
            assert_eq!(pairs.next(pair), Some(answer));
        }
        let values: std::collections::BTreeSet<_> =
            (1000..1100).map(|port| flow(&frame(ours, theirs, [port, 443]))).collect();
        assert!(values.len() > 50, "{values:?}");
    }

    #[test]
    fn short_and_other_frames_go_to_the_first() {
        let whole = frame([1, 2, 3, 4], [5, 6, 7, 8], [9, 10]);
        assert!((0..whole.len()).all(|len| flow(&whole[..len]) < FLOWS));
        assert_eq!(flow(&[0xff; 60]), 0);
    }

    #[test]
    fn a_pair_that_takes_nothing_holds_up_the_network_and_is_forgotten_when_it_is_not_used() {
        let mut pairs = Pairs::new(2);
        let sent = frame([1, 2, 3, 4], [5, 6, 7, 8], [9, 10]);
        pairs.sent(1, &sent);
        (0..WAITING).for_each(|_| pairs.came(sent.clone(), 0));
        assert!(!pairs.have_room());
        pairs.use_only(1);
        assert!(pairs.have_room() && pairs.next(1).is_none());
        pairs.came(sent.clone(), 0);
        assert_eq!(pairs.next(0), Some(sent));
    }
}
