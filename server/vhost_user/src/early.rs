//! Queues that are enabled before features are agreed on.
//!
//! QEMU enables a network's queues so, and QEMU 11 waits to be told that they are. The library takes the message for a mistake, because
//! the protocol wants features first, and answers nothing. Nothing is served until memory and bells are there, so the order does not
//! matter here: each message is looked at before the library takes it, and what it refuses is done and answered in its place.

use std::{
    io::{self, Write},
    os::unix::net::UnixStream,
};

use rustix::net::{RecvFlags, recv};

/// Bytes of a message's header: three words, of which the first is the request, the second are flags.
const HEADER: usize = 12;
/// And of one with the number of a queue and whether it is enabled.
const MESSAGE: usize = HEADER + 8;
const SET_VRING_ENABLE: u32 = 18;
const VERSION: u32 = 1;
const IS_ANSWER: u32 = 1 << 2;
const WANTS_ANSWER: u32 = 1 << 3;

/// A message that enables or disables a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Enabling {
    pub(crate) queue: u32,
    pub(crate) enable: bool,
    wants_answer: bool,
}

impl Enabling {
    /// The next message if it is such a one; it stays where it is. Waits for all of it.
    pub(crate) fn peek(socket: &UnixStream) -> Option<Self> {
        let [SET_VRING_ENABLE, flags, _] = words::<HEADER, 3>(socket)? else { return None };
        let [_, _, _, queue, enable] = words::<MESSAGE, 5>(socket)?;
        Some(Self { queue, enable: enable == 1, wants_answer: flags & WANTS_ANSWER != 0 })
    }

    /// Says, if that is asked for, whether it has been done.
    ///
    /// # Errors
    /// Nobody listens.
    pub(crate) fn answer(self, mut socket: &UnixStream, done: bool) -> io::Result<()> {
        if !self.wants_answer {
            return Ok(());
        }
        let words = [SET_VRING_ENABLE, VERSION | IS_ANSWER, 8, u32::from(!done), 0];
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        socket.write_all(&bytes)
    }
}

/// So many bytes that come next, as words; `None` if they do not, which the library will find out, too.
fn words<const BYTES: usize, const WORDS: usize>(socket: &UnixStream) -> Option<[u32; WORDS]> {
    let mut bytes = [0; BYTES];
    let (_, count) = recv(socket, &mut bytes, RecvFlags::PEEK | RecvFlags::WAITALL).ok()?;
    let word = |at: usize| [0, 1, 2, 3].map(|byte| bytes[4 * at + byte]);
    (count == BYTES).then(|| std::array::from_fn(|at| u32::from_ne_bytes(word(at))))
}
