//! The pair of 8259A interrupt controllers (Intel 8259A data sheet), with the edge/level control
//! registers of the ISA bridges (PIIX3 data sheet, ELCR).

use crate::lapic::message::Taken;

/// Command port of the master.
pub const MASTER: u64 = 0x20;
/// Command port of the slave.
pub const SLAVE: u64 = 0xa0;
/// Edge/level control of the master; the slave's follows.
pub const ELCR: u64 = 0x4d0;

/// The master's input the slave is wired to.
const CASCADE: u8 = 2;
/// What an acknowledge without a request gives.
const SPURIOUS: u8 = 7;

/// Where the initialization sequence is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    /// Initialized: the data port is the mask.
    Mask,
    Icw2,
    Icw3,
    Icw4,
}

struct Chip {
    master: bool,
    /// Input levels.
    lines: u8,
    irr: u8,
    imr: u8,
    isr: u8,
    /// Level-triggered inputs.
    elcr: u8,
    /// The input of highest priority.
    first: u8,
    base: u8,
    expect: Expect,
    icw4_follows: bool,
    single: bool,
    read_isr: bool,
    poll: bool,
    special_mask: bool,
    fully_nested: bool,
    auto_eoi: bool,
    rotate_on_auto_eoi: bool,
}

impl Chip {
    fn new(master: bool) -> Self {
        Self {
            master,
            lines: 0,
            irr: 0,
            imr: 0,
            isr: 0,
            elcr: 0,
            first: 0,
            base: 0,
            expect: Expect::Mask,
            icw4_follows: false,
            single: false,
            read_isr: false,
            poll: false,
            special_mask: false,
            fully_nested: false,
            auto_eoi: false,
            rotate_on_auto_eoi: false,
        }
    }

    /// Drives an input; what became of the request, if this makes one. A masked one waits, but for
    /// good if nothing unmasks it: it counts as lost.
    fn set_line(&mut self, input: u8, level: bool) -> Taken {
        let bit = 1 << input;
        let level_triggered = self.elcr & bit != 0;
        let taken = match level {
            true if self.imr & bit == 0 && self.irr & bit == 0 => Taken::Yes,
            true if self.imr & bit == 0 => Taken::Merged,
            _ => Taken::No,
        };
        if level && (level_triggered || self.lines & bit == 0) {
            self.irr |= bit;
        }
        if !level && level_triggered {
            self.irr &= !bit;
        }
        self.lines = if level { self.lines | bit } else { self.lines & !bit };
        taken
    }

    /// The rank of the highest of a set of inputs: 0 is first. 8 if the set is empty.
    fn rank(&self, inputs: u8) -> u8 {
        inputs.rotate_right(u32::from(self.first)).trailing_zeros() as u8
    }

    /// The input that interrupts now.
    fn request(&self) -> Option<u8> {
        let rank = self.rank(self.irr & !self.imr);
        let mut serving = self.isr;
        if self.special_mask {
            serving &= !self.imr;
        }
        if self.fully_nested && self.master {
            serving &= !(1 << CASCADE);
        }
        (rank < self.rank(serving)).then_some((rank + self.first) & 7)
    }

    fn acknowledge(&mut self, input: u8) {
        let bit = 1 << input;
        if !self.auto_eoi {
            self.isr |= bit;
        } else if self.rotate_on_auto_eoi {
            self.first = (input + 1) & 7;
        }
        if self.elcr & bit == 0 {
            self.irr &= !bit;
        }
    }

    fn write_command(&mut self, value: u8) {
        if value & 0x10 != 0 {
            self.icw1(value);
        } else if value & 0x08 != 0 {
            self.ocw3(value);
        } else {
            self.ocw2(value);
        }
    }

    fn icw1(&mut self, value: u8) {
        let (elcr, lines) = (self.elcr, self.lines);
        *self = Self { elcr, lines, irr: self.irr & elcr, ..Self::new(self.master) };
        self.expect = Expect::Icw2;
        self.icw4_follows = value & 1 != 0;
        self.single = value & 2 != 0;
    }

    fn ocw2(&mut self, value: u8) {
        let (rotate, specific, eoi) = (value & 0x80 != 0, value & 0x40 != 0, value & 0x20 != 0);
        let input = if specific {
            value & 7
        } else {
            if !eoi {
                self.rotate_on_auto_eoi = rotate;
                return;
            }
            match self.rank(self.isr) {
                8 => return,
                rank => (rank + self.first) & 7,
            }
        };
        if eoi {
            self.isr &= !(1 << input);
        }
        if rotate {
            self.first = (input + 1) & 7;
        }
    }

    fn ocw3(&mut self, value: u8) {
        self.poll = value & 4 != 0;
        if value & 2 != 0 {
            self.read_isr = value & 1 != 0;
        }
        if value & 0x40 != 0 {
            self.special_mask = value & 0x20 != 0;
        }
    }

    fn write_data(&mut self, value: u8) {
        let after_icw3 = if self.icw4_follows { Expect::Icw4 } else { Expect::Mask };
        match self.expect {
            Expect::Mask => self.imr = value,
            Expect::Icw2 => {
                self.base = value & 0xf8;
                self.expect = if self.single { after_icw3 } else { Expect::Icw3 };
            }
            Expect::Icw3 => self.expect = after_icw3,
            Expect::Icw4 => {
                self.fully_nested = value & 0x10 != 0;
                self.auto_eoi = value & 2 != 0;
                self.expect = Expect::Mask;
            }
        }
    }

    fn poll(&mut self) -> u8 {
        self.poll = false;
        let Some(input) = self.request() else { return 0 };
        self.acknowledge(input);
        0x80 | input
    }

    fn read(&mut self, data_port: bool) -> u8 {
        if self.poll {
            self.poll()
        } else if data_port {
            self.imr
        } else if self.read_isr {
            self.isr
        } else {
            self.irr
        }
    }
}

/// Both 8259As.
pub(crate) struct Pic {
    master: Chip,
    slave: Chip,
}

impl Pic {
    /// Everything is masked, as firmware leaves it.
    pub(crate) fn new() -> Self {
        let masked = |master| Chip { imr: 0xff, ..Chip::new(master) };
        Self { master: masked(true), slave: masked(false) }
    }

    /// The wire to the CPU.
    pub(crate) fn output(&self) -> bool {
        self.master.request().is_some()
    }

    /// Drives ISA interrupt `irq`, 0 to 15 but not 2; what became of the interrupt, if any.
    pub(crate) fn set_irq(&mut self, irq: u8, level: bool) -> Taken {
        let chip = if irq < 8 { &mut self.master } else { &mut self.slave };
        let taken = chip.set_line(irq & 7, level);
        self.cascade();
        taken
    }

    /// Whether ISA interrupt `irq` interrupts with this vector.
    pub(crate) fn sends(&self, irq: u8, vector: u8) -> bool {
        let chip = if irq < 8 { &self.master } else { &self.slave };
        chip.base + (irq & 7) == vector
    }

    /// The master's cascade input requests exactly while the slave does: the slave drops its output
    /// on every acknowledge, so a further request is a new edge.
    fn cascade(&mut self) {
        self.master.set_line(CASCADE, false);
        self.master.irr &= !(1 << CASCADE);
        if self.slave.request().is_some() {
            self.master.set_line(CASCADE, true);
        }
    }

    /// The interrupt-acknowledge cycle: the vector, or `None` if nothing requests any more.
    pub(crate) fn acknowledge(&mut self) -> Option<u8> {
        let input = self.master.request()?;
        self.master.acknowledge(input);
        if input != CASCADE {
            return Some(self.master.base + input);
        }
        let vector = match self.slave.request() {
            Some(input) => {
                self.slave.acknowledge(input);
                self.slave.base + input
            }
            None => self.slave.base + SPURIOUS,
        };
        self.cascade();
        Some(vector)
    }

    pub(crate) fn read(&mut self, slave: bool, data_port: bool) -> u8 {
        let chip = if slave { &mut self.slave } else { &mut self.master };
        let value = chip.read(data_port);
        self.cascade();
        value
    }

    pub(crate) fn write(&mut self, slave: bool, data_port: bool, value: u8) {
        let chip = if slave { &mut self.slave } else { &mut self.master };
        if data_port {
            chip.write_data(value);
        } else {
            chip.write_command(value);
        }
        self.cascade();
    }

    /// What firmware does with an ISA interrupt that PCI's wires are routed to.
    pub(crate) fn make_level_triggered(&mut self, irq: u8) {
        let slave = irq >= 8;
        self.write_elcr(slave, self.read_elcr(slave) | 1 << (irq & 7));
    }

    pub(crate) fn read_elcr(&self, slave: bool) -> u8 {
        if slave { self.slave.elcr } else { self.master.elcr }
    }

    /// Timer, keyboard, cascade, RTC and FPU cannot be level-triggered.
    pub(crate) fn write_elcr(&mut self, slave: bool, value: u8) {
        if slave {
            self.slave.elcr = value & 0xde;
        } else {
            self.master.elcr = value & 0xf8;
        }
    }
}
