//! What a local APIC does (SDM chapter 10), without locks or neighbours.

use x86::Fault;

use super::message::{BROADCAST, Delivery, Destination, Message, Taken};
use super::registers::{
    BASE_ADDRESS, BASE_BSP, BASE_ENABLED, BASE_X2APIC, DEFAULT_BASE, ESR_RECEIVE_VECTOR,
    ESR_REGISTER, ESR_SEND_VECTOR, ICR_PENDING, ICR_WRITABLE, LVT_MASKED, LVT_WRITABLE,
    SVR_ENABLED, VERSION, lvt_index, msr_writable, register as reg,
};
use super::timer::{Mode, Timer};
use super::vectors::VectorSet;
use crate::pending;
use crate::time::BACKLOG;

/// NMIs that can wait: a CPU takes the first at once, and keeps one more while that one's handler runs (SDM 6.7.1).
/// Here both may arrive before the first is taken.
const MOST_NMIS: u8 = 2;

/// What has to happen outside this local APIC after an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Tell the I/O APIC that a level-triggered interrupt ended.
    Eoi(u8),
    /// Send an interrupt.
    Send(Message, Shorthand),
}

/// ICR bits 19:18: who a message is for, beside its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shorthand {
    Destination,
    ToSelf,
    All,
    Others,
}

pub(crate) struct ApicState {
    id: u32,
    base: u64,
    tpr: u8,
    ldr: u32,
    dfr: u32,
    svr: u32,
    isr: VectorSet,
    tmr: VectorSet,
    irr: VectorSet,
    /// The end of the interrupt in service is told in memory, by and by.
    put_off: bool,
    esr: u32,
    /// Errors since the last write of the ESR.
    errors: u32,
    icr: u64,
    lvt: [u32; LVT_WRITABLE.len()],
    pub(crate) timer: Timer,
    /// Interrupts the periodic timer owes: they came while one waited, or went unnoticed.
    owed: u64,
    /// The wire from the 8259s.
    lint0: bool,
    /// A message with delivery mode ExtINT came.
    ext_int: bool,
    /// NMIs that wait, up to [`MOST_NMIS`].
    nmis: u8,
    /// The handler of one runs.
    nmi_in_service: bool,
    init: bool,
    start_up: Option<u8>,
}

impl ApicState {
    /// The state after power-up. The bootstrap processor's is as firmware leaves it: LINT0 takes
    /// the 8259s' interrupts, LINT1 NMIs.
    pub(crate) fn new(id: u32, bsp: bool, timer: Timer) -> Self {
        let mut state = Self {
            id,
            base: DEFAULT_BASE | BASE_ENABLED | if bsp { BASE_BSP } else { 0 },
            tpr: 0,
            ldr: 0,
            dfr: 0,
            svr: 0,
            isr: VectorSet::default(),
            tmr: VectorSet::default(),
            irr: VectorSet::default(),
            put_off: false,
            esr: 0,
            errors: 0,
            icr: 0,
            lvt: [0; LVT_WRITABLE.len()],
            timer,
            owed: 0,
            lint0: false,
            ext_int: false,
            nmis: 0,
            nmi_in_service: false,
            init: false,
            start_up: None,
        };
        state.reset_registers();
        if bsp {
            state.lvt[lvt_index(reg::LVT_LINT0)] = 7 << 8;
            state.lvt[lvt_index(reg::LVT_LINT1)] = 4 << 8;
        }
        state
    }

    /// Registers as after INIT (SDM 10.4.7.3): APIC ID and APIC_BASE stay.
    fn reset_registers(&mut self) {
        self.tpr = 0;
        self.ldr = 0;
        self.dfr = u32::MAX;
        self.svr = 0xff;
        (self.isr, self.tmr, self.irr) = Default::default();
        self.put_off = false;
        (self.esr, self.errors, self.icr) = (0, 0, 0);
        self.lvt = [LVT_MASKED; LVT_WRITABLE.len()];
        self.timer.reset();
        self.owed = 0;
        self.ext_int = false;
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    fn enabled(&self) -> bool {
        self.base & BASE_ENABLED != 0
    }

    pub(crate) fn x2apic(&self) -> bool {
        self.base & (BASE_ENABLED | BASE_X2APIC) == BASE_ENABLED | BASE_X2APIC
    }

    /// Enabled in APIC_BASE and in the spurious-interrupt register.
    fn accepts(&self) -> bool {
        self.enabled() && self.svr & SVR_ENABLED != 0
    }

    /// WRMSR of APIC_BASE (SDM 10.12.5 for the permitted changes of mode).
    pub(crate) fn set_base(&mut self, value: u64) -> Result<(), Fault> {
        let mode = |base: u64| (base & BASE_ENABLED != 0, base & BASE_X2APIC != 0);
        let forbidden = matches!(
            (mode(self.base), mode(value)),
            (_, (false, true)) | ((true, true), (true, false)) | ((false, _), (true, true))
        );
        let reserved = !(BASE_ADDRESS | BASE_ENABLED | BASE_X2APIC | BASE_BSP);
        if value & reserved != 0 || forbidden {
            return Err(Fault::gp(0));
        }
        let (was, was_x2apic) = (self.enabled(), self.x2apic());
        self.base = value;
        if was && !self.enabled() {
            self.reset_registers();
        }
        if self.x2apic() && !was_x2apic {
            self.ldr = self.id >> 4 << 16 | 1 << (self.id & 15);
        }
        Ok(())
    }

    /// What the CPU has to look at, [`pending`] bits.
    pub(crate) fn pending(&self) -> u32 {
        let bit = |condition, bit| if condition { bit } else { 0 };
        // What waits behind an end that was put off may be deliverable: whether it is, only the vCPU can tell.
        let behind = self.put_off && self.irr.highest().is_some();
        bit(behind || self.ext_int() || self.deliverable().is_some(), pending::INTERRUPT)
            | bit(self.nmis > 0, pending::NMI)
            | bit(self.init, pending::INIT)
            | bit(self.start_up.is_some(), pending::START_UP)
    }

    /// The 8259s' interrupt waits: through LINT0, or straight if the local APIC is disabled.
    pub(crate) fn ext_int(&self) -> bool {
        let lint0 = self.lvt[lvt_index(reg::LVT_LINT0)];
        let wired = !self.enabled() || lint0 & (LVT_MASKED | 0x700) == 0x700;
        (self.lint0 && wired) || self.ext_int
    }

    /// [`ApicState::ext_int`]; an ExtINT message is taken once.
    pub(crate) fn take_ext_int(&mut self) -> bool {
        let waits = self.ext_int();
        self.ext_int = false;
        waits
    }

    /// Processor priority (SDM 10.8.3.1).
    pub(crate) fn ppr(&self) -> u8 {
        let serving = self.isr.highest().unwrap_or(0) & 0xf0;
        if self.tpr & 0xf0 >= serving { self.tpr } else { serving }
    }

    /// Arbitration priority, for lowest-priority delivery (SDM 10.6.2.4).
    pub(crate) fn apr(&self) -> u8 {
        let waiting = self.irr.highest().unwrap_or(0) & 0xf0;
        self.ppr().max(waiting)
    }

    fn deliverable(&self) -> Option<u8> {
        let vector = self.irr.highest()?;
        (self.enabled() && vector & 0xf0 > self.ppr() & 0xf0).then_some(vector)
    }

    /// The CPU takes the interrupt of highest priority, if the task priority still permits it.
    pub(crate) fn acknowledge(&mut self) -> Option<u8> {
        let vector = self.deliverable()?;
        self.irr.remove(vector);
        self.isr.insert(vector);
        self.repay(vector);
        Some(vector)
    }

    /// The vCPU may tell the end of what it has just begun to serve by and by: nothing waits for it, neither an interrupt nor the I/O APIC.
    pub(crate) fn put_off_eoi(&mut self) -> bool {
        let only = |vector: u8| !self.tmr.contains(vector) && self.isr.has_one();
        self.put_off = self.irr.highest().is_none() && self.isr.highest().is_some_and(only);
        self.put_off
    }

    /// An end that was put off has been told, or will be told by the register.
    pub(crate) fn settle_eoi(&mut self, told: bool) -> Option<Effect> {
        let put_off = std::mem::take(&mut self.put_off);
        if put_off && told { self.eoi() } else { None }
    }

    /// The class above which the vCPU may take interrupts by itself, once the end that was put off has been told. `None` if another
    /// interrupt is served or waits, or if the local APIC is disabled.
    pub(crate) fn open_above(&self) -> Option<u8> {
        let serves = self.isr.highest().is_some() && !self.put_off;
        let waits = self.irr.highest().is_some() || self.ext_int();
        (self.accepts() && !serves && !waits).then_some(self.tpr >> 4)
    }

    /// The vCPU has taken an edge-triggered interrupt by itself, after the end that was put off. The end of this one is put off, too.
    pub(crate) fn took(&mut self, vector: u8) -> Option<Effect> {
        let effect = self.settle_eoi(true);
        if vector >= 16 {
            self.isr.insert(vector);
            self.put_off = true;
        }
        effect
    }

    /// The timer's interrupt was taken: the next of those it owes waits now.
    fn repay(&mut self, vector: u8) {
        let timer = self.lvt[lvt_index(reg::LVT_TIMER)];
        if self.owed != 0 && timer & (LVT_MASKED | 0xff) == u32::from(vector) {
            self.owed -= 1;
            self.irr.insert(vector);
        }
    }

    /// An interrupt arrives; nothing takes it if the local APIC is disabled.
    fn accept(&mut self, vector: u8, level: bool) -> Taken {
        if !self.accepts() {
            return Taken::No;
        }
        if vector < 16 {
            self.error(ESR_RECEIVE_VECTOR);
            return Taken::Yes;
        }
        let waits = self.irr.contains(vector);
        self.irr.insert(vector);
        if level {
            self.tmr.insert(vector);
        } else {
            self.tmr.remove(vector);
        }
        if waits { Taken::Merged } else { Taken::Yes }
    }

    /// Whether a message to `destination` is for this local APIC (SDM 10.6.2).
    pub(crate) fn matches(&self, destination: Destination) -> bool {
        match destination {
            Destination::Physical(BROADCAST) | Destination::Logical(BROADCAST) => true,
            Destination::Physical(id) => id == self.id,
            Destination::Logical(mask) if self.x2apic() => {
                mask >> 16 == self.ldr >> 16 && mask & self.ldr & 0xffff != 0
            }
            Destination::Logical(mask) => {
                let ldr = self.ldr >> 24;
                if self.dfr >> 28 == 0xf {
                    mask & ldr != 0
                } else {
                    mask >> 4 == ldr >> 4 && mask & ldr & 0xf != 0
                }
            }
        }
    }

    /// A message arrives.
    pub(crate) fn receive(&mut self, message: &Message) -> Taken {
        match message.delivery {
            Delivery::Fixed | Delivery::Lowest => {
                return self.accept(message.vector, message.level);
            }
            Delivery::Nmi => self.nmi(),
            Delivery::Init => self.init(),
            Delivery::StartUp => self.start_up = Some(message.vector),
            Delivery::ExtInt => self.ext_int = true,
            Delivery::Smi | Delivery::Reserved => {}
        }
        Taken::Yes
    }

    fn init(&mut self) {
        self.reset_registers();
        if self.x2apic() {
            self.ldr = self.id >> 4 << 16 | 1 << (self.id & 15);
        }
        self.init = true;
        (self.nmis, self.nmi_in_service) = (0, false);
        self.start_up = None;
    }

    pub(crate) fn take_nmi(&mut self) -> bool {
        let waits = self.nmis > 0;
        self.nmis -= u8::from(waits);
        self.nmi_in_service |= waits;
        waits
    }

    pub(crate) fn nmi_ended(&mut self) {
        self.nmi_in_service = false;
    }

    fn nmi(&mut self) {
        let most = MOST_NMIS - u8::from(self.nmi_in_service);
        self.nmis = most.min(self.nmis + 1);
    }

    pub(crate) fn take_init(&mut self) -> bool {
        std::mem::take(&mut self.init)
    }

    pub(crate) fn take_start_up(&mut self) -> Option<u8> {
        self.start_up.take()
    }

    /// Drives LINT0. As a fixed interrupt it counts as edge-triggered, whatever the LVT says.
    pub(crate) fn set_lint0(&mut self, level: bool) {
        if level && !self.lint0 {
            self.local_interrupt(reg::LVT_LINT0);
        }
        self.lint0 = level;
    }

    /// An edge on LINT1; with the local APIC disabled it is the CPU's NMI pin.
    pub(crate) fn pulse_lint1(&mut self) {
        if self.enabled() {
            self.local_interrupt(reg::LVT_LINT1);
        } else {
            self.nmi();
        }
    }

    pub(crate) fn expire(&mut self, now: u64) {
        let Some(missed) = self.timer.expire(now) else { return };
        match self.local_interrupt(reg::LVT_TIMER) {
            Taken::No => self.owed = 0,
            Taken::Merged => self.owe(missed.map_or(0, |missed| missed + 1)),
            Taken::Yes => self.owe(missed.unwrap_or(0)),
        }
    }

    fn owe(&mut self, ticks: u64) {
        self.owed = (self.owed + ticks).min(BACKLOG);
    }

    /// Accesses to the timer see it as of this moment, not as of when its thread last ran: an
    /// interrupt that is due is neither lost to a new count nor later than the count it ends.
    fn catch_up(&mut self) {
        let now = self.timer.now();
        self.expire(now);
    }

    pub(crate) fn set_tsc_deadline(&mut self, deadline: u64) {
        self.catch_up();
        self.timer.set_tsc_deadline(deadline);
        self.catch_up();
    }

    pub(crate) fn tsc_deadline(&mut self) -> u64 {
        self.catch_up();
        self.timer.tsc_deadline()
    }

    /// An interrupt by way of the LVT. (ExtINT needs none: it follows the level of LINT0.)
    fn local_interrupt(&mut self, register: u32) -> Taken {
        let lvt = self.lvt[lvt_index(register)];
        if lvt & LVT_MASKED != 0 {
            return Taken::No;
        }
        let kinds = matches!(register, reg::LVT_LINT0 | reg::LVT_LINT1 | reg::LVT_CMCI);
        match Delivery::from_bits(if kinds { u64::from(lvt >> 8) } else { 0 }) {
            Delivery::Fixed => return self.accept(lvt as u8, false),
            Delivery::Nmi => self.nmi(),
            Delivery::Init => self.init(),
            _ => return Taken::No,
        }
        Taken::Yes
    }

    /// Errors that were corrected have come to the number that software asked for.
    pub(crate) fn corrected_machine_check(&mut self) {
        self.local_interrupt(reg::LVT_CMCI);
    }

    fn error(&mut self, bit: u32) {
        let first = self.errors & bit == 0;
        self.errors |= bit;
        let lvt = self.lvt[lvt_index(reg::LVT_ERROR)];
        if first && lvt as u8 >= 16 {
            self.local_interrupt(reg::LVT_ERROR);
        }
    }

    pub(crate) fn tpr(&self) -> u8 {
        self.tpr
    }

    pub(crate) fn set_tpr(&mut self, value: u8) {
        self.tpr = value;
    }

    /// Reads a register both modes have; `None` if it does not exist.
    fn read_register(&mut self, register: u32) -> Option<u32> {
        Some(match register {
            reg::VERSION => VERSION,
            reg::TPR => self.tpr.into(),
            reg::PPR => self.ppr().into(),
            reg::LDR => self.ldr,
            reg::SVR => self.svr,
            reg::ISR..reg::TMR => self.isr.register(register - reg::ISR),
            reg::TMR..reg::IRR => self.tmr.register(register - reg::TMR),
            reg::IRR..=reg::IRR_LAST => self.irr.register(register - reg::IRR),
            reg::ESR => self.esr,
            reg::LVT_TIMER..=reg::LVT_ERROR | reg::LVT_CMCI => self.lvt[lvt_index(register)],
            reg::TIMER_INITIAL => self.timer.initial(),
            reg::TIMER_CURRENT => {
                self.catch_up();
                self.timer.current()
            }
            reg::TIMER_DIVIDE => self.timer.divide_configuration(),
            _ => return None,
        })
    }

    /// Writes a register both modes have; false if it does not exist.
    fn write_register(&mut self, register: u32, value: u32) -> bool {
        if matches!(register, reg::LVT_TIMER | reg::TIMER_INITIAL | reg::TIMER_DIVIDE) {
            self.catch_up();
        }
        match register {
            reg::TPR => self.tpr = value as u8,
            reg::SVR => self.set_svr(value),
            reg::ESR => self.esr = std::mem::take(&mut self.errors),
            reg::LVT_TIMER..=reg::LVT_ERROR | reg::LVT_CMCI => self.set_lvt(register, value),
            reg::TIMER_INITIAL => {
                self.timer.set_initial(value);
                self.owed = 0;
            }
            reg::TIMER_DIVIDE => self.timer.set_divide_configuration(value),
            _ => return false,
        }
        true
    }

    fn set_svr(&mut self, value: u32) {
        self.svr = value & 0x3ff;
        if !self.accepts() {
            self.lvt.iter_mut().for_each(|lvt| *lvt |= LVT_MASKED);
        }
    }

    fn set_lvt(&mut self, register: u32, value: u32) {
        let index = lvt_index(register);
        let mut value = value & LVT_WRITABLE[index];
        if self.svr & SVR_ENABLED == 0 {
            value |= LVT_MASKED;
        }
        self.lvt[index] = value;
        if register == reg::LVT_TIMER {
            self.timer.set_mode(Mode::from_lvt(value));
            self.owed = 0;
        }
    }

    fn eoi(&mut self) -> Option<Effect> {
        let vector = self.isr.highest()?;
        self.isr.remove(vector);
        self.tmr.contains(vector).then_some(Effect::Eoi(vector))
    }

    fn send(&mut self, destination: u32) -> Option<Effect> {
        let icr = self.icr;
        let logical = icr & 1 << 11 != 0;
        let destination = if self.x2apic() {
            Destination::new(destination, logical)
        } else {
            Destination::from_8_bits(destination as u8, logical)
        };
        let delivery = Delivery::from_bits(icr >> 8);
        // INIT level de-assert only synchronized the buses of old.
        let deassert = delivery == Delivery::Init && icr & 0xc000 == 0x8000;
        let vectored = matches!(delivery, Delivery::Fixed | Delivery::Lowest);
        if vectored && (icr as u8) < 16 {
            self.error(ESR_SEND_VECTOR);
            return None;
        }
        let shorthand = match icr >> 18 & 3 {
            0 => Shorthand::Destination,
            1 => Shorthand::ToSelf,
            2 => Shorthand::All,
            _ => Shorthand::Others,
        };
        let message = Message { destination, delivery, vector: icr as u8, level: false };
        (!deassert).then_some(Effect::Send(message, shorthand))
    }

    /// Reads a register through MMIO (SDM 10.4.1).
    pub(crate) fn mmio_read(&mut self, register: u32) -> u32 {
        match register {
            reg::ID => self.id << 24,
            reg::APR => self.apr().into(),
            reg::DFR => self.dfr,
            reg::ICR_LOW => self.icr as u32,
            reg::ICR_HIGH => (self.icr >> 32) as u32,
            reg::EOI | reg::RRD => 0,
            _ => self.read_register(register).unwrap_or_else(|| {
                self.error(ESR_REGISTER);
                0
            }),
        }
    }

    /// Writes a register through MMIO.
    pub(crate) fn mmio_write(&mut self, register: u32, value: u32) -> Option<Effect> {
        match register {
            reg::LDR => self.ldr = value & 0xff00_0000,
            reg::DFR => self.dfr = value | 0x0fff_ffff,
            reg::EOI => return self.eoi(),
            reg::ICR_HIGH => {
                self.icr = self.icr & 0xffff_ffff | u64::from(value & 0xff00_0000) << 32;
            }
            reg::ICR_LOW => {
                self.icr = self.icr & !0xffff_ffff | u64::from(value) & ICR_WRITABLE;
                return self.send((self.icr >> 56) as u32);
            }
            reg::ID | reg::VERSION | reg::PPR | reg::TIMER_CURRENT => {}
            _ => {
                let is_there = self.write_register(register, value);
                if !is_there {
                    self.error(ESR_REGISTER);
                }
            }
        }
        None
    }

    /// Reads a register through its MSR (SDM 10.12.1.2); #GP if there is none.
    pub(crate) fn msr_read(&mut self, register: u32) -> Result<u64, Fault> {
        match register {
            _ if !self.x2apic() => Err(Fault::gp(0)),
            reg::ID => Ok(self.id.into()),
            reg::ICR_LOW => Ok(self.icr),
            _ => self.read_register(register).map(u64::from).ok_or(Fault::gp(0)),
        }
    }

    /// Writes a register through its MSR; #GP if there is none or a reserved bit is set.
    pub(crate) fn msr_write(&mut self, register: u32, value: u64) -> Result<Option<Effect>, Fault> {
        if !self.x2apic() || value & !msr_writable(register).ok_or(Fault::gp(0))? != 0 {
            return Err(Fault::gp(0));
        }
        Ok(match register {
            reg::EOI => self.eoi(),
            reg::ICR_LOW => {
                self.icr = value & !ICR_PENDING;
                self.send((value >> 32) as u32)
            }
            reg::SELF_IPI => {
                self.icr = value & 0xff | 1 << 18;
                self.send(0)
            }
            _ => {
                self.write_register(register, value as u32);
                None
            }
        })
    }
}
