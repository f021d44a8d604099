//! The first serial port's two directions.
//!
//! Output: the UART hands bytes over with its lock held, on the vCPU's thread, so it must not wait
//! for whatever reads our standard output. A [`ConsoleOutlet`] buffers them for a thread of its own. When
//! the buffer is full the guest does wait (losing output would be worse), but never after the
//! machine was told to stop, and never once writing failed: a closed pipe swallows the rest.

use std::{
    io::Write,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use bus::Shared;
use chipset::{SerialOutput, Uart};

/// Bytes buffered before the guest has to wait.
const CAPACITY: usize = 1 << 16;
/// How soon input the guest had no room for is offered again.
const RETRY: Duration = Duration::from_millis(5);

/// Gives the guest's serial port input. Clones feed the same port.
#[derive(Clone)]
pub struct ConsoleInput(Shared<Uart>);

impl ConsoleInput {
    pub(crate) fn new(uart: Shared<Uart>) -> Self {
        Self(uart)
    }

    /// Gives input; waits while the guest has plenty it has not read.
    pub fn push(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).receive(bytes);
            bytes = bytes.get(taken..).unwrap_or_default();
            if taken == 0 {
                thread::sleep(RETRY);
            }
        }
    }
}

/// Output on its way to a writer.
pub(crate) struct ConsoleOutlet(Arc<Pipe>);

#[derive(Default)]
struct Pipe {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    buffer: Vec<u8>,
    /// The writer has bytes it has not finished writing.
    writing: bool,
    /// Writing failed: what comes is dropped.
    broken: bool,
    /// Nobody may wait for room any more; what there is still gets written.
    closing: bool,
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, guard: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, byte: u8) {
        let mut state = self.lock();
        while state.buffer.len() >= CAPACITY && !state.broken && !state.closing {
            state = self.wait(state);
        }
        if state.broken || state.buffer.len() >= CAPACITY {
            return;
        }
        state.buffer.push(byte);
        drop(state);
        self.changed.notify_all();
    }

    /// The next bytes to write; `None` once closed and empty.
    fn take(&self) -> Option<Vec<u8>> {
        let mut state = self.lock();
        while state.buffer.is_empty() && !state.closing {
            state = self.wait(state);
        }
        state.writing = !state.buffer.is_empty();
        let bytes = std::mem::take(&mut state.buffer);
        drop(state);
        self.changed.notify_all();
        (!bytes.is_empty()).then_some(bytes)
    }

    fn written(&self, broken: bool) {
        let mut state = self.lock();
        state.writing = false;
        state.broken |= broken;
        drop(state);
        self.changed.notify_all();
    }
}

impl ConsoleOutlet {
    /// An outlet whose thread writes to `writer`.
    pub(crate) fn start(mut writer: Box<dyn Write + Send>) -> std::io::Result<Self> {
        let pipe = Arc::new(Pipe::default());
        let source = Arc::clone(&pipe);
        let drain = move || {
            while let Some(bytes) = source.take() {
                let outcome = writer.write_all(&bytes).and_then(|()| writer.flush());
                source.written(outcome.is_err());
            }
        };
        thread::Builder::new().name("console".into()).spawn(drain)?;
        Ok(Self(pipe))
    }

    /// What the UART writes to.
    pub(crate) fn sink(&self) -> Box<dyn SerialOutput> {
        Box::new(Sink(Arc::clone(&self.0)))
    }

    /// From now on nobody waits for room.
    pub(crate) fn close(&self) {
        self.0.lock().closing = true;
        self.0.changed.notify_all();
    }

    /// Waits until everything is written, but no longer than `patience`.
    pub(crate) fn drain(&self, patience: Duration) {
        let state = self.0.lock();
        let busy = |state: &mut State| (state.writing || !state.buffer.is_empty()) && !state.broken;
        // Whether it drained or patience ran out, we go on.
        let _ = self.0.changed.wait_timeout_while(state, patience, busy);
    }
}

struct Sink(Arc<Pipe>);

impl SerialOutput for Sink {
    fn write(&mut self, byte: u8) {
        self.0.push(byte);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io, sync::mpsc, time::Instant};

    /// Passes what is written to a channel.
    struct Channel(mpsc::Sender<Vec<u8>>);
    impl Write for Channel {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A reader that never reads.
    struct Stalled;
    impl Write for Stalled {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            loop {
                thread::park();
            }
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A closed pipe.
    struct Closed;
    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn write_all(outlet: &ConsoleOutlet, count: usize) {
        let mut sink = outlet.sink();
        (0..count).for_each(|i| sink.write(i as u8));
    }

    #[test]
    fn everything_arrives_in_order() {
        let (sender, receiver) = mpsc::channel();
        let outlet = ConsoleOutlet::start(Box::new(Channel(sender))).expect("a thread");
        write_all(&outlet, 3 * CAPACITY);
        outlet.close();
        outlet.drain(Duration::from_secs(10));
        let bytes: Vec<u8> = receiver.try_iter().flatten().collect();
        assert_eq!(bytes.len(), 3 * CAPACITY);
        assert!(bytes.iter().enumerate().all(|(i, &byte)| byte == i as u8));
    }

    #[test]
    fn a_closed_pipe_swallows_output() {
        let outlet = ConsoleOutlet::start(Box::new(Closed)).expect("a thread");
        write_all(&outlet, 3 * CAPACITY);
    }

    #[test]
    fn a_stalled_reader_holds_the_guest_only_until_the_machine_stops() {
        let outlet = ConsoleOutlet::start(Box::new(Stalled)).expect("a thread");
        let pipe = Arc::clone(&outlet.0);
        let guest = thread::spawn(move || (0..3 * CAPACITY).for_each(|_| pipe.push(0)));
        thread::sleep(Duration::from_millis(50));
        assert!(!guest.is_finished(), "the guest waits for room");
        outlet.close();
        guest.join().expect("it ended");
        let started = Instant::now();
        outlet.drain(Duration::from_millis(50));
        assert!(started.elapsed() < Duration::from_secs(5), "and leaving does not hang");
    }
}
