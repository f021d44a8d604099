//! The interrupts of shared folders come to the CPU whose program waits for them.
//!
//! Linux has the first CPU take them all. The program's own CPU, if it is another one, then waits until the first has been woken and
//! has woken it in turn, which takes ten times as long as the request. So where one CPU does most of the work, the interrupts are
//! sent to that one. An interrupt that somebody else has sent elsewhere is left alone.

use std::{fs, thread, time::Duration};

use crate::busy::{self, CpuTime, Work};

/// How often the CPUs are looked at while any works, and at the least.
const OFTEN: Duration = Duration::from_millis(50);
const SELDOM: Duration = Duration::from_millis(800);

/// An interrupt, and where it goes: the kernel's words.
struct Interrupt {
    file: String,
    goes: String,
}

/// Steers the interrupts of the folders that are there now between the CPUs that are, for as long as the machine runs. Where the
/// kernel does not count what CPUs do, they stay where they are.
pub fn start() {
    if cpu_times().is_none_or(|times| times.len() < 2) {
        return;
    }
    let interrupts = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let mut interrupts: Vec<_> =
        busy::folder_interrupts(&interrupts).filter_map(Interrupt::open).collect();
    thread::spawn(move || steer(&mut interrupts));
}

fn steer(interrupts: &mut [Interrupt]) {
    let (mut period, mut before) = (OFTEN, Vec::new());
    while let Some(now) = cpu_times() {
        period = match Work::between(&before, &now) {
            Work::Little => (period * 2).min(SELDOM),
            Work::Shared => OFTEN,
            Work::Mostly(cpu) => {
                interrupts.iter_mut().for_each(|interrupt| interrupt.send_to(cpu));
                OFTEN
            }
        };
        before = now;
        thread::sleep(period);
    }
}

/// What each CPU has done; `None` where the kernel does not count it.
fn cpu_times() -> Option<Vec<CpuTime>> {
    Some(CpuTime::of_all(&fs::read_to_string("/proc/schedstat").ok()?))
}

impl Interrupt {
    /// The interrupt of a number, if there is one.
    fn open(number: &str) -> Option<Self> {
        let file = format!("/proc/irq/{number}/smp_affinity_list");
        let goes = fs::read_to_string(&file).ok()?;
        Some(Self { file, goes })
    }

    /// Sends it to a CPU, unless it goes elsewhere by now than where it was sent last.
    fn send_to(&mut self, cpu: usize) {
        let wanted = format!("{cpu}\n");
        if self.goes == wanted || fs::read_to_string(&self.file).ok().as_ref() != Some(&self.goes) {
            return;
        }
        // The kernel does not let everybody move those that it has spread itself.
        if fs::write(&self.file, &wanted).is_ok() {
            self.goes = wanted;
        }
    }
}
