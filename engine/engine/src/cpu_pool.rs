//! vCPUs that outnumber the host's CPUs take turns, and know who runs.
//!
//! A vCPU that spins until another vCPU has done something keeps its host CPU until its time slice is over. The other vCPU may need
//! that very CPU, and the host's scheduler does not know. So there are as many permits as host CPUs, and a vCPU runs guest code only
//! while it has a permit. Each vCPU is then known to run or to wait, and the permit of a vCPU that only spins can go to the one it spins for.
//!
//! No scheduler decides from above. A vCPU that wants a permit asks the vCPU that has held its own the longest to give way, once that one has
//! had its share. The share is shorter if the asking vCPU was idle, or has an interrupt to take. If no permit comes free for long, as
//! when a vCPU waits for a device that does not answer, there is one permit more.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use bus::Kicker;

use crate::{
    VcpuRequests,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// A vCPU's share: how long the vCPU keeps its permit while others wait.
const SHARE: Duration = Duration::from_millis(4);
/// The share where an urgent vCPU waits.
const SHORT_SHARE: Duration = Duration::from_micros(500);
/// How long a vCPU that waits for a permit sleeps at the most, before it looks again whom to ask.
const PATIENCE: Duration = Duration::from_millis(10);
/// How long a vCPU waits for a permit before there is one permit more.
const LONGEST: Duration = Duration::from_millis(200);

/// The host CPUs that a machine's vCPUs share, where there are more vCPUs.
pub struct CpuPool {
    state: Mutex<State>,
    members: Box<[Member]>,
}

struct Member {
    requests: Arc<VcpuRequests>,
    /// The vCPU has been asked to give way.
    asked: AtomicBool,
    /// The vCPU has got a permit, or is more urgent than before.
    called: Condvar,
}

struct State {
    /// For each permit the vCPU that has it. The first `cpus` permits stay; a permit behind those is one too many, and
    /// is removed when its vCPU releases it.
    permits: Vec<Option<Holder>>,
    cpus: usize,
    queue: VecDeque<Waiting>,
    /// For each vCPU the number of the permit that it had last.
    last: Box<[usize]>,
}

struct Holder {
    vcpu: usize,
    since: Instant,
    asked: bool,
}

struct Waiting {
    vcpu: usize,
    urgent: bool,
}

/// A vCPU's side of the pool: by this the vCPU waits for a host CPU, and lets others have that CPU. Clones belong to the
/// same vCPU.
#[derive(Clone)]
pub struct CpuPermit {
    pool: Arc<CpuPool>,
    vcpu: usize,
}

impl CpuPool {
    /// A pool of `permits` permits, at least one, for the vCPUs that `requests` belong to.
    pub fn new(permits: usize, requests: &[Arc<VcpuRequests>]) -> Arc<Self> {
        let cpus = permits.max(1);
        let permits = (0..cpus).map(|_| None).collect();
        let last = (0..requests.len()).map(|vcpu| vcpu % cpus).collect();
        let member = |requests: &Arc<VcpuRequests>| Member {
            requests: Arc::clone(requests),
            asked: AtomicBool::new(false),
            called: Condvar::new(),
        };
        let state = Mutex::new(State { permits, cpus, queue: VecDeque::new(), last });
        Arc::new(Self { state, members: requests.iter().map(member).collect() })
    }

    /// The side of the vCPU with this number.
    pub fn permit(self: &Arc<Self>, vcpu: usize) -> CpuPermit {
        CpuPermit { pool: Arc::clone(self), vcpu }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the vCPU that has this permit to give way.
    fn ask(&self, state: &mut State, permit: usize) {
        let Some(holder) = &mut state.permits[permit] else { return };
        holder.asked = true;
        let member = &self.members[holder.vcpu];
        member.asked.store(true, Ordering::SeqCst);
        member.requests.kick();
    }

    /// Has whoever should give way to a vCPU that waits do so; how long it may sleep then.
    fn press(&self, state: &mut State, vcpu: usize) -> Duration {
        let Some(position) = state.queue.iter().position(|waiting| waiting.vcpu == vcpu) else {
            return PATIENCE;
        };
        let share = if state.queue[position].urgent { SHORT_SHARE } else { SHARE };
        let asked = state.permits.iter().flatten().filter(|holder| holder.asked).count();
        // Those who have been asked already give way to it, too.
        let Some((permit, since)) = state.longest().filter(|_| asked <= position) else {
            return PATIENCE;
        };
        let left = share.saturating_sub(since.elapsed());
        if left.is_zero() {
            self.ask(state, permit);
            return PATIENCE;
        }
        left
    }
}

impl State {
    fn permit_of(&self, vcpu: usize) -> Option<usize> {
        self.permits.iter().position(|permit| permit.as_ref().is_some_and(|one| one.vcpu == vcpu))
    }

    fn take(&mut self, permit: usize, vcpu: usize) {
        self.permits[permit] = Some(Holder { vcpu, since: Instant::now(), asked: false });
        self.last[vcpu] = permit;
    }

    /// One more permit, for a vCPU that has waited too long: the CPU that it is on.
    fn add(&mut self, vcpu: usize) -> usize {
        self.queue.retain(|waiting| waiting.vcpu != vcpu);
        self.permits.push(Some(Holder { vcpu, since: Instant::now(), asked: false }));
        self.last[vcpu]
    }

    /// The number of a permit that no vCPU has: the one that this vCPU had last, if that is free.
    fn free(&self, vcpu: usize) -> Option<usize> {
        let last = self.last[vcpu];
        let is_free = |permit: &usize| self.permits[*permit].is_none();
        Some(last).filter(is_free).or_else(|| (0..self.cpus).find(is_free))
    }

    /// Of the permits whose vCPUs have not been asked to give way: the one taken first, and when.
    fn longest(&self) -> Option<(usize, Instant)> {
        let permits = self.permits.iter().enumerate();
        let holder = permits.filter_map(|(permit, one)| Some((permit, one.as_ref()?)));
        let keeps = holder.filter(|(_, one)| !one.asked).map(|(permit, one)| (permit, one.since));
        keeps.min_by_key(|(_, since)| *since)
    }
}

impl CpuPermit {
    fn own(&self) -> &Member {
        &self.pool.members[self.vcpu]
    }

    /// Takes a permit if one is free: its number.
    pub fn try_acquire(&self) -> Option<usize> {
        let mut state = self.pool.state();
        let permit = state.free(self.vcpu)?;
        state.take(permit, self.vcpu);
        Some(permit)
    }

    /// Waits for a permit: its number.
    pub fn acquire(&self, urgent: bool) -> usize {
        let started = Instant::now();
        let mut state = self.pool.state();
        let ahead = state.queue.iter().take_while(|waiting| urgent && waiting.urgent).count();
        let at = if urgent { ahead } else { state.queue.len() };
        state.queue.insert(at, Waiting { vcpu: self.vcpu, urgent });
        if let Some(permit) = state.free(self.vcpu) {
            state.queue.retain(|waiting| waiting.vcpu != self.vcpu);
            state.take(permit, self.vcpu);
            return permit;
        }
        while started.elapsed() < LONGEST {
            let time = self.pool.press(&mut state, self.vcpu);
            let waited = self.own().called.wait_timeout(state, time);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if let Some(permit) = state.permit_of(self.vcpu) {
                return permit;
            }
        }
        state.add(self.vcpu)
    }

    /// Lets others have the permit.
    pub fn release(&self) {
        let mut state = self.pool.state();
        self.own().asked.store(false, Ordering::SeqCst);
        let Some(permit) = state.permit_of(self.vcpu) else { return };
        if permit >= state.cpus {
            state.permits.remove(permit);
            return;
        }
        state.permits[permit] = None;
        if let Some(next) = state.queue.pop_front() {
            state.take(permit, next.vcpu);
            self.pool.members[next.vcpu].called.notify_one();
        }
    }

    /// Somebody has asked for the permit.
    #[inline]
    pub fn is_asked(&self) -> bool {
        self.own().asked.load(Ordering::Relaxed)
    }

    /// A vCPU (any, if none is named) is waited for by looking. True if it does not run; then it is the next to.
    pub fn prefer(&self, vcpu: Option<usize>) -> bool {
        let mut state = self.pool.state();
        let wanted = |waiting: &Waiting| vcpu.is_none_or(|vcpu| waiting.vcpu == vcpu);
        let Some(at) = state.queue.iter().position(wanted) else { return false };
        if let Some(mut waiting) = state.queue.remove(at) {
            waiting.urgent = true;
            self.pool.members[waiting.vcpu].called.notify_one();
            state.queue.push_front(waiting);
        }
        true
    }

    /// Somebody waits for a permit.
    pub fn is_wanted(&self) -> bool {
        !self.pool.state().queue.is_empty()
    }

    /// The vCPU, whose own thread this is, gives way at the end of the instruction.
    pub fn give_way(&self) {
        self.own().asked.store(true, Ordering::SeqCst);
        self.own().requests.kick_myself();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn pool(permits: usize, vcpus: usize) -> (Arc<CpuPool>, Vec<Arc<VcpuRequests>>) {
        let requests: Vec<_> = (0..vcpus).map(|_| Arc::new(VcpuRequests::default())).collect();
        (CpuPool::new(permits, &requests), requests)
    }

    /// Waits for a permit in a thread of its own, until `waiting` wait.
    fn waits(pool: &Arc<CpuPool>, vcpu: usize, waiting: usize) -> thread::JoinHandle<usize> {
        let permit = pool.permit(vcpu);
        let thread = thread::spawn(move || permit.acquire(false));
        while pool.state().queue.len() < waiting {
            thread::yield_now();
        }
        thread
    }

    #[test]
    fn a_permit_is_kept_until_its_share_is_used_up_and_then_asked_for() {
        let (pool, requests) = pool(1, 2);
        let (first, second) = (pool.permit(0), pool.permit(1));
        assert_eq!(first.try_acquire(), Some(0));
        assert_eq!(second.try_acquire(), None);
        let started = Instant::now();
        let waiting = waits(&pool, 1, 1);
        while !first.is_asked() {
            thread::yield_now();
        }
        assert!(started.elapsed() >= SHARE / 2, "{:?}", started.elapsed());
        assert_ne!(requests[0].waiting(), 0, "and kicked");
        first.release();
        assert_eq!(waiting.join().expect("runs"), 0);
        assert!(!first.is_asked());
    }

    #[test]
    fn who_is_waited_for_comes_first() {
        let (pool, _requests) = pool(1, 3);
        let first = pool.permit(0);
        assert_eq!(first.try_acquire(), Some(0));
        let second = waits(&pool, 1, 1);
        let third = waits(&pool, 2, 2);
        assert!(!first.prefer(Some(0)), "it runs");
        assert!(first.prefer(Some(2)));
        first.release();
        assert_eq!(third.join().expect("runs"), 0);
        pool.permit(2).release();
        assert_eq!(second.join().expect("runs"), 0);
    }

    #[test]
    fn one_that_never_gives_way_does_not_hold_up_the_others_for_good() {
        let (pool, _requests) = pool(1, 2);
        assert_eq!(pool.permit(0).try_acquire(), Some(0));
        assert_eq!(pool.permit(1).acquire(true), 0);
        assert_eq!(pool.state().permits.len(), 2, "one more");
        pool.permit(1).release();
        let state = pool.state();
        assert_eq!((state.permits.len(), state.permit_of(0)), (1, Some(0)));
    }

    #[test]
    fn each_has_its_turn() {
        let (pool, _requests) = pool(2, 5);
        let turns: Vec<_> = (0..5)
            .map(|vcpu| {
                let permit = pool.permit(vcpu);
                thread::spawn(move || {
                    (0..20).for_each(|_| {
                        assert!(permit.try_acquire().unwrap_or_else(|| permit.acquire(false)) < 2);
                        permit.release();
                    });
                })
            })
            .collect();
        turns.into_iter().for_each(|turn| turn.join().expect("no panic"));
        let state = pool.state();
        assert!(state.queue.is_empty() && state.permits.iter().all(Option::is_none));
    }
}
