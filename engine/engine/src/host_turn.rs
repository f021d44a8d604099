//! Machines that share a host CPU take turns on it.
//!
//! The processes of a vCPU hand over to each other all the time. At each hand-over the host's scheduler is free to run
//! another machine first. Where several machines want a CPU, the scheduler does so: each machine gets the CPU for some
//! 50 us at a time, and finds its caches cold. So machines agree on longer turns. The turn on a CPU is a lock that all
//! machines of the user know ([`host::Locks`]). A vCPU takes the turn once it has run for [`CREDIT`]. After [`SHARE`] the
//! vCPU gives the turn away if another one waits. A vCPU that would have to wait moves to a CPU whose turn is free.
//!
//! No machine depends on another one. A vCPU that gets no turn within [`LONGEST`] runs without a turn, as all vCPUs do
//! where there are no locks.

use std::{
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use host::Locks;

/// How long a vCPU keeps its turn while another machine waits for it.
const SHARE: Duration = Duration::from_millis(4);
/// How long a vCPU runs after a halt before it takes a turn. A vCPU that only answers a request halts again sooner.
const CREDIT: Duration = Duration::from_millis(1);
/// How long a vCPU waits for a turn at the most. The host keeps no order among those who wait for a lock, so a vCPU may wait
/// for many more turns than there are other machines.
const LONGEST: Duration = Duration::from_secs(1);
/// How long a vCPU that got no turn runs without a turn: at first, and at the most. If the vCPU gets no turn after that either,
/// the time doubles.
const ALONE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(64)];

/// The turns of one vCPU. An index of a CPU is an index into the list that [`HostTurn::new`] gets.
#[derive(Debug)]
pub struct HostTurn {
    queue: Arc<Queue>,
    held: Option<Held>,
    /// When a vCPU without a turn takes one.
    due: Instant,
    /// How long the vCPU will run without a turn if it does not get the next one.
    alone: Duration,
    /// The thread that waits in the vCPU's place has been started.
    has_thread: bool,
}

/// A turn that the vCPU has.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Index of the CPU.
    at: usize,
    /// When the vCPU got the turn, or last saw that nobody waits for it.
    since: Instant,
}

/// What a vCPU shares with a thread that waits in its place. A wait for a lock has no limit, and the vCPU's wait has one.
#[derive(Debug)]
struct Queue {
    /// Two locks for each host CPU: [`Queue::turn`] and [`Queue::next`].
    locks: Box<dyn Locks>,
    /// Numbers of the host CPUs that the machine may use.
    cpus: Vec<usize>,
    wish: Mutex<Wish>,
    changed: Condvar,
}

/// What a vCPU waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Nothing,
    /// The turn on the CPU with this index.
    Turn(usize),
    /// The thread has got the turn.
    Granted,
    /// The vCPU has stopped waiting, and the thread has not.
    GivenUp,
    /// The vCPU has ended.
    Over,
}

impl HostTurn {
    /// The turns of a vCPU of a machine that may use the host CPUs with these numbers.
    pub fn new(locks: Box<dyn Locks>, cpus: &[usize]) -> Self {
        let (wish, changed) = (Mutex::new(Wish::Nothing), Condvar::new());
        Self {
            queue: Arc::new(Queue { locks, cpus: cpus.to_vec(), wish, changed }),
            held: None,
            due: Instant::now() + CREDIT,
            alone: ALONE[0],
            has_thread: false,
        }
    }

    /// The vCPU begins to run after a halt.
    pub fn begin(&mut self) {
        self.due = self.due.max(Instant::now() + CREDIT);
    }

    /// Gives the turn back, if the vCPU has one.
    pub fn release(&mut self) {
        if let Some(held) = self.held.take() {
            self.queue.locks.unlock(self.queue.turn(held.at));
        }
    }

    /// True if a vCPU that runs on the CPU with index `at` must take a turn now, or give its turn away and take another. A turn on
    /// another CPU is given back.
    pub fn is_due(&mut self, at: usize) -> bool {
        let now = Instant::now();
        let Some(held) = self.held else { return now >= self.due && !self.queue.is_given_up() };
        if held.at != at {
            self.release();
            self.begin();
            return false;
        }
        if now < held.since + SHARE {
            return false;
        }
        self.hold(at);
        self.queue.is_wanted(at)
    }

    /// Takes a turn that nobody has or waits for, if there is one: the index of its CPU. The CPU with index `at` is tried first.
    pub fn try_take(&mut self, at: usize) -> Option<usize> {
        let count = self.queue.cpus.len();
        let found = (0..count).map(|n| (at + n) % count).find(|at| self.queue.try_take(*at))?;
        self.hold(found);
        Some(found)
    }

    /// Waits for the turn on the CPU with index `at`. A vCPU that does not get the turn runs without one for a while.
    pub fn wait(&mut self, at: usize) {
        if self.is_granted(at) {
            self.hold(at);
            self.alone = ALONE[0];
        } else {
            self.due = Instant::now() + self.alone;
            self.alone = ALONE[1].min(self.alone * 2);
        }
    }

    /// Waits for the turn, with a thread in its place: true if the vCPU has got the turn.
    fn is_granted(&mut self, at: usize) -> bool {
        if !self.has_thread && Queue::serve(&self.queue).is_err() {
            return false;
        }
        self.has_thread = true;
        self.queue.wait(at)
    }

    fn hold(&mut self, at: usize) {
        self.held = Some(Held { at, since: Instant::now() });
    }
}

impl Drop for HostTurn {
    fn drop(&mut self) {
        self.release();
        self.queue.set(Wish::Over);
    }
}

impl Queue {
    /// Starts the thread that waits in the vCPU's place.
    fn serve(queue: &Arc<Self>) -> io::Result<()> {
        let queue = Arc::clone(queue);
        let run = move || while queue.serve_one() {};
        thread::Builder::new().name("turns".to_owned()).spawn(run).map(drop)
    }

    /// Waits until the vCPU wants a turn, and then for that turn: false when the vCPU has ended.
    fn serve_one(&self) -> bool {
        let wish = self.wish();
        let idle = |wish: &mut Wish| matches!(wish, Wish::Nothing | Wish::Granted);
        let wish = self.changed.wait_while(wish, idle).unwrap_or_else(PoisonError::into_inner);
        let Wish::Turn(at) = *wish else { return false };
        drop(wish);
        self.take(at);
        let mut wish = self.wish();
        if *wish == Wish::Turn(at) {
            *wish = Wish::Granted;
            self.changed.notify_all();
            return true;
        }
        self.locks.unlock(self.turn(at));
        if *wish == Wish::GivenUp {
            *wish = Wish::Nothing;
        }
        true
    }

    /// Waits for the turn on the CPU with index `at`, on that CPU.
    fn take(&self, at: usize) {
        self.cpus.get(at).into_iter().for_each(|cpu| host::current().pin(0, *cpu));
        self.locks.lock(self.next(at));
        self.locks.lock(self.turn(at));
        self.locks.unlock(self.next(at));
    }

    /// Has the thread wait for the turn on the CPU with index `at`: true if the turn has come within [`LONGEST`].
    fn wait(&self, at: usize) -> bool {
        self.set(Wish::Turn(at));
        let waits = |wish: &mut Wish| *wish != Wish::Granted;
        let waited = self.changed.wait_timeout_while(self.wish(), LONGEST, waits);
        let mut wish = waited.unwrap_or_else(PoisonError::into_inner).0;
        let granted = *wish == Wish::Granted;
        *wish = if granted { Wish::Nothing } else { Wish::GivenUp };
        granted
    }

    /// The thread still waits for a turn that the vCPU does not want any more. The vCPU and its thread are one holder of locks, so the
    /// vCPU must take no lock until the thread is done.
    fn is_given_up(&self) -> bool {
        *self.wish() == Wish::GivenUp
    }

    fn set(&self, wish: Wish) {
        *self.wish() = wish;
        self.changed.notify_all();
    }

    fn wish(&self) -> MutexGuard<'_, Wish> {
        self.wish.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the turn on the CPU with index `at` unless somebody has it or waits for it.
    fn try_take(&self, at: usize) -> bool {
        !self.is_wanted(at) && self.locks.try_lock(self.turn(at))
    }

    /// Somebody waits for the turn on the CPU with index `at`.
    fn is_wanted(&self, at: usize) -> bool {
        let next = self.next(at);
        let free = self.locks.try_lock(next);
        if free {
            self.locks.unlock(next);
        }
        !free
    }

    /// Number of the lock that is the turn on the CPU with index `at`.
    fn turn(&self, at: usize) -> usize {
        2 * self.cpus.get(at).copied().unwrap_or(at)
    }

    /// Number of the lock that the vCPU has whose turn on that CPU is next.
    fn next(&self, at: usize) -> usize {
        self.turn(at) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Locks that several holders share.
    #[derive(Debug, Default)]
    struct Shared(Mutex<HashMap<usize, usize>>, Condvar);

    /// One of the holders.
    #[derive(Debug)]
    struct Holder(Arc<Shared>, usize);

    impl Locks for Holder {
        fn lock(&self, number: usize) {
            let held = self.0.0.lock().expect("no panic");
            let others =
                |held: &mut HashMap<_, _>| held.get(&number).is_some_and(|one| *one != self.1);
            let mut held = self.0.1.wait_while(held, others).expect("no panic");
            held.insert(number, self.1);
        }
        fn try_lock(&self, number: usize) -> bool {
            *self.0.0.lock().expect("no panic").entry(number).or_insert(self.1) == self.1
        }
        fn unlock(&self, number: usize) {
            let mut held = self.0.0.lock().expect("no panic");
            if held.get(&number) == Some(&self.1) {
                held.remove(&number);
            }
            self.0.1.notify_all();
        }
    }

    /// The vCPUs of so many machines that may use these CPUs.
    fn vcpus<const N: usize>(cpus: &[usize]) -> [HostTurn; N] {
        let shared = Arc::new(Shared::default());
        std::array::from_fn(|one| HostTurn::new(Box::new(Holder(Arc::clone(&shared), one)), cpus))
    }

    #[test]
    fn a_turn_is_taken_after_a_while_and_given_away_when_the_share_is_over() {
        let begun = Instant::now();
        let [mut first, mut second] = vcpus(&[5]);
        assert!(first.due >= begun + CREDIT);
        thread::sleep(CREDIT);
        assert!(first.is_due(0));
        assert_eq!(first.try_take(0), Some(0));
        assert_eq!(second.try_take(0), None);
        thread::sleep(SHARE);
        assert!(!first.is_due(0), "nobody waits");
        let waiting = thread::spawn(move || {
            second.wait(0);
            second
        });
        let started = Instant::now();
        while !first.is_due(0) {
            thread::yield_now();
        }
        assert!(started.elapsed() >= SHARE / 2);
        first.release();
        let second = waiting.join().expect("no panic");
        assert!(second.held.is_some());
        assert_eq!(first.try_take(0), None);
        drop(second);
        assert_eq!(first.try_take(0), Some(0));
    }

    #[test]
    fn who_would_have_to_wait_goes_to_a_cpu_whose_turn_is_free() {
        let [mut first, mut second, mut third] = vcpus(&[3, 4]);
        assert_eq!(first.try_take(1), Some(1));
        assert_eq!(second.try_take(1), Some(0));
        assert_eq!(third.try_take(1), None);
        assert!(!first.is_due(0), "it has been moved by somebody else");
        assert_eq!(third.try_take(0), Some(1), "and has given its turn back");
    }

    #[test]
    fn one_that_never_gives_its_turn_away_does_not_hold_up_the_others_for_good() {
        let [mut first, mut second] = vcpus(&[0]);
        assert_eq!(first.try_take(0), Some(0));
        let started = Instant::now();
        second.wait(0);
        assert!(started.elapsed() >= LONGEST && second.held.is_none());
        assert!(second.due > Instant::now(), "it goes on without a turn");
        assert_eq!(second.alone, 2 * ALONE[0]);
        second.due = Instant::now();
        assert!(!second.is_due(0), "its thread waits");
        first.release();
        // The thread gives the turn back.
        while first.try_take(0).is_none() {
            thread::yield_now();
        }
        assert!(second.is_due(0));
    }

    #[test]
    fn many_have_their_turns() {
        let turns: [HostTurn; 6] = vcpus(&[0]);
        let running = Arc::new(Mutex::new(()));
        let all = turns.map(|mut turn| {
            let running = Arc::clone(&running);
            thread::spawn(move || {
                for _ in 0..20 {
                    turn.wait(0);
                    assert!(turn.held.is_some());
                    let runs = running.try_lock().expect("nobody else runs");
                    thread::yield_now();
                    drop(runs);
                    turn.release();
                }
            })
        });
        all.into_iter().for_each(|one| one.join().expect("no panic"));
    }
}
