//! The server's side: a body serves queues that another process's transport carries.
//!
//! One thread does everything, so that a message finds no request under way: whoever is told where a queue stopped knows that
//! nothing of it is touched any more.
//!
//! Whose transport it is shows in the memory table: our monitor's has the marks of code pages in it, another program's, such as QEMU's, has not.

use std::{
    fs::File,
    hint,
    io::{
        self,
        ErrorKind::{Interrupted, WouldBlock},
        Read, Write,
    },
    iter, mem,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use ram::{DmaMemory, Ram};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
};
use vhost::vhost_user::{
    BackendReqHandler, Error as Refusal, Result as Answer, VhostUserBackendReqHandlerMut,
    message::VhostUserMemoryRegion,
};
use virtio::{Interrupt, Queue, RequestLog, RingError, Shape, Telling, VirtioDevice};

use crate::{LOG, MARKS, NOTES, WORDS, early::Enabling, words::Words};

#[cfg(test)]
mod bell_tests;
#[cfg(test)]
mod late_tests;
mod messages;

/// VIRTIO_F_VERSION_1, VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC.
const RING_FEATURES: u64 = 1 << 32 | EVENT_IDX | 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
/// Entries of another program's queues at the most: QEMU's limit. The protocol does not tell it ours.
const FOREIGN_MAX: u16 = 1024;

/// How long a queue whose requests nobody waits for stays quiet after the last of them.
const QUIET: Duration = Duration::from_millis(10);

/// How late a driver is told of answers that may wait, and of how many it is not told at the most.
const LATE: Duration = Duration::from_micros(100);
const MOST_LATE: u16 = 32;

/// How long a server looks at its queues without looking for messages of the monitor's.
const WATCH: Duration = Duration::from_millis(2);

/// How long an answer waits for the vCPU that is on its way to ring.
const EARLY: Duration = Duration::from_micros(50);

/// Rung by other threads of the server's when the host has something for a queue: a device that does not only answer has one.
pub struct Bell {
    event: Arc<File>,
    queue: usize,
}

impl Bell {
    /// A bell of this queue.
    ///
    /// # Errors
    /// The host gives no descriptor.
    pub fn new(queue: usize) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event: Arc::new(event.into()), queue })
    }

    /// A function that rings it, from any thread.
    pub fn ringer(&self) -> impl Fn() + Send + Sync + use<> {
        let event = Arc::clone(&self.event);
        // One that has been rung 2^64 times will be looked at anyway.
        move || drop((&*event).write(&1_u64.to_ne_bytes()))
    }

    /// Makes the bell silent. Whoever calls this looks at the bell's queue afterwards, since nobody else hears of the ring.
    fn take_ring(&self) {
        // As for doorbells, the number does not matter.
        drop((&*self.event).read(&mut [0; 8]));
    }
}

/// Serves until the monitor hangs up.
///
/// # Errors
/// The host refuses, or the monitor breaks the protocol.
pub fn serve(
    device: Box<dyn VirtioDevice>,
    bell: Option<Bell>,
    socket: UnixStream,
) -> io::Result<()> {
    let server = Arc::new(Mutex::new(DeviceServer::new(device, bell)));
    let mut handler = BackendReqHandler::from_stream(socket.try_clone()?, Arc::clone(&server));
    loop {
        lock(&server).watch();
        let (asked, rung) = wait(&socket, &server)?;
        lock(&server).run_rung(&rung);
        lock(&server).tell_late();
        if asked {
            let enabling = Enabling::peek(&socket);
            match (handler.handle_request(), enabling) {
                (Ok(()), _) => {}
                (Err(Refusal::Disconnected), _) => return Ok(()),
                (Err(Refusal::SocketBroken(_) | Refusal::PartialMessage), _) => return Ok(()),
                (Err(Refusal::InactiveFeature(_)), Some(early)) => {
                    lock(&server).enable_early(early, &socket)?;
                }
                (Err(error), _) => return Err(io::Error::other(error.to_string())),
            }
        }
    }
}

/// Has this process end `patience` after the monitor has hung up, whatever it is doing: a file that the monitor gave us may never answer.
/// To be called before there is a filter, which allows no more threads.
///
/// # Errors
/// The host gives no descriptor or thread.
pub fn leave_after(socket: &UnixStream, patience: Duration) -> io::Result<()> {
    let socket = socket.try_clone()?;
    thread::Builder::new().name("end".into()).spawn(move || {
        let hung_up = || {
            let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
            poll(&mut polled, None).is_ok_and(|count| count > 0)
        };
        while !hung_up() {}
        thread::sleep(patience);
        tracing::error!("a device's process has not ended by itself");
        process::exit(1);
    })?;
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the monitor, a doorbell or the host: whether the monitor says something, and the queues that were rung.
fn wait(socket: &UnixStream, server: &Mutex<DeviceServer>) -> io::Result<(bool, Vec<usize>)> {
    let server = lock(server);
    let kicks = server.rings.iter().enumerate();
    let kicks = kicks.filter_map(|(i, ring)| Some((i, ring.bell()?)));
    let own = server.bell.iter().map(|bell| (bell.queue, bell.event.as_fd()));
    let kicks: Vec<_> = own.chain(kicks).collect();
    let mut polled = vec![PollFd::new(socket, PollFlags::IN)];
    polled.extend(kicks.iter().map(|(_, kick)| PollFd::new(kick, PollFlags::IN)));
    let at_once = server.is_busy.then(Timespec::default);
    let next = server.quiet_until.into_iter().chain(server.late_until).min();
    let wait = at_once.or_else(|| next.map(left));
    match poll(&mut polled, wait.as_ref()) {
        Err(Errno::INTR) | Ok(_) => {}
        Err(error) => return Err(error.into()),
    }
    let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let asked = polled.first().is_some_and(is_ready);
    let rung = kicks.iter().zip(polled.iter().skip(1)).filter(|(_, fd)| is_ready(fd));
    let rung = rung.map(|((index, _), _)| *index).collect();
    Ok((asked, rung))
}

/// The time until then.
fn left(end: Instant) -> Timespec {
    let left = end.saturating_duration_since(Instant::now());
    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
}

/// A queue as the monitor has described it so far.
#[derive(Default)]
struct ServedRing {
    shape: Shape,
    /// The request that is next, modulo 2^16.
    base: u16,
    kick: Option<File>,
    /// Shared with the queue's interrupt: another program's monitor changes it while the queue runs.
    call: Arc<Mutex<Option<File>>>,
    error: Option<File>,
    enabled: bool,
    queue: Option<Queue>,
    /// When the driver was last told of answers.
    told: Option<Instant>,
}

impl ServedRing {
    /// The doorbell of a queue that runs.
    fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().filter(|_| self.queue.is_some()).map(AsFd::as_fd)
    }

    /// Makes the doorbell silent. One that cannot be read, such as a pipe whose other end is closed, would be ready for ever.
    fn take_kick(&mut self) {
        // The number says how often it was rung, which does not matter.
        let read = self.kick.as_mut().map(|kick| kick.read(&mut [0; 8]));
        match read {
            None | Some(Ok(1..)) => {}
            Some(Err(error)) if matches!(error.kind(), WouldBlock | Interrupted) => {}
            Some(_) => self.kick = None,
        }
    }

    /// There is a request, of which no doorbell need tell.
    fn has_more(&self) -> bool {
        self.queue.as_ref().is_some_and(Queue::has_more)
    }

    fn stop(&mut self) {
        if let Some(mut queue) = self.queue.take() {
            queue.set_quiet(false);
            // Of a ring that is not accessible nobody can be told anything.
            let _ = queue.tell_driver();
            self.base = queue.next();
        }
    }
}

/// The guest's memory.
#[derive(Clone)]
enum Memory {
    /// Our monitor's.
    Ours(Ram),
    /// Another program's.
    Foreign(DmaMemory),
}

impl Memory {
    fn queue(
        self,
        shape: Shape,
        max: u16,
        event_idx: bool,
        call: Interrupt,
    ) -> Result<Queue, RingError> {
        match self {
            Self::Ours(ram) => Queue::new(shape, max, event_idx, ram, call),
            Self::Foreign(memory) => Queue::foreign(shape, FOREIGN_MAX, event_idx, memory, call),
        }
    }
}

struct DeviceServer {
    device: Box<dyn VirtioDevice>,
    bell: Option<Bell>,
    memory: Option<Memory>,
    /// The memory table: the monitor gives rings by addresses of its own.
    regions: Vec<VhostUserMemoryRegion>,
    features: u64,
    rings: Vec<ServedRing>,
    /// There are quiet queues, until then.
    quiet_until: Option<Instant>,
    /// When a driver is to be told of answers of which it has not been told yet, if there are any.
    late_until: Option<Instant>,
    /// What the monitor and we tell each other without events.
    words: Option<Arc<Words>>,
    /// Where requests are noted, if the monitor has such a place.
    log: Option<Arc<RequestLog>>,
    /// Something was asked a moment ago: we look at the queues by ourselves, if we may.
    is_busy: bool,
}

impl DeviceServer {
    fn new(device: Box<dyn VirtioDevice>, bell: Option<Bell>) -> Self {
        let rings = device.queue_sizes().iter().map(|_| ServedRing::default()).collect();
        Self {
            device,
            bell,
            memory: None,
            regions: Vec::new(),
            features: 0,
            rings,
            quiet_until: None,
            late_until: None,
            words: None,
            log: None,
            is_busy: false,
        }
    }

    fn ring(&mut self, index: impl TryInto<usize>) -> Answer<&mut ServedRing> {
        let index = index.try_into().ok();
        index.and_then(|index| self.rings.get_mut(index)).ok_or(Refusal::InvalidParam)
    }

    /// Starts a queue if everything is known of it.
    fn start(&mut self, index: usize) -> Answer<()> {
        let event_idx = self.features & EVENT_IDX != 0;
        let max = self.device.queue_sizes().get(index).copied().ok_or(Refusal::InvalidParam)?;
        let (memory, words) = (self.memory.clone(), self.words.clone());
        let log = self.log.clone();
        let ring = self.ring(index)?;
        let (Some(memory), Some(_)) = (memory, &ring.kick) else { return Ok(()) };
        if ring.queue.is_some() || !ring.enabled {
            return Ok(());
        }
        let call = Arc::clone(&ring.call);
        let interrupt = Arc::new(move || {
            if !words.as_ref().is_some_and(|words| words.answer(index)) {
                signal(&call);
            }
        });
        match memory.queue(ring.shape, max, event_idx, interrupt) {
            Ok(mut queue) => {
                queue.go_on_from(ring.base);
                log.into_iter().for_each(|log| queue.log_to(log, index as u16));
                ring.queue = Some(queue);
                self.run(index);
            }
            Err(error) => self.fail(index, &error.to_string()),
        }
        Ok(())
    }

    fn enable_early(&mut self, early: Enabling, socket: &UnixStream) -> io::Result<()> {
        let done = self.set_vring_enable(early.queue, early.enable).is_ok();
        early.answer(socket, done)
    }

    /// Serves queues without being rung for, for as long as the monitor allows after each request.
    fn watch(&mut self) {
        let is_busy = mem::take(&mut self.is_busy);
        let Some(words) = self.words.clone().filter(|_| is_busy) else { return };
        let patience = words.patience();
        if patience.is_zero() {
            return;
        }
        words.set_watched(true);
        let (start, mut last) = (Instant::now(), Instant::now());
        let mut untold = true;
        while last.elapsed() < patience && start.elapsed() < WATCH {
            self.tell_late();
            if self.run_unrung() {
                (last, untold) = (Instant::now(), true);
            } else if untold && last.elapsed() > EARLY {
                self.tell_by_events();
                untold = false;
            }
            hint::spin_loop();
        }
        words.set_watched(false);
        self.tell_by_events();
        // What was offered meanwhile without a doorbell.
        let more = self.run_unrung();
        self.is_busy = more || last.elapsed() < patience;
    }

    /// Tells of answers for which no vCPU has come: the driver need not ring for a request that is taken before it looks whether it should.
    fn tell_by_events(&self) {
        let Some(words) = &self.words else { return };
        for (index, ring) in self.rings.iter().enumerate() {
            if words.take_back(index) {
                signal(&ring.call);
            }
        }
    }

    /// Serves queues in which there is something; whether there was.
    fn run_unrung(&mut self) -> bool {
        let more = self.rings.iter().map(ServedRing::has_more).enumerate();
        let asked = more.filter(|(index, more)| *more && !self.is_patient(*index));
        let asked: Vec<_> = asked.map(|(index, _)| index).collect();
        let Some(words) = self.words.clone().filter(|_| !asked.is_empty()) else {
            self.run_queues(&[]);
            return false;
        };
        // This may take long.
        self.tell_by_events();
        words.set_serving(true);
        self.run_queues(&asked);
        words.set_serving(false);
        true
    }

    /// Serves these queues, whose bells are silent from now on.
    fn run_rung(&mut self, rung: &[usize]) {
        for index in rung {
            let ring = self.rings.get_mut(*index).filter(|ring| ring.bell().is_some());
            ring.into_iter().for_each(ServedRing::take_kick);
            let own = self.bell.as_ref().filter(|bell| bell.queue == *index);
            own.into_iter().for_each(Bell::take_ring);
            self.is_busy |= own.is_none();
        }
        self.run_queues(rung);
    }

    /// Serves these queues. What others were asked meanwhile without a doorbell comes first.
    fn run_queues(&mut self, rung: &[usize]) {
        if rung.is_empty() && self.quiet_until.is_none() {
            return;
        }
        let now = Instant::now();
        if self.quiet_until.is_some_and(|end| end <= now) {
            self.quiet_until = None;
            self.serve_patient(false);
        } else if self.quiet_until.is_some() && !rung.is_empty() {
            self.serve_patient(true);
        }
        for index in rung {
            if self.is_patient(*index) {
                self.serve_quietly(*index, true);
                self.quiet_until = Some(now + QUIET);
            } else {
                self.run(*index);
            }
        }
    }

    /// The queue's requests may wait, if its driver needs no doorbell to be asked for less.
    fn is_patient(&self, index: usize) -> bool {
        self.features & EVENT_IDX != 0 && self.device.is_patient(index)
    }

    fn serve_patient(&mut self, is_quiet: bool) {
        for index in 0..self.rings.len() {
            if self.is_patient(index) {
                self.serve_quietly(index, is_quiet);
            }
        }
    }

    fn serve_quietly(&mut self, index: usize, is_quiet: bool) {
        let queue = self.rings.get_mut(index).and_then(|ring| ring.queue.as_mut());
        queue.into_iter().for_each(|queue| queue.set_quiet(is_quiet));
        self.run(index);
    }

    /// Serves a queue as far as that goes, and those for which something comes meanwhile.
    fn run(&mut self, index: usize) {
        self.run_one(index);
        while let Some(due) = self.device.take_due() {
            self.run_one(due);
        }
    }

    fn run_one(&mut self, index: usize) {
        let Some(ring) = self.rings.get_mut(index) else { return };
        let Some(queue) = ring.queue.as_mut() else { return };
        let served = self.device.process(index, queue);
        let telling = self.device.telling(index);
        if let Err(error) = served {
            return self.fail(index, &error.to_string());
        }
        let few = queue.untold() < MOST_LATE;
        let until = match telling {
            Telling::Late if few => Some(Instant::now() + LATE),
            Telling::Spaced if few => {
                ring.told.map(|told| told + LATE).filter(|until| *until > Instant::now())
            }
            _ => None,
        };
        match until {
            Some(_) if queue.untold() == 0 => {}
            Some(until) => {
                self.late_until = self.late_until.into_iter().chain([until]).min();
            }
            None => self.tell(index),
        }
        self.hush(index);
    }

    /// Lets a vCPU go on that waits for an answer, if all requests are answered. The driver may want no interrupt for them: it has not seen to
    /// earlier answers yet.
    fn hush(&self, index: usize) {
        let is_done = self.rings.get(index).is_some_and(|ring| !ring.has_more());
        self.words.iter().filter(|_| is_done).for_each(|words| words.hush(index));
    }

    /// Interrupts the driver of a queue if there are answers in the queue of which the driver has not been told.
    fn tell(&mut self, index: usize) {
        let Some(ring) = self.rings.get_mut(index) else { return };
        let Some(queue) = ring.queue.as_mut() else { return };
        if queue.untold() != 0 {
            ring.told = Some(Instant::now());
        }
        if let Err(error) = queue.tell_driver() {
            self.fail(index, &error.to_string());
        }
    }

    /// Tells drivers of answers that have waited long enough.
    fn tell_late(&mut self) {
        if self.late_until.is_none_or(|until| until > Instant::now()) {
            return;
        }
        self.late_until = None;
        (0..self.rings.len()).for_each(|index| self.tell(index));
    }

    /// The driver broke a queue: it stops, and the monitor is told.
    fn fail(&mut self, index: usize, problem: &str) {
        tracing::warn!(index, problem, "virtio driver error");
        let Some(ring) = self.rings.get_mut(index) else { return };
        ring.stop();
        ring.enabled = false;
        if let Some(error) = &mut ring.error {
            // As for interrupts.
            let _ = error.write(&1_u64.to_ne_bytes());
        }
    }
}

/// Has the monitor interrupt the driver.
fn signal(call: &Mutex<Option<File>>) {
    // A monitor that does not take it any more has hung up.
    lock(call).iter_mut().for_each(|call| drop(call.write(&1_u64.to_ne_bytes())));
}
