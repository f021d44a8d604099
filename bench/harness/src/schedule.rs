//! Takes turns: each batch of a row goes to every environment before the next batch does.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    Error,
    peers::{Peer, Work},
    protocol,
    record::{Environment, Measurement, NATIVE, Row},
    session::{Failure, Session},
};

/// How thorough to be.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Batches of each row in each environment.
    pub batches: usize,
    /// Length of a batch.
    pub batch: Duration,
    /// What a row may take in one environment; a slower one gets fewer batches.
    pub row: Duration,
    /// What one answer may take.
    pub answer: Duration,
    /// What a start may take.
    pub start: Duration,
}

/// How often an environment may fail before it is given up.
const FAILURES: u32 = 3;

/// An environment and what became of it.
struct Seat<'a> {
    peer: &'a Peer,
    session: Option<Session>,
    kernel: String,
    failures: u32,
    last: Option<Failure>,
}

impl<'a> Seat<'a> {
    fn new(peer: &'a Peer) -> Self {
        Self { peer, session: None, kernel: String::new(), failures: 0, last: None }
    }

    /// The running environment; started if it is not.
    fn session(&mut self, pace: &Pace) -> Result<&mut Session, Failure> {
        if self.session.is_none() {
            if let Some(last) = self.last.as_ref().filter(|_| self.failures >= FAILURES) {
                return Err(last.clone());
            }
            match Session::start(self.peer.command(Work::Serve), pace.start) {
                Ok(session) => {
                    self.kernel = session.kernel().to_owned();
                    self.session = Some(session);
                }
                // What does not start once will not start at all.
                Err(failure) => return Err(self.failed(failure, FAILURES)),
            }
        }
        Ok(self.session.as_mut().expect("it was started above"))
    }

    fn failed(&mut self, failure: Failure, weight: u32) -> Failure {
        if failure.is_fatal() {
            self.session = None;
            self.failures += weight;
            self.last = Some(failure.clone());
        }
        failure
    }

    fn batch(&mut self, row: &str, pace: &Pace) -> Result<(protocol::Batch, Instant), Failure> {
        let session = self.session(pace)?;
        session.batch(row, pace.batch, pace.answer).map_err(|failure| self.failed(failure, 1))
    }
}

/// One row in one environment while it is measured.
#[derive(Default)]
struct Course {
    measurement: Measurement,
    spent: Duration,
    first: Option<(u64, Instant)>,
}

impl Course {
    fn is_over(&self, pace: &Pace) -> bool {
        self.measurement.error.is_some() || self.spent >= pace.row
    }

    fn step(&mut self, seat: &mut Seat<'_>, row: &str, pace: &Pace) {
        let started = Instant::now();
        match seat.batch(row, pace) {
            Ok((batch, arrived)) => self.add(&batch, arrived),
            Err(failure) => self.measurement.error = Some(failure.to_string()),
        }
        self.spent += started.elapsed();
    }

    fn add(&mut self, batch: &protocol::Batch, arrived: Instant) {
        let (guest, host) = *self.first.get_or_insert((batch.at, arrived));
        self.measurement.iterations = batch.iterations;
        self.measurement.samples.push(batch.per_operation());
        self.measurement.error = clock_error(batch.at - guest.min(batch.at), arrived - host);
    }
}

/// A guest whose clock runs slow would look fast: what it says must agree with the host's clock.
fn clock_error(guest: u64, host: Duration) -> Option<String> {
    let (guest, host) = (guest as f64 / 1e9, host.as_secs_f64());
    let off = (guest - host).abs() > 0.3 + 0.05 * host;
    off.then(|| format!("its clock is wrong: {guest:.2} s passed there, {host:.2} s here"))
}

/// Which rows there are, asked of the native program; those named, or all.
///
/// # Errors
/// The native program fails, or there is no such row.
pub fn rows(native: &Peer, names: &[String]) -> Result<Vec<protocol::Row>, Error> {
    let patience = Duration::from_secs(20);
    let session = Session::start(native.command(Work::Serve), patience);
    let rows = session.and_then(|mut session| session.rows(patience)).map_err(Error::Native)?;
    let matches = |row: &protocol::Row, name: &str| row.name == name || row.group == name;
    if let Some(name) = names.iter().find(|name| !rows.iter().any(|row| matches(row, name))) {
        let known: Vec<_> = rows.iter().map(|row| row.name.as_str()).collect();
        let (name, known) = (name.clone(), known.join(", "));
        return Err(Error::Unknown { kind: "row", name, known });
    }
    let wanted = |row: &protocol::Row| names.is_empty() || names.iter().any(|n| matches(row, n));
    Ok(rows.into_iter().filter(wanted).collect())
}

/// Measures rows in all environments.
pub fn measure(
    peers: &[Peer],
    rows: &[protocol::Row],
    pace: &Pace,
) -> (Vec<Environment>, Vec<Row>) {
    let mut seats: Vec<_> = peers.iter().map(Seat::new).collect();
    let bar = progress(rows.len() * pace.batches);
    let measured = rows.iter().map(|row| measure_row(&mut seats, row, pace, &bar)).collect();
    bar.finish_and_clear();
    let environments = seats.into_iter().map(|seat| Environment {
        name: seat.peer.name().to_owned(),
        version: seat.peer.version().to_owned(),
        kernel: seat.kernel,
    });
    (environments.collect(), measured)
}

fn measure_row(seats: &mut [Seat<'_>], row: &protocol::Row, pace: &Pace, bar: &ProgressBar) -> Row {
    let mut courses: Vec<_> = seats.iter().map(|_| Course::default()).collect();
    for _ in 0..pace.batches {
        for (seat, course) in seats.iter_mut().zip(&mut courses) {
            if !course.is_over(pace) {
                bar.set_message(format!("{} in {}", row.name, seat.peer.name()));
                course.step(seat, &row.name, pace);
            }
        }
        bar.inc(1);
    }
    let results: BTreeMap<_, _> = seats
        .iter()
        .zip(courses)
        .map(|(seat, course)| (seat.peer.name().to_owned(), course.measurement))
        .collect();
    debug_assert!(results.contains_key(NATIVE), "native is always measured");
    let protocol::Row { name, group, about } = row.clone();
    Row { name, group, about, unit: "ns".to_owned(), results }
}

fn progress(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {percent:>3}% {elapsed} {msg}");
    let bar = ProgressBar::new(steps as u64);
    style.map(|style| bar.clone().with_style(style)).unwrap_or(bar)
}

#[cfg(test)]
mod tests {
    use super::clock_error;
    use std::time::Duration;

    #[test]
    fn a_slow_clock_is_noticed() {
        let host = Duration::from_secs(10);
        assert_eq!(clock_error(10_000_000_000, host), None);
        assert_eq!(clock_error(9_700_000_000, host), None, "jitter of a busy host");
        assert!(clock_error(5_000_000_000, host).is_some());
        assert!(clock_error(20_000_000_000, host).is_some());
    }
}
