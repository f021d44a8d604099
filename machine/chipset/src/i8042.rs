//! The 8042 keyboard controller with nothing plugged in, and the fast reset of port 0x92.
//!
//! Guests use it to reset the machine and to test for a keyboard; both get the controller's own
//! answers (IBM PS/2 hardware interface technical reference, keyboard controller).

use std::sync::Arc;

use bus::Device;

use crate::events::{MachineEvent, MachineEvents};

/// Data port.
pub const DATA: u64 = 0x60;
/// Command and status port.
pub const COMMAND: u64 = 0x64;
/// System control port A: A20 and fast reset.
pub const PORT_A: u64 = 0x92;

const STATUS_OUTPUT_FULL: u8 = 1 << 0;
const STATUS_SELF_TEST_PASSED: u8 = 1 << 2;
const STATUS_WAS_COMMAND: u8 = 1 << 3;
/// Configuration: both ports' clocks are off and scan codes are translated.
const CONFIG_INITIAL: u8 = 0x74;
/// Output port: A20 on, no reset.
const OUTPUT_PORT: u8 = 0x03;

/// Where the next byte at the data port goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Keyboard,
    Config,
    OutputPort,
    Ignored,
}

pub(crate) struct I8042 {
    events: Arc<dyn MachineEvents>,
    config: u8,
    output: Option<u8>,
    next: Next,
    was_command: bool,
}

impl I8042 {
    pub(crate) fn new(events: Arc<dyn MachineEvents>) -> Self {
        let config = CONFIG_INITIAL;
        Self { events, config, output: None, next: Next::Keyboard, was_command: false }
    }

    fn status(&self) -> u8 {
        let full = if self.output.is_some() { STATUS_OUTPUT_FULL } else { 0 };
        let command = if self.was_command { STATUS_WAS_COMMAND } else { 0 };
        STATUS_SELF_TEST_PASSED | full | command
    }

    fn command(&mut self, command: u8) {
        self.was_command = true;
        self.next = Next::Keyboard;
        match command {
            0x20 => self.output = Some(self.config),
            0x60 => self.next = Next::Config,
            0xa9 | 0xab => self.output = Some(0x01), // port tests: the clock line is stuck low
            0xaa => self.output = Some(0x55),        // self test passed
            0xd0 => self.output = Some(OUTPUT_PORT),
            0xd1 => self.next = Next::OutputPort,
            0xd2..=0xd4 => self.next = Next::Ignored,
            // Pulse output lines: bit 0 low pulses the reset line.
            0xf0..=0xff if command & 1 == 0 => self.events.raise(MachineEvent::Reset),
            _ => {}
        }
    }

    fn data(&mut self, value: u8) {
        self.was_command = false;
        match std::mem::replace(&mut self.next, Next::Keyboard) {
            Next::Config => self.config = value,
            Next::OutputPort if value & 1 == 0 => self.events.raise(MachineEvent::Reset),
            // Nothing is plugged in: a byte to the keyboard is never answered.
            Next::OutputPort | Next::Keyboard | Next::Ignored => {}
        }
    }
}

/// One of its two ports.
pub(crate) struct I8042Port {
    pub(crate) controller: bus::Shared<I8042>,
    pub(crate) command: bool,
}

impl Device for I8042Port {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        let mut controller = crate::lock(&self.controller);
        data.fill(if self.command {
            controller.status()
        } else {
            controller.output.take().unwrap_or(0)
        });
    }

    fn write(&mut self, _: u64, data: &[u8]) {
        let Some(value) = data.first() else { return };
        let mut controller = crate::lock(&self.controller);
        if self.command { controller.command(*value) } else { controller.data(*value) }
    }
}

/// Port 0x92: A20 is always on; a rising bit 0 resets.
pub(crate) struct PortA {
    events: Arc<dyn MachineEvents>,
    value: u8,
}

impl PortA {
    pub(crate) fn new(events: Arc<dyn MachineEvents>) -> Self {
        Self { events, value: 2 }
    }
}

impl Device for PortA {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(self.value);
    }

    fn write(&mut self, _: u64, data: &[u8]) {
        let Some(value) = data.first() else { return };
        if value & !self.value & 1 != 0 {
            self.events.raise(MachineEvent::Reset);
        }
        self.value = value | 2;
    }
}
