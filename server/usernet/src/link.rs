//! The cable: bounded queues of frames between the device's thread and the gateway's.
//!
//! Towards the gateway the device waits for room, so a guest that sends faster than the host can is
//! slowed down rather than told to retransmit. Towards the guest the gateway looks for room before it
//! asks smoltcp for a packet; datagrams that find none are lost.
//!
//! Neither side holds a queue's lock while it wakes the other.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use mio::Waker;
use virtio::{NetBackend, Notify};

use crate::MTU;

/// Frames under way in one direction at most.
const CAPACITY: usize = 256;

#[derive(Default)]
struct LinkState {
    to_gateway: VecDeque<Vec<u8>>,
    to_guest: VecDeque<Vec<u8>>,
    ring: Option<Notify>,
    /// One of the ends is gone.
    cut: bool,
}

struct SharedLink {
    state: Mutex<LinkState>,
    room: Condvar,
    waker: Waker,
}

impl SharedLink {
    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cut(&self) {
        self.lock().cut = true;
        self.room.notify_all();
    }

    fn wake_gateway(&self) {
        if let Err(error) = self.waker.wake() {
            tracing::error!(%error, "cannot wake the network");
        }
    }
}

/// The guest's end; dropping it ends the network.
pub struct Cable(Arc<SharedLink>);

impl Cable {
    /// A cable and its other end.
    pub(crate) fn new(waker: Waker) -> (Self, GatewayEnd) {
        let shared = SharedLink { state: Mutex::default(), room: Condvar::new(), waker };
        let shared = Arc::new(shared);
        (Self(Arc::clone(&shared)), GatewayEnd(shared))
    }

    /// A function that sets who is told of frames for the guest.
    pub fn ringer(&self) -> impl FnOnce(Notify) + Send + 'static {
        let shared = Arc::clone(&self.0);
        move |ring| shared.lock().ring = Some(ring)
    }
}

impl NetBackend for Cable {
    fn send(&mut self, frame: &[u8]) {
        let shared = &self.0;
        let full = |state: &mut LinkState| state.to_gateway.len() >= CAPACITY && !state.cut;
        let state = shared.room.wait_while(shared.lock(), full);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let idle = state.to_gateway.is_empty();
        state.to_gateway.push_back(frame.to_vec());
        drop(state);
        if idle {
            shared.wake_gateway();
        }
    }

    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        let mut state = self.0.lock();
        let was_full = state.to_guest.len() >= CAPACITY;
        let next = state.to_guest.pop_front();
        drop(state);
        if was_full {
            self.0.wake_gateway();
        }
        next.map(|next| *frame = next).is_some()
    }

    fn mtu(&self) -> u16 {
        MTU
    }

    fn ignores_checksums(&self) -> bool {
        true
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.0.cut();
        self.0.wake_gateway();
    }
}

/// The gateway's end.
pub(crate) struct GatewayEnd(Arc<SharedLink>);

impl GatewayEnd {
    /// All frames the guest has sent; `None` once the cable is cut.
    pub(crate) fn take(&self) -> Option<VecDeque<Vec<u8>>> {
        let mut state = self.0.lock();
        let frames = std::mem::take(&mut state.to_gateway);
        let cut = state.cut;
        drop(state);
        self.0.room.notify_all();
        (!cut).then_some(frames)
    }

    /// Whether the guest's queue takes another frame.
    pub(crate) fn has_room(&self) -> bool {
        self.0.lock().to_guest.len() < CAPACITY
    }

    /// Sends a frame to the guest; lost if there is no room.
    pub(crate) fn send(&self, frame: Vec<u8>) {
        let mut state = self.0.lock();
        if state.to_guest.len() < CAPACITY {
            state.to_guest.push_back(frame);
        }
    }

    /// Tells the device of what was sent.
    pub(crate) fn ring(&self) {
        let state = self.0.lock();
        let ring = state.ring.clone().filter(|_| !state.to_guest.is_empty());
        // Not under our lock: it locks the device, whose thread may want ours.
        drop(state);
        ring.into_iter().for_each(|ring| ring());
    }
}

impl Drop for GatewayEnd {
    fn drop(&mut self) {
        self.0.cut();
    }
}

/// For errors of the waker.
pub(crate) fn waker(registry: &mio::Registry, token: mio::Token) -> io::Result<Waker> {
    Waker::new(registry, token)
}
