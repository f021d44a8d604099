//! The network from the guest's end of the cable, frame by frame: also as a hostile guest sends them.
//!
//! Frames here name only addresses of the guest's own network, so that nothing leaves this machine.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket},
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    time::{Duration, Instant},
};

use fastrand::Rng;
use smoltcp::{
    phy::ChecksumCapabilities,
    wire::{
        ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol,
        IpAddress, IpProtocol, Ipv4Packet, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber, UdpPacket,
    },
};
use virtio::NetBackend;

use crate::{
    Cable, GATEWAY, GUEST, MTU, NAME_SERVER, NetworkConfig, Reach, frames, frames::GATEWAY_MAC,
    start, tcp::MAX_FLOWS,
};

const MAC: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 1]);
/// Who a hostile guest may write to here.
const TARGETS: [Ipv4Addr; 5] =
    [GATEWAY, NAME_SERVER, GUEST, Ipv4Addr::new(10, 0, 2, 255), Ipv4Addr::BROADCAST];
const PATIENCE: Duration = Duration::from_secs(20);
/// Where an IP packet begins in a frame, and its target's address in that.
const PACKET: usize = 14;
const TARGET: usize = PACKET + 16;

/// A guest's end of a network.
struct Guest {
    cable: Cable,
    rung: Receiver<()>,
}

impl Guest {
    fn new(config: &NetworkConfig) -> Self {
        let cable = start(config).expect("a network");
        let (sender, rung) = channel();
        // A guest that is gone needs no ringing.
        cable.ringer()(Arc::new(move || sender.send(()).unwrap_or_default()));
        Self { cable, rung }
    }

    /// The next frame for the guest, if it comes in time.
    fn next(&mut self, patience: Duration) -> Option<Vec<u8>> {
        let (deadline, mut frame) = (Instant::now() + patience, Vec::new());
        while !self.cable.receive(&mut frame) {
            let left = deadline.saturating_duration_since(Instant::now());
            self.rung.recv_timeout(left).ok()?;
        }
        Some(frame)
    }

    /// The next datagram for the guest: from where to where, and what is in it.
    fn next_datagram(&mut self) -> (SocketAddrV4, SocketAddrV4, Vec<u8>) {
        loop {
            let frame = self.next(PATIENCE).expect("a datagram");
            let ethernet = EthernetFrame::new_checked(&frame[..]).expect("a frame");
            let Ok(packet) = Ipv4Packet::new_checked(ethernet.payload()) else { continue };
            let Ok(datagram) = UdpPacket::new_checked(packet.payload()) else { continue };
            let from = SocketAddrV4::new(packet.src_addr(), datagram.src_port());
            let to = SocketAddrV4::new(packet.dst_addr(), datagram.dst_port());
            return (from, to, datagram.payload().to_vec());
        }
    }

    /// Has the gateway answer, which it does if it is still there and has seen all frames before. An answer that
    /// finds no room is lost, so it may have to be asked again.
    fn asks_the_gateway(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            self.cable.send(&arp(GATEWAY));
            while let Some(frame) = self.next(Duration::from_millis(300)) {
                let ethernet = EthernetFrame::new_checked(&frame[..]).expect("a frame");
                if ethernet.ethertype() == EthernetProtocol::Arp {
                    return;
                }
            }
        }
        panic!("the gateway does not answer any more");
    }
}

/// A network that reaches nothing outside.
fn closed() -> NetworkConfig {
    NetworkConfig { forwards: Vec::new(), name_server: None, reach: Reach::Public(Vec::new()) }
}

fn from_guest(mut frame: Vec<u8>) -> Vec<u8> {
    frame[..6].copy_from_slice(&GATEWAY_MAC.0);
    frame[6..12].copy_from_slice(&MAC.0);
    frame
}

fn arp(wanted: Ipv4Addr) -> Vec<u8> {
    let repr = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Request,
        source_hardware_addr: MAC,
        source_protocol_addr: GUEST,
        target_hardware_addr: EthernetAddress([0; 6]),
        target_protocol_addr: wanted,
    };
    from_guest(frames::ethernet(GATEWAY_MAC, EthernetProtocol::Arp, repr.buffer_len(), |bytes| {
        repr.emit(&mut ArpPacket::new_unchecked(bytes));
    }))
}

fn datagram(from: u16, to: SocketAddrV4, payload: &[u8]) -> Vec<u8> {
    from_guest(frames::udp(GATEWAY_MAC, SocketAddrV4::new(GUEST, from), to, payload))
}

/// A first SYN.
fn syn(from: u16, to: SocketAddrV4) -> Vec<u8> {
    let repr = TcpRepr {
        src_port: from,
        dst_port: to.port(),
        control: TcpControl::Syn,
        seq_number: TcpSeqNumber(1),
        ack_number: None,
        window_len: 1000,
        window_scale: Some(7),
        max_seg_size: Some(1460),
        sack_permitted: true,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let ends = (GUEST, *to.ip());
    let fill = |bytes: &mut [u8]| {
        let (from, to) = (IpAddress::Ipv4(GUEST), IpAddress::Ipv4(*to.ip()));
        let mut packet = TcpPacket::new_unchecked(bytes);
        repr.emit(&mut packet, &from, &to, &ChecksumCapabilities::default());
    };
    from_guest(frames::ipv4(GATEWAY_MAC, ends, IpProtocol::Tcp, repr.buffer_len(), fill))
}

/// An echo request, a question for an address, a first SYN, datagrams for all who listen.
fn sound_frames() -> Vec<Vec<u8>> {
    let ping = frames::ipv4(GATEWAY_MAC, (GUEST, GATEWAY), IpProtocol::Icmp, 16, |bytes| {
        bytes[0] = 8;
        bytes[2..4].copy_from_slice(&[0xf7, 0xff]); // the checksum of this and zeroes
    });
    vec![
        from_guest(ping),
        arp(GATEWAY),
        syn(1000, SocketAddrV4::new(GATEWAY, 9)),
        datagram(68, SocketAddrV4::new(Ipv4Addr::BROADCAST, 67), &discover()),
        datagram(1000, SocketAddrV4::new(NAME_SERVER, 53), b"a question"),
        datagram(1000, SocketAddrV4::new(GATEWAY, 32_768), b"to a peer of no forwarded port"),
    ]
}

/// DHCPDISCOVER as RFC 2131 has it, with some options.
fn discover() -> Vec<u8> {
    let mut message = vec![0; 240];
    message[..3].copy_from_slice(&[1, 1, 6]);
    message[28..34].copy_from_slice(&MAC.0);
    message[236..240].copy_from_slice(&[99, 130, 83, 99]);
    message.extend([53, 1, 1, 55, 3, 1, 3, 6, 50, 4, 10, 0, 2, 15, 61, 7, 1]);
    message.extend(MAC.0);
    message.push(255);
    message
}

/// Damages a frame, but for its addresses; its IP header's checksum is right again after that.
fn damage(frame: &[u8], random: &mut Rng) -> Vec<u8> {
    let mut frame = frame.to_vec();
    for _ in 0..random.usize(1..6) {
        let at = random.usize(12..frame.len());
        frame[at] = random.u8(..);
    }
    match random.u8(..4) {
        0 => frame.truncate(random.usize(..frame.len())),
        1 => frame.resize(random.usize(..usize::from(MTU) + 40), 0x41),
        _ => {}
    }
    if let Some(target) = frame.get_mut(TARGET..TARGET + 4) {
        target.copy_from_slice(&random.choice(TARGETS).expect("one").octets());
    }
    if let Ok(mut packet) = Ipv4Packet::new_checked(frame.get_mut(PACKET..).unwrap_or_default()) {
        packet.fill_checksum();
    }
    frame
}

#[test]
fn frames_of_any_length_are_survived() {
    let mut guest = Guest::new(&closed());
    for len in (0..200).chain([1499, 1518, 65_534, 65_535, 65_536, 70_000]) {
        for byte in [0, 0xff, 0x45] {
            guest.cable.send(&vec![byte; len]);
            let mut frame = from_guest(vec![byte; len.max(PACKET)]);
            frame[12..14].copy_from_slice(&[8, 0]);
            guest.cable.send(&frame);
        }
    }
    guest.asks_the_gateway();
}

#[test]
fn damaged_frames_are_survived() {
    let mut guest = Guest::new(&closed());
    let (sound, mut random) = (sound_frames(), Rng::with_seed(1));
    for round in 0..20_000 {
        let frame = random.choice(&sound).expect("one");
        let frame = damage(frame, &mut random);
        guest.cable.send(&frame);
        if round % 1000 == 0 {
            guest.asks_the_gateway();
        }
    }
    guest.asks_the_gateway();
}

/// Sound frames around messages that end early, or whose options say more than is there.
#[test]
fn malformed_dhcp_messages_are_survived_and_a_sound_one_is_answered() {
    let mut guest = Guest::new(&closed());
    let (sound, to) = (discover(), SocketAddrV4::new(Ipv4Addr::BROADCAST, 67));
    for len in 0..sound.len() {
        guest.cable.send(&datagram(68, to, &sound[..len]));
        for byte in [0, 1, 7, 0x80, 0xff] {
            let mut message = sound.clone();
            message[len] = byte;
            guest.cable.send(&datagram(68, to, &message));
        }
        guest.asks_the_gateway();
    }
    guest.cable.send(&datagram(68, to, &[&sound[..240], &[0xff; 60_000]].concat()));
    guest.asks_the_gateway();
    guest.cable.send(&datagram(68, to, &sound));
    let (from, _, offer) = guest.next_datagram();
    assert_eq!(from, SocketAddrV4::new(GATEWAY, 67));
    assert_eq!(offer[16..20], GUEST.octets(), "the address offered");
}

/// Descriptors this process has open.
fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("listed").count()
}

#[test]
fn a_flood_of_connections_is_bounded_and_the_network_goes_on() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let to = SocketAddrV4::new(GATEWAY, listener.local_addr().expect("an address").port());
    let mut guest = Guest::new(&NetworkConfig { reach: Reach::Everything, ..closed() });
    let before = descriptors();
    for port in 0..u16::try_from(2 * MAX_FLOWS).expect("ports") {
        guest.cable.send(&syn(1024 + port, to));
        // What is answered is taken, so that there is room.
        let mut frame = Vec::new();
        while guest.cable.receive(&mut frame) {}
    }
    guest.asks_the_gateway();
    assert!(descriptors() <= before + MAX_FLOWS + 64, "{} descriptors", descriptors());
}

/// A port of this host that is free.
fn free_port() -> u16 {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    socket.local_addr().expect("an address").port()
}

#[test]
fn forwarded_datagrams_and_their_answers_find_their_peers() {
    let port = free_port();
    let forward = format!("udp:127.0.0.1:{port}-:7").parse().expect("sound");
    let mut guest = Guest::new(&NetworkConfig { forwards: vec![forward], ..closed() });
    guest.asks_the_gateway(); // and with that tells who it is
    let peers = [(); 3].map(|()| {
        let peer = UdpSocket::bind("127.0.0.1:0").expect("a port");
        peer.set_read_timeout(Some(PATIENCE)).expect("set");
        peer.connect(("127.0.0.1", port)).expect("connected");
        peer
    });
    for (number, peer) in peers.iter().enumerate() {
        peer.send(&[b'a' + number as u8; 9000]).expect("sent");
        let (from, to, payload) = guest.next_datagram();
        assert_eq!((*from.ip(), to), (GATEWAY, SocketAddrV4::new(GUEST, 7)));
        assert_eq!(payload, vec![b'a' + number as u8; 9000]);
        guest.cable.send(&datagram(7, from, &[number as u8]));
    }
    for (number, peer) in peers.iter().enumerate() {
        let mut answer = [0; 16];
        assert_eq!(peer.recv(&mut answer).expect("answered"), 1);
        assert_eq!(answer[0], number as u8);
    }
}

/// An address of this host's that is not its loopback's, if it has one.
fn other_address() -> Option<Ipv4Addr> {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a port");
    // Sends nothing; the kernel picks the address it would send from.
    socket.connect(("192.0.2.1", 9)).ok()?;
    match socket.local_addr().expect("an address").ip() {
        std::net::IpAddr::V4(own) => Some(own),
        std::net::IpAddr::V6(_) => None,
    }
}

/// Whether a guest's connection to `to` comes to a listener at that address.
fn arrives(reach: Reach, to: Ipv4Addr) -> bool {
    let bound = if to == GATEWAY { Ipv4Addr::LOCALHOST } else { to };
    let listener = TcpListener::bind((bound, 0)).expect("a port");
    listener.set_nonblocking(true).expect("set");
    let port = listener.local_addr().expect("an address").port();
    let mut guest = Guest::new(&NetworkConfig { reach, ..closed() });
    guest.cable.send(&syn(2000, SocketAddrV4::new(to, port)));
    guest.asks_the_gateway();
    listener.accept().is_ok()
}

#[test]
fn a_restricted_guest_does_not_reach_this_host_by_any_of_its_addresses() {
    let addresses = [Some(GATEWAY), other_address()].into_iter().flatten();
    for address in addresses {
        assert!(arrives(Reach::Everything, address), "{address}");
        assert!(!arrives(Reach::Public(Vec::new()), address), "{address}");
        let rule = format!("{address}/32:*").parse().expect("a rule");
        assert!(arrives(Reach::Public(vec![rule]), address), "{address}, allowed");
    }
}
