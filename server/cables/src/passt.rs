//! passt, a program that turns frames into the host's connections: IPv6 and all, with the host's own addresses.
//!
//! It serves a network interface by vhost-user, over one end of a socket pair that it gets as its standard input, and ends with us. What
//! it served before 2025, frames one after the other on a stream, is not spoken here: through such a passt (Debian 12's) what comes in
//! stops after about 1 MB, with QEMU as well.

use std::{
    io::ErrorKind,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use usernet::{Forward, Protocol};

use crate::CableError;

/// The program, which is looked for in `PATH`.
const PROGRAM: &str = "passt";
const VHOST_USER: &str = "--vhost-user";
/// Mistakes that passt finds, it finds this soon.
const STARTUP: Duration = Duration::from_millis(150);
const GLANCE: Duration = Duration::from_millis(10);

/// A passt that serves a network interface. It is ended when this is dropped.
pub struct PasstServer {
    child: Child,
    /// Made before there is a filter that lets nobody be signalled by number.
    pidfd: Option<OwnedFd>,
}

impl PasstServer {
    /// Starts one that leads these ports of the host to the guest, and returns our end of the protocol.
    ///
    /// # Errors
    /// passt is not installed, too old, or cannot be run. What it does not like about the ports it says instead of answering ([`PasstServer::refusal`]).
    pub fn start(forwards: &[Forward]) -> Result<(Self, UnixStream), CableError> {
        knows_vhost_user(PROGRAM)?;
        let (ours, its) = UnixStream::pair()?;
        let mut command = Command::new(PROGRAM);
        command.args(["--foreground", "--quiet", "--fd", "0", VHOST_USER]).args(options(forwards));
        command.stdin(Stdio::from(OwnedFd::from(its))).stdout(Stdio::null());
        // A terminal's Ctrl-C is for the monitor, whose end is its.
        command.process_group(0);
        // The command holds a copy of the other end, which would keep the socket open after its end, and goes now.
        let child = command.spawn()?;
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).ok();
        Ok((Self { child, pidfd }, ours))
    }

    /// How it ended, if it has or does so at once.
    pub fn refusal(&mut self) -> Option<CableError> {
        let status = self.ended_within(STARTUP)?;
        Some(CableError::Passt(format!("it ended at once ({status}); it has said why")))
    }

    /// How it has ended, if it does so soon.
    fn ended_within(&mut self, patience: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + patience;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < deadline => thread::sleep(GLANCE),
                other => return other.ok().flatten(),
            }
        }
    }
}

impl Drop for PasstServer {
    fn drop(&mut self) {
        // One that has ended needs no killing, and one that cannot be killed ends with its socket.
        if let Some(pidfd) = &self.pidfd {
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
        let _ = self.ended_within(STARTUP);
    }
}

/// Asks it for what it can do by vhost-user, which one that cannot takes for a mistake.
fn knows_vhost_user(program: &str) -> Result<(), CableError> {
    let mut command = Command::new(program);
    command.args([VHOST_USER, "--print-capabilities"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let problem = match command.status() {
        Ok(status) if status.success() => return Ok(()),
        Ok(_) => "the one that is installed has no vhost-user: one of 2025 or later is needed, such as Debian 13's; or use user".to_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            "it is not installed: install the package passt, of 2025 or later, or use user".to_owned()
        }
        Err(error) => error.to_string(),
    };
    Err(CableError::Passt(problem))
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
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn forwards_become_options() {
        let forward = |text: &str| text.parse().expect("sound");
        let forwards = [forward("tcp:127.0.0.1:8080-:80"), forward("udp::5353-:53")];
        let expected = ["--tcp-ports", "127.0.0.1/8080:80", "--udp-ports", "127.0.0.1/5353:53"];
        assert_eq!(options(&forwards), expected);
    }

    /// A program that takes these words for what `pattern` says, and any others for a mistake.
    fn impostor(directory: &tempfile::TempDir, pattern: &str) -> String {
        let path = directory.path().join("program");
        let script = format!("#!/bin/sh\ncase \"$*\" in {pattern}) exit 0;; esac\nexit 1\n");
        fs::write(&path, script).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("allowed");
        path.display().to_string()
    }

    #[test]
    fn what_is_missing_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let said = |program: &str| knows_vhost_user(program).err().map(|error| error.to_string());
        let old = said(&impostor(&directory, "--socket*")).expect("too old");
        assert!(old.contains("one of 2025 or later is needed"), "{old}");
        let absent = said(&directory.path().join("absent").display().to_string());
        assert!(absent.expect("absent").contains("it is not installed"));
        let new = impostor(&directory, "'--vhost-user --print-capabilities'");
        assert_eq!(said(&new), None);
    }
}
