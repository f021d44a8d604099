//! A cable with faults.
//!
//! Frames that pass at once go from the device's thread to the network's and back, as without faults. Frames that arrive later wait in
//! two queues, one per direction, and a thread of this filter moves them on when they are due.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use virtio::{NetBackend, Notify};

use crate::{
    Effect, NetAction, Schedule,
    schedule::{DeviceRequest, Op, Strike},
};

/// Frames that wait in one direction at most; more are lost, as in any queue.
const CAPACITY: usize = 4096;
/// How long a frame that is to be overtaken waits for the one that overtakes it.
const OVERTAKEN: Duration = Duration::from_millis(100);
/// Bytes of an Ethernet header, which no fault changes: a frame for nobody would be a lost one.
const ETHERNET: usize = 14;
/// With a rate, frames that would wait longer are lost.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// A cable whose frames meet the faults of a schedule.
pub struct FaultyNet {
    shared: Arc<SharedTraffic>,
    mtu: u16,
    ignores_checksums: bool,
}

struct SharedTraffic {
    state: Mutex<Traffic>,
    changed: Condvar,
}

struct Traffic {
    backend: Box<dyn NetBackend>,
    schedule: Schedule<NetAction>,
    out: Direction,
    back: Direction,
    ring: Option<Notify>,
    /// The cable is pulled: nothing passes.
    out_of_plug: bool,
    ended: bool,
}

/// Frames on their way in one direction.
#[derive(Default)]
struct Direction {
    waiting: Vec<(Instant, Vec<u8>)>,
    overtaken: Vec<(Instant, Vec<u8>)>,
    arrived: VecDeque<Vec<u8>>,
    /// With a rate: when the cable is free again.
    free: Option<Instant>,
}

/// What faults made of a frame: copies of it, each to arrive this much later.
struct FrameFate {
    copies: usize,
    later: Duration,
    overtaken: bool,
}

impl FaultyNet {
    /// `backend` with these faults. Its thread ends when this is dropped.
    ///
    /// # Errors
    /// The host gives no thread.
    pub fn new(
        backend: Box<dyn NetBackend>,
        schedule: Schedule<NetAction>,
    ) -> std::io::Result<Self> {
        let (mtu, ignores_checksums) = (backend.mtu(), backend.ignores_checksums());
        let (out, back) = Default::default();
        let (ring, out_of_plug, ended) = (None, false, false);
        let state = Traffic { backend, schedule, out, back, ring, out_of_plug, ended };
        let shared = Arc::new(SharedTraffic { state: Mutex::new(state), changed: Condvar::new() });
        let own = shared.clone();
        thread::Builder::new().name("faults".into()).spawn(move || own.deliver())?;
        Ok(Self { shared, mtu, ignores_checksums })
    }

    /// What another thread can do to it.
    pub fn control(&self) -> NetControl {
        NetControl(self.shared.clone())
    }

    /// Returns what takes the function to call when there are frames for the guest.
    pub fn ringer(&self) -> impl FnOnce(Notify) + Send + use<> {
        let shared = self.shared.clone();
        move |ring| shared.lock().ring = Some(ring)
    }
}

/// What another thread than the device's own can do to a cable.
#[derive(Clone)]
pub struct NetControl(Arc<SharedTraffic>);

impl NetControl {
    /// The cue of a fault has come.
    pub fn arm(&self, fault: &str) {
        self.0.lock().schedule.arm(fault);
    }

    /// There is a link from now on, or none, and frames on their way are lost.
    pub fn set_link(&self, up: bool) {
        let mut state = self.0.lock();
        state.out_of_plug = !up;
        if !up {
            (state.out, state.back) = Default::default();
        }
    }
}

impl NetBackend for FaultyNet {
    fn send(&mut self, frame: &[u8]) {
        self.shared.lock().send(frame);
        self.shared.changed.notify_one();
    }

    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        let mut state = self.shared.lock();
        state.receive_all();
        self.shared.changed.notify_one();
        match state.back.arrived.pop_front() {
            Some(arrived) => {
                *frame = arrived;
                true
            }
            None => false,
        }
    }

    fn mtu(&self) -> u16 {
        self.mtu
    }

    /// A corrupted frame must fail its checksum, so there have to be checksums.
    fn ignores_checksums(&self) -> bool {
        self.ignores_checksums && !self.shared.lock().schedule.has(is_corruption)
    }
}

fn is_corruption(action: &NetAction) -> bool {
    matches!(action, NetAction::Corrupt(_))
}

impl Drop for FaultyNet {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_one();
    }
}

impl SharedTraffic {
    fn lock(&self) -> MutexGuard<'_, Traffic> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves frames on when they are due, until the cable is dropped.
    fn deliver(&self) {
        let mut state = self.lock();
        while !state.ended {
            state.advance(Instant::now());
            // The ring locks the device, whose thread may be waiting for this lock.
            if let (false, Some(ring)) = (state.back.arrived.is_empty(), state.ring.clone()) {
                drop(state);
                ring();
                state = self.lock();
            }
            let idle = Duration::from_secs(3600);
            let wait =
                state.next().map_or(idle, |due| due.saturating_duration_since(Instant::now()));
            // What arrived while the lock was free has a notification that came too early.
            if !wait.is_zero() && !state.ended {
                let waited = self.changed.wait_timeout(state, wait);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

impl Traffic {
    fn send(&mut self, frame: &[u8]) {
        if self.out_of_plug {
            return;
        }
        let mut frame = frame.to_vec();
        let fate = self.meet(Op::Send, &mut frame);
        self.out.put(frame, &fate, Instant::now());
        self.pass_out();
    }

    fn receive_all(&mut self) {
        let mut frame = Vec::new();
        while self.back.arrived.len() < CAPACITY && self.backend.receive(&mut frame) {
            let mut frame = std::mem::take(&mut frame);
            if self.out_of_plug {
                continue;
            }
            let fate = self.meet(Op::Receive, &mut frame);
            self.back.put(frame, &fate, Instant::now());
        }
    }

    fn advance(&mut self, now: Instant) {
        self.out.advance(now);
        self.back.advance(now);
        self.pass_out();
    }

    fn pass_out(&mut self) {
        while let Some(frame) = self.out.arrived.pop_front() {
            self.backend.send(&frame);
        }
    }

    /// When the next frame is due.
    fn next(&self) -> Option<Instant> {
        [&self.out, &self.back].into_iter().filter_map(Direction::next).min()
    }

    fn meet(&mut self, op: Op, frame: &mut [u8]) -> FrameFate {
        let request = DeviceRequest { op, bytes: 0..frame.len() as u64 };
        let mut fate = FrameFate { copies: 1, later: Duration::ZERO, overtaken: false };
        for strike in self.schedule.strikes(&request) {
            self.suffer(strike, op, &mut fate, frame);
        }
        fate
    }

    fn suffer(
        &mut self,
        strike: Strike<NetAction>,
        op: Op,
        fate: &mut FrameFate,
        frame: &mut [u8],
    ) {
        let effect = match strike.action {
            NetAction::Loss => fate.lose(),
            NetAction::Duplicate => {
                fate.copies *= 2;
                Effect::Duplicated
            }
            NetAction::Reorder => {
                fate.overtaken = true;
                Effect::Reordered
            }
            NetAction::Corrupt(bits) => self.corrupt(bits, frame),
            NetAction::Delay { by, jitter } => {
                let more = jitter.mul_f64(self.schedule.random().f64());
                fate.wait(by + more)
            }
            NetAction::Rate(bits) => {
                let line = if op == Op::Send { &mut self.out } else { &mut self.back };
                match line.occupy(frame.len(), bits, Instant::now()) {
                    Some(wait) => fate.wait(wait),
                    None => fate.lose(),
                }
            }
        };
        self.schedule.record(strike, effect);
    }

    /// Positions in the record count from the frame's beginning.
    fn corrupt(&mut self, bits: u32, frame: &mut [u8]) -> Effect {
        let header = ETHERNET.min(frame.len());
        let mut flipped = self.schedule.flip(bits, &mut frame[header..]);
        flipped.iter_mut().for_each(|(at, ..)| *at += header as u64);
        Effect::Corrupted(flipped)
    }
}

impl FrameFate {
    fn lose(&mut self) -> Effect {
        self.copies = 0;
        Effect::Dropped
    }

    fn wait(&mut self, time: Duration) -> Effect {
        self.later += time;
        Effect::Delayed(time.as_millis() as u64)
    }
}

impl Direction {
    /// Takes a frame, for now or later; whatever arrives releases what it was to overtake.
    fn put(&mut self, frame: Vec<u8>, fate: &FrameFate, now: Instant) {
        for _ in 0..fate.copies {
            if self.waiting.len() + self.overtaken.len() >= CAPACITY {
                return;
            }
            match (fate.overtaken, fate.later) {
                (true, later) => self.overtaken.push((now + later + OVERTAKEN, frame.clone())),
                (false, Duration::ZERO) => self.arrive(frame.clone()),
                (false, later) => self.waiting.push((now + later, frame.clone())),
            }
        }
    }

    fn arrive(&mut self, frame: Vec<u8>) {
        self.arrived.push_back(frame);
        self.arrived.extend(self.overtaken.drain(..).map(|(_, frame)| frame));
    }

    /// Frames with the same delay keep their order.
    fn advance(&mut self, now: Instant) {
        self.waiting.sort_by_key(|(due, _)| *due);
        let due = self.waiting.partition_point(|(due, _)| *due <= now);
        let frames: Vec<_> = self.waiting.drain(..due).collect();
        frames.into_iter().for_each(|(_, frame)| self.arrive(frame));
        let late: Vec<_> = self.overtaken.extract_if(.., |(due, _)| *due <= now).collect();
        self.arrived.extend(late.into_iter().map(|(_, frame)| frame));
    }

    fn next(&self) -> Option<Instant> {
        self.waiting.iter().chain(&self.overtaken).map(|(due, _)| *due).min()
    }

    /// How long a frame waits for the cable at so many bits a second; nothing if it is lost.
    fn occupy(&mut self, len: usize, bits: u64, now: Instant) -> Option<Duration> {
        let free = self.free.map_or(now, |free| free.max(now));
        let end = free + Duration::from_secs_f64(len as f64 * 8.0 / bits as f64);
        let wait = end - now;
        (wait <= LONGEST_WAIT).then(|| {
            self.free = Some(end);
            wait
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Scenario, Target};
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Gives back what was sent, as the network's own frames.
    struct Mirror(Sender<Vec<u8>>, VecDeque<Vec<u8>>);

    impl NetBackend for Mirror {
        fn send(&mut self, frame: &[u8]) {
            self.0.send(frame.to_vec()).expect("listened to");
        }
        fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
            self.1.pop_front().map(|next| *frame = next).is_some()
        }
        fn ignores_checksums(&self) -> bool {
            true
        }
    }

    fn cable(fault: &str, incoming: &[u8]) -> (FaultyNet, Receiver<Vec<u8>>) {
        let text = format!("seed = 5\n[[fault]]\non = 'net0'\n{fault}");
        let scenario = Scenario::parse(&text).expect("sound");
        let (on, faults) = (Target::Net(0), scenario.of_net(0));
        let schedule = Schedule::new(on, faults, scenario.seed, Box::new(|_| {}));
        let (sender, sent) = channel();
        let frames = incoming.iter().map(|&n| frame(n)).collect();
        (FaultyNet::new(Box::new(Mirror(sender, frames)), schedule).expect("a thread"), sent)
    }

    fn frame(number: u8) -> Vec<u8> {
        vec![number; 60]
    }

    /// What arrives of frames 0 to `count`, by their first bytes.
    fn arriving(fault: &str, count: u8) -> Vec<u8> {
        let (mut net, sent) = cable(fault, &[]);
        (0..count).for_each(|n| net.send(&frame(n)));
        let wait = Duration::from_millis(300);
        std::iter::from_fn(|| sent.recv_timeout(wait).ok()).map(|frame| frame[0]).collect()
    }

    #[test]
    fn frames_go_wrong_as_asked() {
        assert_eq!(arriving("do = 'loss'\nrequest = 2", 3), [0, 2]);
        assert_eq!(arriving("do = 'loss'\nop = 'receive'", 3), [0, 1, 2], "one direction only");
        assert_eq!(arriving("do = 'duplicate'\nrequest = 2", 3), [0, 1, 1, 2]);
        assert_eq!(arriving("do = 'reorder'\nrequest = 2", 4), [0, 2, 1, 3]);
        assert_eq!(arriving("do = 'reorder'\nrequest = 3", 3), [0, 1, 2], "nothing overtakes it");
        assert_eq!(arriving("do = { delay = { by = '50ms' } }\nrequest = 1", 3), [1, 2, 0]);
        assert_eq!(arriving("do = { delay = { by = '20ms' } }", 3), [0, 1, 2], "in order");
    }

    #[test]
    fn frames_for_the_guest_are_told_of_when_they_arrive() {
        let (mut net, _sent) = cable("do = { delay = { by = '30ms' } }\nop = 'receive'", &[7, 8]);
        let (ring, rung) = channel();
        net.ringer()(Arc::new(move || {
            let _ = ring.send(());
        }));
        let (before, mut frame) = (Instant::now(), Vec::new());
        assert!(!net.receive(&mut frame), "not yet");
        rung.recv_timeout(Duration::from_secs(5)).expect("rung");
        assert!(before.elapsed() >= Duration::from_millis(30));
        assert!(net.receive(&mut frame) && frame[0] == 7);
        assert!(net.receive(&mut frame) && frame[0] == 8);
        assert!(!net.receive(&mut frame));
    }

    #[test]
    fn corruption_spares_the_header_and_asks_for_checksums() {
        let (mut net, sent) = cable("do = { corrupt = 1 }", &[]);
        assert!(!net.ignores_checksums());
        net.send(&frame(0));
        let got = sent.recv_timeout(Duration::from_secs(5)).expect("arrived");
        let wrong: Vec<_> = (0..60).filter(|&at| got[at] != 0).collect();
        assert!(matches!(wrong[..], [at] if at >= ETHERNET), "{wrong:?}");
        assert!(cable("do = 'loss'", &[]).0.ignores_checksums());
    }

    #[test]
    fn nothing_passes_a_pulled_cable() {
        let (mut net, sent) = cable("do = { delay = { by = '50ms' } }", &[7, 8]);
        let control = net.control();
        net.send(&frame(0));
        control.set_link(false);
        net.send(&frame(1));
        assert!(!net.receive(&mut Vec::new()), "what came is lost");
        assert!(sent.recv_timeout(Duration::from_millis(200)).is_err(), "what was on its way, too");
        control.set_link(true);
        net.send(&frame(2));
        assert_eq!(sent.recv_timeout(Duration::from_secs(5)).expect("arrives")[0], 2);
    }

    #[test]
    fn a_rate_is_kept() {
        let (mut net, sent) = cable("do = { rate = 48000 }", &[]);
        let before = Instant::now();
        (0..10).for_each(|n| net.send(&frame(n))); // 480 bits each: 10 ms
        (0..10).for_each(|_| drop(sent.recv_timeout(Duration::from_secs(5)).expect("arrives")));
        assert!(before.elapsed() >= Duration::from_millis(100), "{:?}", before.elapsed());
        (0..200).for_each(|n| net.send(&frame(n))); // 2 s of them
        let rest = std::iter::from_fn(|| sent.recv_timeout(Duration::from_millis(400)).ok());
        assert!(rest.count() <= 101, "what waits too long is lost");
    }
}
