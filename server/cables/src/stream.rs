//! Frames on a stream: four bytes of length, most significant first, then the frame.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
};

use crate::inbox::Inbox;

/// The longest frame: an IP packet of 65535 bytes with the longest Ethernet header.
const LONGEST: usize = 65535 + 18;

/// Sends a frame.
///
/// # Errors
/// The other end is gone.
pub(crate) fn send(mut stream: &UnixStream, frame: &[u8]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(4 + frame.len());
    bytes.extend_from_slice(&(frame.len() as u32).to_be_bytes());
    bytes.extend_from_slice(frame);
    stream.write_all(&bytes)
}

/// Receives frames until the other end, or the guest, is gone.
///
/// # Errors
/// The other end sent what is no frame.
pub(crate) fn receive(stream: &UnixStream, inbox: &Inbox) -> io::Result<()> {
    let mut reader = io::BufReader::with_capacity(1 << 17, stream);
    loop {
        let mut length = [0; 4];
        match reader.read_exact(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        let length = u32::from_be_bytes(length) as usize;
        if length > LONGEST {
            return Err(io::Error::other(format!("a frame of {length} bytes")));
        }
        let mut frame = vec![0; length];
        reader.read_exact(&mut frame)?;
        if !inbox.put(frame) {
            return Ok(());
        }
    }
}

/// Has both ends notice that it is over.
pub(crate) fn hang_up(stream: &UnixStream) {
    // The other end may have done so already.
    let _ = stream.shutdown(Shutdown::Both);
}
