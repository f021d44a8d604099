//! Machines that share a host CPU take turns on it.
//!
//! A vCPU hands over between processes all the time: monitor, wedge, wedge. With each the host's scheduler is free to
//! run somebody else first, and where several machines want a CPU it does: each gets the CPU for some 50 us, again and
//! again, and finds its caches cold. So machines agree on longer turns. The turn on a CPU is a lock that all machines of
//! the user know ([`host::Locks`]). A vCPU takes it once it has run for a while, keeps it for its share, and gives it
//! to the next one if there is one. If the turn of another CPU is free, the vCPU moves there.
//!
//! Nobody depends on the others: a vCPU that cannot get a turn for long runs without one, as it does where there are no locks.

use std::{
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use host::Locks;

/// How long a vCPU keeps its turn while another machine waits for it.
const SHARE: Duration = Duration::from_millis(4);
/// How long a vCPU that has halted runs before it takes a turn. Whoever only answers is done by then.
const CREDIT: Duration = Duration::from_millis(1);
/// How long a vCPU waits for its turn, if another machine does not give it away. The host keeps no order among those who wait, so
/// this is many times what a turn takes to come round.
const LONGEST: Duration = Duration::from_secs(1);
/// How long the vCPU then runs without one: the first time, and if it never gets one. Each time is twice as long as the last.
const ALONE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(64)];

/// A vCPU's turns.
#[derive(Debug)]
pub struct HostTurn {
    queue: Arc<Queue>,
    held: Option<Held>,
    /// When the vCPU, which has no turn, is to take one.
    due: Instant,
    /// How long the vCPU runs without a turn if it does not get the next one.
    alone: Duration,
    /// The thread that waits has been started.
    has_thread: bool,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    /// Index of the CPU.
    at: usize,
    since: Instant,
}

/// What the vCPU shares with the thread that waits for it: the vCPU's own wait has an end.
#[derive(Debug)]
struct Queue {
    /// For each host CPU the turn on it, and the place of the one whose turn is next.
    locks: Box<dyn Locks>,
    /// The host's numbers of the CPUs that the machine may use.
    cpus: Vec<usize>,
    wish: Mutex<Wish>,
    changed: Condvar,
}

/// What a vCPU waits for; CPUs have indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Nothing,
    Turn(usize),
    /// It has the turn.
    Granted,
    /// It has given up, and the thread that waits for it has not.
    GivenUp,
    /// The vCPU has ended.
    Over,
}

impl HostTurn {
    /// The turns of a vCPU of a machine that may use these CPUs of the host.
    pub fn new(locks: Box<dyn Locks>, cpus: Vec<usize>) -> Self {
        let queue = Queue { locks, cpus, wish: Mutex::new(Wish::Nothing), changed: Condvar::new() };
        Self {
            queue: Arc::new(queue),
            held: None,
            due: Instant::now() + CREDIT,
            alone: ALONE[0],
            has_thread: false,
        }
    }

    /// The vCPU begins to run.
    pub fn begin(&mut self) {
        self.due = self.due.max(Instant::now() + CREDIT);
    }

    /// The vCPU does not run any more, or lets others run.
    pub fn release(&mut self) {
        if let Some(held) = self.held.take() {
            self.queue.locks.unlock(self.queue.turn(held.at));
        }
    }

    /// The vCPU runs on the CPU with this index, and has to take a turn now, or to let another machine have its own.
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

    /// Takes a turn at once, if there is one that nobody has or waits for: the index of the CPU, rather this one than another.
    pub fn try_take(&mut self, at: usize) -> Option<usize> {
        let count = self.queue.cpus.len();
        let found = (0..count).map(|n| (at + n) % count).find(|at| self.queue.try_take(*at))?;
        self.hold(found);
        Some(found)
    }

    /// Waits for the turn on a CPU. If another machine does not give it away, this vCPU runs without one for a while.
    pub fn wait(&mut self, at: usize) {
        if self.is_granted(at) {
            self.hold(at);
            self.alone = ALONE[0];
        } else {
            self.due = Instant::now() + self.alone;
            self.alone = ALONE[1].min(self.alone * 2);
        }
    }

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
    /// Starts the thread that waits.
    fn serve(queue: &Arc<Self>) -> io::Result<()> {
        let queue = Arc::clone(queue);
        let run = move || while queue.serve_one() {};
        thread::Builder::new().name("turns".to_owned()).spawn(run).map(drop)
    }

    /// Waits for a wish, and then for the turn; false when the vCPU has ended.
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

    /// Waits for the turn on a CPU, for a vCPU that is to run there.
    fn take(&self, at: usize) {
        self.cpus.get(at).into_iter().for_each(|cpu| host::current().pin(0, *cpu));
        self.locks.lock(self.next(at));
        self.locks.lock(self.turn(at));
        self.locks.unlock(self.next(at));
    }

    /// Has the thread wait for the turn on a CPU: true if it has come.
    fn wait(&self, at: usize) -> bool {
        self.set(Wish::Turn(at));
        let waits = |wish: &mut Wish| *wish != Wish::Granted;
        let waited = self.changed.wait_timeout_while(self.wish(), LONGEST, waits);
        let mut wish = waited.unwrap_or_else(PoisonError::into_inner).0;
        let granted = *wish == Wish::Granted;
        *wish = if granted { Wish::Nothing } else { Wish::GivenUp };
        granted
    }

    /// The thread still waits for what the vCPU does not want any more. Both are one holder of locks, so the vCPU must take
    /// none now.
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

    /// Takes the turn on a CPU if nobody has it or waits for it.
    fn try_take(&self, at: usize) -> bool {
        !self.is_wanted(at) && self.locks.try_lock(self.turn(at))
    }

    /// Somebody waits for the turn on a CPU.
    fn is_wanted(&self, at: usize) -> bool {
        let next = self.next(at);
        let free = self.locks.try_lock(next);
        if free {
            self.locks.unlock(next);
        }
        !free
    }

    /// The lock of who runs on the CPU with an index.
    fn turn(&self, at: usize) -> usize {
        2 * self.cpus.get(at).copied().unwrap_or(at)
    }

    /// The lock of whose turn is next.
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
        fn lock(&self, number: usize) -> bool {
            let held = self.0.0.lock().expect("no panic");
            let others =
                |held: &mut HashMap<_, _>| held.get(&number).is_some_and(|one| *one != self.1);
            let mut held = self.0.1.wait_while(held, others).expect("no panic");
            held.insert(number, self.1);
            true
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
        std::array::from_fn(|one| {
            HostTurn::new(Box::new(Holder(Arc::clone(&shared), one)), cpus.to_vec())
        })
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
