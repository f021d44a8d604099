//! Shared folders, driven as a guest does, with a server that repeats what it is asked.

mod driver;

use driver::{Ring, TestMachine, VERSION_1};
use std::sync::{Arc, Mutex};
use virtio::{FileServer, Fs, VirtioDevice};

const QUESTION: u64 = 0x20_0000;
const ANSWER: u64 = 0x20_1000;
const LEN: u32 = 16;
/// Where a request has its number.
const NUMBER: u64 = 8;
/// Data of the message that tells of queue 0. The data of the messages of queues 1, 2 and so on are the numbers that follow.
const FIRST_MESSAGE: u32 = 0x41;

/// A file server that answers each request with the request's own bytes, and notes the numbers of the requests in order.
#[derive(Clone, Default)]
struct Echo {
    asked: Arc<Mutex<Vec<u8>>>,
    answer: Vec<u8>,
}

impl FileServer for Echo {
    fn answer(&mut self, request: &[u8], _: usize) -> &[u8] {
        self.asked.lock().unwrap().push(request[NUMBER as usize]);
        self.answer = request.to_vec();
        &self.answer
    }
}

fn folder(queues: u16) -> (Fs, Echo) {
    let echo = Echo::default();
    (Fs::new(Box::new(echo.clone()), "work").with_queues(queues), echo)
}

/// Offers a request in a queue, so many `times`. The request's number is the queue's.
fn ask(rings: &mut [Ring], queue: usize, times: usize) {
    let offset = 0x100 * queue as u64;
    let ring = &mut rings[queue];
    ring.ram.write_gpa(QUESTION + offset + NUMBER, &[queue as u8]).unwrap();
    for _ in 0..times {
        ring.offer_chain(&[(QUESTION + offset, LEN, false), (ANSWER + offset, LEN, true)]);
    }
}

/// How many requests the folder has given back in a queue since the last call.
fn answered(ring: &mut Ring) -> usize {
    std::iter::from_fn(|| ring.take_used()).inspect(|used| assert_eq!(*used, (0, LEN))).count()
}

#[test]
fn a_folder_says_how_many_queues_it_has() {
    for (wanted, queues) in [(0, 1), (1, 1), (2, 2), (16, 16), (63, 63), (1000, 63)] {
        let (folder, _) = folder(wanted);
        let sizes = [vec![64], vec![1024; queues]].concat();
        let config = [b"work".to_vec(), vec![0; 32], vec![queues as u8, 0, 0, 0]].concat();
        assert_eq!((folder.queue_sizes(), folder.config()), (&*sizes, config.clone()));
        let gone = Fs::gone(&config);
        assert_eq!((gone.queue_sizes(), gone.config()), (&*sizes, config));
        let mut machine = TestMachine::new(folder);
        assert_eq!(machine.common(18), (queues as u16 + 1).to_le_bytes());
        assert_eq!(machine.device_config(36), (queues as u32).to_le_bytes());
    }
    assert_eq!(Fs::config_of("work"), folder(1).0.config());
}

#[test]
fn an_answer_comes_to_the_queue_that_was_asked() {
    let mut machine = TestMachine::new(folder(3).0);
    let mut rings = machine.start(VERSION_1);
    machine.enable_msix(5);
    for queue in 0..4 {
        ask(&mut rings, queue, 1);
        machine.notify(queue as u16);
        assert_eq!(machine.take_messages(), [FIRST_MESSAGE + queue as u32]);
        let answers: Vec<_> = rings.iter_mut().map(answered).collect();
        assert_eq!(answers, [0, 1, 2, 3].map(|index| usize::from(index == queue)));
    }
}

#[test]
fn a_queue_with_many_requests_leaves_others_their_turn() {
    let (folder, echo) = folder(3);
    let mut machine = TestMachine::new(folder);
    let mut rings = machine.start(VERSION_1);
    ask(&mut rings, 2, 14);
    ask(&mut rings, 1, 1);
    ask(&mut rings, 3, 1);
    machine.notify(2);
    assert_eq!(*echo.asked.lock().unwrap(), [vec![2; 8], vec![3, 1], vec![2; 6]].concat());
    // Those of high priority, too, are all answered.
    ask(&mut rings, 0, 16);
    machine.notify(0);
    assert_eq!(rings.iter_mut().map(answered).collect::<Vec<_>>(), [16, 1, 14, 1]);
}
