//! Networks whose other ends are somebody else's: another machine's socket, a tap device of the host, and passt.
//!
//! - `inbox`: frames for the guest, read by a thread, until the device takes them.
//! - `stream`: frames on a stream socket, each after its length, as QEMU writes them.
//! - `socket`: the stream between two machines that were given the same path.
//! - `tap`: a device of the host's kernel.
//! - `passt`: the start of a program that serves a whole interface.
//!
//! Who is at the other end is not trusted more than the guest: lengths are bounded, and what cannot be a
//! frame ends the connection. A frame that nobody takes is lost, as on any wire.

mod inbox;
mod passt;
mod socket;
mod stream;
mod tap;

use std::{io, path::PathBuf, sync::Arc};

use virtio::{NetBackend, Notify};

use inbox::Inbox;
pub use passt::PasstServer;
pub use socket::{forget, listen, socket};
pub use tap::tap;

/// Packets of networks that make no other promise.
const ETHERNET_MTU: u16 = 1500;

/// Why there is no cable.
#[derive(Debug, thiserror::Error)]
pub enum CableError {
    /// The socket's path cannot be used.
    #[error("socket {path:?}: {source}")]
    Socket {
        /// Where it should be.
        path: PathBuf,
        /// What the host said.
        source: io::Error,
    },
    /// passt does not run.
    #[error("passt: {0}")]
    Passt(String),
    /// The device cannot be used.
    #[error("tap device {name}: {problem}")]
    Tap {
        /// Its name.
        name: String,
        /// What is wrong, and what helps.
        problem: String,
    },
    /// The host gives no thread or socket.
    #[error("cannot start the network: {0}")]
    Host(#[from] io::Error),
}

/// Where frames of the guest go. What cannot be delivered is lost.
trait Sender: Send {
    fn send(&mut self, frame: &[u8]);
}

/// A cable whose descriptors are open and that has no thread yet: a process that is to give up rights can do so before it has any.
pub struct Ready(Box<dyn FnOnce() -> Result<Wire, CableError>>);

impl Ready {
    /// Starts the thread that reads; returns the guest's end.
    ///
    /// # Errors
    /// The host has no thread for it.
    pub fn start(self) -> Result<Wire, CableError> {
        self.0()
    }
}

/// The guest's end of a cable. Dropping it tells the other end, if that can be told.
pub struct Wire {
    sender: Box<dyn Sender>,
    inbox: Arc<Inbox>,
}

impl Wire {
    /// A function that sets who is told of frames for the guest.
    pub fn ringer(&self) -> impl FnOnce(Notify) + Send + 'static {
        let inbox = Arc::clone(&self.inbox);
        move |ring| inbox.tell(ring)
    }
}

impl NetBackend for Wire {
    fn send(&mut self, frame: &[u8]) {
        self.sender.send(frame);
    }

    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        self.inbox.take().map(|next| *frame = next).is_some()
    }

    fn mtu(&self) -> u16 {
        ETHERNET_MTU
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

#[cfg(test)]
mod tests;
