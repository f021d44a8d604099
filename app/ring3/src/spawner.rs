//! The process that does for a machine's monitor what it has given up the right to: start processes, remove its sockets, look through the
//! host's processes.
//!
//! Devices are registered before the monitor shuts itself in, and from then on named by a number: a monitor that was taken over has no
//! other started. See [`host_linux::spawner`] and docs/isolation.md.

use std::{
    fs, io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{self, Command, Stdio},
    sync::OnceLock,
    time::Duration,
};

use host_linux::{
    LinuxChild,
    spawner::{Service, Spawner},
    usage::{self, Usage},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use vmm::wedges;

use crate::failure::Failure;

/// How the command line of a device's process begins, whatever program starts it.
pub const DEVICE_SERVER: [&str; 2] = ["ring3", "device"];
/// How long an answer may take: on a busy host it takes a while to add up what many processes take.
const PATIENCE: Duration = Duration::from_secs(10);
/// ... and that a file is removed, when the machine has ended and nobody is to wait.
const BRIEFLY: Duration = Duration::from_millis(200);

/// What it can be asked.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// To know the words of a device; the answer is its number.
    Device(Vec<String>),
    /// To remove a file when the monitor ends, or asks for that.
    File(PathBuf),
    /// To remove one of these.
    Remove(PathBuf),
    /// To know no more devices and files.
    Seal,
    /// What the monitor and all that it started take of the host.
    Usage,
}

/// What a process that it starts becomes.
#[derive(Debug, Serialize, Deserialize)]
enum Start {
    /// The device with this number.
    Device(usize),
    /// A wedge, see [`wedges::become_wedge`].
    Wedge(Vec<u64>),
}

/// The spawner's memory.
struct Helper {
    monitor: u32,
    devices: Vec<Vec<String>>,
    files: Vec<PathBuf>,
    sealed: bool,
}

/// This process's, which has one machine.
static SPAWNER: OnceLock<Spawner> = OnceLock::new();

/// Starts it. To be called before there is any other thread.
///
/// # Errors
/// The host gives no process.
pub fn start() -> Result<(), Failure> {
    let helper =
        Helper { monitor: process::id(), devices: Vec::new(), files: Vec::new(), sealed: false };
    let host = |error: io::Error| Failure::host(format!("cannot start a process: {error}"));
    // Where the host has no such barriers, machines do without.
    host_linux::prepare_fences();
    // A process has one machine.
    let _ = SPAWNER.set(Spawner::start(helper).map_err(host)?);
    wedges::start_by(|words, descriptors| {
        Ok(Box::new(started(&Start::Wedge(words.to_vec()), descriptors)?))
    });
    Ok(())
}

/// A device that can be started.
#[derive(Clone, Copy, Debug)]
pub struct Device(usize);

impl Device {
    /// One that these words of `ring3 device` start.
    ///
    /// # Errors
    /// The spawner is gone, or the monitor has shut itself in.
    pub fn register(words: Vec<String>) -> io::Result<Self> {
        let number: Option<usize> = ask(&Request::Device(words))?;
        number.map(Self).ok_or_else(|| io::Error::other("devices are made before a machine starts"))
    }

    /// Starts its process with these as its standard input and output.
    ///
    /// # Errors
    /// The spawner is gone, or the host gives no process.
    pub fn start(self, input: BorrowedFd<'_>, output: BorrowedFd<'_>) -> io::Result<LinuxChild> {
        started(&Start::Device(self.0), &[input, output])
    }
}

/// Has a file removed with the process.
pub fn remove_at_end(path: PathBuf) {
    // Who has no spawner removes it alone, unless it is killed.
    let _ = ask::<bool>(&Request::File(path));
}

/// Removes one of those files now.
pub fn remove(path: PathBuf) -> io::Result<()> {
    if ask(&Request::Remove(path))? { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
}

/// No other devices and files can be named from now on.
///
/// # Errors
/// The spawner is gone.
pub fn seal() -> io::Result<()> {
    ask::<bool>(&Request::Seal).map(drop)
}

/// What this process and all that it started take of the host.
///
/// # Errors
/// The spawner is gone.
pub fn usage() -> io::Result<Usage> {
    ask(&Request::Usage)
}

fn spawner() -> io::Result<&'static Spawner> {
    SPAWNER.get().ok_or_else(|| io::Error::other("this process starts no others"))
}

fn ask<A: DeserializeOwned>(request: &Request) -> io::Result<A> {
    let patience = if matches!(request, Request::Remove(_)) { BRIEFLY } else { PATIENCE };
    let answer = spawner()?.ask(&serde_json::to_vec(request)?, patience)?;
    Ok(serde_json::from_slice(&answer)?)
}

fn started(start: &Start, descriptors: &[BorrowedFd<'_>]) -> io::Result<LinuxChild> {
    spawner()?.spawn(&serde_json::to_vec(start)?, descriptors)
}

impl Helper {
    fn device(&mut self, words: Vec<String>) -> Option<usize> {
        if self.sealed {
            return None;
        }
        self.devices.push(words);
        Some(self.devices.len() - 1)
    }

    fn file(&mut self, path: PathBuf) -> bool {
        if !self.sealed {
            self.files.push(path);
        }
        !self.sealed
    }

    fn remove(&self, path: &PathBuf) -> bool {
        self.files.contains(path) && fs::remove_file(path).is_ok()
    }

    fn reply(&mut self, request: Request) -> serde_json::Result<Vec<u8>> {
        match request {
            Request::Device(words) => serde_json::to_vec(&self.device(words)),
            Request::File(path) => serde_json::to_vec(&self.file(path)),
            Request::Remove(path) => serde_json::to_vec(&self.remove(&path)),
            Request::Seal => serde_json::to_vec(&std::mem::replace(&mut self.sealed, true)),
            Request::Usage => serde_json::to_vec(&usage::of(self.monitor)),
        }
    }
}

impl Service for Helper {
    fn begin(&mut self) {
        // A host that gives no memory now is asked again, by each wedge.
        let _ = wedges::prepare();
    }

    fn answer(&mut self, request: &[u8]) -> Vec<u8> {
        let request = serde_json::from_slice(request);
        request.and_then(|request| self.reply(request)).unwrap_or_default()
    }

    fn check(&self, request: &[u8]) -> io::Result<()> {
        match serde_json::from_slice(request)? {
            Start::Device(number) if number >= self.devices.len() => {
                Err(io::ErrorKind::InvalidInput.into())
            }
            Start::Device(_) | Start::Wedge(_) => Ok(()),
        }
    }

    fn become_child(&self, request: &[u8], descriptors: Vec<OwnedFd>) -> io::Error {
        match serde_json::from_slice(request) {
            Ok(Start::Device(number)) => become_device(&self.devices[number], descriptors),
            Ok(Start::Wedge(words)) => wedges::become_wedge(&words, &descriptors),
            Err(error) => error.into(),
        }
    }

    /// A socket left behind is noticed by the next client, too.
    fn finish(&mut self) {
        for path in &self.files {
            let _ = fs::remove_file(path);
        }
    }
}

fn become_device(words: &[String], descriptors: Vec<OwnedFd>) -> io::Error {
    let Ok([input, output]) = <[OwnedFd; 2]>::try_from(descriptors) else {
        return io::ErrorKind::InvalidInput.into();
    };
    let mut command = Command::new("/proc/self/exe");
    let [name, device] = DEVICE_SERVER;
    command.arg0(name).arg(device).args(words);
    command.stdin(Stdio::from(input)).stdout(Stdio::from(output));
    // It needs nothing of what is said to us, which may be secret, but how to report.
    let told = std::env::vars_os().filter(|(name, _)| {
        ["RING3_LOG", "RUST_BACKTRACE", "NO_COLOR"].iter().any(|known| name == *known)
    });
    command.env_clear().envs(told);
    // A terminal's Ctrl-C is for the monitor, which ends its devices in order.
    command.process_group(0);
    command.exec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn helper() -> Helper {
        Helper { monitor: process::id(), devices: Vec::new(), files: Vec::new(), sealed: false }
    }

    fn answer(helper: &mut Helper, request: &Request) -> String {
        let request = serde_json::to_vec(request).expect("JSON");
        String::from_utf8(helper.answer(&request)).expect("JSON")
    }

    fn is_allowed(helper: &Helper, start: &Start) -> bool {
        helper.check(&serde_json::to_vec(start).expect("JSON")).is_ok()
    }

    #[test]
    fn nothing_new_can_be_named_once_it_is_sealed() {
        let folder = tempfile::tempdir().expect("a folder");
        let (own, other) = (folder.path().join("own"), folder.path().join("other"));
        for path in [&own, &other] {
            fs::write(path, "").expect("written");
        }
        let mut helper = helper();
        let device = || Request::Device(vec!["disk".to_owned()]);
        assert!(!is_allowed(&helper, &Start::Device(0)), "it is not known yet");
        assert_eq!(answer(&mut helper, &device()), "0");
        assert_eq!(answer(&mut helper, &Request::File(own.clone())), "true");
        assert_eq!(answer(&mut helper, &Request::Seal), "false");
        assert_eq!(answer(&mut helper, &device()), "null");
        assert_eq!(answer(&mut helper, &Request::File(other.clone())), "false");
        assert!(is_allowed(&helper, &Start::Device(0)) && !is_allowed(&helper, &Start::Device(1)));
        assert_eq!(answer(&mut helper, &Request::Remove(other.clone())), "false");
        assert_eq!(answer(&mut helper, &Request::Remove(own.clone())), "true");
        helper.finish();
        assert!(other.exists() && !own.exists());
    }

    #[test]
    fn what_is_no_request_has_no_answer() {
        assert!(helper().answer(b"nonsense").is_empty());
        assert!(helper().check(b"nonsense").is_err());
    }
}
