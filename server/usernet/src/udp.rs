//! UDP: one host socket per pair of guest and remote ports, forgotten when idle.

use std::{
    collections::HashMap,
    io::ErrorKind,
    net::{SocketAddr, SocketAddrV4},
    time::{Duration, Instant},
};

use mio::{Interest, Registry, Token, net::UdpSocket};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use crate::{Targets, tcp::Ends};

/// UdpPorts in use at once; beyond them the longest idle is forgotten.
const MAX_PORTS: usize = 512;
/// How long a pair of ports is remembered.
const IDLE: Duration = Duration::from_secs(60);
/// The largest datagram there is.
pub(crate) const MAX_DATAGRAM: usize = 65_507;

struct Port {
    ends: Ends,
    socket: UdpSocket,
    used: Instant,
}

/// The guest's UDP ports in use.
#[derive(Default)]
pub(crate) struct UdpPorts {
    ports: HashMap<Token, Port>,
    by_ends: HashMap<Ends, Token>,
}

impl UdpPorts {
    /// Sends a datagram of the guest; `token` is for a port not seen before.
    pub(crate) fn send(
        &mut self,
        ends: Ends,
        payload: &[u8],
        targets: &Targets,
        (registry, token): (&Registry, Token),
    ) {
        let known = self.by_ends.get(&ends).copied();
        let Some(token) = known.or_else(|| self.open(ends, targets, registry, token)) else {
            return;
        };
        if let Some(port) = self.ports.get_mut(&token) {
            port.used = Instant::now();
            // Datagrams may be lost; whoever sent this one asks again.
            let _ = port.socket.send(payload);
        }
    }

    fn open(
        &mut self,
        ends: Ends,
        targets: &Targets,
        registry: &Registry,
        token: Token,
    ) -> Option<Token> {
        if self.ports.len() >= MAX_PORTS {
            self.forget_oldest();
        }
        let (_, remote) = ends;
        let target = targets.find(*remote.ip(), remote.port())?;
        let socket = connected(target, registry, token);
        let socket =
            socket.map_err(|error| tracing::debug!(%target, %error, "no host socket")).ok()?;
        self.ports.insert(token, Port { ends, socket, used: Instant::now() });
        self.by_ends.insert(ends, token);
        Some(token)
    }

    /// Gives what arrived for a port to `deliver`, with the ends it is between; whether the port
    /// is one of ours.
    pub(crate) fn receive(
        &mut self,
        token: Token,
        buffer: &mut [u8],
        mut deliver: impl FnMut(Ends, &[u8]),
    ) -> bool {
        let Some(port) = self.ports.get_mut(&token) else { return false };
        loop {
            match port.socket.recv(buffer) {
                Ok(count) => {
                    port.used = Instant::now();
                    deliver(port.ends, buffer.get(..count).unwrap_or_default());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // An earlier datagram was refused: the guest will find out by silence.
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                Err(_) => return true,
            }
        }
    }

    /// Forgets ports idle for long.
    pub(crate) fn sweep(&mut self) {
        let now = Instant::now();
        let idle = self.ports.iter().filter(|(_, port)| now - port.used > IDLE);
        let idle: Vec<_> = idle.map(|(&token, _)| token).collect();
        idle.into_iter().for_each(|token| self.forget(token));
    }

    fn forget_oldest(&mut self) {
        let oldest = self.ports.iter().min_by_key(|(_, port)| port.used);
        if let Some((&token, _)) = oldest {
            self.forget(token);
        }
    }

    fn forget(&mut self, token: Token) {
        if let Some(port) = self.ports.remove(&token) {
            self.by_ends.remove(&port.ends);
        }
    }
}

/// Not bound by name: the process may be one that is not allowed to.
fn connected(target: SocketAddr, registry: &Registry, token: Token) -> std::io::Result<UdpSocket> {
    let family = match target {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
    connect(&socket, &target)?;
    let mut socket = UdpSocket::from_std(socket.into());
    registry.register(&mut socket, token, Interest::READABLE)?;
    Ok(socket)
}

/// A forwarded UDP port: who asked last at which gateway port, so that answers find back.
pub(crate) struct Inbound {
    pub(crate) socket: UdpSocket,
    pub(crate) guest: SocketAddrV4,
    /// Gateway port shown to the guest, per host peer; the port is the index plus the base.
    peers: Vec<SocketAddr>,
}

/// Peers remembered per forwarded port.
const MAX_PEERS: usize = 256;

impl Inbound {
    pub(crate) fn new(socket: UdpSocket, guest: SocketAddrV4) -> Self {
        Self { socket, guest, peers: Vec::new() }
    }

    /// Gives what arrived to `deliver` with the number of the peer it is from.
    pub(crate) fn receive(&mut self, buffer: &mut [u8], mut deliver: impl FnMut(u16, &[u8])) {
        loop {
            match self.socket.recv_from(buffer) {
                Ok((count, peer)) => {
                    let number = self.number_of(peer);
                    deliver(number, buffer.get(..count).unwrap_or_default());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn number_of(&mut self, peer: SocketAddr) -> u16 {
        let known = self.peers.iter().position(|&known| known == peer);
        let number = known.unwrap_or_else(|| {
            if self.peers.len() >= MAX_PEERS {
                self.peers.clear();
            }
            self.peers.push(peer);
            self.peers.len() - 1
        });
        number as u16
    }

    /// Sends the guest's answer to the peer of this number.
    pub(crate) fn answer(&self, number: u16, payload: &[u8]) {
        if let Some(&peer) = self.peers.get(usize::from(number)) {
            // Datagrams may be lost.
            let _ = self.socket.send_to(payload, peer);
        }
    }

    /// How many peer numbers each forwarded port may use.
    pub(crate) const PEERS: u16 = MAX_PEERS as u16;
}
