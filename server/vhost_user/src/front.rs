//! What stands for a body in the monitor: it has queues served by a server in another process.
//!
//! Lock order: the transport's device → the link → interrupts. The thread that watches the server takes the link, and gives it back
//! before it interrupts the driver or rings the transport.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
};

use rustix::process::Pid;
use virtio::{Doorbell, Interrupt, Queue, RequestLog, RingError, VirtioDevice};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::{
    VhostUserError,
    link::{Link, Spawn},
    near::{Binding, Near, Nearness},
    words::{Reply, Turn, Waiting, Words},
};

/// Features of rings and transports (virtio 1.2 section 6): the monitor's transport has its own.
const RESERVED: u64 = ((1 << 42) - 1) & !((1 << 24) - 1);

struct SharedFront {
    link: Mutex<Link>,
    /// What the thread that passes interrupts on waits for.
    epoll: Epoll,
    doorbell: OnceLock<Doorbell>,
    near: OnceLock<Near>,
    /// Is told when there is no server any more.
    mourner: OnceLock<FailureHandler>,
}

impl SharedFront {
    /// Rings, and takes the answer if it comes soon. The thread that passes interrupts on takes it otherwise.
    fn ring_and_wait(
        &self,
        near: &Near,
        how: Waiting,
        link: MutexGuard<'_, Link>,
        (index, is_awaited): (usize, bool),
    ) {
        let words = Arc::clone(&link.words);
        let expected = words.expect(index, how);
        let is_watched = words.is_watched();
        if !is_watched {
            link.kick(index);
        }
        drop(link);
        let moment = Near::moment(how, is_awaited);
        let reply = match expected {
            None => Reply::Nothing,
            Some(Turn::Others) => return,
            Some(Turn::Answered) => Reply::Answer,
            Some(Turn::Ours) => words.wait(index, how, moment),
        };
        match reply {
            Reply::Answer => {
                near.answered_at_once(how);
                let due = self.link().interrupt(index);
                due.into_iter().for_each(|interrupt| interrupt());
            }
            Reply::Silence => near.answered_at_once(how),
            // One that serves a request waits for a disk, as like as not.
            Reply::Nothing if is_awaited && !words.is_serving() => near.was_late(how, is_watched),
            Reply::Nothing => {}
        }
    }
}

/// Is told why there is no server any more.
pub type FailureHandler = Box<dyn Fn(&VhostUserError) + Send + Sync>;

impl SharedFront {
    fn tell_of_the_end(&self, error: &VhostUserError) {
        match self.mourner.get() {
            Some(tell) => tell(error),
            None => tracing::error!(%error, "a device has no server any more"),
        }
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device served by another process.
pub struct Remote {
    shared: Arc<SharedFront>,
    device_type: u16,
    class: u32,
    queues: Vec<u16>,
    features: u64,
    config: Vec<u8>,
    /// Answers when there is no server any more.
    reserve: Option<Box<dyn VirtioDevice>>,
    /// Queues that it has taken over.
    taken_over: Vec<usize>,
}

/// What answers in place of a server that is gone, made from the configuration structure as it was.
pub type Reserve = fn(config: &[u8]) -> Box<dyn VirtioDevice>;

impl Remote {
    /// Starts the server.
    ///
    /// # Errors
    /// It refuses, or the host does.
    pub fn new(spawn: Spawn, reserve: Option<Reserve>) -> Result<Self, VhostUserError> {
        let mut link = Link::new(spawn)?;
        let config = link.config()?;
        let features = link.offered & !RESERVED;
        let identity = link.identity.clone();
        let (doorbell, near) = (OnceLock::new(), OnceLock::new());
        let mourner = OnceLock::new();
        let epoll = watching(&link)?;
        let link = Mutex::new(link);
        let shared = Arc::new(SharedFront { link, epoll, doorbell, near, mourner });
        let watched = Arc::clone(&shared);
        let name = format!("server-{}", identity.device_type);
        thread::Builder::new().name(name).spawn(move || watch(&watched))?;
        let (device_type, class, queues) = (identity.device_type, identity.class, identity.queues);
        let reserve = reserve.map(|reserve| reserve(&config));
        let taken_over = Vec::new();
        Ok(Self { shared, device_type, class, queues, features, config, reserve, taken_over })
    }

    /// Has the server come near the vCPU while that is faster.
    pub fn come_near(&self, nearness: Nearness) {
        if let Some(near) = Near::new(nearness) {
            // The first one is as good.
            let _ = self.shared.near.set(near);
        }
    }

    /// Sets who is told when the server is gone for good.
    pub fn on_end(&self, mourner: FailureHandler) {
        // There is one.
        let _ = self.shared.mourner.set(mourner);
    }

    /// A function that sets how the transport is told that the server is gone for good.
    pub fn connector(&self) -> impl FnOnce(Doorbell) + Send + use<> {
        let shared = Arc::clone(&self.shared);
        // It is connected once.
        move |doorbell| drop(shared.doorbell.set(doorbell))
    }

    /// A function that ends the server, once nobody asks it for anything any more.
    pub fn releaser(&self) -> impl FnOnce() + Send + use<> {
        let shared = Arc::clone(&self.shared);
        // Before the link is taken: whoever has it may wait for the server's answer.
        let line = shared.link().line();
        move || {
            line.close();
            shared.link().close();
        }
    }
}

/// A server that does not answer is about to be found to have ended.
fn told(outcome: Result<(), VhostUserError>) {
    if let Err(error) = outcome {
        tracing::warn!(%error, "a device's server");
    }
}

impl VirtioDevice for Remote {
    fn device_type(&self) -> u16 {
        self.device_type
    }

    fn class(&self) -> u32 {
        self.class
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queues
    }

    fn config(&self) -> Vec<u8> {
        self.config.clone()
    }

    fn config_write(&mut self, offset: usize, data: &[u8]) {
        let mut link = self.shared.link();
        told(link.write_config(offset, data));
        if let Ok(config) = link.config() {
            self.config = config;
        }
    }

    fn negotiated(&mut self, features: u64) {
        let mut link = self.shared.link();
        told(link.negotiated(features));
        self.reserve.iter_mut().for_each(|reserve| reserve.negotiated(features));
        // What it is may depend on what was agreed on.
        if let Ok(config) = link.config() {
            self.config = config;
        }
    }

    fn log_to(&mut self, log: &Arc<RequestLog>) {
        self.shared.link().log = Some(Arc::clone(log));
    }

    fn is_patient(&self, index: usize) -> bool {
        self.reserve.as_ref().is_some_and(|reserve| reserve.is_patient(index))
    }

    fn words(&self, index: usize) -> Option<u64> {
        let link = self.shared.link();
        let served = link.is_running(index) && !link.broken && !link.gone;
        let beside = self.shared.near.get().is_some_and(Near::is_beside);
        (served && beside && !self.is_patient(index)).then(|| link.words.offset())
    }

    fn process(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        let mut link = self.shared.link();
        if link.broken {
            return Err(RingError::Elsewhere);
        }
        if link.gone {
            drop(link);
            return self.answer_in_its_place(index, queue);
        }
        if !link.is_running(index) {
            let ram = queue.ram().ok_or(RingError::Elsewhere)?;
            told(link.start(index, queue.shape(), queue.interrupt(), ram));
        }
        // For answers that nobody waits for, the vCPU does not either.
        let near = self.shared.near.get().filter(|_| !self.is_patient(index));
        match near.and_then(|near| Some((near, near.ring()?))) {
            Some((near, how)) => {
                self.shared.ring_and_wait(near, how, link, (index, queue.is_awaited()));
            }
            None => link.kick(index),
        }
        Ok(())
    }

    /// Only the reserve's queues are looked at here; a server looks at its own.
    fn take_due(&mut self) -> Option<usize> {
        self.reserve.as_mut()?.take_due()
    }

    fn stop(&mut self, index: usize) {
        told(self.shared.link().stop(index));
        self.taken_over.retain(|taken| *taken != index);
    }

    fn forget(&mut self, index: usize) {
        self.shared.link().forget(index);
    }

    fn reset(&mut self) {
        told(self.shared.link().reset());
        self.taken_over.clear();
        self.reserve.iter_mut().for_each(|reserve| reserve.reset());
    }
}

impl Remote {
    /// Has the reserve answer what the server has not.
    fn answer_in_its_place(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        let reserve = self.reserve.as_mut().ok_or(RingError::Elsewhere)?;
        if !self.taken_over.contains(&index) {
            queue.go_on_from(queue.given_back()?);
            self.taken_over.push(index);
        }
        reserve.process(index, queue)
    }
}

/// Passes interrupts on, and has a server that ended replaced, until that fails.
fn watch(shared: &SharedFront) {
    loop {
        let outcome =
            wait(shared).map_err(VhostUserError::from).and_then(|()| shared.link().start_anew());
        match outcome {
            Ok(Some(interrupts)) => {
                tracing::warn!("a device's server has ended and was started anew");
                interrupts.iter().for_each(|interrupt| interrupt());
            }
            Ok(None) => return,
            Err(error) => {
                shared.link().gone = true;
                ring_all(shared);
                return shared.tell_of_the_end(&error);
            }
        }
    }
}

/// What an event of the watched server is about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Event {
    Ended,
    Call(usize),
    Broke(usize),
}

impl Event {
    fn number(self) -> u64 {
        match self {
            Self::Ended => 0,
            Self::Call(index) => 1 + 2 * index as u64,
            Self::Broke(index) => 2 + 2 * index as u64,
        }
    }

    fn numbered(number: u64) -> Self {
        match (number, number.saturating_sub(1) as usize / 2) {
            (0, _) => Self::Ended,
            (odd, index) if odd % 2 == 1 => Self::Call(index),
            (_, index) => Self::Broke(index),
        }
    }
}

fn add(epoll: &Epoll, fd: RawFd, event: Event, what: EventSet) -> io::Result<()> {
    epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(what, event.number()))
}

/// Has the events of every server reported.
fn watching(link: &Link) -> io::Result<Epoll> {
    let epoll = Epoll::new()?;
    for (index, ring) in link.rings.iter().enumerate() {
        add(&epoll, ring.call.as_raw_fd(), Event::Call(index), EventSet::IN)?;
        add(&epoll, ring.error.as_raw_fd(), Event::Broke(index), EventSet::IN)?;
    }
    Ok(epoll)
}

/// Has the end of this server reported. That of its predecessor is not, whose socket is closed.
fn watch_end(shared: &SharedFront) -> io::Result<()> {
    let socket = shared.link().socket.as_raw_fd();
    add(&shared.epoll, socket, Event::Ended, EventSet::READ_HANG_UP)
}

/// Waits for what the server says and passes it on, until it has ended.
fn wait(shared: &SharedFront) -> io::Result<()> {
    watch_end(shared)?;
    let mut events = [EpollEvent::default(); 16];
    let mut place = Binding::default();
    loop {
        let count = match shared.epoll.wait(-1, &mut events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        let happened = events.iter().take(count).map(|event| Event::numbered(event.data()));
        let happened: Vec<_> = happened.collect();
        let (due, broke, server, words) = heard(&shared.link(), &happened);
        due.iter().for_each(|interrupt| interrupt());
        if let Some(near) = shared.near.get().filter(|_| !due.is_empty()) {
            place.answered(near, server, &words);
        }
        if broke {
            shared.link().broken = true;
            ring_all(shared);
        }
        if happened.contains(&Event::Ended) {
            // Its successor begins where this thread is.
            shared.near.get().iter().for_each(|near| place.leave(near, server, &words));
            return Ok(());
        }
    }
}

/// Takes note of events: the interrupts that are due, whether a queue is broken, whose events they are, and the words with whom that is.
fn heard(link: &Link, happened: &[Event]) -> (Vec<Interrupt>, bool, Option<Pid>, Arc<Words>) {
    let (mut due, mut broke) = (Vec::new(), false);
    for event in happened {
        match event {
            Event::Ended => {}
            Event::Call(index) => due.extend(link.called(*index)),
            Event::Broke(index) => broke |= link.broke(*index),
        }
    }
    (due, broke, link.server(), Arc::clone(&link.words))
}

/// Has the transport look at every queue, and so find out what has happened.
fn ring_all(shared: &SharedFront) {
    let queues = shared.link().rings.len();
    if let Some(doorbell) = shared.doorbell.get() {
        (0..queues).for_each(|index| doorbell.ring(index));
    }
}
