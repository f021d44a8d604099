//! The monitor's end of the protocol: one server, what it has been told, and the next one, should it end.
//!
//! A server that is asked something and mute for too long is ended like one that hung up, since whoever asked holds up the guest. It is ended before
//! the question fails, so that nobody touches the guest's queues afterwards.

use std::{
    collections::BTreeMap,
    io,
    net::Shutdown,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ram::{HIGH_BASE, Ram};
use rustix::process::Pid;
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
        message::VhostUserConfigFlags,
    },
};
use virtio::{Interrupt, REQUEST_LOG_LEN, RequestLog, Shape};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::{
    Identity, LOG, MARKS, NOTES, Started, VhostUserError, WORDS,
    patience::within,
    words::{self, Words},
};

/// A server that ends this often in [`WHILE`] is given up.
const MOST_ENDS: usize = 5;
const WHILE: Duration = Duration::from_secs(60);

/// Starts a server.
pub type Spawn = Box<dyn Fn() -> Result<Started, VhostUserError> + Send>;

/// A process that is ended when this is dropped.
pub trait Process: Send {
    /// How it has ended, its socket being closed: "was killed by signal 9".
    fn fate(&mut self) -> String {
        "has ended".to_owned()
    }

    /// Its number, if it is one of its own whose place among the CPUs we may choose.
    fn id(&self) -> Option<u32> {
        None
    }
}

/// A queue that is served elsewhere, or was, or will be.
pub(crate) struct RemoteRing {
    kick: EventFd,
    pub(crate) call: EventFd,
    pub(crate) error: EventFd,
    /// Where it goes on when it is started again.
    base: u16,
    pub(crate) running: Option<Running>,
}

/// A queue while it is served.
pub(crate) struct Running {
    shape: Shape,
    pub(crate) interrupt: Interrupt,
}

impl RemoteRing {
    fn new() -> io::Result<Self> {
        let event = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        Ok(Self { kick: event()?, call: event()?, error: event()?, base: 0, running: None })
    }
}

/// The line to the server of the moment, for whoever has it end: others may hold the link and wait for that server's answer.
#[derive(Default)]
pub(crate) struct Line {
    closed: AtomicBool,
    socket: Mutex<Option<UnixStream>>,
}

impl Line {
    fn socket(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// To this server from now on.
    fn leads_to(&self, socket: &UnixStream) -> io::Result<()> {
        *self.socket() = Some(socket.try_clone()?);
        if self.is_closed() {
            self.close();
        }
        Ok(())
    }

    /// Hangs up, on every server to come, too.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        if let Some(socket) = &*self.socket() {
            // One that has ended already needs no hanging up.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// A server with all that makes another take its place.
pub(crate) struct Link {
    spawn: Spawn,
    frontend: Frontend,
    pub(crate) socket: UnixStream,
    process: Option<Box<dyn Process>>,
    /// How long it may take to answer.
    patience: Duration,
    line: Arc<Line>,
    pub(crate) identity: Identity,
    pub(crate) offered: u64,
    /// Features negotiated, if they have been.
    features: Option<u64>,
    /// What the driver wrote into the configuration structure.
    written: BTreeMap<usize, Vec<u8>>,
    memory: Option<Ram>,
    /// What servers and we tell each other without events.
    pub(crate) words: Arc<Words>,
    /// Where servers note requests.
    pub(crate) log: Option<Arc<RequestLog>>,
    pub(crate) rings: Vec<RemoteRing>,
    ends: Vec<Instant>,
    /// It has told of a queue that the driver broke.
    pub(crate) broken: bool,
    /// There is no server any more, and there will be none.
    pub(crate) gone: bool,
}

impl Link {
    pub(crate) fn new(spawn: Spawn) -> Result<Self, VhostUserError> {
        let Started { socket, identity, patience, process } = spawn()?;
        let rings = identity.queues.iter().map(|_| RemoteRing::new()).collect::<Result<_, _>>()?;
        let (frontend, socket) = connect(socket, &identity)?;
        let mut link = Self {
            spawn,
            frontend,
            socket,
            process: Some(process),
            patience,
            line: Arc::new(Line::default()),
            identity,
            offered: 0,
            features: None,
            written: BTreeMap::new(),
            memory: None,
            words: Arc::new(Words::new()?),
            log: None,
            rings,
            ends: Vec::new(),
            broken: false,
            gone: false,
        };
        link.line.leads_to(&link.socket)?;
        link.offered = link.ask(greet)?;
        Ok(link)
    }

    /// By which the server can be hung up on while somebody waits for its answer.
    pub(crate) fn line(&self) -> Arc<Line> {
        Arc::clone(&self.line)
    }

    /// Asks the server, or tells it something. If it is mute it has ended when this returns.
    fn ask<T, E>(
        &mut self,
        what: impl FnOnce(&mut Frontend) -> Result<T, E>,
    ) -> Result<T, VhostUserError>
    where
        VhostUserError: From<E>,
    {
        let Some(answer) = within(&self.socket, self.patience, || what(&mut self.frontend)) else {
            self.process = None;
            return Err(VhostUserError::Mute(self.patience));
        };
        Ok(answer?)
    }

    /// What is due when a queue's server calls.
    pub(crate) fn called(&self, index: usize) -> Option<Interrupt> {
        // How often it called does not matter.
        let _ = self.rings.get(index)?.call.read();
        self.interrupt(index)
    }

    /// By which the driver is told of a queue's answers.
    pub(crate) fn interrupt(&self, index: usize) -> Option<Interrupt> {
        let running = self.rings.get(index)?.running.as_ref()?;
        Some(Arc::clone(&running.interrupt))
    }

    /// Whether the server says that the driver broke a queue.
    pub(crate) fn broke(&self, index: usize) -> bool {
        self.rings.get(index).is_some_and(|ring| ring.error.read().is_ok())
    }

    /// Waits until the server has ended, which is hung up on.
    pub(crate) fn close(&mut self) {
        self.process = None;
    }

    pub(crate) fn config(&mut self) -> Result<Vec<u8>, VhostUserError> {
        let room = vec![0; self.identity.config];
        if room.is_empty() {
            return Ok(room);
        }
        let flags = VhostUserConfigFlags::empty();
        let (_, config) =
            self.ask(|server| server.get_config(0, room.len() as u32, flags, &room))?;
        Ok(config)
    }

    pub(crate) fn write_config(
        &mut self,
        offset: usize,
        data: &[u8],
    ) -> Result<(), VhostUserError> {
        self.written.insert(offset, data.to_vec());
        if self.gone {
            return Ok(());
        }
        self.send_config(offset, data)
    }

    fn send_config(&mut self, offset: usize, data: &[u8]) -> Result<(), VhostUserError> {
        let flags = VhostUserConfigFlags::WRITABLE;
        self.ask(|server| server.set_config(offset as u32, flags, data))
    }

    pub(crate) fn negotiated(&mut self, features: u64) -> Result<(), VhostUserError> {
        self.features = Some(features);
        if self.gone {
            return Ok(());
        }
        let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let agreed = features & self.offered | protocol;
        self.ask(|server| server.set_features(agreed))
    }

    pub(crate) fn is_running(&self, index: usize) -> bool {
        self.rings.get(index).is_some_and(|ring| ring.running.is_some())
    }

    /// Has a queue served from where it is.
    pub(crate) fn start(
        &mut self,
        index: usize,
        shape: Shape,
        interrupt: Interrupt,
        memory: &Ram,
    ) -> Result<(), VhostUserError> {
        if self.memory.is_none() {
            self.words = words_behind(memory).unwrap_or_else(|| Arc::clone(&self.words));
            self.send_memory(memory)?;
            self.memory = Some(memory.clone());
        }
        if let Some(ring) = self.rings.get_mut(index) {
            ring.running = Some(Running { shape, interrupt });
        }
        self.send_ring(index)
    }

    fn send_memory(&mut self, memory: &Ram) -> Result<(), VhostUserError> {
        let [object, marks, notes] = memory.descriptors()?;
        let mut regions = vec![region(0, memory.low_len(), 0, object)];
        if memory.high_len() > 0 {
            let (len, offset) = (memory.high_len(), memory.low_len());
            regions.push(region(HIGH_BASE, len, offset, object));
        }
        let pages = memory.len() / ram::PAGE;
        regions.push(region(MARKS, pages, 0, marks));
        regions.push(region(NOTES, pages, 0, notes));
        regions.push(region(WORDS, words::LEN, self.words.offset(), self.words.fd()));
        if let Some(log) = self.log.as_ref().and_then(|log| log.descriptor()) {
            regions.push(region(LOG, REQUEST_LOG_LEN, 0, log));
        }
        self.ask(|server| server.set_mem_table(&regions).map(drop))
    }

    fn send_ring(&mut self, index: usize) -> Result<(), VhostUserError> {
        let max = self.identity.queues.get(index).copied().unwrap_or_default();
        let Some(ring) = self.rings.get(index) else { return Ok(()) };
        let Some(Running { shape, .. }) = &ring.running else { return Ok(()) };
        let (shape, base) = (*shape, ring.base);
        self.words.clear(index);
        let (kick, call, error) =
            (ring.kick.try_clone()?, ring.call.try_clone()?, ring.error.try_clone()?);
        let bells = Bells { kick: &kick, call: &call, error: Some(&error) };
        self.ask(|server| serve_ring(server, index, max, shape, base, &bells))
    }

    /// The server's process.
    pub(crate) fn server(&self) -> Option<Pid> {
        let id = self.process.as_ref()?.id()?;
        Pid::from_raw(id.try_into().ok()?)
    }

    pub(crate) fn kick(&self, index: usize) {
        if let Some(ring) = self.rings.get(index) {
            // One that has been rung 2^64 times will be looked at anyway.
            let _ = ring.kick.write(1);
        }
    }

    /// Stops a queue; when this returns nobody touches it.
    pub(crate) fn stop(&mut self, index: usize) -> Result<(), VhostUserError> {
        if !self.is_running(index) {
            return Ok(());
        }
        let base = (!self.gone).then(|| self.ask(|server| server.get_vring_base(index)));
        let (Some(ring), Some(memory)) = (self.rings.get_mut(index), &self.memory) else {
            return Ok(());
        };
        // What has ended cannot say where it was, but what it gave back is known.
        ring.go_on(memory);
        ring.running = None;
        if let Some(base) = base {
            ring.base = base? as u16;
        }
        Ok(())
    }

    /// A queue that is made anew begins at its beginning.
    pub(crate) fn forget(&mut self, index: usize) {
        if let Some(ring) = self.rings.get_mut(index) {
            ring.base = 0;
        }
    }

    pub(crate) fn reset(&mut self) -> Result<(), VhostUserError> {
        // All of them, whatever becomes of one: another server is told of what runs.
        let stopped: Vec<_> = (0..self.rings.len()).map(|index| self.stop(index)).collect();
        (0..self.rings.len()).for_each(|index| self.forget(index));
        (self.features, self.broken) = (None, false);
        self.written.clear();
        if self.gone {
            return Ok(());
        }
        stopped.into_iter().collect::<Result<(), _>>()?;
        self.ask(|server| server.reset_device())
    }

    /// Another server in place of one that has ended, with every queue at its first request that was not given back.
    /// Returns the interrupts that are due: it may have ended between giving a request back and saying so. `None` if it was to end.
    pub(crate) fn start_anew(&mut self) -> Result<Option<Vec<Interrupt>>, VhostUserError> {
        if self.line.is_closed() {
            return Ok(None);
        }
        if !self.identity.replaceable {
            let fate =
                self.process.as_mut().map_or_else(|| "has ended".to_owned(), |own| own.fate());
            return Err(VhostUserError::Ended(fate));
        }
        loop {
            self.ends.retain(|end| end.elapsed() < WHILE);
            self.ends.push(Instant::now());
            if self.ends.len() > MOST_ENDS {
                let ends = self.ends.len();
                return Err(io::Error::other(format!("it has ended {ends} times")).into());
            }
            match self.start_another() {
                // This one has ended while it was told.
                Err(VhostUserError::Protocol(error)) => tracing::warn!(%error, "a device's server"),
                outcome => break outcome?,
            }
        }
        let running = self.rings.iter().filter_map(|ring| ring.running.as_ref());
        Ok(Some(running.map(|running| Arc::clone(&running.interrupt)).collect()))
    }

    fn start_another(&mut self) -> Result<(), VhostUserError> {
        // The last one has gone, and its locks with it, before its successor is asked for.
        self.process = None;
        let Started { socket, identity, patience, process } = (self.spawn)()?;
        if identity != self.identity {
            return Err(io::Error::other("what it serves has changed").into());
        }
        (self.frontend, self.socket) = connect(socket, &identity)?;
        (self.process, self.patience) = (Some(process), patience);
        self.line.leads_to(&self.socket)?;
        self.ask(greet)?;
        self.tell_again()
    }

    /// Tells a new server what the one before knew.
    fn tell_again(&mut self) -> Result<(), VhostUserError> {
        if let Some(features) = self.features {
            self.negotiated(features)?;
        }
        for (offset, data) in self.written.clone() {
            self.send_config(offset, &data)?;
        }
        let Some(memory) = self.memory.clone() else { return Ok(()) };
        self.send_memory(&memory)?;
        for index in 0..self.rings.len() {
            if let Some(ring) = self.rings.get_mut(index) {
                ring.go_on(&memory);
            }
            self.send_ring(index)?;
        }
        Ok(())
    }
}

impl RemoteRing {
    /// Sets where it goes on to what the used ring says has been given back.
    fn go_on(&mut self, memory: &Ram) {
        let Some(Running { shape, .. }) = &self.running else { return };
        let mut index = [0; 2];
        // The ring was checked to be RAM when it was started, and RAM stays.
        if memory.read_gpa(shape.used + 2, &mut index).is_ok() {
            self.base = u16::from_le_bytes(index);
        }
    }
}

/// Memory, as a server is told of it: it finds at `at` what the descriptor has from `offset` on.
pub(crate) fn region(
    at: u64,
    len: u64,
    offset: u64,
    fd: BorrowedFd<'_>,
) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: at,
        memory_size: len,
        userspace_addr: at,
        mmap_offset: offset,
        mmap_handle: fd.as_raw_fd(),
    }
}

/// The events of a queue.
pub(crate) struct Bells<'a> {
    pub(crate) kick: &'a EventFd,
    pub(crate) call: &'a EventFd,
    pub(crate) error: Option<&'a EventFd>,
}

/// Tells a server all of a queue, and has it served from the request that is `base` on.
pub(crate) fn serve_ring(
    frontend: &mut Frontend,
    index: usize,
    max: u16,
    shape: Shape,
    base: u16,
    bells: &Bells<'_>,
) -> Result<(), vhost::Error> {
    let place = VringConfigData {
        queue_max_size: max,
        queue_size: shape.size,
        flags: 0,
        desc_table_addr: shape.descriptors,
        used_ring_addr: shape.used,
        avail_ring_addr: shape.available,
        log_addr: None,
    };
    frontend.set_vring_num(index, shape.size)?;
    frontend.set_vring_addr(index, &place)?;
    frontend.set_vring_base(index, base)?;
    frontend.set_vring_call(index, bells.call)?;
    bells.error.map_or(Ok(()), |error| frontend.set_vring_err(index, error))?;
    frontend.set_vring_kick(index, bells.kick)?;
    frontend.set_vring_enable(index, true)
}

fn connect(
    socket: UnixStream,
    identity: &Identity,
) -> Result<(Frontend, UnixStream), VhostUserError> {
    let other = socket.try_clone()?;
    Ok((Frontend::from_stream(socket, identity.queues.len() as u64), other))
}

/// A page of words behind RAM for a device and its servers. Wedges map these pages, too. `None` if RAM has no page left, or the host
/// refuses to map one.
fn words_behind(memory: &Ram) -> Option<Arc<Words>> {
    let file = memory.object().descriptor()?.try_clone_to_owned().ok()?;
    Words::of_another(file.into(), memory.take_words()?).ok().map(Arc::new)
}

/// The first words; returns what the server offers.
fn greet(frontend: &mut Frontend) -> Result<u64, VhostUserError> {
    frontend.set_owner()?;
    let offered = frontend.get_features()?;
    let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::RESET_DEVICE;
    let has = frontend.get_protocol_features()?;
    if !has.contains(wanted) {
        return Err(io::Error::other("it lacks configuration or reset").into());
    }
    frontend.set_protocol_features(wanted)?;
    Ok(offered)
}
