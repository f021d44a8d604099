//! Bytes from one descriptor to another, until the end.

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
};

use crate::sys;

const PIECE: usize = 64 << 10;

/// Copies until either side ends, then closes both: the end of the host's input ends the command's.
pub fn copy(from: File, to: File) {
    copy_while(from, to, |_, _| true);
}

/// The same to a connection, and ends as soon as nobody reads at its other end: the command's next byte then finds its pipe
/// broken, where otherwise it would be lost and the one after it find that.
pub fn copy_while_read(from: File, to: File) {
    copy_while(from, to, sys::wait_while_read);
}

fn copy_while(mut from: File, mut to: File, goes_on: impl Fn(&File, &File) -> bool) {
    let mut buffer = vec![0; PIECE];
    while goes_on(&from, &to) {
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
