//! Many machines at once: what a host has to bear where every job gets one.

use std::time::{Duration, Instant};

use crate::{
    instance::{self, Instance, Pace},
    peers::{Peer, Work},
    processes,
    rounds::{self, Pair},
    session::{Failure, Session},
};

/// Rows that are measured here.
pub const ROWS: [&str; 2] = ["twenty", "twentymem"];
/// How many there are at once.
const MANY: usize = 20;
/// How much longer many may take to start than one.
const PATIENCE: u32 = 3;

/// Starts many of every environment, one kind after the other: both rows.
pub(crate) fn measure(instances: &[Instance<'_>], pace: &Pace) -> Pair {
    let pace = &Pace { batches: pace.batches.min(instance::MIN_BATCHES), ..*pace };
    rounds::measure(instances, pace, |instance| {
        check(instance.boot, pace.longest())?;
        let (time, memory) = start(instance.peer, pace.start * PATIENCE)?;
        Ok((time.as_nanos() as f64, memory as f64 / f64::from(1 << 20)))
    })
}

/// Where one takes long to start, many are not tried: they would take all the host's CPUs for longer
/// than `limit`.
fn check(one: Option<Duration>, limit: Duration) -> Result<(), Failure> {
    let cpus = processes::all_cpus().count().max(1);
    let Some(one) = one.filter(|one| *one * MANY as u32 / cpus > limit) else { return Ok(()) };
    let (one, limit) = (one.as_secs_f64(), limit.as_secs());
    let why =
        format!("not tried: one starts in {one:.1} s, so {MANY} would take more than {limit} s");
    Err(Failure::NotAsked(why))
}

/// Until all are ready, and the bytes they then take.
fn start(peer: &Peer, patience: Duration) -> Result<(Duration, u64), Failure> {
    let started = Instant::now();
    let sessions = (0..MANY).map(|_| Session::spawn(peer.command(Work::Density)));
    let mut sessions = sessions.collect::<Result<Vec<_>, _>>()?;
    for session in &mut sessions {
        session.ready(patience.saturating_sub(started.elapsed()))?;
    }
    let time = started.elapsed();
    let descendants = sessions.iter().map(|session| processes::descendants(session.id()));
    Ok((time, descendants.map(|descendants| processes::memory(&descendants)).sum()))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn peer(script: &'static str) -> Peer {
        Peer::new("shell", "", move |_| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        })
    }

    #[test]
    fn many_of_what_starts_slowly_are_not_tried() {
        let limit = Duration::from_secs(60);
        assert_eq!(check(None, limit), Ok(()), "nothing is known");
        assert_eq!(check(Some(Duration::from_secs(2)), limit), Ok(()));
        let cpus = processes::all_cpus().count();
        let failure = check(Some(Duration::from_secs(4) * cpus), limit).expect_err("80 s");
        assert!(failure.to_string().contains("60 s"), "{failure}");
    }

    #[test]
    fn all_have_to_be_ready() {
        let slow = r#"sleep 0.5; echo '@bench {"ready":"Linux 1","at":0}'; read line"#;
        let (time, memory) = start(&peer(slow), SOON).expect("all are ready");
        assert!(time >= Duration::from_millis(500), "{time:?}");
        assert!(memory > MANY as u64 * 50_000, "{MANY} shells take more than {memory} bytes");
        let failure = start(&peer("echo no; exit 1"), SOON).expect_err("none is ready");
        assert_eq!(failure, Failure::Ended("no".to_owned()));
    }
}
