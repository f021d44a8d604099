//! ACPI fixed power management hardware (ACPI 6.5, 4.8) and the reset register.

use std::sync::Arc;

use bus::{Device, InterruptLine, Rearm, Timed};
use host::Clock;

use crate::alarm::Alarm;
use crate::events::{MachineEvent, MachineEvents};
use crate::time::{ns_for, ticks_in};

/// PM1a event block: status and enable, 2 bytes each.
pub const PM1A_EVENT: u64 = 0x600;
/// PM1a control block, 2 bytes.
pub const PM1A_CONTROL: u64 = 0x604;
/// Power management timer, 4 bytes.
pub const PM_TIMER: u64 = 0x608;
/// Bytes from [`PM1A_EVENT`] to the end of the timer.
pub const LEN: u64 = 12;
/// GSI of the system control interrupt: level-triggered, active high.
pub const SCI_GSI: u32 = 9;
/// SLP_TYP of S5, soft off.
pub const S5: u8 = 5;
/// Frequency of the power management timer, in hertz.
pub const PM_TIMER_HZ: u64 = 3_579_545;
/// Port of the reset register.
pub const RESET: u64 = 0xcf9;
/// Value that resets.
pub const RESET_VALUE: u8 = 6;

/// The timer's bits; its status bit is set whenever the highest changes.
const TIMER_BITS: u32 = 24;

const TIMER_STATUS: u16 = 1 << 0;
const GLOBAL_STATUS: u16 = 1 << 5;
const POWER_BUTTON: u16 = 1 << 8;
const SLEEP_BUTTON: u16 = 1 << 9;
const RTC_STATUS: u16 = 1 << 10;
const WAKE_STATUS: u16 = 1 << 15;
const ENABLES: u16 = TIMER_STATUS | GLOBAL_STATUS | POWER_BUTTON | SLEEP_BUTTON | RTC_STATUS;
const SCI_ENABLED: u16 = 1 << 0;
const SLEEP_ENABLE: u16 = 1 << 13;
/// PM1 control bits that keep what is written: bus master reload, SLP_TYP.
const CONTROL_WRITABLE: u16 = 1 << 1 | 7 << 10;

/// The power management block.
pub struct PowerManagement {
    clock: Arc<dyn Clock>,
    alarm: Alarm,
    sci: Arc<dyn InterruptLine>,
    events: Arc<dyn MachineEvents>,
    status: u16,
    enable: u16,
    control: u16,
    /// Changes of the timer's highest bit seen.
    seen_halves: u64,
}

impl PowerManagement {
    pub(crate) fn new(
        clock: Arc<dyn Clock>,
        rearm: Arc<dyn Rearm>,
        sci: Arc<dyn InterruptLine>,
        events: Arc<dyn MachineEvents>,
    ) -> Self {
        let alarm = Alarm::new(rearm);
        let mut power =
            Self { clock, alarm, sci, events, status: 0, enable: 0, control: 0, seen_halves: 0 };
        power.seen_halves = power.halves();
        power
    }

    /// Presses the power button: the guest should shut down.
    pub fn press_power_button(&mut self) {
        self.status |= POWER_BUTTON;
        self.update();
    }

    fn timer(&self) -> u64 {
        ticks_in(self.clock.monotonic_ns(), PM_TIMER_HZ)
    }

    fn halves(&self) -> u64 {
        self.timer() >> (TIMER_BITS - 1)
    }

    /// Notes whether the timer's highest bit has changed.
    fn sync(&mut self) {
        let halves = self.halves();
        if halves != self.seen_halves {
            self.seen_halves = halves;
            self.status |= TIMER_STATUS;
        }
    }

    fn update(&mut self) {
        self.sci.set(self.status & self.enable != 0);
        let waits = self.enable & !self.status & TIMER_STATUS != 0;
        let change = ns_for((self.seen_halves + 1) << (TIMER_BITS - 1), PM_TIMER_HZ);
        self.alarm.set(waits.then_some(change));
    }

    /// The whole block as it reads. The machine is in ACPI mode from the start.
    fn registers(&mut self) -> [u8; LEN as usize] {
        self.sync();
        let mut block = [0; LEN as usize];
        let timer = (self.timer() & ((1 << TIMER_BITS) - 1)) as u32;
        block[0..2].copy_from_slice(&self.status.to_le_bytes());
        block[2..4].copy_from_slice(&self.enable.to_le_bytes());
        block[4..6].copy_from_slice(&(self.control | SCI_ENABLED).to_le_bytes());
        block[8..12].copy_from_slice(&timer.to_le_bytes());
        block
    }

    fn write_register(&mut self, register: u64, value: u16, mask: u16) {
        match register {
            0 => self.status &= !(value & (ENABLES | WAKE_STATUS)),
            2 => self.enable = (self.enable & !mask | value) & ENABLES,
            4 => self.set_control(self.control & !mask | value),
            _ => {}
        }
    }

    fn set_control(&mut self, value: u16) {
        self.control = value & CONTROL_WRITABLE;
        if value & SLEEP_ENABLE != 0 && value >> 10 & 7 == u16::from(S5) {
            self.events.raise(MachineEvent::PowerOff);
        }
    }
}

impl Device for PowerManagement {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let block = self.registers();
        data.fill(0xff);
        let bytes = block.iter().skip(offset as usize);
        data.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        self.update();
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.sync();
        let mut at = offset;
        let mut rest = data;
        while let Some((first, tail)) = rest.split_first() {
            // A register's second byte goes with its first when both are written.
            match tail.split_first() {
                Some((second, tail)) if at & 1 == 0 => {
                    self.write_register(at, u16::from_le_bytes([*first, *second]), 0xffff);
                    (at, rest) = (at + 2, tail);
                }
                _ => {
                    let shift = (at & 1) * 8;
                    self.write_register(at & !1, u16::from(*first) << shift, 0xff << shift);
                    (at, rest) = (at + 1, tail);
                }
            }
        }
        self.update();
    }
}

impl Timed for PowerManagement {
    fn deadline(&self) -> Option<u64> {
        self.alarm.deadline()
    }

    fn expire(&mut self, now: u64) {
        if self.alarm.take_due(now).is_some() {
            self.sync();
            self.update();
        }
    }
}

/// The reset control register, port 0xcf9 (PIIX3 data sheet, RCR): bit 2 going high resets.
pub(crate) struct ResetRegister {
    events: Arc<dyn MachineEvents>,
    value: u8,
}

impl ResetRegister {
    pub(crate) fn new(events: Arc<dyn MachineEvents>) -> Self {
        Self { events, value: 0 }
    }
}

impl Device for ResetRegister {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(self.value);
    }

    fn write(&mut self, _: u64, data: &[u8]) {
        let Some(value) = data.first() else { return };
        if value & !self.value & 4 != 0 {
            self.events.raise(MachineEvent::Reset);
        }
        self.value = value & 2;
    }
}
