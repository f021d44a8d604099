//! What `ring3 run` and `ring3 exec` do alike around a machine: this host in its terms, limits, and what users are told of its engine.

use std::{
    io::Write,
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use host::Locks;
use host_linux::{LinuxClock, LinuxEntropy, LockFile, cpu, limits};
use vmm::{Attachment, FlushCounts, Host, KnownBlocks, RunningMachine};

use crate::{control, failure::Failure, output, values::Crowded};

/// How long a stopped machine may take to come to rest before we leave anyway.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// How long traces may take to tell the rest of a machine that has ended by itself.
const TELLING: Duration = Duration::from_secs(20);
/// How long they may take of a machine that somebody has ended, who waits for its end.
const TELLING_BRIEFLY: Duration = Duration::from_millis(500);

/// Waits until all traces of a machine that has ended have told the rest, within reason.
pub fn finish_telling(by_itself: bool) {
    control::finish_telling(if by_itself { TELLING } else { TELLING_BRIEFLY });
}

/// Refuses a machine that the limits of this process leave no room for, and warns of those that it may meet later.
pub fn check_limits(memory: u64) -> Result<(), Failure> {
    if let Some(problem) = limits::refusal(memory) {
        return Err(Failure::host(problem));
    }
    if let Some(warning) = limits::warning(memory) {
        output::complain(&warning);
    }
    Ok(())
}

/// Warns the user if guest code is interpreted although no option asks for that.
pub fn tell_engine(running: &RunningMachine) {
    if let Some(reason) = running.fallback() {
        let cost = "guest code is interpreted, which is tens of times slower (`ring3 doctor`)";
        output::complain(&format!("{cost}: {reason}"));
    }
}

/// Begins to read the host's clock, which takes a while where its frequency must be measured.
///
/// # Errors
/// The host gives no thread.
pub fn start_clock() -> Result<JoinHandle<LinuxClock>, Failure> {
    let started = thread::Builder::new().name("clock".into()).spawn(LinuxClock::new);
    started.map_err(|error| vmm::Error::Thread(error).into())
}

/// The clock, once it can be read. Measuring cannot fail; if the thread could, this one measures.
pub fn ready(clock: JoinHandle<LinuxClock>) -> LinuxClock {
    clock.join().unwrap_or_default()
}

/// This host, with the first serial port's output going to `console`.
pub fn host(
    clock: LinuxClock,
    console: Box<dyn Write + Send>,
    attachments: Vec<Attachment>,
    known_blocks: Arc<KnownBlocks>,
    turns: Vec<Box<dyn Locks>>,
) -> Host {
    let (clock, entropy) = (Arc::new(clock), Arc::new(LinuxEntropy));
    let (messages, on_panic) = (None, None);
    let flush_counts = FlushCounts::new(inspect::linux::flush_counts);
    Host {
        clock,
        entropy,
        cpuid,
        console,
        attachments,
        messages,
        known_blocks,
        flush_counts,
        turns,
        on_panic,
    }
}

/// For each of so many vCPUs the locks by which it takes turns with the vCPUs of other machines. Where no file of locks can be
/// opened there are none.
pub fn turns(crowded: Crowded, vcpus: u32) -> Vec<Box<dyn Locks>> {
    let path = control::folder().ok().filter(|_| crowded == Crowded::Turns);
    let path = path.map(|folder| folder.join("host-cpus"));
    let lock = |path: &PathBuf| Some(Box::new(LockFile::open(path).ok()?) as Box<dyn Locks>);
    path.map_or_else(Vec::new, |path| (0..vcpus).map_while(|_| lock(&path)).collect())
}

/// The host's CPUID in the model's terms.
fn cpuid(leaf: u32, subleaf: u32) -> vmm::CpuidResult {
    let host = cpu::cpuid(leaf, subleaf);
    vmm::CpuidResult { eax: host.eax, ebx: host.ebx, ecx: host.ecx, edx: host.edx }
}
