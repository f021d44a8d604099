//! The vCPU's side of the interrupt system: its local APIC as instructions reach it.

use std::sync::Arc;

use x86::{Fault, msr};

use crate::interrupts::Interrupts;
use crate::lapic::Lapic;
use crate::lapic::registers::BASE_ENABLED;
use crate::lapic::state::Effect;
use crate::machine_check::{Logged, MachineChecks, MachineError};

/// What a vCPU asks of the interrupt system. Clones are handles to the same local APIC.
#[derive(Clone)]
pub struct CpuInterrupts {
    pub(crate) id: u32,
    pub(crate) lapic: Arc<Lapic>,
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) machine_checks: Arc<MachineChecks>,
}

impl CpuInterrupts {
    /// The APIC ID, which is the vCPU's number.
    pub fn apic_id(&self) -> u32 {
        self.id
    }

    /// What waits, a set of [`pending`] bits: one relaxed load, to be asked before every block.
    #[inline]
    pub fn pending(&self) -> u32 {
        self.lapic.pending()
    }

    /// Takes the interrupt of highest priority; the CPU must then deliver the vector. `None` if
    /// what was pending no longer is.
    pub fn acknowledge(&self) -> Option<u8> {
        let vector = self.take_vector();
        vector.inspect(|vector| self.interrupts.taken(*vector))
    }

    fn take_vector(&self) -> Option<u8> {
        let (ext_int, vector) = self.lapic.with(|state| match state.take_ext_int() {
            true => (true, None),
            false => (false, state.acknowledge()),
        });
        if !ext_int {
            return vector;
        }
        self.interrupts.acknowledge_pic().or_else(|| self.lapic.with(|state| state.acknowledge()))
    }

    /// Whether the end of the interrupt that was just taken may be told by and by: see [`PutOffEoi`](crate::PutOffEoi).
    pub(crate) fn put_off_eoi(&self) -> bool {
        self.lapic.with(|state| state.put_off_eoi())
    }

    /// It was told, or will be by the register.
    pub(crate) fn settle_eoi(&self, told: bool) {
        let effect = self.lapic.with(|state| state.settle_eoi(told));
        self.act(effect);
    }

    /// The class above which the vCPU may take interrupts by itself, once the end that was put off has been told. `None` means that the
    /// vCPU may take no interrupt by itself.
    pub(crate) fn open_above(&self) -> Option<u8> {
        self.lapic.with(|state| state.open_above())
    }

    /// The vCPU has taken an interrupt by itself, whose end is put off.
    pub(crate) fn took(&self, vector: u8) {
        let effect = self.lapic.with(|state| state.took(vector));
        self.act(effect);
    }

    /// The vector of an edge-triggered message (its GPA and data) that is for this vCPU and for no other.
    pub fn vector_of(&self, message: (u64, u32)) -> Option<u8> {
        self.interrupts.vector_of(self.id, message)
    }

    /// Takes a pending NMI.
    pub fn take_nmi(&self) -> bool {
        self.lapic.with(|state| state.take_nmi())
    }

    /// The handler of the NMI that was taken last has ended.
    pub fn nmi_ended(&self) {
        self.lapic.with(|state| state.nmi_ended());
    }

    /// Takes a pending INIT: the vCPU must reset and wait for start-up.
    pub fn take_init(&self) -> bool {
        self.lapic.with(|state| state.take_init())
    }

    /// Takes a pending start-up IPI: a vCPU that waits for it begins at vector * 4096, others
    /// ignore it.
    pub fn take_start_up(&self) -> Option<u8> {
        self.lapic.with(|state| state.take_start_up())
    }

    /// CR8: the task priority class.
    pub fn cr8(&self) -> u8 {
        self.lapic.with(|state| state.tpr() >> 4)
    }

    /// Sets CR8, 0 to 15.
    pub fn set_cr8(&self, value: u8) {
        self.lapic.with(|state| state.set_tpr(value << 4));
    }

    /// Whether the local APIC is enabled in APIC_BASE: what CPUID.1:EDX.APIC shows.
    pub fn apic_enabled(&self) -> bool {
        self.lapic.with(|state| state.base() & BASE_ENABLED != 0)
    }

    /// Whether `gpa` is in the local APIC's register page, for this CPU: then it is to be
    /// accessed by [`CpuInterrupts::mmio_read`] and [`CpuInterrupts::mmio_write`], not by the bus.
    #[inline]
    pub fn claims(&self, gpa: u64) -> bool {
        self.lapic.claims(gpa)
    }

    /// Reads a register; `gpa` is one this claims. Registers are four bytes each 16 bytes: what
    /// lies between reads as zero.
    pub fn mmio_read(&self, gpa: u64, data: &mut [u8]) {
        let register = (gpa >> 4 & 0xff) as u32;
        let value = self.lapic.with(|state| state.mmio_read(register)).to_le_bytes();
        data.fill(0);
        let bytes = value.iter().skip((gpa & 0xf) as usize);
        data.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    }

    /// Writes a register; `gpa` is one this claims. A write that is not of a whole register is
    /// lost.
    pub fn mmio_write(&self, gpa: u64, data: &[u8]) {
        let Some(value) = data.first_chunk().filter(|_| gpa & 0xf == 0) else { return };
        let (register, value) = ((gpa >> 4 & 0xff) as u32, u32::from_le_bytes(*value));
        let effect = self.lapic.with(|state| state.mmio_write(register, value));
        self.act(effect);
    }

    /// The CPU meets an error of the hardware: it is noted in a bank, and what was corrected interrupts as software has
    /// asked for. Returns what the bank says, and whether all CPUs are to take #MC.
    pub fn log_error(&self, error: &MachineError) -> Logged {
        let logged = self.machine_checks.log(error);
        if logged.interrupts {
            self.lapic.with(|state| state.corrected_machine_check());
        }
        logged
    }

    /// The CPU takes #MC: for an error of its own, or of another's. False if it is busy with one.
    pub fn begin_machine_check(&self, own: Option<&MachineError>) -> bool {
        self.machine_checks.begin(own)
    }

    /// RDMSR of IA32_APIC_BASE, IA32_TSC_DEADLINE, an x2APIC register or one of machine checks.
    ///
    /// # Errors
    /// #GP for anything else, for x2APIC registers outside x2APIC mode, and for those that cannot
    /// be read.
    pub fn msr_read(&self, index: u32) -> Result<u64, Fault> {
        self.lapic.with(|state| match index {
            msr::APIC_BASE => Ok(state.base()),
            msr::TSC_DEADLINE => Ok(state.tsc_deadline()),
            msr::X2APIC..=msr::X2APIC_LAST => state.msr_read(index - msr::X2APIC),
            _ => self.machine_checks.read(index).ok_or(Fault::gp(0)),
        })
    }

    /// WRMSR of IA32_APIC_BASE, IA32_TSC_DEADLINE, an x2APIC register or one of machine checks.
    ///
    /// # Errors
    /// #GP as for [`CpuInterrupts::msr_read`], for reserved bits, and for changes of mode that are
    /// not permitted.
    pub fn msr_write(&self, index: u32, value: u64) -> Result<(), Fault> {
        match index {
            msr::APIC_BASE => self.lapic.set_base(value),
            msr::TSC_DEADLINE => {
                self.lapic.with(|state| state.set_tsc_deadline(value));
                Ok(())
            }
            msr::X2APIC..=msr::X2APIC_LAST => {
                let register = index - msr::X2APIC;
                let effect = self.lapic.with(|state| state.msr_write(register, value))?;
                self.act(effect);
                Ok(())
            }
            _ => self.machine_checks.write(index, value).ok_or(Fault::gp(0)),
        }
    }

    /// Sends an interrupt to the local APIC with an identifier: its kind and vector as in an interrupt command register.
    /// False for kinds that are not for other CPUs in the middle of their work, and if there is none with that identifier.
    pub fn send(&self, to: u32, command: u32) -> bool {
        self.interrupts.send_one(to, command)
    }

    fn act(&self, effect: Option<Effect>) {
        if let Some(effect) = effect {
            self.interrupts.act(self.id, effect);
        }
    }
}
