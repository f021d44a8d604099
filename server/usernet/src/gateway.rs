//! Who gets which packet, and the thread that waits for all of them.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind},
    net::{Ipv4Addr, SocketAddrV4},
    thread,
    time::Duration,
};

use mio::{
    Events, Interest, Poll, Token,
    net::{TcpListener, UdpSocket},
};
use smoltcp::{
    iface::{Config as InterfaceConfig, Interface, SocketSet},
    phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken},
    time::Instant,
    wire::{
        DHCP_SERVER_PORT, EthernetAddress, EthernetFrame, EthernetProtocol, HardwareAddress,
        IpAddress, IpCidr, IpProtocol, Ipv4Packet, TcpPacket, UdpPacket,
    },
};

use crate::{
    Cable, Forward, GATEWAY, GatewayError, MTU, NAME_SERVER, NetworkConfig, PREFIX, Protocol,
    Targets, dhcp, frames, link,
    link::GatewayEnd,
    tcp::Flows,
    udp::{Inbound, MAX_DATAGRAM, UdpPorts},
};

const WAKE: Token = Token(0);
/// How often idle connections and ports are looked at.
const SWEEP: Duration = Duration::from_secs(1);
/// The first of the gateway's ports that stand for peers of forwarded UDP ports.
const INBOUND_PORTS: u16 = 32_768;

/// The guest's side as smoltcp sees it: IP packets in and out.
struct IpDevice {
    cable: GatewayEnd,
    guest: EthernetAddress,
    received: VecDeque<Vec<u8>>,
}

impl Device for IpDevice {
    type RxToken<'a> = Received;
    type TxToken<'a> = FrameSender<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, FrameSender<'_>)> {
        let frame = self.received.pop_front()?;
        Some((Received(frame), FrameSender { cable: &self.cable, guest: self.guest }))
    }

    fn transmit(&mut self, _: Instant) -> Option<FrameSender<'_>> {
        self.cable.has_room().then_some(FrameSender { cable: &self.cable, guest: self.guest })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = usize::from(MTU);
        // The guest leaves its checksums to the device, and is told that ours are right.
        capabilities.checksum.tcp = Checksum::None;
        capabilities
    }
}

/// An IP packet in the frame it came in.
struct Received(Vec<u8>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0.get(EthernetFrame::<&[u8]>::header_len()..).unwrap_or_default())
    }
}

struct FrameSender<'a> {
    cable: &'a GatewayEnd,
    guest: EthernetAddress,
}

impl TxToken for FrameSender<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut result = None;
        let fill = |bytes: &mut [u8]| result = Some(f(bytes));
        let frame = frames::ethernet(self.guest, EthernetProtocol::Ipv4, len, fill);
        self.cable.send(frame);
        result.expect("the frame was filled")
    }
}

/// Everything the thread owns.
struct Gateway {
    targets: Targets,
    poll: Poll,
    next_token: usize,
    wire: IpDevice,
    interface: Interface,
    sockets: SocketSet<'static>,
    flows: Flows,
    ports: UdpPorts,
    listeners: HashMap<Token, (TcpListener, SocketAddrV4)>,
    inbound: Vec<(Token, Inbound)>,
    buffer: Vec<u8>,
}

/// A network with its ports open, before it has a thread.
pub struct Network {
    gateway: Gateway,
    cable: Cable,
}

impl Network {
    pub(crate) fn open(config: &NetworkConfig) -> Result<Self, GatewayError> {
        let poll = Poll::new()?;
        let (cable, end) = Cable::new(link::waker(poll.registry(), WAKE)?);
        let mut gateway = Gateway::new(Targets::new(config), poll, end);
        for &forward in &config.forwards {
            gateway.listen(forward).map_err(|error| GatewayError::Forward { forward, error })?;
        }
        Ok(Self { gateway, cable })
    }

    /// Starts the thread; returns the guest's end of the cable.
    ///
    /// # Errors
    /// The host has no thread for it.
    pub fn start(self) -> Result<Cable, GatewayError> {
        let gateway = self.gateway;
        thread::Builder::new().name("usernet".into()).spawn(move || gateway.run())?;
        Ok(self.cable)
    }
}

fn interface(wire: &mut IpDevice) -> Interface {
    let config = InterfaceConfig::new(HardwareAddress::Ip);
    let mut interface = Interface::new(config, wire, Instant::now());
    interface.update_ip_addrs(|addresses| {
        // The list holds more than one.
        let _ = addresses.push(IpCidr::new(IpAddress::Ipv4(GATEWAY), PREFIX));
    });
    interface.set_any_ip(true);
    interface
}

impl Gateway {
    fn new(targets: Targets, poll: Poll, cable: GatewayEnd) -> Self {
        let (guest, received) = (EthernetAddress::BROADCAST, VecDeque::new());
        let mut wire = IpDevice { cable, guest, received };
        let interface = interface(&mut wire);
        Self {
            targets,
            poll,
            next_token: 1,
            wire,
            interface,
            sockets: SocketSet::new(Vec::new()),
            flows: Flows::default(),
            ports: UdpPorts::default(),
            listeners: HashMap::new(),
            inbound: Vec::new(),
            buffer: vec![0; MAX_DATAGRAM],
        }
    }

    fn token(&mut self) -> Token {
        self.next_token += 1;
        Token(self.next_token)
    }

    fn listen(&mut self, forward: Forward) -> io::Result<()> {
        let token = self.token();
        let guest = SocketAddrV4::new(forward.guest.0, forward.guest.1);
        match forward.protocol {
            Protocol::Tcp => {
                let mut listener = TcpListener::bind(forward.host)?;
                self.poll.registry().register(&mut listener, token, Interest::READABLE)?;
                self.listeners.insert(token, (listener, guest));
            }
            Protocol::Udp => {
                let mut socket = UdpSocket::bind(forward.host)?;
                self.poll.registry().register(&mut socket, token, Interest::READABLE)?;
                self.inbound.push((token, Inbound::new(socket, guest)));
            }
        }
        Ok(())
    }

    fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let mut swept = std::time::Instant::now();
        loop {
            let nap = self.nap();
            match self.poll.poll(&mut events, Some(nap)) {
                Err(error) if error.kind() != ErrorKind::Interrupted => {
                    return tracing::error!(%error, "the network ends");
                }
                _ => {}
            }
            for token in events.iter().map(mio::event::Event::token) {
                self.event(token);
            }
            let Some(frames) = self.wire.cable.take() else { return };
            frames.into_iter().for_each(|frame| self.frame(frame));
            if swept.elapsed() >= SWEEP {
                swept = std::time::Instant::now();
                self.flows.sweep();
                self.ports.sweep();
                // Whom the host had no descriptor for when they came is told of only once.
                self.accept_all();
            }
            self.relay();
        }
    }

    /// How long there is nothing to do but wait.
    fn nap(&mut self) -> Duration {
        let due = self.interface.poll_delay(Instant::now(), &self.sockets);
        // What finds no room now is told when there is.
        let room = self.wire.cable.has_room();
        due.filter(|_| room).map_or(SWEEP, |due| Duration::from(due).min(SWEEP))
    }

    /// Lets smoltcp and the connections work until neither has anything more to do.
    fn relay(&mut self) {
        loop {
            self.interface.poll(Instant::now(), &mut self.wire, &mut self.sockets);
            self.wire.cable.ring();
            if !self.flows.pump(&mut self.sockets, self.poll.registry()) {
                return;
            }
        }
    }

    fn event(&mut self, token: Token) {
        if token == WAKE {
            // Room for the guest: whoever waited for it is looked at by smoltcp itself.
        } else if self.listeners.contains_key(&token) {
            self.accept(token);
        } else if self.inbound.iter().any(|(inbound, _)| *inbound == token) {
            self.receive_inbound(token);
        } else if !self.receive(token) {
            self.flows.event(token);
        }
    }

    fn accept(&mut self, listener: Token) {
        // Nobody would answer yet: they wait in the listener's queue.
        let absent = self.wire.guest.is_broadcast();
        while let Some((listener, guest)) = self.listeners.get(&listener).filter(|_| !absent) {
            let (stream, guest) = match listener.accept() {
                Ok((stream, _)) => (stream, *guest),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => return tracing::warn!(%error, "cannot accept a connection"),
            };
            let token = self.token();
            let registry = (self.poll.registry(), token);
            self.flows.accepted(stream, guest, &mut self.interface, &mut self.sockets, registry);
        }
    }

    fn receive(&mut self, token: Token) -> bool {
        let (cable, mac) = (&self.wire.cable, self.wire.guest);
        self.ports.receive(token, &mut self.buffer, |(guest, remote), payload| {
            cable.send(frames::udp(mac, remote, guest, payload));
        })
    }

    fn receive_inbound(&mut self, token: Token) {
        let (cable, mac) = (&self.wire.cable, self.wire.guest);
        for (index, (inbound_token, inbound)) in self.inbound.iter_mut().enumerate() {
            if *inbound_token == token {
                let guest = inbound.guest;
                inbound.receive(&mut self.buffer, |number, payload| {
                    let port = INBOUND_PORTS + index as u16 * Inbound::PEERS + number;
                    let from = SocketAddrV4::new(GATEWAY, port);
                    cable.send(frames::udp(mac, from, guest, payload));
                });
            }
        }
    }

    fn frame(&mut self, frame: Vec<u8>) {
        let Ok(ethernet) = EthernetFrame::new_checked(&frame[..]) else { return };
        self.hear(ethernet.src_addr());
        match ethernet.ethertype() {
            EthernetProtocol::Arp => {
                if let Some(reply) = frames::arp_reply(ethernet.payload()) {
                    self.wire.cable.send(reply);
                }
            }
            EthernetProtocol::Ipv4 => {
                if let Some(true) = self.packet(ethernet.payload()) {
                    self.wire.received.push_back(frame);
                }
            }
            _ => {}
        }
    }

    /// Learns the guest's address. With its first frame come those who wait for it at forwarded
    /// ports.
    fn hear(&mut self, from: EthernetAddress) {
        let first = self.wire.guest.is_broadcast();
        if from.is_unicast() {
            self.wire.guest = from;
        }
        if first {
            self.accept_all();
        }
    }

    fn accept_all(&mut self) {
        let listeners: Vec<_> = self.listeners.keys().copied().collect();
        listeners.into_iter().for_each(|listener| self.accept(listener));
    }

    /// Handles an IP packet; true if it is for smoltcp, `None` if it is damaged.
    fn packet(&mut self, bytes: &[u8]) -> Option<bool> {
        let packet = Ipv4Packet::new_checked(bytes).ok()?;
        if packet.more_frags() || packet.frag_offset() != 0 || !packet.verify_checksum() {
            return None;
        }
        let (from, to) = (packet.src_addr(), packet.dst_addr());
        match packet.next_header() {
            IpProtocol::Tcp => self.segment((from, to), packet.payload()),
            IpProtocol::Udp => self.datagram((from, to), packet.payload()),
            IpProtocol::Icmp if to == GATEWAY || to == NAME_SERVER => {
                let reply = frames::echo_reply(self.wire.guest, &packet)?;
                self.wire.cable.send(reply);
                Some(false)
            }
            _ => None,
        }
    }

    fn segment(&mut self, (from, to): (Ipv4Addr, Ipv4Addr), bytes: &[u8]) -> Option<bool> {
        let segment = TcpPacket::new_checked(bytes).ok()?;
        let opens = segment.syn() && !segment.ack();
        let ends = (
            SocketAddrV4::new(from, segment.src_port()),
            SocketAddrV4::new(to, segment.dst_port()),
        );
        let token = self.token();
        let registry = (self.poll.registry(), token);
        self.flows.segment(ends, opens, &self.targets, &mut self.sockets, registry);
        if opens {
            // Each first SYN meets the one socket that listens for it before the next is made.
            self.interface.poll(Instant::now(), &mut self.wire, &mut self.sockets);
        }
        Some(true)
    }

    fn datagram(&mut self, (from, to): (Ipv4Addr, Ipv4Addr), bytes: &[u8]) -> Option<bool> {
        let datagram = UdpPacket::new_checked(bytes).ok()?;
        if datagram.dst_port() == DHCP_SERVER_PORT && (to.is_broadcast() || to == GATEWAY) {
            self.wire.cable.send(dhcp::reply(datagram.payload())?);
            return Some(false);
        }
        if to == GATEWAY && self.answers_inbound(from, &datagram) {
            return Some(false);
        }
        let ends = (
            SocketAddrV4::new(from, datagram.src_port()),
            SocketAddrV4::new(to, datagram.dst_port()),
        );
        let token = self.token();
        let registry = (self.poll.registry(), token);
        self.ports.send(ends, datagram.payload(), &self.targets, registry);
        Some(false)
    }

    /// Whether a datagram answers a peer of a forwarded port.
    fn answers_inbound(&self, from: Ipv4Addr, datagram: &UdpPacket<&[u8]>) -> bool {
        let Some(number) = datagram.dst_port().checked_sub(INBOUND_PORTS) else { return false };
        let (index, peer) = (number / Inbound::PEERS, number % Inbound::PEERS);
        let inbound = self.inbound.get(usize::from(index)).map(|(_, inbound)| inbound);
        let guest = SocketAddrV4::new(from, datagram.src_port());
        let inbound = inbound.filter(|inbound| inbound.guest == guest);
        inbound.inspect(|inbound| inbound.answer(peer, datagram.payload())).is_some()
    }
}
