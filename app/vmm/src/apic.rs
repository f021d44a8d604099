//! The local APIC of a vCPU as the engine wants it.

use std::sync::Arc;

use chipset::{CpuInterrupts, KvmClock, MachineEvent, MachineEvents};
use engine::LocalApic;
use ram::Ram;
use x86::{Fault, msr, paravirt::call};

use crate::{events::Events, paravirt::Paravirt};

/// Register of the local APIC that sends interrupts: its offset in the page, and its MSR.
const COMMAND: u64 = 0x300;
const COMMAND_MSR: u32 = msr::X2APIC + 0x30;
/// What is sent is not for one CPU by its identifier: a shorthand, or a logical destination.
const NOT_ONE: u64 = 3 << 18 | 1 << 11;

/// A write to this register of the local APIC can change which messages are for this CPU: the registers of its identifiers, of their format,
/// and the one that enables the local APIC (SDM 10.4.1).
fn routes(register: u64) -> bool {
    matches!(register, 0x02 | 0x0d | 0x0e | 0x0f)
}

/// The chipset's local APIC as the engine wants it, and the clock that is refreshed along with it.
pub(crate) struct Apic {
    pub interrupts: CpuInterrupts,
    pub kvm_clock: Option<Arc<KvmClock>>,
    pub paravirt: Paravirt,
    pub events: Arc<Events>,
    pub ram: Ram,
}

impl Apic {
    /// The clock, and the number of this CPU in it.
    fn clock(&self) -> Option<(&KvmClock, usize)> {
        Some((self.kvm_clock.as_deref()?, self.interrupts.apic_id() as usize))
    }
}

impl LocalApic for Apic {
    fn pending(&self) -> u32 {
        self.interrupts.pending()
    }
    fn acknowledge(&self) -> Option<u8> {
        if let Some(clock) = &self.kvm_clock {
            clock.refresh();
        }
        self.paravirt.acknowledge()
    }
    fn take_nmi(&self) -> bool {
        self.interrupts.take_nmi()
    }
    fn nmi_ended(&self) {
        self.interrupts.nmi_ended();
    }
    /// The one that boots would begin at the reset vector, in firmware, which would start the machine anew.
    fn take_init(&self) -> bool {
        let taken = self.interrupts.take_init();
        if taken {
            self.paravirt.reset();
        }
        let boots = self.interrupts.apic_id() == 0;
        if taken && boots {
            self.events.raise(MachineEvent::Reset);
        }
        taken && !boots
    }
    fn take_start_up(&self) -> Option<u8> {
        self.interrupts.take_start_up()
    }
    fn enabled(&self) -> bool {
        self.interrupts.apic_enabled()
    }
    fn cr8(&self) -> u8 {
        self.interrupts.cr8()
    }
    fn set_cr8(&self, value: u8) {
        self.interrupts.set_cr8(value);
    }
    fn msr_read(&self, index: u32) -> Result<u64, Fault> {
        let known = self.clock().and_then(|(clock, cpu)| clock.msr_read(cpu, index));
        let known = known.or_else(|| self.paravirt.msr_read(index));
        known.map_or_else(
            || {
                self.paravirt.settle_eoi_for_read(index);
                self.interrupts.msr_read(index)
            },
            Ok,
        )
    }
    fn msr_write(&self, index: u32, value: u64) -> Result<(), Fault> {
        if let Some((clock, cpu)) = self.clock()
            && clock.msr_write(cpu, index, value)
        {
            return Ok(());
        }
        if let Some(done) = self.paravirt.msr_write(index, value) {
            return done;
        }
        self.paravirt.settle_eoi();
        self.interrupts.msr_write(index, value)?;
        if index == msr::APIC_BASE || routes(index.wrapping_sub(msr::X2APIC).into()) {
            self.ram.change_bells();
        }
        if index == COMMAND_MSR {
            let one = value & NOT_ONE == 0;
            self.paravirt.has_sent(one.then_some((value >> 32) as usize));
        }
        Ok(())
    }
    fn hypercall(&self, kernel: bool, number: u64, arguments: [u64; 4]) -> Option<u64> {
        let [gpa, which, ..] = arguments;
        match &self.kvm_clock {
            Some(clock) if kernel && number == call::CLOCK_PAIRING => Some(clock.pair(gpa, which)),
            _ => self.paravirt.hypercall(kernel, number, arguments),
        }
    }
    fn direct(&self) -> Option<(u64, u8)> {
        self.paravirt.direct()
    }
    fn took(&self, vector: u8) {
        self.paravirt.took(vector);
    }
    fn vector_of(&self, message: (u64, u32)) -> Option<u8> {
        self.interrupts.vector_of(message)
    }
    fn take_unhalt(&self) -> bool {
        self.paravirt.take_unhalt()
    }
    fn halts(&self) {
        if let Some(clock) = &self.kvm_clock {
            clock.halts();
        }
    }
    fn has_spun(&self) {
        self.paravirt.has_spun();
    }
    fn set_preempted(&self) {
        self.paravirt.set_preempted();
    }
    fn note_stolen(&self, ns: u64) {
        self.paravirt.note_stolen(ns);
    }
    fn set_running(&self) -> bool {
        self.paravirt.set_running()
    }
    fn mmio_read(&self, gpa: u64, data: &mut [u8]) -> bool {
        let ours = self.interrupts.claims(gpa);
        if ours {
            self.paravirt.settle_eoi();
            self.interrupts.mmio_read(gpa, data);
        }
        ours
    }
    fn mmio_write(&self, gpa: u64, data: &[u8]) -> bool {
        let ours = self.interrupts.claims(gpa);
        if ours {
            self.paravirt.settle_eoi();
            self.interrupts.mmio_write(gpa, data);
            if routes(gpa >> 4 & 0xff) {
                self.ram.change_bells();
            }
            if gpa & 0xfff == COMMAND {
                self.paravirt.has_sent(None);
            }
        }
        ours
    }
}
