//! The I/O APIC (82093AA data sheet, with the EOI register of version 0x20).
//!
//! The pin's level is what its users assert: the polarity bit is stored and has no effect, as the
//! machine has no inverters between device and pin.

use crate::lapic::ApicBus;
use crate::lapic::message::{Delivery, Destination, Message, Taken};

/// Where the registers are, a GPA.
pub const BASE: u64 = 0xfec0_0000;
/// Bytes of registers.
pub const LEN: u64 = 0x1000;
/// Interrupt input pins; GSI n is pin n.
pub const PINS: usize = 24;

/// Version 0x20, and the number of the last pin.
const VERSION: u32 = 0x20 | (PINS as u32 - 1) << 16;

const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
/// Bits of a redirection entry software may set.
const WRITABLE: u64 = 0xff00_0000_0001_afff;

const INDEX_ID: u8 = 0;
const INDEX_VERSION: u8 = 1;
const INDEX_ARBITRATION: u8 = 2;
const INDEX_TABLE: u8 = 0x10;

const OFFSET_SELECT: u64 = 0x00;
const OFFSET_WINDOW: u64 = 0x10;
const OFFSET_EOI: u64 = 0x40;

pub(crate) struct IoApic {
    id: u8,
    select: u8,
    table: [u64; PINS],
    /// Levels of the pins, one bit each.
    asserted: u32,
}

impl IoApic {
    pub(crate) fn new() -> Self {
        Self { id: 0, select: 0, table: [MASKED; PINS], asserted: 0 }
    }

    /// Drives a pin; what became of the interrupt, if this makes one.
    pub(crate) fn set_pin(&mut self, pin: usize, level: bool, apics: &ApicBus) -> Taken {
        let bit = 1 << pin;
        let rising = level && self.asserted & bit == 0;
        self.asserted = if level { self.asserted | bit } else { self.asserted & !bit };
        if rising { self.service(pin, apics) } else { Taken::No }
    }

    /// Whether the pin interrupts with this vector.
    pub(crate) fn sends(&self, pin: usize, vector: u8) -> bool {
        self.table[pin] & MASKED == 0 && self.table[pin] as u8 == vector
    }

    /// Sends the pin's message, unless masked or, if level-triggered, still being served. An edge
    /// on a masked pin is lost.
    fn service(&mut self, pin: usize, apics: &ApicBus) -> Taken {
        let entry = self.table[pin];
        if entry & (MASKED | REMOTE_IRR) != 0 {
            return Taken::No;
        }
        let level = entry & LEVEL != 0;
        let taken = apics.send(&message(entry));
        if level && taken != Taken::No {
            self.table[pin] |= REMOTE_IRR;
        }
        taken
    }

    /// Sends again for a level-triggered pin that is still asserted.
    fn service_level(&mut self, pin: usize, apics: &ApicBus) {
        if self.table[pin] & LEVEL != 0 && self.asserted & 1 << pin != 0 {
            self.service(pin, apics);
        }
    }

    /// A local APIC has finished serving a level-triggered interrupt.
    pub(crate) fn end_of_interrupt(&mut self, vector: u8, apics: &ApicBus) {
        for pin in 0..PINS {
            let entry = self.table[pin];
            if entry as u8 == vector && entry & (LEVEL | REMOTE_IRR) == LEVEL | REMOTE_IRR {
                self.table[pin] &= !REMOTE_IRR;
                self.service_level(pin, apics);
            }
        }
    }

    /// The pin and half (shift in bits) of a redirection entry behind the index register.
    fn entry(&self) -> Option<(usize, u32)> {
        let index = self.select.checked_sub(INDEX_TABLE)?;
        let pin = usize::from(index / 2);
        (pin < PINS).then_some((pin, u32::from(index & 1) * 32))
    }

    fn read_window(&self) -> u32 {
        match self.select {
            INDEX_ID | INDEX_ARBITRATION => u32::from(self.id) << 24,
            INDEX_VERSION => VERSION,
            _ => self.entry().map_or(u32::MAX, |(pin, shift)| (self.table[pin] >> shift) as u32),
        }
    }

    fn write_window(&mut self, value: u32, apics: &ApicBus) {
        if self.select == INDEX_ID {
            self.id = (value >> 24) as u8 & 0xf;
        }
        let Some((pin, shift)) = self.entry() else { return };
        let written = WRITABLE & 0xffff_ffff << shift;
        let entry = self.table[pin] & !written | u64::from(value) << shift & written;
        // Made edge-triggered, a pin waits for no EOI.
        self.table[pin] = if entry & LEVEL == 0 { entry & !REMOTE_IRR } else { entry };
        self.service_level(pin, apics);
    }

    pub(crate) fn read(&self, offset: u64) -> u32 {
        match offset {
            OFFSET_SELECT => self.select.into(),
            OFFSET_WINDOW => self.read_window(),
            _ => u32::MAX,
        }
    }

    pub(crate) fn write(&mut self, offset: u64, value: u32, apics: &ApicBus) {
        match offset {
            OFFSET_SELECT => self.select = value as u8,
            OFFSET_WINDOW => self.write_window(value, apics),
            OFFSET_EOI => self.end_of_interrupt(value as u8, apics),
            _ => {}
        }
    }
}

fn message(entry: u64) -> Message {
    Message {
        destination: Destination::from_8_bits((entry >> 56) as u8, entry & 1 << 11 != 0),
        delivery: Delivery::from_bits(entry >> 8),
        vector: entry as u8,
        level: entry & LEVEL != 0,
    }
}
