//! Frames for the guest: bounded, so that a fast sender waits for a slow guest.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use virtio::Notify;

/// Frames that wait at most.
const CAPACITY: usize = 256;

#[derive(Default)]
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    room: Condvar,
}

#[derive(Default)]
struct InboxState {
    frames: VecDeque<Vec<u8>>,
    ring: Option<Notify>,
    closed: bool,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who is told of frames. Those that came before are told of at once.
    pub(crate) fn tell(&self, ring: Notify) {
        self.lock().ring = Some(ring);
        self.ring();
    }

    /// Adds a frame, waiting for room; false once the guest is gone.
    pub(crate) fn put(&self, frame: Vec<u8>) -> bool {
        let full = |state: &mut InboxState| state.frames.len() >= CAPACITY && !state.closed;
        let state = self.room.wait_while(self.lock(), full);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.closed {
            return false;
        }
        state.frames.push_back(frame);
        drop(state);
        self.ring();
        true
    }

    /// Not under our lock: it locks the device, whose thread may want ours. Two may ring at once, and one that found the other
    /// ringing could not leave it to that: the device may have looked already.
    fn ring(&self) {
        let ring = self.lock().ring.clone();
        ring.iter().for_each(|ring| ring());
    }

    pub(crate) fn take(&self) -> Option<Vec<u8>> {
        let frame = self.lock().frames.pop_front();
        self.room.notify_one();
        frame
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.room.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }
}
