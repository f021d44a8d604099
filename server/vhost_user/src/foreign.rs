//! A device that another program serves, at a socket: qemu-storage-daemon, virtiofsd, passt and the like.
//!
//! Such a server differs from ours in three things. It does not say which code it has written over, it gives requests back in any order, and nobody
//! can start another in its place. So we stand between: requests are taken from the guest's queue and offered in one of ours
//! (`shadow`), with copies of their data. The server has memory of ours, and none of the guest's.
//!
//! When the server has gone, what it had and what comes later is refused in its place. It has [`PATIENCE`] to answer a message, and the same to
//! give back what it has when the driver resets the device: one that is later counts as gone, since it could write into what comes next.

use std::{
    fmt::Display,
    io,
    net::Shutdown,
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ram::{DmaMemory, Ram};
use vhost::{
    VhostBackend,
    vhost_user::{
        Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
        message::VhostUserConfigFlags,
    },
};
use virtio::{Chain, Doorbell, Queue, RingError, VirtioDevice};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

use crate::{
    VhostUserError,
    link::{Bells, region, serve_ring},
    patience::within,
    shadow::{SIZE, Shadow},
};

/// How long the server may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
const GLANCE: Duration = Duration::from_millis(1);
/// Where, in place of a GPA, the server finds our memory.
const BASE: u64 = 1 << 32;
const VERSION_1: u64 = 1 << 32;
/// Features of device types (virtio 1.2 section 6).
const OF_TYPES: u64 = (1 << 24) - 1;

/// What kind of device it is, which the protocol does not say.
pub struct Nature {
    /// What it is called in errors.
    pub name: &'static str,
    /// Device ID.
    pub device_type: u16,
    /// PCI class.
    pub class: u32,
    /// The largest size of each queue.
    pub queues: &'static [u16],
    /// Features that such a device may have.
    pub known: u64,
    /// Those of them that the guest may have.
    pub passed: u64,
    /// What the guest may have besides, and the server hears nothing of.
    pub ours: u64,
    /// The configuration structure.
    pub config: ConfigSource,
    /// All of an answer counts, however many bytes the server says it has written.
    pub whole_answers: bool,
    /// The queue whose requests wait for what may never come: the server is not asked to give them back, nor are they refused.
    pub patient: Option<usize>,
    /// Refuses a request; returns the bytes written.
    pub refuse: fn(&Chain, &DmaMemory) -> Result<u32, RingError>,
}

/// Who says what the device is like.
pub enum ConfigSource {
    /// The server, in so many bytes.
    Asked(u32),
    /// We do.
    Known(Vec<u8>),
}

/// A queue with its bells.
struct ForeignQueue {
    shadow: Shadow,
    kick: EventFd,
    call: EventFd,
    running: bool,
}

/// What the thread that watches shares with the device.
#[derive(Default)]
struct WatchState {
    doorbell: OnceLock<Doorbell>,
    /// There is no server any more.
    gone: AtomicBool,
}

/// A device served by another program.
pub struct Foreign {
    nature: Nature,
    frontend: Frontend,
    socket: UnixStream,
    offered: u64,
    config: Vec<u8>,
    memory: Ram,
    lines: Vec<ForeignQueue>,
    has_memory: bool,
    shared: Arc<WatchState>,
}

impl Foreign {
    /// Connects to a server.
    ///
    /// # Errors
    /// Nobody listens there, or whoever does is no server of such a device.
    pub fn connect(path: &Path, nature: Nature) -> Result<Self, VhostUserError> {
        let name = format!("vhost-user:{}", path.display());
        let socket = UnixStream::connect(path).map_err(|error| {
            let why = format!("no server can be reached ({error}); start it before the machine");
            VhostUserError::Refused(format!("{name}: {why}"))
        })?;
        Self::at(socket, &name, nature)
    }

    /// The device of the server at the other end, which errors call `name`.
    ///
    /// # Errors
    /// It is no server of such a device.
    pub fn at(socket: UnixStream, name: &str, nature: Nature) -> Result<Self, VhostUserError> {
        let problem = |problem: String| VhostUserError::Refused(format!("{name}: {problem}"));
        let mut frontend = Frontend::from_stream(socket.try_clone()?, nature.queues.len() as u64);
        let greeted = within(&socket, PATIENCE, || greet(&mut frontend, &nature));
        let (offered, config) =
            greeted.unwrap_or_else(|| Err(stranger(late()))).map_err(problem)?;
        let memory = Shadow::memory(nature.queues.len()).map_err(io::Error::other)?;
        let lines = (0..nature.queues.len()).map(|index| ForeignQueue::new(&memory, index));
        let lines = lines.collect::<io::Result<Vec<_>>>()?;
        let shared = Arc::new(WatchState::default());
        watch(socket.try_clone()?, &lines, &shared)?;
        let has_memory = false;
        Ok(Self { nature, frontend, socket, offered, config, memory, lines, has_memory, shared })
    }

    /// A function that sets how the transport is told of what the server has done.
    pub fn connector(&self) -> impl FnOnce(Doorbell) + Send + use<> {
        let shared = Arc::clone(&self.shared);
        // It is connected once.
        move |doorbell| drop(shared.doorbell.set(doorbell))
    }

    /// A function that hangs up, once nobody asks the server for anything any more.
    ///
    /// # Errors
    /// The host gives no descriptor.
    pub fn releaser(&self) -> io::Result<impl FnOnce() + Send + use<>> {
        let (socket, shared) = (self.socket.try_clone()?, Arc::clone(&self.shared));
        Ok(move || {
            shared.gone.store(true, Ordering::Release);
            // One that has hung up needs no hanging up.
            let _ = socket.shutdown(Shutdown::Both);
        })
    }

    fn is_gone(&self) -> bool {
        self.shared.gone.load(Ordering::Acquire)
    }

    fn give_up(&self, problem: &str) {
        if !self.shared.gone.swap(true, Ordering::AcqRel) {
            tracing::error!(device = self.nature.name, problem, "another program's server");
            // One that has hung up needs no hanging up.
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }

    /// Tells the server something: one that cannot be told is as good as gone.
    fn tell(&mut self, what: impl FnOnce(&mut Self) -> Result<(), vhost::Error>) {
        if self.is_gone() {
            return;
        }
        let told = self.socket.try_clone();
        let told = told
            .map_err(|error| error.to_string())
            .and_then(|socket| within(&socket, PATIENCE, || what(self)).ok_or_else(late))
            .and_then(|told| told.map_err(|error| error.to_string()));
        if let Err(problem) = told {
            self.give_up(&problem);
        }
    }

    fn start(&mut self, index: usize) -> Result<(), vhost::Error> {
        if !self.has_memory {
            let memory = &self.memory;
            let [object, ..] = memory.descriptors().map_err(vhost::Error::IOError)?;
            self.frontend.set_mem_table(&[region(BASE, memory.len(), 0, object)])?;
            self.has_memory = true;
        }
        let line = &mut self.lines[index];
        let shape = line.shadow.shape(BASE);
        let bells = Bells { kick: &line.kick, call: &line.call, error: None };
        serve_ring(&mut self.frontend, index, SIZE, shape, 0, &bells)?;
        line.running = true;
        Ok(())
    }

    /// Gives the guest what the server has done, and the server what the guest wants.
    fn relay(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        self.give_back(index, queue)?;
        let before = self.lines[index].shadow.offered();
        while let Some(chain) = queue.pop()? {
            if !Shadow::fits(&chain) {
                tracing::warn!(device = self.nature.name, "refused a request that is too long");
                self.refuse(chain, queue)?;
                continue;
            }
            let shadow = &mut self.lines[index].shadow;
            if let Some(chain) = shadow.offer(BASE, chain, queue.memory())? {
                queue.put_back(chain);
                break;
            }
        }
        let line = &self.lines[index];
        if line.shadow.offered() != before {
            // One that has been rung 2^64 times will be looked at anyway.
            let _ = line.kick.write(1);
        }
        Ok(())
    }

    /// Together, since a frame's buffers are told of together.
    fn give_back(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        let shadow = &mut self.lines[index].shadow;
        let mut done = Vec::new();
        for _ in 0..shadow.waiting()? {
            match shadow.take(queue.memory(), self.nature.whole_answers) {
                Ok(taken) => done.extend(taken),
                Err(RingError::Elsewhere) => {
                    self.give_up("it gave a request back that it did not have");
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        queue.complete_together(done)
    }

    fn refuse(&self, chain: Chain, queue: &mut Queue) -> Result<(), RingError> {
        let written = (self.nature.refuse)(&chain, queue.memory())?;
        queue.complete(chain, written)
    }

    fn refuse_all(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        if self.nature.patient == Some(index) {
            return Ok(());
        }
        for chain in self.lines[index].shadow.take_all() {
            self.refuse(chain, queue)?;
        }
        while let Some(chain) = queue.pop()? {
            self.refuse(chain, queue)?;
        }
        Ok(())
    }

    /// Has the server stop a queue, with nothing left in its hands.
    fn halt(&mut self, index: usize) {
        if !std::mem::take(&mut self.lines[index].running) {
            return;
        }
        if self.nature.patient != Some(index) {
            self.drain(index);
        }
        self.tell(|foreign| foreign.frontend.get_vring_base(index).map(drop));
    }

    /// Waits for what the server has; the guest does not want it any more.
    fn drain(&mut self, index: usize) {
        let deadline = Instant::now() + PATIENCE;
        while !self.lines[index].shadow.is_idle() && !self.is_gone() {
            match self.lines[index].shadow.returned() {
                Ok(Some(_)) => {}
                Ok(None) if Instant::now() < deadline => thread::sleep(GLANCE),
                Ok(None) => self.give_up("it does not give back what it has"),
                Err(error) => self.give_up(&error.to_string()),
            }
        }
    }
}

impl ForeignQueue {
    fn new(memory: &Ram, index: usize) -> io::Result<Self> {
        let event = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        let shadow = Shadow::new(memory, index).map_err(io::Error::other)?;
        Ok(Self { shadow, kick: event()?, call: event()?, running: false })
    }
}

impl VirtioDevice for Foreign {
    fn device_type(&self) -> u16 {
        self.nature.device_type
    }

    fn class(&self) -> u32 {
        self.nature.class
    }

    fn features(&self) -> u64 {
        self.offered & self.nature.passed | self.nature.ours
    }

    fn queue_sizes(&self) -> &[u16] {
        self.nature.queues
    }

    fn config(&self) -> Vec<u8> {
        self.config.clone()
    }

    fn negotiated(&mut self, features: u64) {
        let ours = VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let agreed = (features & self.nature.passed | ours) & self.offered;
        self.tell(|foreign| foreign.frontend.set_features(agreed));
    }

    fn process(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        if !self.lines[index].running {
            self.tell(|foreign| foreign.start(index));
        }
        if !self.is_gone() {
            self.relay(index, queue)?;
        }
        if self.is_gone() { self.refuse_all(index, queue) } else { Ok(()) }
    }

    // A queue that is stopped needs nothing: the server does not touch the guest's memory, and we do so only when it is processed.

    fn forget(&mut self, index: usize) {
        self.halt(index);
        match Shadow::new(&self.memory, index) {
            Ok(shadow) => self.lines[index].shadow = shadow,
            Err(error) => self.give_up(&error.to_string()),
        }
    }

    fn reset(&mut self) {
        (0..self.lines.len()).for_each(|index| self.forget(index));
    }
}

fn late() -> String {
    format!("it has not answered for {} s", PATIENCE.as_secs())
}

fn stranger(problem: impl Display) -> String {
    format!("it does not answer as a vhost-user server ({problem})")
}

/// The first words: what the server offers, and the configuration structure; or what is wrong with it.
fn greet(frontend: &mut Frontend, nature: &Nature) -> Result<(u64, Vec<u8>), String> {
    frontend.set_owner().map_err(stranger)?;
    let offered = frontend.get_features().map_err(stranger)?;
    let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    if offered & VERSION_1 == 0 || offered & protocol == 0 {
        return Err(format!("it lacks virtio 1.0 or protocol features (it has {offered:#x})"));
    }
    let unknown = offered & OF_TYPES & !nature.known;
    if unknown != 0 {
        let name = nature.name;
        return Err(format!(
            "it offers what no {name} has ({unknown:#x}); it serves another device"
        ));
    }
    let has = frontend.get_protocol_features().map_err(stranger)?;
    let wanted = has & VhostUserProtocolFeatures::CONFIG;
    frontend.set_protocol_features(wanted).map_err(stranger)?;
    let len = match &nature.config {
        ConfigSource::Known(config) => return Ok((offered, config.clone())),
        ConfigSource::Asked(len) => *len,
    };
    let name = nature.name;
    let other = |_| format!("it does not say what its {name} is like; it serves another device");
    if wanted.is_empty() {
        return Err(other(()));
    }
    let (flags, room) = (VhostUserConfigFlags::empty(), vec![0; len as usize]);
    let config = frontend.get_config(0, len, flags, &room);
    config.map(|(_, config)| (offered, config)).map_err(|_| other(()))
}

/// Starts the thread that rings the transport when the server calls, or has hung up.
fn watch(socket: UnixStream, lines: &[ForeignQueue], shared: &Arc<WatchState>) -> io::Result<()> {
    let epoll = Epoll::new()?;
    let add = |fd: RawFd, what, number| {
        epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(what, number))
    };
    add(socket.as_raw_fd(), EventSet::READ_HANG_UP, lines.len() as u64)?;
    let mut calls = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let call = line.call.try_clone()?;
        add(call.as_raw_fd(), EventSet::IN, index as u64)?;
        calls.push(call);
    }
    let shared = Arc::clone(shared);
    thread::Builder::new().name("foreign".into()).spawn(move || {
        // It must stay open to be watched.
        let _socket = socket;
        if let Err(error) = pass_on(&epoll, &calls, &shared) {
            tracing::error!(%error, "another program's server is not watched any more");
        }
        shared.gone.store(true, Ordering::Release);
        (0..calls.len()).for_each(|index| shared.ring(index));
    })?;
    Ok(())
}

/// Rings the transport when the server calls, until it hangs up.
fn pass_on(epoll: &Epoll, calls: &[EventFd], shared: &WatchState) -> io::Result<()> {
    let mut events = [EpollEvent::default(); 16];
    loop {
        let count = match epoll.wait(-1, &mut events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        for event in events.iter().take(count) {
            let index = event.data() as usize;
            let Some(call) = calls.get(index) else {
                if !shared.gone.load(Ordering::Acquire) {
                    tracing::error!("another program's server has hung up");
                }
                return Ok(());
            };
            // How often it called does not matter.
            let _ = call.read();
            shared.ring(index);
        }
    }
}

impl WatchState {
    fn ring(&self, index: usize) {
        self.doorbell.get().into_iter().for_each(|doorbell| doorbell.ring(index));
    }
}
