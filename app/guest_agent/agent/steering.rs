//! The interrupts of shared folders come to the CPU whose program waits for them.
//!
//! Linux 6.1 has the first CPU take all of a folder's interrupts. A program on another CPU then waits until the first CPU has been
//! woken and has woken the program's CPU in turn, which takes ten times as long as the request. So where one CPU does most of the
//! work, the interrupts are sent to that CPU. An interrupt that somebody else has sent elsewhere is left alone. But what somebody writes
//! between the agent's read of an interrupt's file and its write is lost: the kernel cannot compare and write at once.

use std::{fs, thread, time::Duration};

use crate::busy::{self, CpuTime, Work};

/// Time between two looks at the CPUs: the shortest, while any CPU works, and the longest.
const OFTEN: Duration = Duration::from_millis(50);
const SELDOM: Duration = Duration::from_millis(800);

/// An interrupt of a folder's queue.
struct Interrupt {
    /// The kernel's file that says to which CPUs the interrupt goes.
    file: String,
    /// What that file said last, as far as we know.
    goes: String,
}

/// Has a thread send folders' interrupts to the CPU that works, for as long as the machine runs. The thread knows the folders that
/// the machine has now. No thread is started in a machine of one CPU, or if the kernel does not count what CPUs do.
pub fn start() {
    if cpu_times().is_none_or(|times| times.len() < 2) {
        return;
    }
    let interrupts = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let interrupts =
        busy::folder_interrupts(&interrupts).filter_map(Interrupt::open).collect();
    thread::spawn(move || steer(interrupts));
}

/// Steers until the kernel does not count any more, or no interrupt is left that is ours to send.
fn steer(mut interrupts: Vec<Interrupt>) {
    let (mut period, mut before) = (OFTEN, Vec::new());
    while !interrupts.is_empty()
        && let Some(now) = cpu_times()
    {
        period = match Work::between(&before, &now) {
            Work::Little => (period * 2).min(SELDOM),
            Work::Shared => OFTEN,
            Work::Mostly(cpu) => {
                interrupts.retain_mut(|interrupt| interrupt.send_to(cpu));
                OFTEN
            }
        };
        before = now;
        thread::sleep(period);
    }
}

/// How long each CPU has worked; `None` if the kernel does not count that.
fn cpu_times() -> Option<Vec<CpuTime>> {
    Some(CpuTime::of_all(&fs::read_to_string("/proc/schedstat").ok()?))
}

impl Interrupt {
    /// The interrupt of this number, if the kernel has one.
    fn open(number: &str) -> Option<Self> {
        let file = format!("/proc/irq/{number}/smp_affinity_list");
        let goes = fs::read_to_string(&file).ok()?;
        Some(Self { file, goes })
    }

    /// Sends the interrupt to a CPU. False if the interrupt is not ours to send: somebody else has sent it elsewhere since, or the
    /// kernel lets nobody.
    fn send_to(&mut self, cpu: usize) -> bool {
        let wanted = format!("{cpu}\n");
        if self.goes == wanted {
            return true;
        }
        let is_ours = fs::read_to_string(&self.file).is_ok_and(|goes| goes == self.goes);
        let is_sent = is_ours && fs::write(&self.file, &wanted).is_ok();
        if is_sent {
            self.goes = wanted;
        }
        is_sent
    }
}
