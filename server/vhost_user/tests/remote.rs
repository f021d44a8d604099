//! A driver, a device in the monitor's place of which another thread serves, and servers that end in the middle.

#[path = "../../../machine/virtio/tests/driver/mod.rs"]
mod driver;

use std::{
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use contract::GuestRam;
use driver::{DRIVER_OK, EVENT_IDX, NEEDS_RESET, Ring, SIZE, TestMachine, VERSION_1};
use rustix::{
    process::Pid,
    thread::{CpuSet, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity},
};
use vhost_user::{
    Bell, Identity, Nearness, Process, Remote, Reserve, Spawn, Started, VhostUserError, serve,
};
use virtio::{LogReader, Queue, RingError, VirtioDevice};

const BUFFER: u64 = 0x20_0000;
const ANSWER: u64 = 0x20_1000;
const FEATURE: u64 = 1 << 5;
const QUEUES: [u16; 2] = [SIZE, SIZE];
/// How long a server may be mute, and longer than any test that goes well takes.
const PATIENCE: Duration = Duration::from_secs(2);
const AGES: Duration = Duration::from_secs(20);

/// What the tests know of all servers there have been.
#[derive(Default)]
struct Host {
    started: AtomicUsize,
    irreplaceable: AtomicUsize,
    /// So many of them end at their next request, with it in their hands.
    doomed: AtomicUsize,
    served: AtomicUsize,
    negotiated: Mutex<Vec<u64>>,
    /// The next request keeps its server busy until that is ended, or for ages.
    sticky: AtomicBool,
    ended: AtomicUsize,
    /// What they answer with is not there yet.
    has_nothing: AtomicBool,
    /// Nobody waits for what queue 0 is asked.
    is_patient: AtomicBool,
    /// Rings the last of them.
    ringer: Mutex<Option<Box<dyn Fn() + Send>>>,
}

/// Answers each request by its bytes, each one higher.
struct Adder {
    host: Arc<Host>,
    socket: UnixStream,
    configuration: [u8; 4],
}

impl VirtioDevice for Adder {
    fn device_type(&self) -> u16 {
        4
    }
    fn class(&self) -> u32 {
        0xff_00_00
    }
    fn features(&self) -> u64 {
        FEATURE
    }
    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }
    fn config(&self) -> Vec<u8> {
        self.configuration.to_vec()
    }
    fn config_write(&mut self, offset: usize, data: &[u8]) {
        self.configuration[offset..offset + data.len()].copy_from_slice(data);
    }
    fn negotiated(&mut self, features: u64) {
        self.host.negotiated.lock().unwrap().push(features);
    }
    fn is_replaceable(&self) -> bool {
        self.host.irreplaceable.load(Ordering::SeqCst) == 0
    }
    fn is_patient(&self, index: usize) -> bool {
        index == 0 && self.host.is_patient.load(Ordering::SeqCst)
    }
    fn process(&mut self, _: usize, queue: &mut Queue) -> Result<(), RingError> {
        if self.host.has_nothing.load(Ordering::SeqCst) {
            return Ok(());
        }
        while let Some(chain) = queue.pop()? {
            if self.host.sticky.swap(false, Ordering::SeqCst) {
                self.host.hangs();
                return Ok(());
            }
            let less = |doomed: usize| doomed.checked_sub(1);
            if self.host.doomed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
                self.socket.shutdown(Shutdown::Both).unwrap();
                return Ok(());
            }
            let mut data = vec![0; chain.readable.len() as usize];
            chain.readable.read(queue.memory(), 0, &mut data)?;
            data.iter_mut().for_each(|byte| *byte += 1);
            chain.writable.write(queue.memory(), 0, &data)?;
            queue.complete(chain, data.len() as u32)?;
            self.host.served.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    }
}

impl Host {
    fn hangs(&self) {
        let (before, start) = (self.ended.load(Ordering::SeqCst), Instant::now());
        while self.ended.load(Ordering::SeqCst) == before && start.elapsed() < AGES {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Stands for a process: dropped, it has ended.
struct Thread(Arc<Host>, Option<JoinHandle<()>>, Pid);

impl Process for Thread {
    fn id(&self) -> Option<u32> {
        Some(self.2.as_raw_nonzero().get() as u32)
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
        self.1.take().into_iter().for_each(|thread| thread.join().unwrap());
    }
}

fn spawner(host: &Arc<Host>) -> Spawn {
    let host = Arc::clone(host);
    Box::new(move || {
        let (socket, theirs) = UnixStream::pair()?;
        host.started.fetch_add(1, Ordering::SeqCst);
        let device =
            Adder { host: Arc::clone(&host), socket: theirs.try_clone()?, configuration: [7; 4] };
        let (identity, bell) = (Identity::of(&device), Bell::new(1)?);
        *host.ringer.lock().unwrap() = Some(Box::new(bell.ringer()));
        let (tell, told) = mpsc::channel();
        let thread = thread::spawn(move || {
            tell.send(gettid()).unwrap();
            drop(serve(Box::new(device), Some(bell), theirs));
        });
        let process = Box::new(Thread(Arc::clone(&host), Some(thread), told.recv().unwrap()));
        Ok(Started { socket, identity, patience: PATIENCE, process })
    })
}

struct Bench {
    host: Arc<Host>,
    machine: TestMachine,
    rings: Vec<Ring>,
}

impl Bench {
    fn new() -> Self {
        Self::with(Host::default(), None)
    }

    fn with(host: Host, reserve: Option<Reserve>) -> Self {
        Self::of(host, reserve, Nearness::Apart)
    }

    fn of(host: Host, reserve: Option<Reserve>, nearness: Nearness) -> Self {
        let host = Arc::new(host);
        let remote = Remote::new(spawner(&host), reserve).expect("a server");
        remote.come_near(nearness);
        let connect = remote.connector();
        let mut machine = TestMachine::new(remote);
        connect(machine.doorbell.clone());
        machine.enable_msix(3);
        let rings = machine.start(VERSION_1 | FEATURE);
        machine.set_common(16, &0_u16.to_le_bytes());
        Self { host, machine, rings }
    }

    /// Offers a request to a queue and rings.
    fn asks(&mut self, queue: usize, data: &[u8]) {
        self.machine.ram.write_gpa(BUFFER, data).unwrap();
        let len = data.len() as u32;
        self.rings[queue].offer_chain(&[(BUFFER, len, false), (ANSWER, len, true)]);
        self.machine.notify(queue as u16);
    }

    fn answered(&mut self, queue: usize) -> Vec<u8> {
        let (_, len) = until(|| self.rings[queue].take_used());
        let mut answer = vec![0; len as usize];
        self.machine.ram.read_gpa(ANSWER, &mut answer).unwrap();
        answer
    }

    fn is_served(&mut self, queue: usize, data: &[u8]) {
        self.asks(queue, data);
        let expected: Vec<_> = data.iter().map(|byte| byte + 1).collect();
        assert_eq!(self.answered(queue), expected);
    }
}

/// Has the server of queue 0 hang, and resets the device.
fn hang_and_reset(bench: &mut Bench) {
    bench.is_served(0, b"before");
    bench.host.sticky.store(true, Ordering::SeqCst);
    bench.asks(0, b"during");
    until(|| (!bench.host.sticky.load(Ordering::SeqCst)).then_some(()));
    let start = Instant::now();
    bench.rings = bench.machine.start(VERSION_1 | FEATURE);
    assert!(start.elapsed() < AGES / 2, "the driver waited for {:?}", start.elapsed());
}

/// The same, without sleeping.
fn until_soon<T>(mut is_there: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + AGES;
    loop {
        match is_there() {
            Some(found) => return found,
            None => assert!(Instant::now() < deadline, "it never came"),
        }
        thread::yield_now();
    }
}

/// Waits until there is something.
fn until<T>(mut is_there: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match is_there() {
            Some(found) => return found,
            None => assert!(Instant::now() < deadline, "it never came"),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn requests_are_served_elsewhere_and_the_driver_is_told() {
    let mut bench = Bench::new();
    assert_eq!(bench.machine.offered() & 0xff_ffff, FEATURE);
    assert_eq!(bench.machine.device_config::<4>(0), [7; 4]);
    assert_eq!(*bench.host.negotiated.lock().unwrap(), [VERSION_1 | FEATURE]);
    for (number, queue) in [0, 1, 0, 0, 1].into_iter().enumerate() {
        bench.is_served(queue, &[number as u8; 3000]);
        let data = until(|| bench.machine.take_messages().pop());
        assert_eq!(data, 0x41 + queue as u32, "the queue's own vector");
    }
    let structure = bench.machine.structure(4);
    bench.machine.mmio_write(structure + 1, &[9]);
    assert_eq!(bench.machine.device_config::<4>(0), [7, 9, 7, 7], "the server has it");
}

#[test]
fn what_nobody_waits_for_needs_no_doorbells_and_few_interrupts_and_is_served_all_the_same() {
    let mut bench = Bench::with(Host::default(), None);
    bench.host.is_patient.store(true, Ordering::SeqCst);
    bench.rings = bench.machine.start(VERSION_1 | FEATURE | EVENT_IDX);
    // The driver would be told of each.
    bench.rings[0].set_used_event(0);
    bench.asks(0, b"first");
    bench.answered(0);
    let (start, mut quiet, mut number) = (Instant::now(), 0, 1);
    while quiet < 6 {
        assert!(start.elapsed() < AGES, "it has to ring each time");
        bench.rings[0].set_used_event(number);
        bench.rings[0].offer_chain(&[(BUFFER, 4, false), (ANSWER, 4, true)]);
        if bench.rings[0].available_event() == number {
            bench.machine.notify(0);
        } else {
            quiet += 1;
            // It is served along with another queue, and otherwise in a while.
            if quiet % 2 == 0 {
                bench.is_served(1, b"other");
            }
        }
        bench.answered(0);
        number += 1;
    }
    until(|| (bench.rings[0].available_event() == number).then_some(()));
    until(|| bench.machine.take_messages().contains(&0x41).then_some(()));
}

#[test]
fn a_server_that_ends_in_the_middle_of_a_request_is_replaced_and_the_request_is_served() {
    let mut bench = Bench::new();
    let structure = bench.machine.structure(4);
    bench.machine.mmio_write(structure, &[1]);
    bench.is_served(0, b"before");
    bench.is_served(1, b"other");
    let (log, mut noted) = (LogReader::new(bench.machine.log.clone()), [0; 2]);
    for round in 1..=3 {
        bench.host.doomed.store(1, Ordering::SeqCst);
        bench.is_served(0, b"during");
        assert_eq!(bench.host.started.load(Ordering::SeqCst), 1 + round);
        bench.is_served(1, b"after");
    }
    assert_eq!(log.read(|note| noted[usize::from(note.is_end)] += 1), 0);
    // Three servers have ended with a request that the next one has taken again.
    assert_eq!(noted, [9, 6], "requests that were taken, and given back");
    assert_eq!(bench.host.served.load(Ordering::SeqCst), 8, "each once");
    assert_eq!(bench.machine.device_config::<4>(0), [1, 7, 7, 7], "what the driver wrote stays");
    let second = bench.machine.ram.words_start() + ram::PAGE;
    assert_eq!(bench.machine.ram.take_words(), Some(second), "all servers had the same words");
    assert_eq!(bench.machine.status() & NEEDS_RESET, 0);
}

#[test]
fn a_server_that_ends_time_and_again_is_given_up_and_the_driver_told() {
    let mut bench = Bench::new();
    bench.is_served(0, b"before");
    bench.host.doomed.store(100, Ordering::SeqCst);
    bench.asks(0, b"during");
    until(|| (bench.machine.status() & NEEDS_RESET != 0).then_some(()));
    let started = bench.host.started.load(Ordering::SeqCst);
    assert!((3..20).contains(&started), "{started} servers");
    until(|| bench.machine.take_messages().contains(&0x40).then_some(()));
    // The rest of the machine goes on: the driver can look at the device, and give it up.
    bench.machine.set_status(0);
    assert_eq!(bench.machine.status(), 0);
}

/// Gives every request back with nothing in it, one a turn.
#[derive(Default)]
struct Nothing {
    due: Option<usize>,
}

impl VirtioDevice for Nothing {
    fn device_type(&self) -> u16 {
        4
    }
    fn class(&self) -> u32 {
        0xff_00_00
    }
    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }
    fn process(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        if let Some(chain) = queue.pop()? {
            queue.complete(chain, 0)?;
            self.due = Some(index);
        }
        Ok(())
    }
    fn take_due(&mut self) -> Option<usize> {
        self.due.take()
    }
}

#[test]
fn a_server_that_cannot_be_replaced_is_not_and_the_reserve_answers() {
    let host = Host { irreplaceable: AtomicUsize::new(1), ..Host::default() };
    let mut bench = Bench::with(host, Some(|_| Box::<Nothing>::default()));
    bench.is_served(0, b"before");
    bench.is_served(1, b"before");
    bench.host.doomed.store(1, Ordering::SeqCst);
    bench.asks(0, b"during");
    assert_eq!(bench.answered(0), b"", "the request it had in its hands");
    for queue in [0, 1, 1, 0] {
        bench.asks(queue, b"after");
        assert_eq!(bench.answered(queue), b"");
    }
    (0..3).for_each(|_| bench.rings[1].offer_chain(&[(ANSWER, 1, true)]));
    bench.asks(1, b"with others");
    (0..4).for_each(|_| assert_eq!(bench.answered(1), b"", "there was more"));
    assert_eq!(bench.host.started.load(Ordering::SeqCst), 1, "there was no other");
    assert_eq!(bench.machine.status() & NEEDS_RESET, 0);
    bench.rings = bench.machine.start(VERSION_1 | FEATURE);
    bench.asks(0, b"after a reset");
    assert_eq!(bench.answered(0), b"");
}

#[test]
fn a_driver_that_breaks_its_queue_needs_a_reset_and_has_the_device_again() {
    let mut bench = Bench::new();
    bench.is_served(0, b"before");
    let available = bench.rings[0].available;
    bench.rings[0].write16(available + 2, 0x7777);
    bench.machine.notify(0);
    until(|| (bench.machine.status() & NEEDS_RESET != 0).then_some(()));
    bench.rings = bench.machine.start(VERSION_1 | FEATURE);
    assert_eq!(bench.machine.status() & (NEEDS_RESET | DRIVER_OK), DRIVER_OK);
    bench.is_served(0, b"after");
    bench.is_served(1, b"after");
    assert_eq!(bench.host.started.load(Ordering::SeqCst), 1, "the server was not at fault");
}

#[test]
fn without_bus_mastering_nothing_is_touched() {
    let mut bench = Bench::new();
    bench.is_served(0, b"before");
    bench.machine.set_config(4, 0x0002);
    bench.asks(0, b"during");
    thread::sleep(Duration::from_millis(50));
    assert!(bench.rings[0].take_used().is_none());
    bench.machine.set_config(4, 0x0006);
    assert_eq!(bench.answered(0), b"evsjoh");
}

/// Code that is read from a disk is as new as code that is stored.
#[test]
fn what_a_server_writes_over_code_is_known_to_be_stale() {
    let mut bench = Bench::new();
    bench.is_served(0, b"before");
    bench.machine.ram.take_stale_code();
    bench.machine.ram.mark_code(ANSWER);
    bench.is_served(0, b"during");
    assert_eq!(bench.machine.ram.take_stale_code(), [ANSWER]);
}

#[test]
fn what_the_host_has_for_a_queue_reaches_it() {
    let mut bench = Bench::new();
    bench.is_served(1, b"before");
    bench.host.has_nothing.store(true, Ordering::SeqCst);
    bench.asks(1, b"during");
    thread::sleep(Duration::from_millis(50));
    assert!(bench.rings[1].take_used().is_none(), "there is nothing yet");
    bench.host.has_nothing.store(false, Ordering::SeqCst);
    let ring = bench.host.ringer.lock().unwrap().take().expect("a server");
    ring();
    assert_eq!(bench.answered(1), b"evsjoh");
}

/// The driver stays on one CPU, as a vCPU does as a rule. A server that is near answers while the driver rings, and what it does not answer
/// then, it answers later.
fn answers_while_the_driver_rings(nearness: Nearness) {
    const TIMES: usize = 200;
    const ROUNDS: usize = 20;
    if thread::available_parallelism().is_ok_and(|cpus| cpus.get() < 2) {
        return; // there is no other CPU, and all is as in the other tests
    }
    let mut bench = Bench::of(Host::default(), None, nearness);
    let before = sched_getaffinity(None).expect("known");
    let mut one = CpuSet::new();
    one.set(sched_getcpu());
    sched_setaffinity(None, &one).expect("allowed");
    let mut at_once = 0;
    // Something else may have the other CPU for a while, as another test's server.
    for _ in 0..ROUNDS {
        at_once = 0;
        for _ in 0..TIMES {
            bench.asks(0, b"request");
            at_once += bench.machine.take_messages().len();
            assert_eq!(bench.answered(0), b"sfrvftu");
            if at_once == 0 {
                until(|| bench.machine.take_messages().pop());
            }
        }
        if at_once > TIMES / 4 {
            break;
        }
        thread::sleep(Duration::from_millis(200));
    }
    assert!(at_once > TIMES / 4, "{at_once} of {TIMES} answers were there at once");
    bench.machine.take_messages();
    bench.host.has_nothing.store(true, Ordering::SeqCst);
    bench.asks(1, b"during");
    assert!(bench.machine.take_messages().is_empty(), "there is nothing yet");
    bench.host.has_nothing.store(false, Ordering::SeqCst);
    let ring = bench.host.ringer.lock().unwrap().take().expect("a server");
    ring();
    assert_eq!(until(|| bench.machine.take_messages().pop()), 0x42, "it is told all the same");
    assert_eq!(bench.answered(1), b"evsjoh");
    bench.host.doomed.store(1, Ordering::SeqCst);
    bench.is_served(0, b"its successor's");
    assert_eq!(bench.host.started.load(Ordering::SeqCst), 2);
    sched_setaffinity(None, &before).expect("allowed");
}

#[test]
fn a_server_on_the_same_cpu_is_waited_for_a_moment() {
    answers_while_the_driver_rings(Nearness::SameCpu);
}

/// And no request is lost at the end of the moment in which a server looks without being rung for.
#[test]
fn a_server_beside_the_vcpu_looks_for_requests_by_itself() {
    answers_while_the_driver_rings(Nearness::Near);
    let mut bench = Bench::of(Host::default(), None, Nearness::Near);
    for number in 0..3000_u32 {
        bench.asks(0, b"request");
        let answer = until_soon(|| bench.rings[0].take_used());
        assert_eq!(answer.1, 7);
        // As long as a server looks, more or less.
        let pause = Duration::from_micros((number % 100).into());
        let start = Instant::now();
        while start.elapsed() < pause {}
    }
}

#[test]
fn a_server_that_hangs_is_replaced_once_it_is_waited_for() {
    let mut bench = Bench::new();
    hang_and_reset(&mut bench);
    bench.is_served(0, b"after");
    bench.is_served(1, b"after");
    assert_eq!(bench.host.started.load(Ordering::SeqCst), 2);
    assert_eq!(bench.machine.status() & NEEDS_RESET, 0);
}

#[test]
fn a_server_that_hangs_and_cannot_be_replaced_is_given_up() {
    let host = Host { irreplaceable: AtomicUsize::new(1), ..Host::default() };
    let mut bench = Bench::with(host, Some(|_| Box::<Nothing>::default()));
    hang_and_reset(&mut bench);
    bench.asks(0, b"after");
    assert_eq!(bench.answered(0), b"", "the reserve's");
    assert_eq!(bench.host.started.load(Ordering::SeqCst), 1);
}

/// One that is mute from the first.
#[test]
fn a_server_that_does_not_greet_is_none() {
    let device = Nothing::default();
    let identity = Identity::of(&device);
    let others = Mutex::new(Vec::new());
    let spawn: Spawn = Box::new(move || {
        let (socket, theirs) = UnixStream::pair()?;
        others.lock().unwrap().push(theirs);
        let process = Box::new(Thread(Arc::default(), None, gettid()));
        Ok(Started { socket, identity: identity.clone(), patience: PATIENCE, process })
    });
    let error = Remote::new(spawn, None).err().expect("mute").to_string();
    assert_eq!(error, "the process of a device has not answered for 2s");
}

/// Never comes back from a change of its configuration.
struct Stuck;

impl VirtioDevice for Stuck {
    fn device_type(&self) -> u16 {
        4
    }
    fn class(&self) -> u32 {
        0xff_00_00
    }
    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }
    fn config(&self) -> Vec<u8> {
        vec![0; 4]
    }
    fn config_write(&mut self, _: usize, _: &[u8]) {
        thread::sleep(3 * AGES);
    }
    fn process(&mut self, _: usize, _: &mut Queue) -> Result<(), RingError> {
        Ok(())
    }
}

/// A vCPU that waits for a server can end when the machine does.
#[test]
fn who_waits_for_a_server_that_stands_still_is_released() {
    let spawn: Spawn = Box::new(|| {
        let (socket, theirs) = UnixStream::pair()?;
        // It is left behind: nobody can end a thread.
        thread::spawn(move || serve(Box::new(Stuck), None, theirs));
        let process = Box::new(Thread(Arc::default(), None, gettid()));
        Ok(Started { socket, identity: Identity::of(&Stuck), patience: AGES, process })
    });
    let mut remote = Remote::new(spawn, None).unwrap_or_else(|error| panic!("{error}"));
    let (release, (done, waits)) = (remote.releaser(), mpsc::channel());
    thread::spawn(move || {
        remote.config_write(0, &[1]);
        // Its drop waits for nobody.
        done.send(()).unwrap();
    });
    assert!(waits.recv_timeout(Duration::from_millis(300)).is_err(), "it does not wait");
    let start = Instant::now();
    release();
    waits.recv_timeout(AGES).expect("released");
    assert!(start.elapsed() < AGES / 4, "after {:?}", start.elapsed());
}

#[test]
fn a_server_that_refuses_says_why() {
    let refuses = Box::new(|| Err(VhostUserError::Refused("no such disk".to_owned())));
    let refused = Remote::new(refuses, None);
    assert_eq!(refused.err().expect("refused").to_string(), "no such disk");
}
