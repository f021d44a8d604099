//! vCPUs that outnumber the host's CPUs take turns, and know who runs.
//!
//! A vCPU that spins until another vCPU has done something keeps its host CPU until its time slice is over. The other vCPU may need
//! that very CPU, and the host's scheduler does not know. So there are as many seats as host CPUs, and a vCPU runs guest code only
//! while it has a seat. Each vCPU is then known to run or to wait, and the seat of a vCPU that only spins can go to the one it spins for.
//!
//! No scheduler decides from above. A vCPU that wants a seat asks the vCPU that has sat the longest to give way, once that one has
//! had its share. The share is shorter if the asking vCPU was idle, or has an interrupt to take. If no seat comes free for long, as
//! when a vCPU waits for a device that does not answer, there is one seat more.

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

/// How long a vCPU may keep its seat from others.
const SHARE: Duration = Duration::from_millis(4);
/// The same, where the other one is urgent.
const SHORT_SHARE: Duration = Duration::from_micros(500);
/// How long a vCPU that waits for a seat sleeps at the most, before it looks again whom to ask.
const PATIENCE: Duration = Duration::from_millis(10);
/// How long a vCPU waits for a seat before there is one seat more.
const LONGEST: Duration = Duration::from_millis(200);

/// The vCPUs of a machine that has more of them than CPUs.
pub struct Crowd {
    state: Mutex<State>,
    members: Box<[Member]>,
}

struct Member {
    requests: Arc<VcpuRequests>,
    /// It is to give way.
    asked: AtomicBool,
    /// It has got a seat, or is more urgent than before.
    called: Condvar,
}

struct State {
    /// First come as many as there are CPUs. Those behind them are gone when whoever sits there stands up.
    seats: Vec<Option<Sitting>>,
    cpus: usize,
    queue: VecDeque<Waiting>,
    /// Where each sat last.
    last: Box<[usize]>,
}

struct Sitting {
    vcpu: usize,
    since: Instant,
    asked: bool,
}

struct Waiting {
    vcpu: usize,
    urgent: bool,
}

/// What a vCPU does about its seat. Clones are the same vCPU's.
#[derive(Clone)]
pub struct Seat {
    crowd: Arc<Crowd>,
    vcpu: usize,
}

impl Crowd {
    /// So many seats, at least one, for these vCPUs.
    pub fn new(seats: usize, requests: &[Arc<VcpuRequests>]) -> Arc<Self> {
        let cpus = seats.max(1);
        let seats = (0..cpus).map(|_| None).collect();
        let last = (0..requests.len()).map(|vcpu| vcpu % cpus).collect();
        let member = |requests: &Arc<VcpuRequests>| Member {
            requests: Arc::clone(requests),
            asked: AtomicBool::new(false),
            called: Condvar::new(),
        };
        let state = Mutex::new(State { seats, cpus, queue: VecDeque::new(), last });
        Arc::new(Self { state, members: requests.iter().map(member).collect() })
    }

    /// That of a vCPU.
    pub fn seat(self: &Arc<Self>, vcpu: usize) -> Seat {
        Seat { crowd: Arc::clone(self), vcpu }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody is to give way.
    fn ask(&self, state: &mut State, seat: usize) {
        let Some(sitting) = &mut state.seats[seat] else { return };
        sitting.asked = true;
        let member = &self.members[sitting.vcpu];
        member.asked.store(true, Ordering::SeqCst);
        member.requests.kick();
    }

    /// Has whoever should give way to a vCPU that waits do so; how long it may sleep then.
    fn press(&self, state: &mut State, vcpu: usize) -> Duration {
        let Some(position) = state.queue.iter().position(|waiting| waiting.vcpu == vcpu) else {
            return PATIENCE;
        };
        let share = if state.queue[position].urgent { SHORT_SHARE } else { SHARE };
        let asked = state.seats.iter().flatten().filter(|sitting| sitting.asked).count();
        // Those who have been asked already give way to it, too.
        let Some((seat, since)) = state.longest().filter(|_| asked <= position) else {
            return PATIENCE;
        };
        let left = share.saturating_sub(since.elapsed());
        if left.is_zero() {
            self.ask(state, seat);
            return PATIENCE;
        }
        left
    }
}

impl State {
    fn seat_of(&self, vcpu: usize) -> Option<usize> {
        self.seats.iter().position(|seat| seat.as_ref().is_some_and(|one| one.vcpu == vcpu))
    }

    fn take(&mut self, seat: usize, vcpu: usize) {
        self.seats[seat] = Some(Sitting { vcpu, since: Instant::now(), asked: false });
        self.last[vcpu] = seat;
    }

    /// One more seat, for a vCPU that has waited too long: the CPU that it is on.
    fn put_up(&mut self, vcpu: usize) -> usize {
        self.queue.retain(|waiting| waiting.vcpu != vcpu);
        self.seats.push(Some(Sitting { vcpu, since: Instant::now(), asked: false }));
        self.last[vcpu]
    }

    /// A seat that nobody has, that of last time if it can be.
    fn free(&self, vcpu: usize) -> Option<usize> {
        let last = self.last[vcpu];
        let is_free = |seat: &usize| self.seats[*seat].is_none();
        Some(last).filter(is_free).or_else(|| (0..self.cpus).find(is_free))
    }

    /// The seat that one who has not been asked has had the longest, and since when.
    fn longest(&self) -> Option<(usize, Instant)> {
        let seats = self.seats.iter().enumerate();
        let sitting = seats.filter_map(|(seat, one)| Some((seat, one.as_ref()?)));
        let keeps = sitting.filter(|(_, one)| !one.asked).map(|(seat, one)| (seat, one.since));
        keeps.min_by_key(|(_, since)| *since)
    }
}

impl Seat {
    fn own(&self) -> &Member {
        &self.crowd.members[self.vcpu]
    }

    /// Takes a seat if one is free: its number.
    pub fn try_sit(&self) -> Option<usize> {
        let mut state = self.crowd.state();
        let seat = state.free(self.vcpu)?;
        state.take(seat, self.vcpu);
        Some(seat)
    }

    /// Waits for a seat: its number.
    pub fn sit(&self, urgent: bool) -> usize {
        let started = Instant::now();
        let mut state = self.crowd.state();
        let ahead = state.queue.iter().take_while(|waiting| urgent && waiting.urgent).count();
        let at = if urgent { ahead } else { state.queue.len() };
        state.queue.insert(at, Waiting { vcpu: self.vcpu, urgent });
        if let Some(seat) = state.free(self.vcpu) {
            state.queue.retain(|waiting| waiting.vcpu != self.vcpu);
            state.take(seat, self.vcpu);
            return seat;
        }
        while started.elapsed() < LONGEST {
            let time = self.crowd.press(&mut state, self.vcpu);
            let waited = self.own().called.wait_timeout(state, time);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if let Some(seat) = state.seat_of(self.vcpu) {
                return seat;
            }
        }
        state.put_up(self.vcpu)
    }

    /// Lets others have the seat.
    pub fn stand_up(&self) {
        let mut state = self.crowd.state();
        self.own().asked.store(false, Ordering::SeqCst);
        let Some(seat) = state.seat_of(self.vcpu) else { return };
        if seat >= state.cpus {
            state.seats.remove(seat);
            return;
        }
        state.seats[seat] = None;
        if let Some(next) = state.queue.pop_front() {
            state.take(seat, next.vcpu);
            self.crowd.members[next.vcpu].called.notify_one();
        }
    }

    /// Somebody has asked for the seat.
    #[inline]
    pub fn is_asked(&self) -> bool {
        self.own().asked.load(Ordering::Relaxed)
    }

    /// A vCPU (any, if none is named) is waited for by looking. True if it does not run; then it is the next to.
    pub fn favour(&self, vcpu: Option<usize>) -> bool {
        let mut state = self.crowd.state();
        let wanted = |waiting: &Waiting| vcpu.is_none_or(|vcpu| waiting.vcpu == vcpu);
        let Some(at) = state.queue.iter().position(wanted) else { return false };
        if let Some(mut waiting) = state.queue.remove(at) {
            waiting.urgent = true;
            self.crowd.members[waiting.vcpu].called.notify_one();
            state.queue.push_front(waiting);
        }
        true
    }

    /// Somebody waits for a seat.
    pub fn is_wanted(&self) -> bool {
        !self.crowd.state().queue.is_empty()
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

    fn crowd(seats: usize, vcpus: usize) -> (Arc<Crowd>, Vec<Arc<VcpuRequests>>) {
        let requests: Vec<_> = (0..vcpus).map(|_| Arc::new(VcpuRequests::default())).collect();
        (Crowd::new(seats, &requests), requests)
    }

    /// Waits for a seat in a thread of its own, until `waiting` wait.
    fn waits(crowd: &Arc<Crowd>, vcpu: usize, waiting: usize) -> thread::JoinHandle<usize> {
        let seat = crowd.seat(vcpu);
        let thread = thread::spawn(move || seat.sit(false));
        while crowd.state().queue.len() < waiting {
            thread::yield_now();
        }
        thread
    }

    #[test]
    fn a_seat_is_kept_until_its_share_is_used_up_and_then_asked_for() {
        let (crowd, requests) = crowd(1, 2);
        let (first, second) = (crowd.seat(0), crowd.seat(1));
        assert_eq!(first.try_sit(), Some(0));
        assert_eq!(second.try_sit(), None);
        let started = Instant::now();
        let waiting = waits(&crowd, 1, 1);
        while !first.is_asked() {
            thread::yield_now();
        }
        assert!(started.elapsed() >= SHARE / 2, "{:?}", started.elapsed());
        assert_ne!(requests[0].waiting(), 0, "and kicked");
        first.stand_up();
        assert_eq!(waiting.join().expect("sits"), 0);
        assert!(!first.is_asked());
    }

    #[test]
    fn who_is_waited_for_comes_first() {
        let (crowd, _requests) = crowd(1, 3);
        let first = crowd.seat(0);
        assert_eq!(first.try_sit(), Some(0));
        let second = waits(&crowd, 1, 1);
        let third = waits(&crowd, 2, 2);
        assert!(!first.favour(Some(0)), "it runs");
        assert!(first.favour(Some(2)));
        first.stand_up();
        assert_eq!(third.join().expect("sits"), 0);
        crowd.seat(2).stand_up();
        assert_eq!(second.join().expect("sits"), 0);
    }

    #[test]
    fn one_that_never_gives_way_does_not_hold_up_the_others_for_good() {
        let (crowd, _requests) = crowd(1, 2);
        assert_eq!(crowd.seat(0).try_sit(), Some(0));
        assert_eq!(crowd.seat(1).sit(true), 0);
        assert_eq!(crowd.state().seats.len(), 2, "one more");
        crowd.seat(1).stand_up();
        let state = crowd.state();
        assert_eq!((state.seats.len(), state.seat_of(0)), (1, Some(0)));
    }

    #[test]
    fn each_has_its_turn() {
        let (crowd, _requests) = crowd(2, 5);
        let turns: Vec<_> = (0..5)
            .map(|vcpu| {
                let seat = crowd.seat(vcpu);
                thread::spawn(move || {
                    (0..20).for_each(|_| {
                        assert!(seat.try_sit().unwrap_or_else(|| seat.sit(false)) < 2);
                        seat.stand_up();
                    });
                })
            })
            .collect();
        turns.into_iter().for_each(|turn| turn.join().expect("no panic"));
        let state = crowd.state();
        assert!(state.queue.is_empty() && state.seats.iter().all(Option::is_none));
    }
}
