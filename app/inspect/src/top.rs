//! What a machine's vCPUs have done so far, again and again.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use vmm::Inspector;

use crate::lines::say;

/// Pause between two looks at whether the reader is still there.
const BREATH: Duration = Duration::from_millis(50);

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopRequest {
    /// Milliseconds between two looks.
    pub period: u64,
}

/// What is sent to the reader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopLine {
    /// A look at all vCPUs.
    Counts {
        /// Nanoseconds since the first.
        ns: u64,
        /// What each vCPU has done since it began, by name.
        vcpus: Vec<BTreeMap<String, u64>>,
    },
}

/// Milliseconds between two looks at the least: each stops the vCPUs.
const SHORTEST: u64 = 50;

/// Sends what the vCPUs have done until the reader goes, or the machine ends.
///
/// # Errors
/// The reader goes.
pub fn serve(
    inspector: &Inspector,
    request: &TopRequest,
    output: &mut impl Write,
    gone: impl Fn() -> bool,
) -> io::Result<()> {
    let period = Duration::from_millis(request.period.max(SHORTEST));
    let began = Instant::now();
    let mut next = began;
    while let Some(vcpus) = look(inspector) {
        let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        say(output, &TopLine::Counts { ns, vcpus })?;
        output.flush()?;
        next += period;
        while Instant::now() < next {
            thread::sleep(BREATH.min(next.saturating_duration_since(Instant::now())));
            if gone() {
                return Ok(());
            }
        }
        next = next.max(Instant::now() - period);
    }
    Ok(())
}

/// `None` if the machine has ended.
fn look(inspector: &Inspector) -> Option<Vec<BTreeMap<String, u64>>> {
    let counts = |vcpu| {
        inspector.run_on_vcpu(vcpu, |access| {
            let statistics = access.statistics();
            let times = [
                ("halted ns".to_owned(), statistics.halted_ns),
                ("running ns".to_owned(), statistics.running_ns),
            ];
            statistics.counts().chain(times).collect()
        })
    };
    (0..inspector.vcpus()).map(counts).collect()
}
