//! Has the kernel look again at what the host has changed in a shared folder. The kernel keeps what it was told for long, and its
//! driver of shared folders hears of no changes.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Write},
    thread,
};

use crate::sys;

/// Follows what the host says at this port of a folder, of which this is a mount that nothing else is mounted in. To be called before
/// there are programs that could connect to the port in our place.
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
                node.and_then(|node| sys::known_file(folder, node)).iter().for_each(sys::look_at);
            }
            [.., 0] => sys::look_up(folder, &path),
            _ => return Ok(()),
        }
    }
}
