//! `--on-panic`: what happens when the guest's kernel says that it has crashed.

use std::{
    fs::File,
    path::{Path, PathBuf},
    str::FromStr,
    sync::mpsc::{Sender, channel},
    time::Duration,
};

use clap::Args;
use vmm::Inspector;

use crate::{control, failure::Failure, output};

/// Where a core goes if nobody says.
const CORE: &str = "ring3.core";
/// How long a vCPU that has told of a crash waits for the rest of ring3. Without that, a kernel that resets the machine right after
/// could be gone before anybody has looked at it.
const STANDS: Duration = Duration::from_secs(1);

/// What happens when the guest's kernel crashes, as an option.
#[derive(Clone, Debug, Args)]
pub struct PanicOptions {
    /// What happens when the guest's kernel says that it has crashed: ignore, stop, dump[=FILE], exit
    ///
    /// With `stop` the machine stands and can be looked at (`ring3 gdb`, `ring3 dump`) until `ring3 stop`. With `dump` its core is
    /// written to FILE (ring3.core), and then it ends; with `exit` it ends at once. The exit code is 8 for all of them. The kernel
    /// says that it has crashed by a pvpanic device (PCI 1b36:0011), for which it needs its driver: Linux's module pvpanic-pci.
    /// With `ignore` there is no such device.
    #[arg(long, value_name = "WHAT", default_value = "ignore")]
    pub on_panic: OnPanic,
}

/// What happens when the guest's kernel crashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnPanic {
    /// There is no such device; the kernel does what its own parameters say.
    Ignore,
    /// The machine stands.
    Stop,
    /// Its core is written to this file, and the machine ends.
    Dump(PathBuf),
    /// The machine ends.
    Exit,
}

impl FromStr for OnPanic {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("dump=")) {
            ("ignore", _) => Ok(Self::Ignore),
            ("stop", _) => Ok(Self::Stop),
            ("dump", _) => Ok(Self::Dump(CORE.into())),
            ("exit", _) => Ok(Self::Exit),
            (_, Some(file)) if !file.is_empty() => Ok(Self::Dump(file.into())),
            _ => Err("it is ignore, stop, dump, dump=FILE or exit".to_owned()),
        }
    }
}

/// The vCPU that has told of a crash stands as long as this exists.
pub type Stands = Sender<()>;

/// What the device calls: it sends an event, and returns once the event has been dealt with.
pub fn teller<E>(events: Sender<E>, event: fn(Stands) -> E) -> impl Fn() {
    move || {
        let (stands, dealt_with) = channel();
        // The receiver is gone only if the run has ended otherwise, and then nothing waits.
        drop(events.send(event(stands)));
        let _ = dealt_with.recv_timeout(STANDS);
    }
}

/// Tells the user of a machine that has crashed and stands how to look at it.
pub fn tell(name: &str) {
    output::complain(&format!(
        "the guest's kernel crashed, and the machine stands: `ring3 gdb {name}`, `ring3 dump {name} FILE`, `ring3 stop {name}`"
    ));
}

/// A file that is open for a core: later this process can open none.
pub struct CoreFile<'a> {
    file: File,
    path: &'a Path,
}

impl OnPanic {
    /// The file for the core, which is empty as long as there is none.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn core(&self) -> Result<Option<CoreFile<'_>>, Failure> {
        let Self::Dump(path) = self else { return Ok(None) };
        let wrong = |error| Failure::usage(format!("--on-panic dump={}: {error}", path.display()));
        Ok(Some(CoreFile { file: File::create(path).map_err(wrong)?, path }))
    }
}

impl CoreFile<'_> {
    /// Writes the core of a machine that has crashed. Whatever comes of it, the machine has crashed all the same.
    pub fn write(mut self, inspector: &Inspector) {
        let path = self.path.display();
        match control::write_core(inspector, &mut self.file) {
            Ok(missing) => {
                output::complain(&format!("the machine's core is in {path}"));
                missing.into_iter().for_each(output::complain);
            }
            Err(error) => output::complain(&format!("{path}: no core: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_is_a_word_or_a_file() {
        let parsed = |text: &str| text.parse::<OnPanic>();
        assert_eq!(parsed("stop"), Ok(OnPanic::Stop));
        assert_eq!(parsed("dump"), Ok(OnPanic::Dump(CORE.into())));
        assert_eq!(parsed("dump=a b"), Ok(OnPanic::Dump("a b".into())));
        assert!(parsed("dump=").is_err() && parsed("explode").is_err());
    }

    #[test]
    fn the_device_waits_until_its_event_has_been_dealt_with() {
        let (sender, events) = channel();
        let device = std::thread::spawn(teller(sender, |stands| stands));
        let stands = events.recv().expect("told");
        std::thread::sleep(Duration::from_millis(50));
        assert!(!device.is_finished(), "it did not wait");
        drop(stands);
        device.join().expect("it goes on");
        teller(channel().0, |stands| stands)();
    }

    #[test]
    fn a_file_that_cannot_be_written_is_told_of_before_anything_starts() {
        let nowhere = OnPanic::Dump("/nowhere/core".into());
        let failure = nowhere.core().map(drop).expect_err("no such folder");
        assert!(failure.to_string().contains("--on-panic dump=/nowhere/core"), "{failure}");
    }
}
