//! A driver whose device a server at a socket serves, of which nothing is known: here ours, as another program's monitor has it.

#[path = "../../../machine/virtio/tests/driver/mod.rs"]
mod driver;

use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use contract::GuestRam;
use driver::{NEEDS_RESET, Ring, SIZE, TestMachine, VERSION_1};
use ram::DmaMemory;
use vhost_user::{ConfigSource, Foreign, Nature, serve};
use virtio::{Chain, Queue, RingError, VirtioDevice};
use vm_memory::{Bytes, GuestAddress};

const BUFFER: u64 = 0x20_0000;
const ANSWER: u64 = 0x30_0000;
const FEATURE: u64 = 1 << 5;
const HIDDEN: u64 = 1 << 6;
const OURS: u64 = 1 << 7;
const REFUSED: u8 = 0xee;

/// What a server does with its requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Answers each by its bytes, each one higher.
    Sound,
    /// So, but two at a time, the second first.
    Backwards,
    /// Ends with the first in its hands.
    Ends,
    /// Gives back what it was not asked.
    Lies,
}

struct Adder {
    manner: Manner,
    socket: UnixStream,
    held: Vec<Chain>,
    negotiated: Sender<u64>,
}

impl Adder {
    fn answer(chain: Chain, queue: &mut Queue) -> Result<(), RingError> {
        let mut data = vec![0; chain.readable.len() as usize];
        chain.readable.read(queue.memory(), 0, &mut data)?;
        data.iter_mut().for_each(|byte| *byte += 1);
        chain.writable.write(queue.memory(), 0, &data)?;
        queue.complete(chain, data.len() as u32)
    }

    fn lie(queue: &Queue) {
        let used = queue.shape().used;
        queue.memory().write_obj([77_u32, 4], GuestAddress(used + 4)).unwrap();
        queue.memory().write_obj(1_u16, GuestAddress(used + 2)).unwrap();
        queue.interrupt()();
    }
}

impl VirtioDevice for Adder {
    fn device_type(&self) -> u16 {
        4
    }
    fn class(&self) -> u32 {
        0xff_00_00
    }
    fn features(&self) -> u64 {
        FEATURE | HIDDEN
    }
    fn queue_sizes(&self) -> &[u16] {
        &[256, 256]
    }
    fn config(&self) -> Vec<u8> {
        vec![1, 2, 3, 4]
    }
    fn negotiated(&mut self, features: u64) {
        // The driver has reset the device since.
        self.held.clear();
        self.negotiated.send(features).unwrap();
    }
    fn process(&mut self, _: usize, queue: &mut Queue) -> Result<(), RingError> {
        while let Some(chain) = queue.pop()? {
            self.held.push(chain);
        }
        match (self.manner, self.held.len()) {
            (_, 0) | (Manner::Backwards, 1) => return Ok(()),
            (Manner::Ends, _) => self.socket.shutdown(Shutdown::Both).unwrap(),
            (Manner::Lies, _) => Self::lie(queue),
            _ => {}
        }
        if matches!(self.manner, Manner::Sound | Manner::Backwards) {
            self.held.drain(..).rev().try_for_each(|chain| Self::answer(chain, queue))?;
        }
        Ok(())
    }
}

fn refuse(chain: &Chain, memory: &DmaMemory) -> Result<u32, RingError> {
    chain.writable.write(memory, 0, &[REFUSED])?;
    Ok(1)
}

fn nature() -> Nature {
    Nature {
        name: "adder",
        device_type: 4,
        class: 0xff_00_00,
        queues: &[SIZE, SIZE],
        known: FEATURE | HIDDEN,
        passed: FEATURE,
        config: ConfigSource::Asked(4),
        whole_answers: false,
        ours: 0,
        patient: None,
        refuse,
    }
}

struct Bench {
    negotiated: Receiver<u64>,
    machine: TestMachine,
    rings: Vec<Ring>,
    _directory: tempfile::TempDir,
}

/// A socket at which `each` has the first connection.
fn listening(each: impl FnOnce(UnixStream) + Send + 'static) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || each(listener.accept().unwrap().0));
    (directory, path)
}

fn adder(manner: Manner, negotiated: Sender<u64>) -> (tempfile::TempDir, PathBuf) {
    listening(move |socket| {
        let theirs = socket.try_clone().unwrap();
        let device = Adder { manner, socket: theirs, held: Vec::new(), negotiated };
        // A monitor that hangs up is no failure.
        let _ = serve(Box::new(device), None, socket);
    })
}

impl Bench {
    fn new(manner: Manner) -> Self {
        Self::with(manner, nature())
    }

    fn with(manner: Manner, nature: Nature) -> Self {
        let (sender, negotiated) = channel();
        let (_directory, path) = adder(manner, sender);
        let foreign = Foreign::connect(&path, nature).expect("a server");
        let connect = foreign.connector();
        let mut machine = TestMachine::new(foreign);
        connect(machine.doorbell.clone());
        machine.enable_msix(3);
        let features = machine.offered() & (FEATURE | OURS);
        let rings = machine.start(VERSION_1 | features);
        machine.set_common(16, &0_u16.to_le_bytes());
        Self { negotiated, machine, rings, _directory }
    }

    /// Offers a request to a queue, in `slot`, and rings.
    fn asks(&mut self, queue: usize, slot: u64, data: &[u8]) {
        let (buffer, answer) = (BUFFER + slot * 0x2000, ANSWER + slot * 0x2000);
        self.machine.ram.write_gpa(buffer, data).unwrap();
        let (first, rest) = (1, data.len() as u32 - 1);
        self.rings[queue].offer_chain(&[
            (buffer, first, false),
            (buffer + 1, rest, false),
            (answer, rest, true),
            (answer + u64::from(rest), 1, true),
        ]);
        self.machine.notify(queue as u16);
    }

    fn answered(&mut self, queue: usize, slot: u64) -> Vec<u8> {
        let (_, len) = until(|| self.rings[queue].take_used());
        let mut answer = vec![0; len as usize];
        self.machine.ram.read_gpa(ANSWER + slot * 0x2000, &mut answer).unwrap();
        answer
    }

    fn is_served(&mut self, queue: usize, data: &[u8]) {
        self.asks(queue, 0, data);
        let expected: Vec<_> = data.iter().map(|byte| byte + 1).collect();
        assert_eq!(self.answered(queue, 0), expected);
    }

    fn is_refused(&mut self, queue: usize) {
        self.asks(queue, 0, b"request");
        assert_eq!(self.answered(queue, 0), [REFUSED]);
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
    let mut bench = Bench::new(Manner::Sound);
    assert_eq!(bench.machine.offered() & 0xff_ffff, FEATURE);
    assert_eq!(bench.machine.device_config::<4>(0), [1, 2, 3, 4]);
    assert_eq!(bench.negotiated.recv().unwrap(), VERSION_1 | FEATURE);
    for (number, queue) in [0, 1, 0, 0, 1].into_iter().cycle().take(600).enumerate() {
        bench.is_served(queue, &[number as u8 / 3; 3000]);
        let data = until(|| bench.machine.take_messages().pop());
        assert_eq!(data, 0x41 + queue as u32, "the queue's own vector");
    }
}

#[test]
fn requests_may_come_back_in_any_order() {
    let mut bench = Bench::new(Manner::Backwards);
    for _ in 0..300 {
        bench.asks(0, 0, b"first");
        thread::yield_now();
        assert!(bench.rings[0].take_used().is_none());
        bench.asks(0, 1, b"second");
        assert_eq!(bench.answered(0, 1), b"tfdpoe");
        assert_eq!(bench.answered(0, 0), b"gjstu");
    }
}

/// Code that is read from a disk is as new as code that is stored.
#[test]
fn what_a_server_writes_over_code_is_known_to_be_stale() {
    let mut bench = Bench::new(Manner::Sound);
    bench.is_served(0, b"before");
    bench.machine.ram.take_stale_code();
    bench.machine.ram.mark_code(ANSWER);
    bench.is_served(0, b"during");
    assert_eq!(bench.machine.ram.take_stale_code(), [ANSWER]);
}

#[test]
fn a_server_that_ends_has_its_requests_refused_and_all_that_come_later() {
    let mut bench = Bench::new(Manner::Ends);
    bench.is_refused(0);
    bench.is_refused(0);
    bench.is_refused(1);
    assert_eq!(bench.machine.status() & NEEDS_RESET, 0);
    bench.rings = bench.machine.start(VERSION_1 | FEATURE);
    bench.is_refused(0);
}

#[test]
fn a_server_that_gives_back_what_it_was_not_asked_is_given_up() {
    let mut bench = Bench::new(Manner::Lies);
    bench.is_refused(0);
    bench.is_refused(1);
}

#[test]
fn after_a_reset_everything_begins_anew() {
    let mut bench = Bench::new(Manner::Sound);
    for round in 0..20 {
        bench.is_served(0, &[round; 100]);
        // Perhaps it is answered before the reset, perhaps not.
        bench.asks(0, 1, b"forgotten");
        bench.rings = bench.machine.start(VERSION_1 | FEATURE);
        bench.is_served(1, b"after");
    }
    assert_eq!(bench.machine.status() & NEEDS_RESET, 0);
}

/// Requests that may never be answered, as those for a network's frames.
#[test]
fn a_patient_queue_is_not_waited_for() {
    let mut bench = Bench::with(Manner::Backwards, Nature { patient: Some(1), ..nature() });
    for _ in 0..3 {
        bench.asks(1, 0, b"never answered");
        let start = Instant::now();
        bench.rings = bench.machine.start(VERSION_1 | FEATURE);
        assert!(start.elapsed() < Duration::from_secs(4), "a reset waits for the server");
    }
    bench.asks(1, 0, b"first");
    bench.asks(1, 1, b"second");
    assert_eq!(bench.answered(1, 1), b"tfdpoe");
    assert_eq!(bench.answered(1, 0), b"gjstu");
}

#[test]
fn a_patient_queue_is_silent_when_its_server_has_gone() {
    let mut bench = Bench::with(Manner::Ends, Nature { patient: Some(1), ..nature() });
    bench.asks(1, 0, b"never answered");
    bench.is_refused(0);
    bench.asks(1, 1, b"nor this");
    bench.is_refused(0);
    assert!(bench.rings[1].take_used().is_none(), "something came");
}

/// As QEMU 11 does.
#[test]
fn a_queue_that_is_enabled_before_all_else_is_answered_for() {
    const ENABLE: u32 = 18;
    let (_directory, path) = adder(Manner::Sound, channel().0);
    let mut monitor = UnixStream::connect(&path).unwrap();
    monitor.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let bytes = |words: [u32; 5]| words.map(u32::to_ne_bytes).concat();
    let asks = 1 | 1 << 3;
    for (queue, flags, failed) in [(0, 1, None), (1, asks, Some(0)), (9, asks, Some(1))] {
        monitor.write_all(&bytes([ENABLE, flags, 8, queue, 1])).unwrap();
        let Some(failed) = failed else { continue };
        let mut answer = [0; 20];
        monitor.read_exact(&mut answer).unwrap();
        assert_eq!(answer.to_vec(), bytes([ENABLE, 1 | 1 << 2, 8, failed, 0]), "queue {queue}");
    }
}

#[test]
fn features_of_ours_are_no_business_of_the_servers() {
    let mut bench = Bench::with(Manner::Sound, Nature { ours: OURS, ..nature() });
    assert_eq!(bench.machine.offered() & 0xff_ffff, FEATURE | OURS);
    assert_eq!(bench.negotiated.recv().unwrap(), VERSION_1 | FEATURE);
    bench.is_served(0, b"request");
}

#[test]
fn a_request_that_is_too_long_is_refused_and_others_are_served() {
    let mut bench = Bench::new(Manner::Sound);
    let part = (ANSWER, 2 << 20, true);
    bench.rings[0].offer_chain(&[[(BUFFER, 8, false)].as_slice(), &[part; 9]].concat());
    bench.machine.notify(0);
    assert_eq!(bench.answered(0, 0), [REFUSED]);
    bench.is_served(0, b"after");
}

fn refused(path: &std::path::Path, nature: Nature) -> String {
    Foreign::connect(path, nature).err().expect("refused").to_string()
}

#[test]
fn what_is_no_such_server_is_named() {
    let (_directory, path) = listening(|socket| {
        thread::sleep(Duration::from_secs(30));
        drop(socket);
    });
    let absent = path.with_file_name("absent");
    assert!(refused(&absent, nature()).contains("no server can be reached"), "{absent:?}");
    let said = refused(&path, nature());
    assert!(said.contains("does not answer as a vhost-user server"), "{said}");
    for wrong in [
        Nature { known: FEATURE, ..nature() },
        Nature { config: ConfigSource::Asked(0x2000), ..nature() },
    ] {
        let (_directory, path) = adder(Manner::Sound, channel().0);
        let said = refused(&path, wrong);
        assert!(said.contains("another device") && said.contains("adder"), "{said}");
    }
}
