//! TCP: smoltcp's sockets face the guest, the host's face the world.
//!
//! A connection the guest makes is answered only when the host's has come about, so that "refused"
//! reaches the guest as such: smoltcp holds the SYN|ACK back meanwhile. A connection to a forwarded
//! port is made towards the guest when the host has accepted it.
//!
//! Bytes are copied between the two sockets' buffers and nowhere else; when one side's are full, the
//! other's peer is slowed down by its own TCP. Each side's end of data becomes the other's, and each
//! side's reset too.

use std::{
    collections::{HashMap, HashSet},
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddrV4},
};

use mio::{Interest, Registry, Token, net::TcpStream};
use smoltcp::{
    iface::{Interface, SocketHandle, SocketSet},
    socket::tcp::{self, RecvError, SendError},
    time::Duration,
};

use crate::{GATEWAY, Targets};

/// Connections at once.
pub(crate) const MAX_FLOWS: usize = 2048;
/// Bytes of each smoltcp socket's buffers; their pages are taken only when used.
const BUFFER: usize = 256 << 10;
/// A silent peer is asked after this long, and given up after the second.
const KEEP_ALIVE: Duration = Duration::from_secs(60);
const TIMEOUT: Duration = Duration::from_secs(180);

/// Guest's end and remote end, as the guest sees them.
pub(crate) type Ends = (SocketAddrV4, SocketAddrV4);

struct Flow {
    ends: Ends,
    socket: SocketHandle,
    stream: TcpStream,
    /// The host's connection is not there yet.
    connecting: bool,
    host_ended: bool,
    guest_ended: bool,
}

/// All connections.
pub(crate) struct Flows {
    flows: HashMap<Token, Flow>,
    by_ends: HashMap<Ends, Token>,
    /// Connections to look at.
    dirty: HashSet<Token>,
    next_port: u16,
}

impl Default for Flows {
    fn default() -> Self {
        let (flows, by_ends, dirty) = Default::default();
        Self { flows, by_ends, dirty, next_port: 49_152 }
    }
}

fn new_socket() -> tcp::Socket<'static> {
    let buffer = || tcp::SocketBuffer::new(vec![0; BUFFER]);
    let mut socket = tcp::Socket::new(buffer(), buffer());
    socket.set_keep_alive(Some(KEEP_ALIVE));
    socket.set_timeout(Some(TIMEOUT));
    socket.set_nagle_enabled(false);
    socket.set_ack_delay(None);
    socket
}

impl Flows {
    /// The guest sent a segment from and to these ends; `opens` if it is a first SYN. Prepares a
    /// socket for it. Segments of no known connection are left to smoltcp to refuse.
    pub(crate) fn segment(
        &mut self,
        ends: Ends,
        opens: bool,
        targets: &Targets,
        sockets: &mut SocketSet<'_>,
        registry: (&Registry, Token),
    ) {
        if let Some(&token) = self.by_ends.get(&ends) {
            self.dirty.insert(token);
            return;
        }
        let (_, remote) = ends;
        if !opens || self.flows.len() >= MAX_FLOWS {
            return;
        }
        let Some(target) = targets.find(*remote.ip(), remote.port()) else { return };
        let stream = match TcpStream::connect(target) {
            Ok(stream) => stream,
            Err(error) => return tracing::info!(%target, %error, "cannot connect"),
        };
        let mut socket = new_socket();
        socket.pause_synack(true);
        if socket.listen(remote).is_ok() {
            self.add(ends, sockets.add(socket), stream, true, registry);
        }
    }

    /// The host accepted a connection for the guest's `to`.
    pub(crate) fn accepted(
        &mut self,
        stream: TcpStream,
        to: SocketAddrV4,
        interface: &mut Interface,
        sockets: &mut SocketSet<'_>,
        registry: (&Registry, Token),
    ) {
        if self.flows.len() >= MAX_FLOWS {
            return;
        }
        let remote = SocketAddrV4::new(GATEWAY, self.free_port(to));
        let mut socket = new_socket();
        if socket.connect(interface.context(), to, remote).is_ok() {
            self.add((to, remote), sockets.add(socket), stream, false, registry);
        }
    }

    fn free_port(&mut self, to: SocketAddrV4) -> u16 {
        loop {
            self.next_port = self.next_port.checked_add(1).unwrap_or(49_152);
            let ends = (to, SocketAddrV4::new(GATEWAY, self.next_port));
            if !self.by_ends.contains_key(&ends) {
                return self.next_port;
            }
        }
    }

    fn add(
        &mut self,
        ends: Ends,
        socket: SocketHandle,
        mut stream: TcpStream,
        connecting: bool,
        (registry, token): (&Registry, Token),
    ) {
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = registry.register(&mut stream, token, interest) {
            tracing::warn!(%error, "cannot watch a connection");
        }
        let _ = stream.set_nodelay(true); // slower without, no worse
        let (host_ended, guest_ended) = (false, false);
        let flow = Flow { ends, socket, stream, connecting, host_ended, guest_ended };
        self.flows.insert(token, flow);
        self.by_ends.insert(ends, token);
        self.dirty.insert(token);
    }

    /// The host's socket has something to say.
    pub(crate) fn event(&mut self, token: Token) {
        self.dirty.insert(token);
    }

    /// Has every connection looked at: timers may have ended some.
    pub(crate) fn sweep(&mut self) {
        self.dirty.extend(self.flows.keys());
    }

    /// Moves bytes on connections where something happened; whether any moved.
    pub(crate) fn pump(&mut self, sockets: &mut SocketSet<'_>, registry: &Registry) -> bool {
        let mut moved = false;
        for token in std::mem::take(&mut self.dirty) {
            let Some(flow) = self.flows.get_mut(&token) else { continue };
            let socket = sockets.get_mut::<tcp::Socket<'_>>(flow.socket);
            moved |= flow.pump(socket);
            if flow.is_over(socket) {
                self.remove(token, sockets, registry);
            }
        }
        moved
    }

    fn remove(&mut self, token: Token, sockets: &mut SocketSet<'_>, registry: &Registry) {
        if let Some(mut flow) = self.flows.remove(&token) {
            self.by_ends.remove(&flow.ends);
            sockets.remove(flow.socket);
            // Closing it removes it as well.
            let _ = registry.deregister(&mut flow.stream);
        }
    }
}

impl Flow {
    /// Moves what can be moved; whether anything changed.
    fn pump(&mut self, socket: &mut tcp::Socket<'_>) -> bool {
        if self.connecting {
            return self.connect(socket);
        }
        let to_guest = self.pump_to_guest(socket);
        let to_host = self.pump_to_host(socket);
        to_guest | to_host
    }

    fn connect(&mut self, socket: &mut tcp::Socket<'_>) -> bool {
        match (self.stream.take_error(), self.stream.peer_addr()) {
            (Ok(None), Ok(_)) => {
                socket.pause_synack(false);
                self.connecting = false;
                true
            }
            (Ok(None), Err(error)) if error.kind() == ErrorKind::NotConnected => false,
            (result, _) => {
                tracing::debug!(?result, remote = %self.ends.1, "the host could not connect");
                socket.abort();
                self.connecting = false;
                true
            }
        }
    }

    fn pump_to_guest(&mut self, socket: &mut tcp::Socket<'_>) -> bool {
        let mut moved = false;
        while !self.host_ended && socket.can_send() {
            let stream = &mut self.stream;
            let outcome = socket.send(|room| match stream.read(room) {
                Ok(count) => (count, Ok(count)),
                Err(error) => (0, Err(error)),
            });
            match outcome {
                Ok(Ok(0)) => {
                    self.host_ended = true;
                    socket.close();
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) if error.kind() == ErrorKind::WouldBlock => break,
                Ok(Err(error)) if error.kind() == ErrorKind::Interrupted => continue,
                Ok(Err(_)) => {
                    self.host_ended = true;
                    socket.abort();
                }
                Err(SendError::InvalidState) => break,
            }
            moved = true;
        }
        moved
    }

    fn pump_to_host(&mut self, socket: &mut tcp::Socket<'_>) -> bool {
        let mut moved = false;
        while !self.guest_ended {
            let stream = &mut self.stream;
            let outcome = socket.recv(|data| match stream.write(data) {
                _ if data.is_empty() => (0, Ok(0)),
                Ok(count) => (count, Ok(count)),
                Err(error) => (0, Err(error)),
            });
            match outcome {
                Ok(Ok(0)) => break,
                Ok(Ok(_)) => {}
                Ok(Err(error)) if error.kind() == ErrorKind::WouldBlock => break,
                Ok(Err(error)) if error.kind() == ErrorKind::Interrupted => continue,
                Ok(Err(_)) => {
                    self.guest_ended = true;
                    socket.abort();
                }
                Err(RecvError::Finished) => {
                    self.guest_ended = true;
                    // A peer that is gone has nothing to be told.
                    let _ = self.stream.shutdown(Shutdown::Write);
                }
                // Not established yet, or reset.
                Err(RecvError::InvalidState) => break,
            }
            moved = true;
        }
        moved
    }

    /// Nothing more can come of it. A socket that only waits out TIME-WAIT counts as over: its guest
    /// has had everything.
    fn is_over(&self, socket: &tcp::Socket<'_>) -> bool {
        let delivered = self.guest_ended || socket.recv_queue() == 0;
        match socket.state() {
            // With an address left, it has a reset to send.
            tcp::State::Closed => delivered && socket.remote_endpoint().is_none(),
            tcp::State::TimeWait => self.guest_ended,
            // The SYN it was made for was not accepted.
            tcp::State::Listen => !self.connecting,
            _ => false,
        }
    }
}
