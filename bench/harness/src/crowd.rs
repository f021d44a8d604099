//! Many machines at once: what a host has to bear where every job gets one.

use std::time::{Duration, Instant};

use crate::{
    life::{Pair, add},
    peers::{Peer, Work},
    processes,
    record::Measurement,
    seat::{Pace, Seat},
    session::{Failure, Session},
};

/// Rows that are measured here.
pub const ROWS: [&str; 2] = ["twenty", "twentymem"];
/// How many there are at once.
const MANY: usize = 20;
/// How often that is tried, at most.
const ROUNDS: usize = 3;
/// How much longer many may take to start than one.
const PATIENCE: u32 = 3;

/// Starts many of every environment, one kind after the other: both rows.
pub(crate) fn measure(seats: &[Seat<'_>], pace: &Pace) -> Pair {
    let mut all: Vec<_> = seats.iter().map(|_| Course::default()).collect();
    for _ in 0..ROUNDS.min(pace.batches) {
        for (seat, course) in seats.iter().zip(&mut all) {
            if course.time.error.is_none() && course.spent < pace.row {
                course.step(seat.peer, pace.start * PATIENCE);
            }
        }
    }
    all.into_iter().map(|course| (course.time, course.memory)).unzip()
}

/// Both rows in one environment, while they are measured.
#[derive(Default)]
struct Course {
    time: Measurement,
    memory: Measurement,
    spent: Duration,
}

impl Course {
    fn step(&mut self, peer: &Peer, patience: Duration) {
        let started = Instant::now();
        match start(peer, patience) {
            Ok((time, memory)) => {
                add(&mut self.time, time.as_nanos() as f64);
                add(&mut self.memory, memory as f64 / f64::from(1 << 20));
            }
            Err(failure) => {
                self.time.error = Some(failure.to_string());
                self.memory.error = Some(failure.to_string());
            }
        }
        self.spent += started.elapsed();
    }
}

/// Until all are ready, and the bytes they then take.
fn start(peer: &Peer, patience: Duration) -> Result<(Duration, u64), Failure> {
    let started = Instant::now();
    let sessions = (0..MANY).map(|_| Session::spawn(peer.command(Work::Crowd)));
    let mut sessions = sessions.collect::<Result<Vec<_>, _>>()?;
    for session in &mut sessions {
        session.ready(patience.saturating_sub(started.elapsed()))?;
    }
    let time = started.elapsed();
    let families = sessions.iter().map(|session| processes::family(session.id()));
    Ok((time, families.map(|family| processes::memory(&family)).sum()))
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
    fn all_have_to_be_ready() {
        let slow = r#"sleep 0.5; echo '@bench {"ready":"Linux 1","at":0}'; read line"#;
        let (time, memory) = start(&peer(slow), SOON).expect("all are ready");
        assert!(time >= Duration::from_millis(500), "{time:?}");
        assert!(memory > MANY as u64 * 50_000, "{MANY} shells take more than {memory} bytes");
        let failure = start(&peer("echo no; exit 1"), SOON).expect_err("none is ready");
        assert_eq!(failure, Failure::Ended("no".to_owned()));
    }
}
