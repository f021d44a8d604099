//! An instance of an environment: started when it is first used, started again after a failure, given up
//! after several in a row.

use std::time::{Duration, Instant};

use crate::{
    forecast::Forecast,
    peers::{Peer, Work},
    processes,
    protocol::Batch,
    record::Environment,
    session::{Failure, Session},
};

/// How thorough to be.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// Batches of each row in each environment.
    pub batches: usize,
    /// Length of a batch.
    pub batch: Duration,
    /// What a row may take in one environment; a slower one gets fewer batches, but never less than [`MIN_BATCHES`].
    pub row: Duration,
    /// What one answer may take.
    pub answer: Duration,
    /// What a start may take.
    pub start: Duration,
}

impl Pace {
    /// What one operation may be expected to take, or is not tried: half of what an answer may, as
    /// forecasts err.
    pub(crate) fn longest(&self) -> Duration {
        self.answer / 2
    }

    /// An environment has had this row's batches, of which there are so many and which took so long.
    pub(crate) fn is_enough(&self, batches: usize, spent: Duration) -> bool {
        batches >= MIN_BATCHES.min(self.batches) && spent >= self.row
    }
}

/// Batches of a row in every environment, however slow: fewer have no spread.
pub const MIN_BATCHES: usize = 5;

/// How often an environment may fail in a row before it is given up.
const FAILURES: u32 = 3;

/// One instance of an environment, running or not, and how often it has failed.
pub(crate) struct Instance<'a> {
    pub(crate) peer: &'a Peer,
    work: Work,
    session: Option<Session>,
    kernel: String,
    /// What its last start took, if it was started.
    pub(crate) boot: Option<Duration>,
    failures: u32,
    last: Option<Failure>,
    /// What its rows of whole programs took.
    pub(crate) forecast: Forecast,
}

impl<'a> Instance<'a> {
    pub(crate) fn new(peer: &'a Peer) -> Self {
        Self::for_work(peer, Work::Serve)
    }

    /// With two CPUs.
    pub(crate) fn with_two_cpus(peer: &'a Peer) -> Self {
        Self::for_work(peer, Work::ServeOnTwo)
    }

    fn for_work(peer: &'a Peer, work: Work) -> Self {
        let (session, boot, kernel) = (None, None, String::new());
        let forecast = Forecast::default();
        Self { peer, work, session, kernel, boot, failures: 0, last: None, forecast }
    }

    /// The running environment; started if it is not.
    pub(crate) fn session(&mut self, pace: &Pace) -> Result<&mut Session, Failure> {
        if self.session.is_none() {
            self.start(pace)?;
        }
        Ok(self.session.as_mut().expect("it was started above"))
    }

    fn start(&mut self, pace: &Pace) -> Result<(), Failure> {
        if let Some(last) = self.last.as_ref().filter(|_| self.failures >= FAILURES) {
            return Err(last.clone());
        }
        match Session::start(self.peer.command(self.work), pace.start) {
            Ok(session) => {
                self.kernel = session.kernel().to_owned();
                self.boot = Some(session.boot());
                self.session = Some(session);
                Ok(())
            }
            // What does not start once will not start at all.
            Err(failure) => Err(self.failed(failure, FAILURES)),
        }
    }

    fn failed(&mut self, failure: Failure, weight: u32) -> Failure {
        if failure.is_fatal() {
            self.session = None;
            self.failures += weight;
            self.last = Some(failure.clone());
        }
        failure
    }

    /// One batch of a row, and when it arrived.
    pub(crate) fn batch(&mut self, row: &str, pace: &Pace) -> Result<(Batch, Instant), Failure> {
        let session = self.session(pace)?;
        let batch = session.batch(row, pace.batch, pace.answer);
        if batch.is_ok() {
            self.failures = 0;
        }
        batch.map_err(|failure| self.failed(failure, 1))
    }

    /// Lets what runs in it have one CPU, as machines have, or all of ours; of machines, which
    /// have one anyway, nothing changes.
    pub(crate) fn confine(&mut self, to_one: bool) {
        if let Some(session) = self.session.as_ref().filter(|_| self.peer.has_all_cpus()) {
            let mask = if to_one { processes::one_cpu() } else { processes::all_cpus() };
            processes::confine(session.id(), &mask);
        }
    }

    /// Starts a server in it.
    pub(crate) fn serve(&mut self, name: &str, port: u16, pace: &Pace) -> Result<(), Failure> {
        let session = self.session(pace)?;
        session.serve(name, port, pace.answer).map_err(|failure| self.failed(failure, 1))
    }

    /// Ends the server in it; one that has ended with its environment has nothing left to say.
    pub(crate) fn unserve(&mut self) {
        let _ = self.session.as_mut().map(Session::unserve);
    }

    /// What a report says of the environment. `other` is its other instance, which may be the only one that was started.
    pub(crate) fn environment(&self, other: &Self) -> Environment {
        let started = if self.kernel.is_empty() { other } else { self };
        Environment {
            name: self.peer.name().to_owned(),
            version: self.peer.version().to_owned(),
            kernel: started.kernel.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_environment_is_too_slow_for_five_batches() {
        let second = Duration::from_secs(1);
        let pace = Pace { batches: 7, row: second * 8, ..Pace::default() };
        assert!(!pace.is_enough(4, second * 4000));
        assert!(pace.is_enough(5, second * 8));
        assert!(!pace.is_enough(6, second * 7));
        assert!(Pace { batches: 3, ..pace }.is_enough(3, second * 8), "where fewer are asked for");
    }

    #[test]
    fn an_environment_that_fails_now_and_then_is_not_given_up() {
        let script = r#"echo '@bench {"ready":"Linux 1","at":0}'
            while read run row length; do
                [ $row = bad ] && exit 1
                echo "@bench {\"row\":\"$row\",\"iterations\":1,\"ns\":1,\"at\":1}"
            done"#;
        let peer = Peer::new("shell", "", move |_| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", script]);
            command
        });
        let (mut instance, wait) = (Instance::new(&peer), Duration::from_secs(20));
        let pace = Pace { start: wait, answer: wait, ..Pace::default() };
        for _ in 0..=FAILURES {
            instance.batch("bad", &pace).expect_err("it ends");
            instance.batch("good", &pace).expect("it was started again");
        }
        for _ in 0..FAILURES {
            instance.batch("bad", &pace).expect_err("it ends");
        }
        instance.batch("good", &pace).expect_err("given up");
    }
}
