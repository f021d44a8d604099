//! Device servers, seen from the monitor: how the process of a device is started, and what becomes of it. [`crate::device`] is what runs in it.

use std::{
    os::{
        fd::AsFd,
        unix::{net::UnixStream, process::ExitStatusExt},
    },
    process::ExitStatus,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    thread,
    time::{Duration, Instant},
};

use host_linux::LinuxChild;
use signal_hook::consts::SIGKILL;
use vhost_user::{Nearness, Process, Remote, Reserve, Spawn, Started, VhostUserError, introduced};
use vmm::{Attachment, Execution};

use crate::{failure::Failure, injection::Elsewhere, output, spawner};

/// How long a device may take to end by itself: less than its machine may.
const PATIENCE: Duration = Duration::from_millis(1400);
const GLANCE: Duration = Duration::from_millis(2);
/// How long it may take to answer: it may have a flush to finish first, on a disk that others keep busy.
pub const ANSWER: Duration = Duration::from_secs(60);

/// Who is told of a device that is gone for good; without one the user is, and the guest goes on with errors in its place.
static TOLD: OnceLock<Box<dyn Fn(String) + Send + Sync>> = OnceLock::new();

/// Sets who is told of a device that is gone for good.
pub fn tell_losses(tell: impl Fn(String) + Send + Sync + 'static) {
    // A process has one machine.
    let _ = TOLD.set(Box::new(tell));
}

fn lost(what: &str) {
    match TOLD.get() {
        Some(tell) => tell(what.to_owned()),
        None => output::complain(&format!("{what}; the guest has errors in its place from now on")),
    }
}

/// What a device's standard output, which goes both ways, is for once it has said what it is.
pub enum Further {
    /// Nothing.
    Nothing,
    /// Faults' orders and records.
    Faults(Elsewhere),
    /// Somebody in the guest, who gets our end.
    Listener(Sender<UnixStream>),
}

impl From<Option<Elsewhere>> for Further {
    fn from(faults: Option<Elsewhere>) -> Self {
        faults.map_or(Self::Nothing, Self::Faults)
    }
}

/// A device that is served by a process of its own, which these words of `ring3 device` start.
pub fn attach(
    words: Vec<String>,
    option: &'static str,
    reserve: Option<Reserve>,
    nearness: Nearness,
    further: Further,
) -> Result<Attachment, Failure> {
    let what =
        [words.first(), words.last()].into_iter().flatten().cloned().collect::<Vec<_>>().join(" ");
    let registered = spawner::Device::register(words);
    let registered = registered.map_err(|error| Failure::host(format!("{option}: {error}")))?;
    let spawn: Spawn = Box::new(move || start(registered, &further));
    let remote = Remote::new(spawn, reserve).map_err(|error| match error {
        VhostUserError::Refused(problem) => Failure::usage(problem),
        error => Failure::host(format!("{option}: {error}")),
    })?;
    remote.on_end(Box::new(move |error| lost(&format!("{option}: {what} is gone: {error}"))));
    remote.come_near(nearness);
    let (connect, release) = (Box::new(remote.connector()), Box::new(remote.releaser()));
    let device = Box::new(remote);
    // It only passes doorbells on, for which no thread is worth waking.
    Ok(Attachment { device, execution: Execution::Inline, connect, release })
}

fn start(device: spawner::Device, further: &Further) -> Result<Started, VhostUserError> {
    let (socket, theirs) = UnixStream::pair()?;
    // Our end, and its.
    let (said, says) = UnixStream::pair()?;
    let child = device.start(theirs.as_fd(), says.as_fd())?;
    // Copies of its ends would keep both open after its end.
    drop((theirs, says));
    let process = Box::new(DeviceProcess { child, status: None, stands_still: Arc::default() });
    let (identity, records) = introduced(said.try_clone()?, ANSWER)?;
    match further {
        Further::Nothing => {}
        Further::Faults(faults) => {
            faults.attend(records, said, Arc::clone(&process.stands_still))?;
        }
        // Nobody who wants it is there any more once the machine runs.
        Further::Listener(sender) => drop(sender.send(said)),
    }
    Ok(Started { socket, identity, patience: ANSWER, process })
}

/// A device's process. Dropped, it has ended: by itself if it does so soon, because its disk may have something to bring in order.
struct DeviceProcess {
    child: LinuxChild,
    /// How it has ended, once it has.
    status: Option<ExitStatus>,
    /// A fault has it answer nothing any more, so that it is not waited for.
    stands_still: Arc<AtomicBool>,
}

impl Process for DeviceProcess {
    fn fate(&mut self) -> String {
        match self.end() {
            Some(status) => status.signal().map_or_else(
                || format!("has ended ({status})"),
                |signal| {
                    format!("was killed by signal {signal}, perhaps for want of memory on the host")
                },
            ),
            None => "has hung up".to_owned(),
        }
    }

    fn id(&self) -> Option<u32> {
        Some(self.child.pid)
    }
}

impl DeviceProcess {
    /// How it has ended, if it does so soon.
    fn end(&mut self) -> Option<ExitStatus> {
        let deadline = Instant::now() + PATIENCE;
        let stands_still = Arc::clone(&self.stands_still);
        let hopeful = || Instant::now() < deadline && !stands_still.load(Ordering::Acquire);
        while !self.has_ended() && hopeful() {
            thread::sleep(GLANCE);
        }
        self.status
    }

    fn has_ended(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten().map(ExitStatus::from_raw);
        }
        self.status.is_some()
    }
}

impl Drop for DeviceProcess {
    fn drop(&mut self) {
        self.end();
        self.child.signal(SIGKILL);
        while !self.has_ended() {
            thread::sleep(GLANCE);
        }
    }
}
