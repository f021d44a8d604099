//! Frames of a guest, all to addresses of its own network, so that nothing leaves this machine.

use std::{
    cell::RefCell,
    net::Ipv4Addr,
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    time::{Duration, Instant},
};

use usernet::{Cable, GATEWAY, GUEST, NAME_SERVER, NetworkConfig, Reach};
use virtio::NetBackend;

use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "usernet", seeds, run };

/// Where an IP packet has its addresses in a frame.
const TARGET_ADDRESS: usize = 14 + 16;
const CHECKSUM: usize = 14 + 10;
const ARP: [u8; 2] = [8, 6];
const PATIENCE: Duration = Duration::from_secs(20);
/// Frames of one input.
const MOST: usize = 64;

struct Guest {
    cable: Cable,
    rung: Receiver<()>,
}

thread_local! {
    static GUEST_END: RefCell<Option<Guest>> = const { RefCell::new(None) };
}

impl Guest {
    fn new() -> Self {
        let reach = Reach::Public(Vec::new());
        let forwards = Vec::new();
        let cable = usernet::start(&NetworkConfig { forwards, name_server: None, reach })
            .expect("a network");
        let (sender, rung) = channel();
        // A guest that is gone needs no ringing.
        cable.ringer()(Arc::new(move || sender.send(()).unwrap_or_default()));
        Self { cable, rung }
    }

    /// The gateway has seen all frames, and is still there.
    fn asks_the_gateway(&mut self) {
        let (deadline, mut frame) = (Instant::now() + PATIENCE, Vec::new());
        while Instant::now() < deadline {
            self.cable.send(&arp());
            let glance = Instant::now() + Duration::from_millis(200);
            while Instant::now() < glance {
                if self.cable.receive(&mut frame) {
                    if frame.get(12..14) == Some(&ARP) {
                        return;
                    }
                } else {
                    let _ = self.rung.recv_timeout(Duration::from_millis(20));
                }
            }
        }
        panic!("the gateway does not answer any more");
    }
}

fn ethernet(kind: [u8; 2], payload: &[u8]) -> Vec<u8> {
    [&[0x52, 0x55, 10, 0, 2, 2, 2, 0, 0, 0, 0, 1], &kind[..], payload].concat()
}

fn arp() -> Vec<u8> {
    let head = [0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1];
    ethernet(ARP, &[&head[..], &GUEST.octets(), &[0; 6], &GATEWAY.octets()].concat())
}

fn ip(protocol: u8, to: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
    let [high, low] = (20 + payload.len() as u16).to_be_bytes();
    let head = [0x45, 0, high, low, 0, 0, 0, 0, 64, protocol, 0, 0];
    let packet = [&head[..], &GUEST.octets(), &to.octets(), payload].concat();
    ethernet([8, 0], &packet)
}

fn discover() -> Vec<u8> {
    let mut message = vec![0; 240];
    message[..3].copy_from_slice(&[1, 1, 6]);
    message[28..34].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    message[236..240].copy_from_slice(&[99, 130, 83, 99]);
    message.extend([53, 1, 1, 55, 3, 1, 3, 6, 50, 4, 10, 0, 2, 15, 255]);
    let [high, low] = (8 + message.len() as u16).to_be_bytes();
    [vec![0, 68, 0, 67, high, low, 0, 0], message].concat()
}

/// Frames, each after its length in two bytes.
fn seeds() -> Vec<Vec<u8>> {
    let syn = [3, 232, 0, 9, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 3, 232, 0, 0, 0, 0];
    let query = [3, 232, 0, 53, 0, 18, 0, 0, 1, 2, 1, 0, 0, 1, 0, 0, 0, 0];
    let frames = [
        arp(),
        ip(1, GATEWAY, &[8, 0, 0xf7, 0xff, 0, 0, 0, 0]),
        ip(6, GATEWAY, &syn),
        ip(17, NAME_SERVER, &query),
        ip(17, Ipv4Addr::BROADCAST, &discover()),
    ];
    let one = frames.map(|frame| [&(frame.len() as u16).to_le_bytes()[..], &frame].concat());
    let all = one.concat();
    one.into_iter().chain([all]).collect()
}

/// The frame with an address of the guest's network, and a sound IP header's checksum more often than not.
fn tame(frame: &mut [u8]) {
    let ours = [GATEWAY, NAME_SERVER, GUEST, Ipv4Addr::new(10, 0, 2, 255)];
    let which = usize::from(frame.last().copied().unwrap_or_default());
    if let Some(address) = frame.get_mut(TARGET_ADDRESS..TARGET_ADDRESS + 4) {
        address.copy_from_slice(&ours[which % ours.len()].octets());
    }
    if which % 8 != 7 && frame.len() >= 34 {
        let words = usize::from(frame[14] & 0xf) * 2;
        frame[CHECKSUM..CHECKSUM + 2].fill(0);
        let header = frame.get(14..14 + 2 * words).unwrap_or_default();
        let sum: u32 =
            header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let sum = !((folded & 0xffff) + (folded >> 16)) as u16;
        frame[CHECKSUM..CHECKSUM + 2].copy_from_slice(&sum.to_be_bytes());
    }
}

fn run(bytes: &[u8]) {
    GUEST_END.with_borrow_mut(|guest| {
        let guest = guest.get_or_insert_with(Guest::new);
        let mut rest = bytes;
        for _ in 0..MOST {
            let Some(len) = rest.first_chunk().map(|word| u16::from_le_bytes(*word)) else { break };
            let (frame, behind) = rest[2..].split_at(usize::from(len).min(rest.len() - 2));
            rest = behind;
            let mut frame = frame.to_vec();
            tame(&mut frame);
            guest.cable.send(&frame);
        }
        guest.asks_the_gateway();
    });
}
