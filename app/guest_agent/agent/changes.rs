//! Has the kernel look again at files that the host has changed in a shared folder. Linux remembers for long what a folder's server has
//! told it, and its driver has no way to hear of changes.

use std::{
    ffi::CStr,
    fs::File,
    io::{self, BufRead, BufReader, Write},
    thread,
};

use crate::sys;

/// Follows what the host says of its changes at this port. `folder` is a private mount of the shared folder. To be called before there are
/// programs that could connect to the port in our place.
pub fn follow(folder: File, port: u32) {
    // A host that has nothing to say refuses; the kernel then asks again by itself.
    if let Ok(host) = sys::connect_to_host(port) {
        thread::spawn(move || drop(obey(&folder, host)));
    }
}

fn obey(folder: &File, host: File) -> io::Result<()> {
    let mut host = BufReader::new(host);
    // That we listen, and later that we have seen to everything.
    host.get_mut().write_all(&[0])?;
    let mut path = Vec::new();
    loop {
        path.clear();
        host.read_until(0, &mut path)?;
        match path.as_slice() {
            [0] => host.get_mut().write_all(&[0])?,
            b".\0" => sys::look_at(folder),
            [b'/', node @ .., 0] => {
                let node = std::str::from_utf8(node).ok().and_then(|node| node.parse().ok());
                // A file that the kernel does not know needs no look.
                let file = node.and_then(|node| sys::known_file(folder, node).ok());
                file.iter().for_each(sys::look_at);
            }
            _ => match CStr::from_bytes_with_nul(&path) {
                Ok(path) => sys::look_up(folder, path),
                Err(_) => return Ok(()),
            },
        }
    }
}
