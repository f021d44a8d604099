//! The console: keys in, text out, size changes.

mod driver;

use driver::{EVENT_IDX, Ring, TestMachine, VERSION_1};
use std::io::Write;
use std::sync::{Arc, Mutex};
use virtio::{CONSOLE_RECEIVE, Console, ConsoleSize, Execution, InputBuffer};

const F_SIZE: u64 = 1;
const BUFFER: u64 = 0x20_0000;

#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);
impl Write for Screen {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(data);
        Ok(data.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct Terminal {
    machine: TestMachine,
    receive: Ring,
    transmit: Ring,
    keys: InputBuffer,
    screen: Screen,
    size: ConsoleSize,
}

fn terminal(features: u64) -> Terminal {
    let (keys, screen) = (InputBuffer::default(), Screen::default());
    let console = Console::new(Box::new(keys.clone()), Box::new(screen.clone()));
    let size = console.size();
    let mut machine = TestMachine::with_execution(console, Execution::Inline);
    machine.enable_msix(3);
    let mut rings = machine.start(features | VERSION_1);
    machine.set_common(16, &0_u16.to_le_bytes());
    let (transmit, receive) = (rings.pop().unwrap(), rings.pop().unwrap());
    Terminal { machine, receive, transmit, keys, screen, size }
}

impl Terminal {
    fn guest_bytes(&self, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.machine.ram.read_gpa(BUFFER, &mut data).unwrap();
        data
    }
}

#[test]
fn output_reaches_the_screen() {
    let mut terminal = terminal(0);
    let text: Vec<u8> = (0..10_000).map(|i| i as u8).collect();
    terminal.machine.ram.write_gpa(BUFFER, &text).unwrap();
    terminal.transmit.offer_chain(&[(BUFFER, 1, false), (BUFFER + 1, 9_999, false)]);
    terminal.machine.notify(1);
    assert_eq!(terminal.transmit.take_used(), Some((0, 0)));
    assert_eq!(*terminal.screen.0.lock().unwrap(), text);
    assert_eq!(terminal.machine.take_messages(), [0x42]);
}

#[test]
fn input_waits_for_buffers_and_buffers_wait_for_input() {
    for features in [0, EVENT_IDX] {
        let mut terminal = terminal(features);
        terminal.keys.push(b"hello");
        terminal.machine.doorbell.ring(CONSOLE_RECEIVE);
        terminal.receive.offer_chain(&[(BUFFER, 3, true)]);
        terminal.machine.notify(0);
        assert_eq!(terminal.receive.take_used(), Some((0, 3)));
        assert_eq!(terminal.guest_bytes(3), b"hel");
        terminal.receive.offer_chain(&[(BUFFER, 64, true)]);
        terminal.machine.notify(0);
        assert_eq!(terminal.receive.take_used(), Some((0, 2)));
        assert_eq!(terminal.guest_bytes(2), b"lo");

        terminal.receive.offer_chain(&[(BUFFER, 64, true)]);
        terminal.machine.notify(0);
        assert_eq!(terminal.receive.take_used(), None);
        terminal.machine.take_messages();
        terminal.receive.set_used_event(2);
        terminal.keys.push(b"!");
        terminal.machine.doorbell.ring(CONSOLE_RECEIVE);
        assert_eq!(terminal.receive.take_used(), Some((0, 1)));
        assert_eq!(terminal.machine.take_messages(), [0x41]);
    }
}

#[test]
fn size_changes_interrupt() {
    let mut terminal = terminal(F_SIZE);
    assert_eq!(terminal.machine.device_config::<4>(0), [0; 4]);
    let generation: [u8; 1] = terminal.machine.common(21);
    terminal.size.set(132, 43);
    terminal.machine.doorbell.config_changed();
    assert_eq!(terminal.machine.take_messages(), [0x40]);
    assert_eq!(terminal.machine.device_config::<4>(0), [132, 0, 43, 0]);
    assert_ne!(terminal.machine.common(21), generation);
    assert_eq!(terminal.machine.device_config::<8>(8)[4..], [0xff; 4], "beyond the structure");
}

#[test]
fn emergency_output_needs_no_queue() {
    let mut terminal = terminal(0);
    terminal.machine.set_status(0);
    let emergency = terminal.machine.structure(4) + 8;
    terminal.machine.mmio_write(emergency, &u32::from(b'!').to_le_bytes());
    assert_eq!(*terminal.screen.0.lock().unwrap(), b"!");
}
