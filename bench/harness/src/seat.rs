//! An environment at the table: started when its turn comes, and what became of it.

use std::time::{Duration, Instant};

use crate::{
    peers::{Peer, Work},
    protocol::Batch,
    record::Environment,
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
    /// What everything should take: as it runs out, rows get fewer batches, but never none.
    pub total: Option<Duration>,
}

/// How often an environment may fail before it is given up.
const FAILURES: u32 = 3;

/// An environment and what became of it.
pub(crate) struct Seat<'a> {
    pub(crate) peer: &'a Peer,
    session: Option<Session>,
    kernel: String,
    failures: u32,
    last: Option<Failure>,
}

impl<'a> Seat<'a> {
    pub(crate) fn new(peer: &'a Peer) -> Self {
        Self { peer, session: None, kernel: String::new(), failures: 0, last: None }
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
        match Session::start(self.peer.command(Work::Serve), pace.start) {
            Ok(session) => {
                self.kernel = session.kernel().to_owned();
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
        session.batch(row, pace.batch, pace.answer).map_err(|failure| self.failed(failure, 1))
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

    /// What a report says of it.
    pub(crate) fn environment(&self) -> Environment {
        Environment {
            name: self.peer.name().to_owned(),
            version: self.peer.version().to_owned(),
            kernel: self.kernel.clone(),
        }
    }
}
