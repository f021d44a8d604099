//! Virtio devices in processes of their own, by vhost-user.
//!
//! A device's body ([`virtio::VirtioDevice`]) knows neither process nor transport, so the same body serves in the monitor or
//! here. What goes where:
//!
//! | monitor | server |
//! |---|---|
//! | [`Remote`] stands for the body: configuration, features; the first doorbell of a queue has it served there, further ones are an eventfd | [`serve`] has the body serve the queues |
//! | a thread passes interrupts on, and starts the server anew when it ends | [`jail`] and [`sandbox`] take from the process what the body does not need, as the module `policy` has it |
//!
//! The protocol is vhost-user's. Four memory regions are ours ([`MARKS`], [`NOTES`], [`WORDS`], [`LOG`]): where the engine marks pages that code was
//! made of, which the server may look at; where the server notes such pages when it writes them (see the crate `ram`); words by which a vCPU
//! and the server tell each other of requests and answers without events (see the module `words`); and where the server notes requests
//! for whoever traces them ([`virtio::RequestLog`]).
//!
//! # A server that ends
//!
//! If its body is replaceable ([`VirtioDevice::is_replaceable`]), [`Remote`] asks its owner for another and tells it where each queue
//! was: at the first request that was not given back. Requests are given back in order, so those that were under way are executed
//! again, which a disk does not mind.
//!
//! One that cannot be replaced, or ends time and again, is given up. What its owner has in reserve answers from then on: of a disk,
//! that every request fails. Without a reserve the device needs a reset, as the driver is told, and stays broken.
//!
//! # Other programs
//!
//! [`serve`] takes other programs' monitors, too, and [`Foreign`] stands for a device that another program serves. Neither knows of our
//! regions; `foreign` says what takes their place.

mod back;
mod early;
mod foreign;
mod front;
pub mod jail;
mod link;
mod near;
mod patience;
mod policy;
pub mod sandbox;
mod shadow;
mod words;

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    sync::mpsc,
    thread,
    time::Duration,
};

pub use back::{Bell, leave_after, serve};
pub use foreign::{ConfigSource, Foreign, Nature};
pub use front::{Remote, Reserve};
pub use link::{Process, Spawn};
pub use near::Nearness;
pub use policy::Served;
use virtio::VirtioDevice;

/// Where, in place of a GPA, the memory table has the marks of code pages.
pub const MARKS: u64 = 1 << 62;
/// Where it has the notes of what was written.
pub const NOTES: u64 = 1 << 62 | 1 << 61;

/// Where it has the words by which both tell each other of requests and answers.
pub const WORDS: u64 = 1 << 62 | 1 << 60;

/// Where it has the log of requests.
pub const LOG: u64 = 1 << 62 | 1 << 59;

/// The longest first line of a server, in bytes.
const MAX_LINE: u64 = 16 << 10;

/// Why a device has no server.
#[derive(Debug, thiserror::Error)]
pub enum VhostUserError {
    /// It says so itself, for a reason the user can do something about.
    #[error("{0}")]
    Refused(String),
    /// It ended, or the host refuses.
    #[error("the process of a device: {0}")]
    Host(#[from] io::Error),
    /// What became of it; nothing can take its place.
    #[error("its process {0}")]
    Ended(String),
    /// The two do not understand each other.
    #[error("the process of a device: {0}")]
    Protocol(#[from] vhost::Error),
    /// It was hung up on.
    #[error("the process of a device has not answered for {0:?}")]
    Mute(Duration),
    /// It never said what it is.
    #[error(
        "the process of a device has not said for {0:?} what it serves; is that on a file system that does not answer, \
         or this host too busy?"
    )]
    Silent(Duration),
}

/// What a device is, as its server says before anything else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Device ID.
    pub device_type: u16,
    /// PCI class code.
    pub class: u32,
    /// Bytes of its configuration structure.
    pub config: usize,
    /// Another server can take its place without loss.
    pub replaceable: bool,
    /// The largest size of each queue.
    pub queues: Vec<u16>,
}

impl Identity {
    /// What a body is.
    pub fn of(device: &dyn VirtioDevice) -> Self {
        Self {
            device_type: device.device_type(),
            class: device.class(),
            config: device.config().len(),
            replaceable: device.is_replaceable(),
            queues: device.queue_sizes().to_vec(),
        }
    }
}

/// Tells the monitor what there is here, or why there is nothing: one line.
///
/// # Errors
/// Nobody listens.
pub fn introduce(to: &mut impl Write, what: Result<&Identity, &str>) -> io::Result<()> {
    match what {
        Ok(Identity { device_type, class, config, replaceable, queues }) => {
            let replaceable = u8::from(*replaceable);
            let queues: Vec<_> = queues.iter().map(u16::to_string).collect();
            writeln!(
                to,
                "device {device_type} {class} {config} {replaceable} {}",
                queues.join(" ")
            )?;
        }
        Err(problem) => writeln!(to, "refused {}", problem.replace('\n', "; "))?,
    }
    to.flush()
}

/// What a server says first on `from`, for which it has as long as `patience`. One that is still silent then should be ended: until
/// its end of the pipe closes, a thread listens to it. What comes behind that line is left in the reader that is returned.
///
/// # Errors
/// It refuses, or ended without a line, or says nothing.
pub fn introduced<R: Read + Send + 'static>(
    from: R,
    patience: Duration,
) -> Result<(Identity, BufReader<R>), VhostUserError> {
    let (sender, line) = mpsc::channel();
    thread::Builder::new().name("introduction".into()).spawn(move || {
        let (mut line, mut from) = (String::new(), BufReader::new(from));
        let read = from.by_ref().take(MAX_LINE).read_line(&mut line);
        // Nobody listening means that the time is over.
        let _ = sender.send(read.map(|_| (line, from)));
    })?;
    match line.recv_timeout(patience) {
        Ok(heard) => heard
            .map_err(VhostUserError::Host)
            .and_then(|(line, from)| Ok((identity_in(&line)?, from))),
        Err(_) => Err(VhostUserError::Silent(patience)),
    }
}

fn identity_in(line: &str) -> Result<Identity, VhostUserError> {
    if let Some(problem) = line.strip_prefix("refused ") {
        return Err(VhostUserError::Refused(problem.trim().to_owned()));
    }
    let numbers = line.strip_prefix("device ").unwrap_or_default().split_whitespace();
    let numbers: Result<Vec<u32>, _> = numbers.map(str::parse).collect();
    match numbers.unwrap_or_default().as_slice() {
        [device_type, class, config, replaceable, queues @ ..] if !queues.is_empty() => {
            Ok(Identity {
                device_type: *device_type as u16,
                class: *class,
                config: *config as usize,
                replaceable: *replaceable != 0,
                queues: queues.iter().map(|&size| size as u16).collect(),
            })
        }
        _ => Err(io::Error::other(format!("it ended at once, saying `{}`", line.trim())).into()),
    }
}

/// A server that has been started: its end of the protocol, what it is, and how to end it.
pub struct Started {
    /// The protocol's socket.
    pub socket: UnixStream,
    /// What it serves.
    pub identity: Identity,
    /// How long it may take to answer, which includes what it does for the guest at that moment.
    pub patience: Duration,
    /// Ends it when dropped.
    pub process: Box<dyn Process>,
}

#[cfg(test)]
host::choose!(host_linux::Linux);

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const AGES: Duration = Duration::from_secs(20);

    fn identity() -> Identity {
        let queues = vec![256, 128];
        Identity { device_type: 2, class: 0x01_00_00, config: 60, replaceable: true, queues }
    }

    /// What a server says with these words, after which it stays.
    fn heard(words: &[u8]) -> (Result<Identity, VhostUserError>, UnixStream) {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        theirs.write_all(words).expect("said");
        (introduced(ours, AGES).map(|(identity, _)| identity), theirs)
    }

    #[test]
    fn what_is_said_is_heard() {
        let mut words = Vec::new();
        introduce(&mut words, Ok(&identity())).expect("said");
        assert_eq!(heard(&words).0.expect("understood"), identity());
        words.extend(b"and more\n");
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        theirs.write_all(&words).expect("said");
        let (_, mut behind) = introduced(ours, AGES).expect("understood");
        let mut more = String::new();
        behind.read_line(&mut more).expect("read");
        assert_eq!(more, "and more\n");
        words.clear();
        introduce(&mut words, Err("no\nsuch file")).expect("said");
        let (refused, _server) = heard(&words);
        assert!(
            matches!(refused, Err(VhostUserError::Refused(problem)) if problem == "no; such file")
        );
        let (nonsense, _server) = heard(b"device two\n");
        assert!(nonsense.expect_err("nonsense").to_string().contains("`device two`"));
        let (endless, _server) = heard(&[b'x'; MAX_LINE as usize]);
        endless.expect_err("not a line");
    }

    /// One whose file is where nothing answers stands still before it has said a word.
    #[test]
    fn a_server_that_says_nothing_is_not_waited_for_forever() {
        let started = Instant::now();
        for words in ["", "device 2 65536"] {
            let (ours, mut theirs) = UnixStream::pair().expect("a pair");
            theirs.write_all(words.as_bytes()).expect("said");
            let silent = introduced(ours, Duration::from_millis(50)).expect_err("no line");
            assert!(silent.to_string().contains("50ms"), "{silent}");
        }
        assert!(started.elapsed() < AGES);
    }
}
