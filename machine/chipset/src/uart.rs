//! The 16550A UART of COM1 (National Semiconductor PC16550D data sheet).
//!
//! It has no baud rate: a byte written has left at once, and input comes as fast as it is read.
//! vm-superio's serial port was not taken because its interrupt is an edge that cannot be
//! withdrawn, and its FIFO cannot be controlled.

use std::collections::VecDeque;
use std::sync::Arc;

use bus::{Device, InterruptLine};

/// Ports of COM1.
pub const COM1: u64 = 0x3f8;
/// Number of ports.
pub const LEN: u64 = 8;
/// ISA interrupt of COM1.
pub const COM1_IRQ: u32 = 4;

/// Bytes of the receive FIFO.
const FIFO: usize = 16;
/// Bytes of input kept for the guest beyond its FIFO.
const BACKLOG: usize = 1 << 16;

const REG_DATA: u64 = 0;
const REG_IER: u64 = 1;
const REG_IIR_FCR: u64 = 2;
const REG_LCR: u64 = 3;
const REG_MCR: u64 = 4;
const REG_LSR: u64 = 5;
const REG_MSR: u64 = 6;
const REG_SCR: u64 = 7;

const IER_RECEIVE: u8 = 1 << 0;
const IER_TRANSMIT: u8 = 1 << 1;
const IER_LINE: u8 = 1 << 2;
const IER_MODEM: u8 = 1 << 3;

const IIR_NONE: u8 = 0x01;
const IIR_MODEM: u8 = 0x00;
const IIR_TRANSMIT: u8 = 0x02;
const IIR_RECEIVE: u8 = 0x04;
const IIR_LINE: u8 = 0x06;
const IIR_TIMEOUT: u8 = 0x0c;
const IIR_FIFO: u8 = 0xc0;

const FCR_ENABLE: u8 = 1 << 0;
const FCR_CLEAR_RECEIVE: u8 = 1 << 1;

const LCR_DIVISOR: u8 = 1 << 7;

const MCR_DTR: u8 = 1 << 0;
const MCR_RTS: u8 = 1 << 1;
const MCR_OUT1: u8 = 1 << 2;
const MCR_OUT2: u8 = 1 << 3;
const MCR_LOOP: u8 = 1 << 4;

const LSR_DATA: u8 = 1 << 0;
const LSR_OVERRUN: u8 = 1 << 1;
const LSR_IDLE: u8 = 3 << 5;

const MSR_CTS: u8 = 1 << 4;
const MSR_DSR: u8 = 1 << 5;
const MSR_RI: u8 = 1 << 6;
const MSR_DCD: u8 = 1 << 7;
/// Trailing edge of the ring indicator.
const MSR_RI_DELTA: u8 = 1 << 2;

/// Where the guest's output goes.
pub trait SerialOutput: Send {
    /// Takes a byte the guest sent. Called on the vCPU's thread with the device locked: a sink
    /// that may block should have a thread and a buffer of its own.
    fn write(&mut self, byte: u8);
}

/// The serial port.
pub struct Uart {
    line: Arc<dyn InterruptLine>,
    output: Box<dyn SerialOutput>,
    /// The receive FIFO.
    fifo: VecDeque<u8>,
    /// Input that has not entered the FIFO yet.
    backlog: VecDeque<u8>,
    ier: u8,
    fcr: u8,
    lcr: u8,
    mcr: u8,
    /// Errors, until read.
    lsr_errors: u8,
    /// Changes of modem lines, until read.
    msr_deltas: u8,
    scr: u8,
    divisor: u16,
    /// The transmitter became empty and nobody has seen it.
    transmit_empty: bool,
}

impl Uart {
    pub(crate) fn new(line: Arc<dyn InterruptLine>, output: Box<dyn SerialOutput>) -> Self {
        Self {
            line,
            output,
            fifo: VecDeque::new(),
            backlog: VecDeque::new(),
            ier: 0,
            fcr: 0,
            lcr: 0,
            mcr: 0,
            lsr_errors: 0,
            msr_deltas: 0,
            scr: 0,
            divisor: 12,
            transmit_empty: false,
        }
    }

    /// Gives the guest input; returns how many bytes were taken. The rest must be offered again
    /// later: the guest is not reading.
    pub fn receive(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(BACKLOG.saturating_sub(self.backlog.len()));
        self.backlog.extend(bytes.iter().take(taken));
        self.update();
        taken
    }

    /// Bytes of input the guest has not read.
    pub fn unread(&self) -> usize {
        self.fifo.len() + self.backlog.len()
    }

    fn room(&self) -> usize {
        let size = if self.fcr & FCR_ENABLE != 0 { FIFO } else { 1 };
        size.saturating_sub(self.fifo.len())
    }

    /// In loopback the wire from outside is cut.
    fn refill(&mut self) {
        if self.mcr & MCR_LOOP == 0 {
            let count = self.room().min(self.backlog.len());
            self.fifo.extend(self.backlog.drain(..count));
        }
    }

    /// The level at which the receive FIFO interrupts, in bytes.
    fn trigger(&self) -> usize {
        match (self.fcr & FCR_ENABLE, self.fcr >> 6) {
            (0, _) | (_, 0) => 1,
            (_, 1) => 4,
            (_, 2) => 8,
            _ => 14,
        }
    }

    /// Received data interrupts at the trigger level; below it, at once, as a timeout.
    fn receive_interrupt(&self) -> Option<u8> {
        if self.fifo.is_empty() || self.ier & IER_RECEIVE == 0 {
            return None;
        }
        Some(if self.fifo.len() >= self.trigger() { IIR_RECEIVE } else { IIR_TIMEOUT })
    }

    /// The pending interrupt of highest priority.
    fn interrupt(&self) -> u8 {
        if self.lsr_errors != 0 && self.ier & IER_LINE != 0 {
            IIR_LINE
        } else if let Some(receive) = self.receive_interrupt() {
            receive
        } else if self.transmit_empty && self.ier & IER_TRANSMIT != 0 {
            IIR_TRANSMIT
        } else if self.msr_deltas != 0 && self.ier & IER_MODEM != 0 {
            IIR_MODEM
        } else {
            IIR_NONE
        }
    }

    /// On a PC, OUT2 connects the interrupt to the bus; in loopback it is cut.
    fn update(&mut self) {
        self.refill();
        let connected = self.mcr & (MCR_OUT2 | MCR_LOOP) == MCR_OUT2;
        self.line.set(connected && self.interrupt() != IIR_NONE);
    }

    /// Modem status: somebody is always at the other end, or in loopback, ourselves.
    fn modem_lines(&self) -> u8 {
        if self.mcr & MCR_LOOP == 0 {
            return MSR_CTS | MSR_DSR | MSR_DCD;
        }
        let wire = |from, to| if self.mcr & from != 0 { to } else { 0 };
        wire(MCR_RTS, MSR_CTS)
            | wire(MCR_DTR, MSR_DSR)
            | wire(MCR_OUT1, MSR_RI)
            | wire(MCR_OUT2, MSR_DCD)
    }

    fn set_mcr(&mut self, value: u8) {
        let before = self.modem_lines();
        self.mcr = value & 0x1f;
        let changed = before ^ self.modem_lines();
        self.msr_deltas |= (changed & !MSR_RI) >> 4;
        if changed & before & MSR_RI != 0 {
            self.msr_deltas |= MSR_RI_DELTA;
        }
    }

    fn transmit(&mut self, byte: u8) {
        if self.mcr & MCR_LOOP == 0 {
            self.output.write(byte);
        } else {
            self.loop_back(byte);
        }
        self.transmit_empty = true;
    }

    /// In loopback the sender does not wait for the FIFO.
    fn loop_back(&mut self, byte: u8) {
        if self.room() > 0 {
            self.fifo.push_back(byte);
        } else {
            self.lsr_errors |= LSR_OVERRUN;
        }
    }

    fn set_fcr(&mut self, value: u8) {
        if (value ^ self.fcr) & FCR_ENABLE != 0 || value & FCR_CLEAR_RECEIVE != 0 {
            self.fifo.clear();
        }
        self.fcr = value & 0xc9;
    }

    fn set_ier(&mut self, value: u8) {
        // Enabling the interrupt while the transmitter is empty, which it always is, raises it.
        if value & !self.ier & IER_TRANSMIT != 0 {
            self.transmit_empty = true;
        }
        self.ier = value & 0xf;
    }

    fn read_iir(&mut self) -> u8 {
        let interrupt = self.interrupt();
        if interrupt == IIR_TRANSMIT {
            self.transmit_empty = false;
        }
        interrupt | if self.fcr & FCR_ENABLE != 0 { IIR_FIFO } else { 0 }
    }

    fn read_register(&mut self, register: u64) -> u8 {
        let [divisor_low, divisor_high] = self.divisor.to_le_bytes();
        match register {
            REG_DATA if self.lcr & LCR_DIVISOR != 0 => divisor_low,
            REG_IER if self.lcr & LCR_DIVISOR != 0 => divisor_high,
            REG_DATA => self.fifo.pop_front().unwrap_or(0),
            REG_IER => self.ier,
            REG_IIR_FCR => self.read_iir(),
            REG_LCR => self.lcr,
            REG_MCR => self.mcr,
            REG_LSR => {
                let data = if self.fifo.is_empty() { 0 } else { LSR_DATA };
                LSR_IDLE | data | std::mem::take(&mut self.lsr_errors)
            }
            REG_MSR => self.modem_lines() | std::mem::take(&mut self.msr_deltas),
            REG_SCR => self.scr,
            _ => 0xff,
        }
    }

    fn write_register(&mut self, register: u64, value: u8) {
        let [divisor_low, divisor_high] = self.divisor.to_le_bytes();
        match register {
            REG_DATA if self.lcr & LCR_DIVISOR != 0 => {
                self.divisor = u16::from_le_bytes([value, divisor_high]);
            }
            REG_IER if self.lcr & LCR_DIVISOR != 0 => {
                self.divisor = u16::from_le_bytes([divisor_low, value]);
            }
            REG_DATA => self.transmit(value),
            REG_IER => self.set_ier(value),
            REG_IIR_FCR => self.set_fcr(value),
            REG_LCR => self.lcr = value,
            REG_MCR => self.set_mcr(value),
            REG_SCR => self.scr = value,
            _ => {}
        }
    }
}

impl Device for Uart {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        for (register, byte) in (offset..).zip(data) {
            *byte = self.read_register(register);
        }
        self.update();
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (register, byte) in (offset..).zip(data) {
            self.write_register(register, *byte);
        }
        self.update();
    }
}
