//! The guest's virtio console at our standard input and output, and whoever attaches to it.

use std::{
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use virtio::{CONSOLE_RECEIVE, Console, Doorbell, InputBuffer};
use vmm::Attachment;

use crate::control::Screen;

/// Bytes of input that wait for the guest at the most, give or take one read.
const CAPACITY: usize = 1 << 16;
/// How soon room is looked for again.
const RETRY: Duration = Duration::from_millis(5);

/// Gives a virtio console input. Clones feed the same console.
#[derive(Clone, Default)]
pub struct Keyboard {
    buffer: InputBuffer,
    doorbell: Arc<OnceLock<Doorbell>>,
}

impl Keyboard {
    /// A console with this keyboard, printing to `screen`.
    pub fn console(&self, screen: Screen) -> Attachment {
        let input = Box::new(self.buffer.clone());
        let doorbell = Arc::clone(&self.doorbell);
        Attachment::new(Box::new(Console::new(input, Box::new(screen))), move |bell| {
            // Connected once.
            let _ = doorbell.set(bell);
        })
    }

    /// Gives input; waits while the guest has plenty it has not read.
    pub fn push(&self, bytes: &[u8]) {
        while self.buffer.waiting() >= CAPACITY {
            thread::sleep(RETRY);
        }
        self.buffer.push(bytes);
        if let Some(doorbell) = self.doorbell.get() {
            doorbell.ring(CONSOLE_RECEIVE);
        }
    }
}
