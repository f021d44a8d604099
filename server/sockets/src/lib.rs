//! The host's ends of a guest's vsock connections.
//!
//! Each port of the host the guest may connect to is one end of a pair of Unix sockets; whoever holds
//! the other end speaks with the guest. A port takes one connection; all others are refused.
//!
//! # Flow
//!
//! Towards the guest, data is read from a socket only when the guest has a buffer for it and credit
//! for it: a full guest leaves bytes in the socket, whose writer then waits. From the guest, data
//! that a socket does not take is kept, up to the credit we gave; the guest may not send more, and a
//! connection that does is reset.
//!
//! # Threads
//!
//! The device's thread does all the work, in `VsockBackend`. A thread of ours only waits: when a
//! socket becomes readable or writable it marks it so and rings the doorbell.

mod connection;

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, ErrorKind},
    os::unix::net::UnixStream,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use mio::{Events, Interest, Poll, Registry, Token, Waker};
use virtio::Notify;
use virtio::vsock::{VsockBackend, VsockHeader, operation};

use connection::{Connection, Ports};

const STOP: Token = Token(usize::MAX);
/// Resets and the like waiting for the guest to take them.
const MAX_REPLIES: usize = 256;

struct SocketsState {
    /// Ports not connected yet.
    offered: BTreeMap<u32, mio::net::UnixStream>,
    connections: BTreeMap<Ports, Connection>,
    /// Packets without data, first in line.
    replies: VecDeque<VsockHeader>,
    registry: Registry,
    ring: Option<Notify>,
}

/// The connections of one guest.
pub struct Sockets {
    state: Arc<Mutex<SocketsState>>,
    waker: Arc<Waker>,
}

impl Sockets {
    /// Offers each port of the host by its socket, and starts the thread that waits. It ends when this is dropped.
    ///
    /// # Errors
    /// The host gives no poll descriptor, or no thread.
    pub fn new(ports: impl IntoIterator<Item = (u32, UnixStream)>) -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), STOP)?);
        let mut offered = BTreeMap::new();
        for (port, stream) in ports {
            stream.set_nonblocking(true)?;
            offered.insert(port, mio::net::UnixStream::from_std(stream));
        }
        let (connections, replies) = (BTreeMap::new(), VecDeque::new());
        let registry = poll.registry().try_clone()?;
        let state = SocketsState { offered, connections, replies, registry, ring: None };
        let state = Arc::new(Mutex::new(state));
        // A waker that is dropped takes its event along: the thread holds it until it has ended.
        let (waiting, held) = (Arc::clone(&state), Arc::clone(&waker));
        thread::Builder::new().name("sockets".into()).spawn(move || {
            wait(poll, &waiting);
            drop(held);
        })?;
        Ok(Self { state, waker })
    }

    /// A function that sets who is told when there may be something for the guest.
    pub fn ringer(&self) -> impl FnOnce(Notify) + Send + 'static {
        let state = Arc::clone(&self.state);
        move |ring| lock(&state).ring = Some(ring)
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        // Without it the thread waits on; the process is ending anyway.
        let _ = self.waker.wake();
    }
}

fn lock(state: &Mutex<SocketsState>) -> MutexGuard<'_, SocketsState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait(mut poll: Poll, state: &Mutex<SocketsState>) {
    let mut events = Events::with_capacity(64);
    loop {
        match poll.poll(&mut events, None) {
            Err(error) if error.kind() != ErrorKind::Interrupted => {
                return tracing::error!(%error, "the guest's sockets end");
            }
            _ => {}
        }
        let mut guard = lock(state);
        for event in &events {
            if event.token() == STOP {
                return;
            }
            guard.mark(event.token());
        }
        let ring = guard.ring.clone();
        drop(guard);
        ring.into_iter().for_each(|ring| ring());
    }
}

impl SocketsState {
    fn mark(&mut self, token: Token) {
        let mut connections = self.connections.values_mut();
        if let Some(connection) = connections.find(|connection| connection.token() == token) {
            connection.ready = true;
        }
    }

    fn reply(&mut self, ports: Ports, operation: u16) {
        if self.replies.len() < MAX_REPLIES {
            let (guest_port, host_port) = ports;
            let (buffer, taken) = self.connections.get(&ports).map_or((0, 0), Connection::credit);
            let flags = 0;
            let header = VsockHeader { guest_port, host_port, operation, flags, buffer, taken };
            self.replies.push_back(header);
        }
    }

    fn connect(&mut self, ports: Ports, header: &VsockHeader) {
        let known = self.connections.contains_key(&ports);
        let stream = self.offered.remove(&header.host_port).filter(|_| !known);
        let Some(mut stream) = stream else { return self.reply(ports, operation::RESET) };
        let token = Token(header.host_port as usize);
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.registry.register(&mut stream, token, interest) {
            tracing::error!(%error, "cannot watch a socket");
            return self.reply(ports, operation::RESET);
        }
        let mut connection = Connection::new(stream, token);
        connection.learn(header);
        self.connections.insert(ports, connection);
        self.reply(ports, operation::RESPONSE);
    }

    fn packet(&mut self, header: &VsockHeader, data: &[u8]) {
        let ports = (header.guest_port, header.host_port);
        if header.operation == operation::REQUEST {
            return self.connect(ports, header);
        }
        let Some(connection) = self.connections.get_mut(&ports) else {
            if header.operation != operation::RESET {
                self.reply(ports, operation::RESET);
            }
            return;
        };
        connection.learn(header);
        match header.operation {
            operation::DATA => {
                let takes_more = connection.accept(data);
                if !takes_more {
                    self.end(ports);
                }
            }
            operation::CREDIT_REQUEST => self.reply(ports, operation::CREDIT_UPDATE),
            operation::SHUTDOWN => connection.shut(header.flags),
            operation::RESET => drop(self.connections.remove(&ports)),
            _ => {}
        }
        self.settle(ports);
    }

    /// Passes on what is kept, and ends a connection that has ended on both sides.
    fn settle(&mut self, ports: Ports) {
        let Some(connection) = self.connections.get_mut(&ports) else { return };
        connection.flush();
        if connection.owes_credit() {
            self.reply(ports, operation::CREDIT_UPDATE);
        } else if connection.is_over() {
            self.end(ports);
        }
    }

    fn end(&mut self, ports: Ports) {
        self.connections.remove(&ports);
        self.reply(ports, operation::RESET);
    }

    fn next(&mut self, room: usize, data: &mut Vec<u8>) -> Option<VsockHeader> {
        let ready = self.connections.iter().filter(|(_, connection)| connection.ready);
        let ready: Vec<Ports> = ready.map(|(ports, _)| *ports).collect();
        ready.iter().for_each(|&ports| self.settle(ports));
        if let Some(reply) = self.replies.pop_front() {
            return Some(reply);
        }
        ready.into_iter().find_map(|ports| {
            let connection = self.connections.get_mut(&ports)?;
            let (operation, flags) = connection.read(room, data)?;
            let (guest_port, host_port) = ports;
            let (buffer, taken) = connection.credit();
            Some(VsockHeader { guest_port, host_port, operation, flags, buffer, taken })
        })
    }
}

impl VsockBackend for Sockets {
    fn packet(&mut self, header: &VsockHeader, data: &[u8]) {
        let mut state = lock(&self.state);
        state.packet(header, data);
        let ring = state.ring.clone();
        drop(state);
        // There may be something to answer, or credit to send more.
        if let Some(ring) = ring {
            ring();
        }
    }

    fn next(&mut self, room: usize, data: &mut Vec<u8>) -> Option<VsockHeader> {
        lock(&self.state).next(room, data)
    }

    fn reset(&mut self) {
        let mut state = lock(&self.state);
        state.connections.clear();
        state.replies.clear();
    }
}

#[cfg(test)]
mod tests;
