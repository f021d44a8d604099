//! The network of passt, a program that turns frames into the host's connections: IPv6 and all, with
//! the host's own addresses. It gets one end of a socket pair as its standard input and ends with us.

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use usernet::{Forward, MTU, Protocol};

use crate::{Error, Sender, Wire, inbox::Inbox, socket::prepared, stream};

/// Mistakes that passt finds, it finds this soon.
const STARTUP: Duration = Duration::from_millis(150);

struct Passt {
    stream: Arc<UnixStream>,
    process: Child,
}

impl Sender for Passt {
    fn send(&mut self, frame: &[u8]) {
        if let Err(error) = stream::send(&self.stream, frame) {
            tracing::warn!(%error, "passt");
            stream::hang_up(&self.stream);
        }
    }
}

impl Drop for Passt {
    fn drop(&mut self) {
        stream::hang_up(&self.stream);
        // It ends when the stream does, but need not take its time.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A cable to a passt of its own, which leads these ports of the host to the guest.
///
/// # Errors
/// passt is not installed, or does not like what it is asked for.
pub fn passt(forwards: &[Forward]) -> Result<Wire, Error> {
    let (ours, its) = UnixStream::pair()?;
    let mut command = Command::new("passt");
    command.args(["--foreground", "--quiet", "--fd", "0"]).args(options(forwards));
    command.stdin(Stdio::from(OwnedFd::from(its))).stdout(Stdio::null());
    let mut process = command.spawn().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Error::Passt("it is not installed: install the package passt, or use user".to_owned())
        }
        _ => Error::Passt(error.to_string()),
    })?;
    // It holds a copy of the other end, which would keep the stream open after its end.
    drop(command);
    starts(&mut process)?;
    let (stream, inbox) = (prepared(ours)?, Arc::new(Inbox::default()));
    let (its, frames) = (Arc::clone(&stream), Arc::clone(&inbox));
    thread::Builder::new().name("passt".into()).spawn(move || {
        match stream::receive(&its, &frames) {
            Ok(()) if !frames.is_closed() => tracing::warn!("passt has ended"),
            Ok(()) => {}
            Err(error) => tracing::warn!(%error, "passt"),
        }
    })?;
    Ok(Wire { sender: Box::new(Passt { stream, process }), inbox, mtu: MTU })
}

fn starts(process: &mut Child) -> Result<(), Error> {
    let deadline = Instant::now() + STARTUP;
    while Instant::now() < deadline {
        if let Some(status) = process.try_wait()? {
            return Err(Error::Passt(format!("it ended at once ({status}); it has said why")));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn options(forwards: &[Forward]) -> Vec<String> {
    let option = |forward: &Forward| {
        let name = match forward.protocol {
            Protocol::Tcp => "--tcp-ports",
            Protocol::Udp => "--udp-ports",
        };
        let (host, guest) = (forward.host, forward.guest.1);
        [name.to_owned(), format!("{}/{}:{guest}", host.ip(), host.port())]
    };
    forwards.iter().flat_map(option).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwards_become_options() {
        let forward = |text: &str| text.parse().expect("sound");
        let forwards = [forward("tcp:127.0.0.1:8080-:80"), forward("udp::5353-:53")];
        let expected = ["--tcp-ports", "127.0.0.1/8080:80", "--udp-ports", "127.0.0.1/5353:53"];
        assert_eq!(options(&forwards), expected);
    }
}
