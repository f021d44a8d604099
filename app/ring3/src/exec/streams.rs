//! Standard input and output of the command, byte by byte, and what the guest's console said.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
};

const PIECE: usize = 64 << 10;
/// How much of the console is kept to explain a failure.
const TAIL: usize = 4096;

/// The threads that carry the streams.
pub struct Streams {
    outputs: Vec<JoinHandle<()>>,
}

impl Streams {
    /// Starts carrying. On a terminal all output is one stream.
    pub fn start(
        stdin: UnixStream,
        stdout: UnixStream,
        stderr: UnixStream,
        on_terminal: bool,
    ) -> io::Result<Self> {
        thread::Builder::new().name("stdin".into()).spawn(move || input(&stdin))?;
        let output = move || carry(&stdout, io::stdout().lock());
        let mut outputs = vec![thread::Builder::new().name("stdout".into()).spawn(output)?];
        if !on_terminal {
            let output = move || carry(&stderr, io::stderr());
            outputs.push(thread::Builder::new().name("stderr".into()).spawn(output)?);
        }
        Ok(Self { outputs })
    }

    /// Waits until everything the command wrote is written.
    pub fn drain(self) {
        for output in self.outputs {
            let _ = output.join(); // a panic has been reported by itself
        }
    }
}

/// Standard input to the guest; its end is the command's end of input.
fn input(to: &UnixStream) {
    copy(io::stdin().lock(), to);
    // A guest that is gone needs no end.
    let _ = to.shutdown(Shutdown::Write);
}

/// The guest's output to ours. When ours takes no more, the command's pipe breaks.
fn carry(from: &UnixStream, to: impl Write) {
    copy(from, to);
    let _ = from.shutdown(Shutdown::Both); // as above
}

fn copy(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; PIECE];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                let piece = buffer.get(..count).unwrap_or_default();
                if to.write_all(piece).and_then(|()| to.flush()).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// The last of what the guest's console printed; clones share it.
#[derive(Clone, Default)]
pub struct ConsoleTail {
    bytes: Arc<Mutex<VecDeque<u8>>>,
    shown: bool,
}

impl ConsoleTail {
    /// An empty one; if `shown`, what is printed goes to standard error as well.
    pub fn new(shown: bool) -> Self {
        Self { shown, ..Self::default() }
    }

    /// The last lines, to explain a failure; nothing if they have been shown.
    pub fn explanation(&self) -> String {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if self.shown || bytes.is_empty() {
            return String::new();
        }
        let bytes: Vec<u8> = bytes.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes).replace('\r', "");
        let lines: Vec<_> = text.lines().collect();
        let last = lines.get(lines.len().saturating_sub(12)..).unwrap_or_default();
        format!("; the guest's console said:\n{}", last.join("\n"))
    }
}

impl Write for ConsoleTail {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.shown {
            io::stderr().write_all(data)?;
        }
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bytes.extend(data);
        let excess = bytes.len().saturating_sub(TAIL);
        bytes.drain(..excess);
        Ok(data.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_the_last_lines() {
        let mut tail = ConsoleTail::new(false);
        assert_eq!(tail.explanation(), "");
        (0..1000).for_each(|i| writeln!(tail, "line {i}\r").expect("kept"));
        let text = tail.explanation();
        assert!(text.ends_with("line 998\nline 999"), "{text}");
        assert!(!text.contains("line 900"), "{text}");
    }
}
