//! Takes turns: each batch of a row goes to every environment before the next batch does.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::{
    Error, density,
    instance::{Instance, Pace},
    network,
    peers::{Peer, Work},
    program,
    progress::Progress,
    protocol,
    record::{Environment, Measurement, NATIVE, Row},
    session::Session,
    startup,
};

/// Takes the samples of one row in one environment.
#[derive(Default)]
struct Sampler {
    measurement: Measurement,
    spent: Duration,
    first: Option<(u64, Instant)>,
}

impl Sampler {
    fn is_over(&self, pace: &Pace) -> bool {
        self.measurement.is_stopped() || pace.is_enough(self.measurement.samples.len(), self.spent)
    }

    /// A batch, unless there were enough, or what it took natively says that it would take too long.
    fn turn(
        &mut self,
        instance: &mut Instance<'_>,
        row: &str,
        native: Option<f64>,
        pace: &Pace,
        progress: &Progress,
    ) {
        if self.first.is_none() && !self.measurement.is_stopped() {
            let refusal =
                native.and_then(|native| instance.forecast.refuses(native, pace.longest()));
            self.measurement.skipped = refusal;
        }
        if !self.is_over(pace) {
            progress.environment(instance.peer.name());
            self.step(instance, row, pace);
        }
    }

    fn step(&mut self, instance: &mut Instance<'_>, row: &str, pace: &Pace) {
        let started = Instant::now();
        match instance.batch(row, pace) {
            Ok((batch, arrived)) => self.add(&batch, arrived),
            Err(failure) => self.measurement.stop(&failure),
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
    let rows: Vec<_> = startup::rows().into_iter().chain(inside).chain(network::rows()).collect();
    let matches = |row: &protocol::Row, name: &str| row.name == name || row.group == name;
    if let Some(name) = names.iter().find(|name| !rows.iter().any(|row| matches(row, name))) {
        let known: Vec<_> = rows.iter().map(|row| row.name.as_str()).collect();
        let (name, known) = (name.clone(), known.join(", "));
        return Err(Error::Unknown { kind: "row", name, known });
    }
    let is_long = |row: &protocol::Row| {
        let groups = [program::SCATTERED, network::GROUP];
        groups.contains(&row.group.as_str())
            || density::ROWS.contains(&row.name.as_str())
            || program::runs_programs(&row.name)
    };
    let possible = |row: &protocol::Row| with_programs || !is_long(row);
    let wanted = |row: &protocol::Row| match names {
        [] => possible(row),
        names => names.iter().any(|name| matches(row, name)),
    };
    Ok(rows.into_iter().filter(wanted).collect())
}

/// Measures rows in all environments; hands over what there is after each row, so that nothing
/// is lost if we are ended.
pub fn measure(
    peers: &[Peer],
    rows: &[protocol::Row],
    pace: &Pace,
    mut so_far: impl FnMut(Vec<Environment>, &[Row]),
) {
    let mut instances: Vec<_> = peers.iter().map(Instance::new).collect();
    let mut with_two_cpus: Vec<_> = peers.iter().map(Instance::with_two_cpus).collect();
    let mut progress = Progress::new(rows);
    let (mut starts, mut measured) = (startup::StartupSamples::default(), Vec::new());
    for row in rows {
        progress.row(row);
        let instances_of_row =
            if row.group == program::TWO_CPUS { &mut with_two_cpus } else { &mut instances };
        measured.push(measure_row(instances_of_row, &mut starts, row, pace, &progress));
        progress.done(row);
        let environments = instances
            .iter()
            .zip(&with_two_cpus)
            .map(|(instance, other)| instance.environment(other));
        so_far(environments.collect(), &measured);
    }
    progress.finish();
}

fn measure_row(
    instances: &mut [Instance<'_>],
    starts: &mut startup::StartupSamples,
    row: &protocol::Row,
    pace: &Pace,
    progress: &Progress,
) -> Row {
    let of_startup = startup::rows().contains(row);
    let measurements = if of_startup {
        startup::measure(&row.name, instances, starts, pace)
    } else if row.group == network::GROUP {
        network::measure(&row.name, instances, pace)
    } else {
        take_turns(row, instances, pace, progress)
    };
    let names = instances.iter().map(|instance| instance.peer.name().to_owned());
    let results: BTreeMap<_, _> = names.zip(measurements).collect();
    debug_assert!(results.contains_key(NATIVE), "native is always measured");
    let protocol::Row { name, group, about } = row.clone();
    Row { unit: startup::unit(&name).to_owned(), name, group, about, results }
}

fn take_turns(
    row: &protocol::Row,
    instances: &mut [Instance<'_>],
    pace: &Pace,
    progress: &Progress,
) -> Vec<Measurement> {
    let of_programs = row.group == program::ROWS[0];
    let mut samplers: Vec<_> = instances.iter().map(|_| Sampler::default()).collect();
    // Starts take no time from rows. What does not start says so when its turn comes.
    for instance in instances.iter_mut() {
        let _ = instance.session(pace);
        instance.confine(of_programs);
    }
    for _ in 0..pace.batches {
        for index in 0..instances.len() {
            let native = samplers[0].measurement.median().filter(|_| of_programs);
            samplers[index].turn(&mut instances[index], &row.name, native, pace, progress);
        }
    }
    if of_programs {
        learn(instances, &samplers);
    }
    samplers.into_iter().map(|sampler| sampler.measurement).collect()
}

/// Forecasts of later rows come from how much slower than native, the first one, this one was.
fn learn(instances: &mut [Instance<'_>], samplers: &[Sampler]) {
    let Some(native) = samplers[0].measurement.median() else { return };
    for (instance, sampler) in instances.iter_mut().zip(samplers) {
        if let Some(here) = sampler.measurement.median() {
            instance.forecast.learn(native, here);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_clock_is_noticed() {
        let host = Duration::from_secs(10);
        assert_eq!(clock_error(10_000_000_000, host), None);
        assert_eq!(clock_error(9_700_000_000, host), None, "jitter of a busy host");
        assert!(clock_error(5_000_000_000, host).is_some());
        assert!(clock_error(20_000_000_000, host).is_some());
    }
}
