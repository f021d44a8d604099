//! Rows that are about an environment as a whole: its start, and what it takes while idle.
//!
//! They are measured from the host, before (start) and while (idle) environments wait for orders.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::{
    density,
    instance::{Instance, Pace},
    peers::{Peer, Work},
    processes,
    protocol::{Message, Row},
    record::Measurement,
    rounds::{self, Pair},
    session::{Failure, Session},
};

/// The group of these rows, as result files and the command line name it.
pub const GROUP: &str = "life";
/// Names, what they are, and the unit of their figures.
const ROWS: [(&str, &str, &str); 6] = [
    ("boot", "from the start of its process to the first program inside", "ns"),
    ("start", "from the start of its process to its end, after one command inside", "ns"),
    ("idle", "CPU while it waits, percent of one CPU", "%"),
    ("memory", "memory of its processes while it waits", "MiB"),
    ("twenty", "twenty at once, with 128 MiB each: until the first program runs in all", "ns"),
    ("twentymem", "memory of these twenty, then", "MiB"),
];

/// The rows there are.
pub fn rows() -> Vec<Row> {
    ROWS.map(|(name, about, _)| Row::new(GROUP, name, about)).to_vec()
}

/// The unit of a row's figures.
pub fn unit(row: &str) -> &'static str {
    ROWS.iter().find(|(name, ..)| *name == row).map_or("ns", |(.., unit)| *unit)
}

/// Samples of starts: both rows about starts use the same ones. Likewise for many starts at once.
#[derive(Default)]
pub(crate) struct StartupSamples {
    single: Option<Pair>,
    density: Option<Pair>,
}

/// One row in every environment: figures by environment, in their order.
pub(crate) fn measure(
    row: &str,
    instances: &mut [Instance<'_>],
    known: &mut StartupSamples,
    pace: &Pace,
) -> Vec<Measurement> {
    match row {
        "boot" => known.single.get_or_insert_with(|| starts(instances, pace)).0.clone(),
        "start" => known.single.get_or_insert_with(|| starts(instances, pace)).1.clone(),
        "twenty" => {
            known.density.get_or_insert_with(|| density::measure(instances, pace)).0.clone()
        }
        "twentymem" => {
            known.density.get_or_insert_with(|| density::measure(instances, pace)).1.clone()
        }
        _ => measure_idle(row, instances, pace),
    }
}

/// Starts every environment several times: `boot` and `start`.
fn starts(instances: &[Instance<'_>], pace: &Pace) -> Pair {
    rounds::measure(instances, pace, |instance| {
        let (boot, whole) = start(instance.peer, pace.start)?;
        Ok((boot.as_nanos() as f64, whole.as_nanos() as f64))
    })
}

/// Until the first program, and until the end.
fn start(peer: &Peer, timeout: Duration) -> Result<(Duration, Duration), Failure> {
    let started = Instant::now();
    let mut session = Session::start(peer.command(Work::Once), timeout)?;
    let wrong = session.wait(timeout, |message| match message {
        Message::Finished { finished } => Some(finished),
        _ => None,
    })?;
    if !wrong.is_empty() {
        return Err(Failure::Wrong(wrong));
    }
    session.end(timeout)?;
    Ok((session.boot(), started.elapsed()))
}

/// CPU time or memory of idle environments, all measured at the same time.
fn measure_idle(row: &str, instances: &mut [Instance<'_>], pace: &Pace) -> Vec<Measurement> {
    let started: Vec<_> = instances
        .iter_mut()
        .map(|instance| instance.session(pace).map(|session| session.id()))
        .collect();
    // What follows a start (a kernel's late work) is over by then.
    thread::sleep(pace.batch * 50);
    let mut all: Vec<_> = started.iter().map(|_| Measurement::default()).collect();
    for _ in 0..pace.batches {
        let figures = figures(row, &started, pace.batch * 20);
        for (measurement, figure) in all.iter_mut().zip(figures) {
            figure.into_iter().for_each(|figure| measurement.add(figure));
        }
    }
    for (measurement, started) in all.iter_mut().zip(started) {
        measurement.error = started.err().map(|failure| failure.to_string());
    }
    all
}

/// One figure of each environment that runs.
fn figures(row: &str, started: &[Result<u32, Failure>], while_: Duration) -> Vec<Option<f64>> {
    let descendants: Vec<_> =
        started.iter().map(|id| id.as_ref().ok().map(|id| processes::descendants(*id))).collect();
    let of_each = |measure: &dyn Fn(&_) -> f64| -> Vec<Option<f64>> {
        descendants.iter().map(|descendants| descendants.as_ref().map(measure)).collect()
    };
    if row == "memory" {
        return of_each(&|descendants| processes::memory(descendants) as f64 / f64::from(1 << 20));
    }
    let time = || of_each(&|descendants| processes::cpu_time(descendants).as_secs_f64());
    let (before, start) = (time(), Instant::now());
    thread::sleep(while_);
    let (after, seconds) = (time(), start.elapsed().as_secs_f64());
    let percent = |(before, after): (Option<f64>, Option<f64>)| {
        Some((after? - before?).max(0.0) / seconds * 100.0)
    };
    before.into_iter().zip(after).map(percent).collect()
}
