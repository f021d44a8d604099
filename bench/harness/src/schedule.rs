//! Takes turns: each batch of a row goes to every environment before the next batch does.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    Error, crowd, life, network,
    peers::{Peer, Work},
    program, protocol,
    record::{Environment, Measurement, NATIVE, Row},
    seat::{Pace, Seat},
    session::Session,
};

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

/// Which rows there are, asked of the native program: those named, or all; those that take
/// long, or need other programs, only where there are such programs.
///
/// # Errors
/// The native program fails, or there is no such row.
pub fn rows(
    native: &Peer,
    names: &[String],
    with_programs: bool,
) -> Result<Vec<protocol::Row>, Error> {
    let patience = Duration::from_secs(20);
    let session = Session::start(native.command(Work::Serve), patience);
    let inside = session.and_then(|mut session| session.rows(patience)).map_err(Error::Native)?;
    let rows: Vec<_> = life::rows().into_iter().chain(inside).chain(network::rows()).collect();
    let matches = |row: &protocol::Row, name: &str| row.name == name || row.group == name;
    if let Some(name) = names.iter().find(|name| !rows.iter().any(|row| matches(row, name))) {
        let known: Vec<_> = rows.iter().map(|row| row.name.as_str()).collect();
        let (name, known) = (name.clone(), known.join(", "));
        return Err(Error::Unknown { kind: "row", name, known });
    }
    let is_long = |row: &protocol::Row| {
        let groups = [program::ROWS[0], network::GROUP];
        groups.contains(&row.group.as_str()) || crowd::ROWS.contains(&row.name.as_str())
    };
    let possible = |row: &protocol::Row| with_programs || !is_long(row);
    let wanted = |row: &protocol::Row| match names {
        [] => possible(row),
        names => names.iter().any(|name| matches(row, name)),
    };
    Ok(rows.into_iter().filter(wanted).collect())
}

/// Measures rows in all environments.
pub fn measure(
    peers: &[Peer],
    rows: &[protocol::Row],
    pace: &Pace,
) -> (Vec<Environment>, Vec<Row>) {
    let mut seats: Vec<_> = peers.iter().map(Seat::new).collect();
    let bar = progress(rows.len());
    let (mut starts, begun) = (life::Starts::default(), Instant::now());
    let mut measured = Vec::new();
    for (done, row) in rows.iter().enumerate() {
        let pace = share(pace, begun.elapsed(), rows.len() - done);
        measured.push(measure_row(&mut seats, &mut starts, row, &pace, &bar));
    }
    bar.finish_and_clear();
    (seats.iter().map(Seat::environment).collect(), measured)
}

/// Rows differ in what they take, so one may take some of what others leave.
const GENEROSITY: u32 = 3;

/// The pace for one of `rows` that are left.
fn share(pace: &Pace, spent: Duration, rows: usize) -> Pace {
    let left = pace.total.map(|total| total.saturating_sub(spent));
    Pace { total: left.map(|left| left / rows.max(1) as u32 * GENEROSITY), ..*pace }
}

fn measure_row(
    seats: &mut [Seat<'_>],
    starts: &mut life::Starts,
    row: &protocol::Row,
    pace: &Pace,
    bar: &ProgressBar,
) -> Row {
    bar.set_message(row.name.clone());
    let of_life = life::rows().contains(row);
    let measurements = if of_life {
        life::measure(&row.name, seats, starts, pace)
    } else if row.group == network::GROUP {
        network::measure(&row.name, seats, pace)
    } else {
        take_turns(&row.name, seats, pace, bar)
    };
    bar.inc(1);
    let names = seats.iter().map(|seat| seat.peer.name().to_owned());
    let results: BTreeMap<_, _> = names.zip(measurements).collect();
    debug_assert!(results.contains_key(NATIVE), "native is always measured");
    let protocol::Row { name, group, about } = row.clone();
    Row { unit: life::unit(&name).to_owned(), name, group, about, results }
}

fn take_turns(
    row: &str,
    seats: &mut [Seat<'_>],
    pace: &Pace,
    bar: &ProgressBar,
) -> Vec<Measurement> {
    let mut courses: Vec<_> = seats.iter().map(|_| Course::default()).collect();
    // Starts take no time from rows. What does not start says so when its turn comes.
    for seat in seats.iter_mut() {
        let _ = seat.session(pace);
    }
    let begun = Instant::now();
    for round in 0..pace.batches {
        if round > 0 && pace.total.is_some_and(|total| begun.elapsed() >= total) {
            break;
        }
        for (seat, course) in seats.iter_mut().zip(&mut courses) {
            if !course.is_over(pace) {
                bar.set_message(format!("{row} in {}", seat.peer.name()));
                course.step(seat, row, pace);
            }
        }
    }
    courses.into_iter().map(|course| course.measurement).collect()
}

fn progress(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}");
    let bar = ProgressBar::new(steps as u64);
    style.map(|style| bar.clone().with_style(style)).unwrap_or(bar)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_shared() {
        let second = Duration::from_secs(1);
        let pace = Pace {
            batches: 5,
            batch: second,
            row: second,
            answer: second,
            start: second,
            total: Some(second * 100),
        };
        assert_eq!(share(&pace, second * 40, 20).total, Some(second * 9));
        assert_eq!(share(&pace, second * 200, 1).total, Some(Duration::ZERO));
    }

    #[test]
    fn a_slow_clock_is_noticed() {
        let host = Duration::from_secs(10);
        assert_eq!(clock_error(10_000_000_000, host), None);
        assert_eq!(clock_error(9_700_000_000, host), None, "jitter of a busy host");
        assert!(clock_error(5_000_000_000, host).is_some());
        assert!(clock_error(20_000_000_000, host).is_some());
    }
}
