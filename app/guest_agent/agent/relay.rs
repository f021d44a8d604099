//! Bytes from one descriptor to another, until the end.

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
};

const PIECE: usize = 64 << 10;

/// Copies until either side ends, then closes both: the end of the host's input ends the command's,
/// and a host that takes no more output breaks the command's pipe.
pub fn copy(mut from: File, mut to: File) {
    let mut buffer = vec![0; PIECE];
    loop {
        match from.read(&mut buffer) {
            // A terminal without a slave side gives an error, which is its end.
            Ok(0) => return,
            Ok(count) if to.write_all(&buffer[..count]).is_err() => return,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
