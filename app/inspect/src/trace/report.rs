//! Where events go: lines on the reader's connection, or a ring that the reader shares.

use std::{
    io::{self, Write},
    os::fd::BorrowedFd,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use ring3_trace::{Event, Line, ring::RingWriter};

use super::lock;
use crate::lines::say;

/// How long a trace waits for a reader that leaves its ring full: as a rule, and once the reader wants no more.
const PATIENCE: [Duration; 2] = [Duration::from_secs(5), Duration::from_millis(500)];
/// Pause between two looks at whether there is room.
const GLANCE: Duration = Duration::from_millis(1);

/// What a trace is written to.
pub trait TraceOutput: Write {
    /// Sends bytes, the first of them with a descriptor.
    ///
    /// # Errors
    /// The reader has gone, or there is no way to pass anything.
    fn pass_with(&mut self, _descriptor: BorrowedFd<'_>, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl TraceOutput for Vec<u8> {
    /// Nobody reads the ring.
    fn pass_with(&mut self, _: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }
}

/// The reader of a trace.
pub struct TraceReport<'a, W> {
    pub output: &'a Mutex<W>,
    pub ring: Option<RingWriter>,
    /// The reader wants no more.
    pub gone: &'a dyn Fn() -> bool,
}

impl<W: TraceOutput> TraceReport<'_, W> {
    /// Says that the trace has begun.
    pub fn begin(&self, probes: usize) -> io::Result<()> {
        let mut line = serde_json::to_vec(&Line::Started { probes })?;
        line.push(b'\n');
        let mut output = lock(self.output);
        match &self.ring {
            Some(ring) => output.pass_with(ring.fd(), &line)?,
            None => output.write_all(&line)?,
        }
        output.flush()
    }

    /// Reports an event; at once if the vCPU is stopped until the reader answers.
    pub fn event(&mut self, event: Event) -> io::Result<()> {
        let Some(ring) = &mut self.ring else {
            let (stands, mut output) = (event.stands, lock(self.output));
            say(&mut *output, &Line::Event(event))?;
            return if stands { output.flush() } else { Ok(()) };
        };
        if !ring.put(&event) {
            self.wait_for_room(&event)?;
        }
        if self.ring.as_ref().is_some_and(RingWriter::is_filling) { self.wake() } else { Ok(()) }
    }

    /// Reports how many events were lost.
    pub fn lost(&mut self, count: u64) -> io::Result<()> {
        match &mut self.ring {
            Some(ring) => ring.lose(count),
            None => say(&mut *lock(self.output), &Line::Lost(count))?,
        }
        Ok(())
    }

    /// Has the reader see what was reported so far.
    pub fn flush(&mut self) -> io::Result<()> {
        self.wake()?;
        lock(self.output).flush()
    }

    fn wake(&mut self) -> io::Result<()> {
        if self.ring.as_mut().is_some_and(RingWriter::take_sleeper) {
            let mut output = lock(self.output);
            say(&mut *output, &Line::Wake)?;
            output.flush()?;
        }
        Ok(())
    }

    /// Puts an event into a ring that is full, once the reader has made room. Meanwhile what vCPUs record waits, and what is too much of
    /// it is lost and counted.
    fn wait_for_room(&mut self, event: &Event) -> io::Result<()> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE[usize::from((self.gone)())] {
            self.wake()?;
            thread::sleep(GLANCE);
            if self.ring.as_mut().is_none_or(|ring| ring.put(event)) {
                return Ok(());
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}
