//! Interrupt routing: from wires and messages to the CPUs.
//!
//! ```text
//! device line -- GSI n --> I/O APIC pin n ---------------- message --> local APIC --> vCPU
//!                     \--> 8259 input (ISA IRQ) --> INTR --> LINT0 ------^
//! MSI ------------------------------------------------- message -------/
//! ```
//!
//! GSIs 0 to 15 are the ISA interrupts, but for the timer: ISA IRQ 0 is GSI 2, as on every PC. PCI's wires go to a GSI from 16
//! on and, for systems without an I/O APIC, to an 8259 input of their own, as chipsets since ICH route them.
//! One lock covers I/O APIC, 8259s and the wires into them, so a wire's edges reach both in order.
//!
//! Lock order: device, then these controllers, then one local APIC, then the kick. What a local
//! APIC wants from outside (an end of interrupt, an IPI) is done after its lock is released.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bus::{Device, InterruptLine, MsiSink};

use crate::ioapic::{IoApic, PINS};
use crate::lapic::message::{BROADCAST, Delivery, Destination, Message, Taken};
use crate::lapic::state::Effect;
use crate::lapic::{ApicBus, Lapic};
use crate::lock;
use crate::pic::Pic;
use crate::time::BACKLOG;

/// GSI of ISA interrupt 0, the timer.
pub const TIMER_GSI: u32 = 2;

/// 8259 inputs.
const ISA_IRQS: usize = 16;
/// Where wires end: in a GSI, or in an 8259 input and nothing else.
const ENDS: usize = PINS + ISA_IRQS;

struct Controllers {
    /// How many sources assert each end of wires: they are ORed.
    asserted: [u32; ENDS],
    /// Ticks owed on each GSI, see [`InterruptLine::tick`].
    owed: [u64; PINS],
    ioapic: IoApic,
    pic: Pic,
}

impl Controllers {
    fn set_end(&mut self, end: usize, level: bool, apics: &ApicBus) -> Taken {
        let by_pic = isa_irq(end).map_or(Taken::No, |irq| {
            self.pic.set_irq(irq, level || self.is_asserted_beside(end, irq))
        });
        match end {
            0..PINS => by_pic.max(self.ioapic.set_pin(end, level, apics)),
            _ => by_pic,
        }
    }

    /// Another end asserts the same 8259 input.
    fn is_asserted_beside(&self, end: usize, irq: u8) -> bool {
        let same = |other: &usize| *other != end && isa_irq(*other) == Some(irq);
        (0..ENDS).filter(same).any(|other| self.asserted[other] != 0)
    }

    /// Ticks once; of `count` ticks, those that nothing took yet are owed. While nothing takes any,
    /// they are lost, as on hardware.
    fn tick(&mut self, gsi: usize, count: u64, apics: &ApicBus) {
        let taken = match self.asserted[gsi] {
            0 => self.set_end(gsi, true, apics),
            _ => Taken::Merged,
        };
        if self.asserted[gsi] == 0 {
            self.set_end(gsi, false, apics);
        }
        let owed = &mut self.owed[gsi];
        *owed = match taken {
            Taken::No => 0,
            Taken::Merged => (*owed + count).min(BACKLOG),
            Taken::Yes => (*owed + count - 1).min(BACKLOG),
        };
    }

    /// A CPU took `vector`: what the clock behind it owes, it pays by one more tick.
    fn repay(&mut self, vector: u8, apics: &ApicBus) {
        let by_pic = |gsi| isa_irq(gsi).is_some_and(|irq| self.pic.sends(irq, vector));
        let is_for = |gsi: &usize| self.ioapic.sends(*gsi, vector) || by_pic(*gsi);
        let Some(gsi) = (0..PINS).filter(|gsi| self.owed[*gsi] != 0).find(is_for) else { return };
        self.owed[gsi] -= 1;
        self.tick(gsi, 1, apics);
    }
}

/// The interrupt controllers outside the CPUs, and the way to those inside.
pub(crate) struct Interrupts {
    controllers: Mutex<Controllers>,
    /// Ticks are owed. Changes only under the controllers' lock.
    owing: AtomicBool,
    apics: ApicBus,
}

impl Interrupts {
    pub(crate) fn new(apics: ApicBus) -> Self {
        let (asserted, owed) = ([0; ENDS], [0; PINS]);
        let controllers = Controllers { asserted, owed, ioapic: IoApic::new(), pic: Pic::new() };
        Self { controllers: Mutex::new(controllers), owing: AtomicBool::new(false), apics }
    }

    /// Every access to the 8259s goes through here, so that LINT0 follows them.
    fn with<T>(&self, access: impl FnOnce(&mut Controllers) -> T) -> T {
        let mut controllers = lock(&self.controllers);
        let before = controllers.pic.output();
        let result = access(&mut controllers);
        let now = controllers.pic.output();
        if now != before {
            self.apics.set_lint0(now);
        }
        result
    }

    /// One source's wire is driven to `level`; `wire` is its level so far.
    fn drive(&self, end: usize, wire: &AtomicBool, level: bool) {
        self.with(|controllers| {
            if wire.swap(level, Ordering::Relaxed) == level {
                return;
            }
            let count = &mut controllers.asserted[end];
            let before = *count;
            *count = if level { before + 1 } else { before - 1 };
            if (before == 0) == (*count == 0) {
                return;
            }
            controllers.set_end(end, level, &self.apics);
        });
    }

    /// Changes what is owed.
    fn with_ticks(&self, change: impl FnOnce(&mut Controllers)) {
        self.with(|controllers| {
            change(controllers);
            let owing = controllers.owed.iter().any(|owed| *owed != 0);
            self.owing.store(owing, Ordering::Relaxed);
        });
    }

    /// A CPU took an interrupt.
    pub(crate) fn taken(&self, vector: u8) {
        if self.owing.load(Ordering::Relaxed) {
            self.with_ticks(|controllers| controllers.repay(vector, &self.apics));
        }
    }

    /// The 8259s' vector, if they still interrupt.
    pub(crate) fn acknowledge_pic(&self) -> Option<u8> {
        self.with(|controllers| controllers.pic.acknowledge())
    }

    /// Sends an interrupt to one local APIC; see [`crate::CpuInterrupts::send`].
    pub(crate) fn send_one(&self, to: u32, command: u32) -> bool {
        let (destination, vector) = (Destination::Physical(to), command as u8);
        let delivery = Delivery::from_bits(u64::from(command) >> 8);
        let usual = matches!(delivery, Delivery::Fixed | Delivery::Lowest | Delivery::Nmi);
        let message = Message { destination, delivery, vector, level: false };
        usual && to != BROADCAST && self.apics.send(&message) != Taken::No
    }

    /// See [`crate::CpuInterrupts::vector_of`].
    pub(crate) fn vector_of(&self, id: u32, (address, data): (u64, u32)) -> Option<u8> {
        let message = Message::from_msi(address, data);
        let usual = matches!(message.delivery, Delivery::Fixed | Delivery::Lowest)
            && !message.level
            && message.vector >= 16;
        let is_for = |number: usize, lapic: &Lapic| {
            lapic.with(|state| state.matches(message.destination)) == (number == id as usize)
        };
        let mut lapics = self.apics.0.iter().enumerate();
        let ours = usual && lapics.all(|(number, lapic)| is_for(number, lapic));
        ours.then_some(message.vector)
    }

    /// Does what local APIC `from` asked for.
    pub(crate) fn act(&self, from: u32, effect: Effect) {
        match effect {
            Effect::Eoi(vector) => {
                lock(&self.controllers).ioapic.end_of_interrupt(vector, &self.apics);
            }
            Effect::Send(message, shorthand) => self.apics.send_ipi(from, &message, shorthand),
        }
    }
}

/// The ISA interrupt at an end of wires. GSI 0 is the pin firmware would wire to the 8259s: nothing is.
fn isa_irq(end: usize) -> Option<u8> {
    match end {
        2 => Some(0),
        1..ISA_IRQS => Some(end as u8),
        PINS..ENDS => Some((end - PINS) as u8),
        _ => None,
    }
}

/// One source's wire.
struct Line {
    interrupts: Arc<Interrupts>,
    end: usize,
    /// Changes only under the controllers' lock.
    level: AtomicBool,
}

impl InterruptLine for Line {
    fn set(&self, level: bool) {
        if self.level.load(Ordering::Relaxed) != level {
            self.interrupts.drive(self.end, &self.level, level);
        }
    }
    fn tick(&self, count: u64) {
        let Interrupts { apics, .. } = &*self.interrupts;
        if count != 0 {
            self.interrupts.with_ticks(|controllers| controllers.tick(self.end, count, apics));
        }
    }
    fn forget_ticks(&self) {
        self.interrupts.with_ticks(|controllers| controllers.owed[self.end] = 0);
    }
}

/// One of PCI's wires: into a GSI, and into an 8259 input.
struct PciLine([Line; 2]);

impl InterruptLine for PciLine {
    fn set(&self, level: bool) {
        self.0.iter().for_each(|line| line.set(level));
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// There is no such GSI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("GSI {0} does not exist: the I/O APIC has pins 0 to 23")]
pub struct NoSuchGsi(pub u32);

/// Hands out interrupt lines and delivers MSIs.
#[derive(Clone)]
pub struct InterruptController {
    pub(crate) interrupts: Arc<Interrupts>,
}

impl InterruptController {
    /// A new wire into `gsi`. Several devices may have one each: the GSI is asserted while any of
    /// them is.
    ///
    /// # Errors
    /// The I/O APIC has no such pin.
    pub fn line(&self, gsi: u32) -> Result<Arc<dyn InterruptLine>, NoSuchGsi> {
        if gsi as usize >= PINS {
            return Err(NoSuchGsi(gsi));
        }
        Ok(Arc::new(self.wire(gsi as usize)))
    }

    fn wire(&self, end: usize) -> Line {
        let level = AtomicBool::new(false);
        Line { interrupts: Arc::clone(&self.interrupts), end, level }
    }

    /// A new wire of PCI's into `gsi`, and into the 8259 input `irq` for systems without an I/O APIC: one that is
    /// level-triggered from now on, as firmware leaves it.
    ///
    /// # Errors
    /// The I/O APIC has no such pin.
    pub fn pci_line(&self, gsi: u32, irq: u8) -> Result<Arc<dyn InterruptLine>, NoSuchGsi> {
        let irq = irq % ISA_IRQS as u8;
        if gsi as usize >= PINS {
            return Err(NoSuchGsi(gsi));
        }
        self.interrupts.with(|controllers| controllers.pic.make_level_triggered(irq));
        let ends = [gsi as usize, PINS + usize::from(irq)];
        Ok(Arc::new(PciLine(ends.map(|end| self.wire(end)))))
    }

    /// A new wire into ISA interrupt `irq`.
    ///
    /// # Errors
    /// The I/O APIC has no such pin.
    pub fn isa_line(&self, irq: u32) -> Result<Arc<dyn InterruptLine>, NoSuchGsi> {
        self.line(if irq == 0 { TIMER_GSI } else { irq })
    }

    /// Pulses every CPU's LINT1, which an NMI button would.
    pub fn nmi(&self) {
        for lapic in &self.interrupts.apics.0 {
            lapic.with(|state| state.pulse_lint1());
        }
    }
}

impl MsiSink for InterruptController {
    fn send(&self, address: u64, data: u32) {
        self.interrupts.apics.send(&Message::from_msi(address, data));
    }
}

/// The I/O APIC as a device.
pub(crate) struct IoApicDevice(pub(crate) Arc<Interrupts>);

impl Device for IoApicDevice {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let register = lock(&self.0.controllers).ioapic.read(offset & 0xff & !0xf);
        let skip = (offset & 0xf) as usize;
        for (to, from) in data.iter_mut().zip(register.to_le_bytes().iter().skip(skip)) {
            *to = *from;
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut value = [0; 4];
        value.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
        let value = u32::from_le_bytes(value);
        lock(&self.0.controllers).ioapic.write(offset & 0xff, value, &self.0.apics);
    }
}

/// One 8259's two ports as a device.
pub(crate) struct PicPorts {
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) slave: bool,
}

impl Device for PicPorts {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        for (port, byte) in (offset..).zip(data) {
            *byte = self.interrupts.with(|c| c.pic.read(self.slave, port & 1 != 0));
        }
    }
    fn write(&mut self, offset: u64, data: &[u8]) {
        for (port, byte) in (offset..).zip(data) {
            self.interrupts.with(|c| c.pic.write(self.slave, port & 1 != 0, *byte));
        }
    }
}

/// The edge/level control registers as a device.
pub(crate) struct ElcrPorts(pub(crate) Arc<Interrupts>);

impl Device for ElcrPorts {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        for (port, byte) in (offset..).zip(data) {
            *byte = self.0.with(|c| c.pic.read_elcr(port & 1 != 0));
        }
    }
    fn write(&mut self, offset: u64, data: &[u8]) {
        for (port, byte) in (offset..).zip(data) {
            self.0.with(|c| c.pic.write_elcr(port & 1 != 0, *byte));
        }
    }
}
