//! Network interface with one or several queue pairs (virtio 1.2 section 5.1).
//!
//! Frames go between the driver and a [`NetBackend`], which knows what a network is; the body knows
//! buffers. Frames no backend could want (too short for Ethernet, longer than the MTU allows) are
//! dropped here, as a wire would. Long frames are cheaper than segmentation: a backend that is not a
//! wire offers a large MTU.

mod pairs;

use crate::{Chain, Queue, RingError, Telling, VirtioDevice};
use pairs::Pairs;
use virtio_bindings::virtio_net as spec;

/// The queue the guest receives frames by; of several the first.
pub const RECEIVE: usize = 0;
/// The queue the guest sends frames by; of several the first.
pub const TRANSMIT: usize = 1;

/// Entries of a queue.
const QUEUE: u16 = 256;
/// Entries of the control queue, which has one request at a time.
const CONTROL_QUEUE: u16 = 64;
/// Where the configuration structure has the status.
const STATUS: usize = 6;
/// Where it has the number of pairs.
const PAIRS: usize = 8;
/// Bytes of `virtio_net_hdr_v1`, before every frame.
const HEADER: usize = 12;
/// Bytes of an Ethernet header, with room for one VLAN tag.
const ETHERNET: usize = 14;
const VLAN_TAG: usize = 4;
/// The most bytes of sent frames of which the driver is told late. The guest's TCP takes a frame to be on its way until the driver
/// is told that the frame was sent, and sends no more while many bytes are on their way.
const MOST_UNTOLD: usize = 16 << 10;
/// The header's `gso_type`: none is offered, so none is accepted.
const GSO_TYPE: usize = 1;

/// What is at the other end of the cable.
pub trait NetBackend: Send {
    /// Takes a frame the guest sent. It is at least an Ethernet header and fits the MTU.
    fn send(&mut self, frame: &[u8]);
    /// Replaces `frame` with one for the guest; false when there is none now. Whoever makes one
    /// available rings the doorbell of [`RECEIVE`].
    fn receive(&mut self, frame: &mut Vec<u8>) -> bool;
    /// The largest IP packet it carries.
    fn mtu(&self) -> u16 {
        1500
    }
    /// Whether it does without checksums: it ignores those of TCP and UDP from the guest, and
    /// frames it gives need not be checked.
    fn ignores_checksums(&self) -> bool {
        false
    }
}

/// A cable with nothing at its other end.
struct CutCable {
    mtu: u16,
}

impl NetBackend for CutCable {
    fn send(&mut self, _: &[u8]) {}

    fn receive(&mut self, _: &mut Vec<u8>) -> bool {
        false
    }

    fn mtu(&self) -> u16 {
        self.mtu
    }
}

/// Where the configuration structure has the MTU, behind address, status and number of queue pairs.
const MTU: usize = 10;

/// The device body.
pub struct Net {
    backend: Box<dyn NetBackend>,
    mac: [u8; 6],
    /// Features the driver accepted.
    features: u64,
    pairs: Pairs,
    queues: Vec<u16>,
    /// Bytes of frames sent since the driver was to be told at once.
    untold: usize,
}

impl Net {
    /// An interface with this address, connected to `backend`.
    pub fn new(backend: Box<dyn NetBackend>, mac: [u8; 6]) -> Self {
        let (pairs, queues) = (Pairs::new(1), vec![QUEUE; 2]);
        Self { backend, mac, features: 0, pairs, queues, untold: 0 }
    }

    /// The same with so many pairs of queues, of which the driver uses as many as it wants; 31 at the most.
    pub fn with_pairs(mut self, pairs: u16) -> Self {
        self.pairs = Pairs::new(pairs);
        self.queues = vec![QUEUE; 2 * usize::from(self.pairs.count())];
        if self.pairs.count() > 1 {
            self.queues.push(CONTROL_QUEUE);
        }
        self
    }

    /// What is left of an interface whose configuration structure was this: its frames are lost.
    pub fn cut(config: &[u8]) -> Self {
        let mac = config.first_chunk().copied().unwrap_or_default();
        let mtu = config.get(MTU..).and_then(<[u8]>::first_chunk).copied();
        let mtu = mtu.map_or(1500, u16::from_le_bytes);
        let pairs = config.get(PAIRS..).and_then(<[u8]>::first_chunk).copied();
        let pairs = pairs.map_or(1, u16::from_le_bytes);
        Self::new(Box::new(CutCable { mtu }), mac).with_pairs(pairs)
    }

    /// The configuration structure of an interface with this address and one pair of queues, whose network carries packets of `mtu`
    /// bytes.
    pub fn config_of(mac: [u8; 6], mtu: u16) -> Vec<u8> {
        Self::config_with(mac, mtu, 1)
    }

    /// Takes the link out of a configuration structure.
    pub fn unlink(config: &mut [u8]) {
        if let Some(status) = config.get_mut(STATUS) {
            *status &= !(spec::VIRTIO_NET_S_LINK_UP as u8);
        }
    }

    fn config_with(mac: [u8; 6], mtu: u16, pairs: u16) -> Vec<u8> {
        let mut config = mac.to_vec();
        config.extend_from_slice(&(spec::VIRTIO_NET_S_LINK_UP as u16).to_le_bytes());
        config.extend_from_slice(&pairs.to_le_bytes());
        config.extend_from_slice(&mtu.to_le_bytes());
        config
    }

    fn longest_frame(&self) -> usize {
        usize::from(self.backend.mtu()) + ETHERNET + VLAN_TAG
    }

    fn mergeable(&self) -> bool {
        self.features & 1 << spec::VIRTIO_NET_F_MRG_RXBUF != 0
    }

    fn has_pairs(&self) -> bool {
        self.features & 1 << spec::VIRTIO_NET_F_MQ != 0
    }

    /// The control queue is the last one; for a driver that wants one pair it is behind that.
    fn is_control(&self, index: usize) -> bool {
        let pairs = if self.has_pairs() { usize::from(self.pairs.count()) } else { 1 };
        index == 2 * pairs
    }

    fn transmit(&mut self, pair: usize, queue: &mut Queue) -> Result<(), RingError> {
        while let Some(chain) = queue.pop()? {
            if let Some(frame) = self.frame_of(&chain, queue)? {
                if self.has_pairs() {
                    self.pairs.sent(pair, &frame);
                }
                self.backend.send(&frame);
                self.untold += frame.len();
            }
            queue.complete(chain, 0)?;
        }
        Ok(())
    }

    /// The frame in a chain; `None` if it is none a wire would carry.
    fn frame_of(&self, chain: &Chain, queue: &Queue) -> Result<Option<Vec<u8>>, RingError> {
        let len = (chain.readable.len() as usize).saturating_sub(HEADER);
        if len < ETHERNET || len > self.longest_frame() {
            tracing::debug!(len, "dropped a frame of the guest");
            return Ok(None);
        }
        let mut header = [0; HEADER];
        chain.readable.read(queue.memory(), 0, &mut header)?;
        if header[GSO_TYPE] != 0 {
            return Ok(None);
        }
        let mut frame = vec![0; len];
        chain.readable.read(queue.memory(), HEADER as u64, &mut frame)?;
        Ok(Some(frame))
    }

    fn receive(&mut self, pair: usize, queue: &mut Queue) -> Result<(), RingError> {
        loop {
            self.refill(pair);
            let Some(frame) = self.pairs.next(pair) else { return Ok(()) };
            if !self.deliver(&frame, queue)? {
                self.pairs.put_back(pair, frame);
                return Ok(());
            }
        }
    }

    /// Takes what the network has, as far as there is room.
    fn refill(&mut self, pair: usize) {
        let mut frame = Vec::new();
        while self.pairs.have_room() && self.backend.receive(&mut frame) {
            self.pairs.came(std::mem::take(&mut frame), pair);
        }
    }

    /// Puts a frame into as many chains as it needs; false if the guest has not given enough.
    fn deliver(&self, frame: &[u8], queue: &mut Queue) -> Result<bool, RingError> {
        let total = HEADER + frame.len();
        let Some(chains) = take_chains(queue, total as u64, self.mergeable())? else {
            return Ok(false);
        };
        let mut packet = self.header(chains.len() as u16).to_vec();
        packet.extend_from_slice(frame);
        // One chain too small for the frame, and no merging: the frame is lost, as on a wire
        // whose receiver has no room.
        let room: u64 = chains.iter().map(|chain| chain.writable.len()).sum();
        packet.truncate(if room < total as u64 { 0 } else { total });
        let mut rest = packet.as_slice();
        let mut filled = Vec::with_capacity(chains.len());
        for chain in chains {
            let (piece, tail) = rest.split_at(rest.len().min(chain.writable.len() as usize));
            chain.writable.write(queue.memory(), 0, piece)?;
            filled.push((chain, piece.len() as u32));
            rest = tail;
        }
        queue.complete_together(filled)?;
        Ok(true)
    }

    fn header(&self, buffers: u16) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        if self.features & 1 << spec::VIRTIO_NET_F_GUEST_CSUM != 0 {
            header[0] = spec::VIRTIO_NET_HDR_F_DATA_VALID as u8;
        }
        header[10..].copy_from_slice(&buffers.to_le_bytes());
        header
    }
}

/// Takes chains with room for `total` bytes, or one if they may not be merged; takes none if there
/// are too few.
fn take_chains(
    queue: &mut Queue,
    total: u64,
    mergeable: bool,
) -> Result<Option<Vec<Chain>>, RingError> {
    let mut chains = Vec::new();
    let mut room = 0;
    while room < total && (mergeable || chains.is_empty()) {
        let Some(chain) = queue.pop()? else {
            chains.into_iter().rev().for_each(|chain| queue.put_back(chain));
            return Ok(None);
        };
        if chain.writable.len() < HEADER as u64 {
            return Err(RingError::NoRoom);
        }
        room += chain.writable.len();
        chains.push(chain);
    }
    Ok(Some(chains))
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u16 {
        crate::device_id::NET
    }

    fn class(&self) -> u32 {
        0x02_00_00 // Ethernet controller
    }

    fn features(&self) -> u64 {
        let features = 1 << spec::VIRTIO_NET_F_MAC
            | 1 << spec::VIRTIO_NET_F_MTU
            | 1 << spec::VIRTIO_NET_F_STATUS
            | 1 << spec::VIRTIO_NET_F_MRG_RXBUF;
        let checksums = 1 << spec::VIRTIO_NET_F_CSUM | 1 << spec::VIRTIO_NET_F_GUEST_CSUM;
        let features =
            if self.backend.ignores_checksums() { features | checksums } else { features };
        let several = 1 << spec::VIRTIO_NET_F_MQ | 1 << spec::VIRTIO_NET_F_CTRL_VQ;
        if self.pairs.count() > 1 { features | several } else { features }
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queues
    }

    fn config(&self) -> Vec<u8> {
        Self::config_with(self.mac, self.backend.mtu(), self.pairs.count())
    }

    fn negotiated(&mut self, features: u64) {
        self.features = features;
    }

    fn process(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        match index {
            _ if self.is_control(index) => self.pairs.obey(queue),
            _ if index % 2 == RECEIVE => self.receive(index / 2, queue),
            _ => self.transmit(index / 2, queue),
        }
    }

    fn take_due(&mut self) -> Option<usize> {
        self.pairs.take_due().map(|pair| 2 * pair + RECEIVE)
    }

    /// Nobody waits for sent frames to be given back. The driver is told at once of a frame that comes in alone, and of several
    /// that come close together with one interrupt.
    fn telling(&mut self, index: usize) -> Telling {
        if self.is_control(index) {
            return Telling::AtOnce;
        }
        if index % 2 == RECEIVE {
            return Telling::Spaced;
        }
        if self.untold < MOST_UNTOLD {
            return Telling::Late;
        }
        self.untold = 0;
        Telling::AtOnce
    }

    /// Frames may be lost, and connections end.
    fn is_replaceable(&self) -> bool {
        true
    }

    fn reset(&mut self) {
        self.features = 0;
        self.pairs.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_few_bytes_on_their_way_may_be_told_of_late() {
        let mut net = Net::new(Box::new(CutCable { mtu: 1500 }), [2, 0, 0, 0, 0, 1]);
        assert_eq!((net.telling(TRANSMIT), net.telling(RECEIVE)), (Telling::Late, Telling::Spaced));
        net.untold = MOST_UNTOLD;
        assert_eq!(net.telling(RECEIVE), Telling::Spaced);
        assert_eq!(net.telling(TRANSMIT), Telling::AtOnce);
        assert_eq!(net.telling(TRANSMIT), Telling::Late, "what follows");
    }
}
