//! What a doorbell does, for others who would ring it.

mod driver;

use bus::Bell;
use driver::{DRIVER_OK, SIZE, TestMachine, VERSION_1};
use virtio::{Queue, RingError, VirtioDevice};

/// Its first queue is served elsewhere, by words at this offset.
struct Served;
const WORDS: u64 = 0x5000;
const QUEUES: [u16; 2] = [SIZE; 2];

impl VirtioDevice for Served {
    fn device_type(&self) -> u16 {
        26
    }
    fn class(&self) -> u32 {
        0xff_00_00
    }
    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }
    fn words(&self, index: usize) -> Option<u64> {
        (index == 0).then_some(WORDS)
    }
    fn process(&mut self, _: usize, _: &mut Queue) -> Result<(), RingError> {
        Ok(())
    }
}

/// A machine whose driver is ready, and what the first doorbell does.
fn ready() -> (TestMachine, Bell) {
    let mut machine = TestMachine::new(Served);
    machine.enable_msix(3);
    assert_eq!(machine.bell(0), None, "there is no driver");
    let rings = machine.start(VERSION_1);
    let (offered, used) = (rings[0].available + 2, rings[0].used + 2);
    let message = (0xfee0_0000, 0x41);
    (machine, Bell { words: WORDS, queue: 0, offered, used, message })
}

#[test]
fn others_may_ring_for_a_queue_that_is_served_and_interrupts() {
    let (mut machine, bell) = ready();
    assert_eq!(machine.bell(0), Some(bell));
    assert_eq!((machine.bell(1), machine.bell(7)), (None, None), "served here; no queue");
    // Bus mastering off and on.
    machine.set_config(4, 0x0002);
    assert_eq!(machine.bell(0), None);
    machine.set_config(4, 0x0006);
    assert_eq!(machine.bell(0), Some(bell));
    let (msix, _) = machine.capabilities().into_iter().find(|&(_, id)| id == 0x11).unwrap();
    for control in [0, 3 << 30] {
        machine.set_config(msix, control);
        assert_eq!(machine.bell(0), None, "MSI-X is off, or masked");
    }
    machine.set_config(msix, 1 << 31);
    assert_eq!(machine.bell(0), Some(bell));
    machine.set_status(0);
    assert_eq!(machine.bell(0), None, "it is reset");
}

#[test]
fn whatever_may_change_a_doorbell_is_told() {
    let (mut machine, _) = ready();
    let mut changes = |change: &dyn Fn(&mut TestMachine)| {
        let before = machine.ram.bells_epoch();
        change(&mut machine);
        machine.ram.bells_epoch() != before
    };
    assert!(!changes(&|machine| machine.notify(0)), "ringing changes nothing");
    assert!(changes(&|machine| machine.enable_msix(3)));
    assert!(changes(&|machine| machine.set_config(4, 0x0002)));
    assert!(changes(&|machine| machine.set_config(0x10, 0xd000_0000)), "its BAR moves");
    let (mut machine, _) = ready();
    let mut changes = |change: &dyn Fn(&mut TestMachine)| {
        let before = machine.ram.bells_epoch();
        change(&mut machine);
        machine.ram.bells_epoch() != before
    };
    assert!(changes(&|machine| machine.set_common(26, &2_u16.to_le_bytes())), "another vector");
    assert!(changes(&|machine| machine.set_status(DRIVER_OK)));
    assert!(changes(&|machine| machine.host.reset()));
}
