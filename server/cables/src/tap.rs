//! A tap device of the host: the guest is on whatever network the device is.
//!
//! The device exists already and is this user's (`ip tuntap add tap0 mode tap user NAME`), or we may make it.

// UNSAFETY: TUNSETIFF has no safe wrapper in rustix.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io::{Read, Write},
    sync::Arc,
    thread,
};

use rustix::{
    io::Errno,
    ioctl::{Setter, ioctl},
};

use crate::{CableError, Ready, Sender, Wire, inbox::Inbox};

/// `TUNSETIFF`, `IFF_TAP` and `IFF_NO_PI` of linux/if_tun.h.
const TUNSETIFF: u32 = 0x4004_54ca;
const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;
/// Bytes of a device's name, with the zero at its end.
const NAME: usize = 16;
/// More than a device's frames have.
const BUFFER: usize = 1 << 16;

/// `struct ifreq` as TUNSETIFF reads it.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; NAME],
    flags: u16,
    rest: [u8; 22],
}

impl Sender for File {
    fn send(&mut self, frame: &[u8]) {
        if let Err(error) = self.write_all(frame) {
            // A device that is down takes nothing.
            tracing::debug!(%error, "tap");
        }
    }
}

/// A cable to the tap device `name`. Its thread ends with the process: the device has no end to wait for.
///
/// # Errors
/// There is no such device and we may not make it, or it is in use.
pub fn tap(name: &str) -> Result<Ready, CableError> {
    let device =
        open(name).map_err(|problem| CableError::Tap { name: name.to_owned(), problem })?;
    Ok(Ready(Box::new(move || start(device))))
}

fn start(device: File) -> Result<Wire, CableError> {
    let inbox = Arc::new(Inbox::default());
    let (mut reader, frames) = (device.try_clone()?, Arc::clone(&inbox));
    thread::Builder::new().name("tap".into()).spawn(move || {
        let mut buffer = vec![0; BUFFER];
        while let Ok(count) = reader.read(&mut buffer) {
            if !frames.put(buffer[..count].to_vec()) {
                return;
            }
        }
    })?;
    Ok(Wire { sender: Box::new(device), inbox })
}

fn open(name: &str) -> Result<File, String> {
    let mut request =
        InterfaceRequest { name: [0; NAME], flags: IFF_TAP | IFF_NO_PI, rest: [0; 22] };
    if name.is_empty() || name.len() >= NAME {
        return Err(format!("a name has 1 to {} characters", NAME - 1));
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let device = File::options().read(true).write(true).open("/dev/net/tun");
    let device = device.map_err(|error| format!("/dev/net/tun: {error}"))?;
    // SAFETY: TUNSETIFF reads a `struct ifreq`, which InterfaceRequest is.
    let done = unsafe { ioctl(&device, Setter::<TUNSETIFF, _>::new(request)) };
    done.map_err(|error| match error {
        Errno::PERM => "it does not exist or is not yours; as root: ip tuntap add NAME mode tap \
                        user YOU, then ip link set NAME up"
            .to_owned(),
        Errno::BUSY => "it is in use".to_owned(),
        other => other.to_string(),
    })?;
    Ok(device)
}
