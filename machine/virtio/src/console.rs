//! Console with one port (virtio 1.2 section 5.3).

use crate::{Queue, RingError, VirtioDevice, lock};
use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, Mutex};

/// The queue the guest receives input by.
pub const RECEIVE: usize = 0;
/// The queue the guest sends output by.
pub const TRANSMIT: usize = 1;

const QUEUES: [u16; 2] = [128, 128];
/// Bytes moved in one piece.
const PIECE: usize = 4096;
const F_SIZE: u64 = 1 << 0;
const F_EMERG_WRITE: u64 = 1 << 2;
/// Byte of the configuration structure that emergency output is written to.
const EMERG_WRITE: usize = 8;

/// Where keys come from.
pub trait ConsoleInput: Send {
    /// Takes up to `data.len()` bytes without waiting; 0 when there are none now. Whoever makes
    /// more available rings the doorbell of [`RECEIVE`].
    fn read(&mut self, data: &mut [u8]) -> usize;
}

/// Input that host threads push. Clones are the same buffer.
#[derive(Clone, Debug, Default)]
pub struct InputBuffer(Arc<Mutex<VecDeque<u8>>>);

impl InputBuffer {
    /// Appends input.
    pub fn push(&self, data: &[u8]) {
        lock(&self.0).extend(data);
    }

    /// How many bytes the guest has not taken yet.
    pub fn waiting(&self) -> usize {
        lock(&self.0).len()
    }
}

impl ConsoleInput for InputBuffer {
    fn read(&mut self, data: &mut [u8]) -> usize {
        let mut buffer = lock(&self.0);
        let count = data.len().min(buffer.len());
        data.iter_mut().zip(buffer.drain(..count)).for_each(|(to, from)| *to = from);
        count
    }
}

/// The terminal's size, settable by host threads. Clones are the same terminal.
#[derive(Clone, Debug, Default)]
pub struct ConsoleSize(Arc<Mutex<(u16, u16)>>);

impl ConsoleSize {
    /// Sets columns and rows; ring [`crate::Doorbell::config_changed`] afterwards.
    pub fn set(&self, columns: u16, rows: u16) {
        *lock(&self.0) = (columns, rows);
    }
}

/// The device body.
pub struct Console {
    input: Box<dyn ConsoleInput>,
    output: Box<dyn Write + Send>,
    size: ConsoleSize,
    /// Input taken from the host for which the guest gave no buffer yet.
    unsent: Vec<u8>,
}

impl Console {
    /// A console of unknown size.
    pub fn new(input: Box<dyn ConsoleInput>, output: Box<dyn Write + Send>) -> Self {
        Self { input, output, size: ConsoleSize::default(), unsent: Vec::new() }
    }

    /// The terminal's size.
    pub fn size(&self) -> ConsoleSize {
        self.size.clone()
    }

    fn refill(&mut self) -> bool {
        if self.unsent.is_empty() {
            self.unsent.resize(PIECE, 0);
            let count = self.input.read(&mut self.unsent);
            self.unsent.truncate(count);
        }
        !self.unsent.is_empty()
    }

    fn receive(&mut self, queue: &mut Queue) -> Result<(), RingError> {
        while self.refill() {
            let Some(chain) = queue.pop()? else { break };
            if chain.writable.is_empty() {
                return Err(RingError::NoRoom);
            }
            let count = chain.writable.len().min(self.unsent.len() as u64) as usize;
            chain.writable.write(queue.memory(), 0, &self.unsent[..count])?;
            self.unsent.drain(..count);
            queue.complete(chain, count as u32)?;
        }
        Ok(())
    }

    fn transmit(&mut self, queue: &mut Queue) -> Result<(), RingError> {
        let mut piece = [0; PIECE];
        while let Some(chain) = queue.pop()? {
            let mut at = 0;
            while at < chain.readable.len() {
                let count = (chain.readable.len() - at).min(PIECE as u64) as usize;
                chain.readable.read(queue.memory(), at, &mut piece[..count])?;
                self.print(&piece[..count]);
                at += count as u64;
            }
            queue.complete(chain, 0)?;
        }
        if let Err(error) = self.output.flush() {
            tracing::warn!(%error, "console output");
        }
        Ok(())
    }

    /// Output the host does not take is lost, as on a terminal that is unplugged.
    fn print(&mut self, data: &[u8]) {
        if let Err(error) = self.output.write_all(data) {
            tracing::warn!(%error, "console output lost");
        }
    }
}

impl VirtioDevice for Console {
    fn device_type(&self) -> u16 {
        crate::device_id::CONSOLE
    }

    fn class(&self) -> u32 {
        0x07_80_00 // other communication controller
    }

    fn features(&self) -> u64 {
        F_SIZE | F_EMERG_WRITE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }

    /// cols, rows, max_nr_ports, emerg_wr.
    fn config(&self) -> Vec<u8> {
        let (columns, rows) = *lock(&self.size.0);
        let mut config = columns.to_le_bytes().to_vec();
        config.extend(rows.to_le_bytes());
        config.extend(1_u32.to_le_bytes());
        config.extend([0; 4]);
        config
    }

    fn config_write(&mut self, offset: usize, data: &[u8]) {
        if let (EMERG_WRITE, [byte, ..]) = (offset, data) {
            self.print(&[*byte]);
        }
    }

    fn process(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        match index {
            RECEIVE => self.receive(queue),
            _ => self.transmit(queue),
        }
    }
}
