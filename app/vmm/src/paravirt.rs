//! What a vCPU of a machine with several gets of KVM's interface, beside its clock: its share of the host's CPUs, and
//! hypercalls by which it lets others have theirs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use bus::Kicker;
use chipset::{CpuInterrupts, PutOffEoi, StealTime};
use engine::{CpuPermit, VcpuRequests};
use ram::Ram;
use x86::{
    Fault,
    paravirt::{self, answer, call, feature},
};

/// What an interrupt command register must not say in a hypercall: a destination of its own kind.
const COMMAND_RESERVED: u64 = 3 << 18 | 1 << 11;
/// vCPUs that one word of a hypercall names.
const BITS: u64 = u64::BITS as u64;

/// A machine's vCPUs, as each of them reaches the others.
#[derive(Clone)]
pub(crate) struct Others {
    requests: Arc<[Arc<VcpuRequests>]>,
    /// They have been woken by a hypercall, and have not halted since.
    woken: Arc<[AtomicBool]>,
}

impl Others {
    pub(crate) fn new(requests: &Arc<[Arc<VcpuRequests>]>) -> Self {
        let woken = requests.iter().map(|_| AtomicBool::new(false)).collect();
        Self { requests: Arc::clone(requests), woken }
    }
}

/// One vCPU's interface.
pub(crate) struct Paravirt {
    features: u64,
    number: usize,
    interrupts: CpuInterrupts,
    others: Others,
    permit: Option<CpuPermit>,
    steal: StealTime,
    eoi: PutOffEoi,
}

impl Paravirt {
    pub(crate) fn new(
        features: u64,
        interrupts: CpuInterrupts,
        others: Others,
        permit: Option<CpuPermit>,
        ram: Ram,
    ) -> Self {
        let number = interrupts.apic_id() as usize;
        let (steal, eoi) = (StealTime::new(ram.clone()), PutOffEoi::new(ram));
        Self { features, number, interrupts, others, permit, steal, eoi }
    }

    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// RDMSR; `None` if the register is not ours.
    pub(crate) fn msr_read(&self, index: u32) -> Option<u64> {
        match index {
            paravirt::STEAL_TIME if self.has(feature::STEAL_TIME) => Some(self.steal.msr_read()),
            paravirt::EOI if self.has(feature::EOI) => Some(self.eoi.msr_read()),
            _ => None,
        }
    }

    /// WRMSR; `None` if the register is not ours.
    pub(crate) fn msr_write(&self, index: u32, value: u64) -> Option<Result<(), Fault>> {
        match index {
            paravirt::STEAL_TIME if self.has(feature::STEAL_TIME) => {
                Some(self.steal.msr_write(value))
            }
            paravirt::EOI if self.has(feature::EOI) => {
                self.settle_eoi();
                Some(self.eoi.msr_write(value))
            }
            _ => None,
        }
    }

    /// Takes the interrupt of highest priority.
    pub(crate) fn acknowledge(&self) -> Option<u8> {
        self.settle_eoi();
        self.interrupts.acknowledge().inspect(|_| self.eoi.taken(&self.interrupts))
    }

    /// See [`engine::LocalApic::direct`].
    pub(crate) fn direct(&self) -> Option<(u64, u8)> {
        self.eoi.direct(&self.interrupts)
    }

    /// See [`engine::LocalApic::took`].
    pub(crate) fn took(&self, vector: u8) {
        self.eoi.took(&self.interrupts, vector);
    }

    /// The local APIC is about to be accessed.
    pub(crate) fn settle_eoi(&self) {
        self.eoi.settle(&self.interrupts);
    }

    /// One of its MSRs is about to be read.
    pub(crate) fn settle_eoi_for_read(&self, index: u32) {
        self.eoi.settle_for_read(&self.interrupts, index);
    }

    /// The vCPU is reset.
    pub(crate) fn reset(&self) {
        self.eoi.reset();
    }

    /// A hypercall's answer, or `None` if this machine has no hypercalls.
    pub(crate) fn hypercall(&self, kernel: bool, number: u64, arguments: [u64; 4]) -> Option<u64> {
        if self.features == 0 {
            return None;
        }
        if !kernel {
            return Some(answer::NOT_PERMITTED);
        }
        let [first, second, third, fourth] = arguments;
        Some(match number {
            call::KICK_CPU if self.has(feature::UNHALT) => self.wake(second),
            call::SEND_IPI if self.has(feature::SEND_IPI) => {
                self.send([first, second], third, fourth)
            }
            call::SCHED_YIELD if self.has(feature::SCHED_YIELD) => self.yield_to(first),
            _ => answer::UNKNOWN,
        })
    }

    fn wake(&self, vcpu: u64) -> u64 {
        let vcpu = usize::try_from(vcpu).unwrap_or(usize::MAX);
        if let (Some(woken), Some(requests)) =
            (self.others.woken.get(vcpu), self.others.requests.get(vcpu))
        {
            woken.store(true, Ordering::SeqCst);
            requests.kick();
            self.is_waited_for(Some(vcpu));
        }
        answer::DONE
    }

    /// Interrupts vCPUs: how many have got it.
    fn send(&self, sets: [u64; 2], first: u64, command: u64) -> u64 {
        if command & COMMAND_RESERVED != 0 {
            return answer::INVALID;
        }
        let bits = (0..2 * BITS).filter(|bit| sets[(bit / BITS) as usize] >> (bit % BITS) & 1 != 0);
        let ids = bits.filter_map(|bit| u32::try_from(first.checked_add(bit)?).ok());
        let sent = ids.filter(|id| {
            let taken = self.interrupts.send(*id, command as u32);
            self.is_waited_for(Some(*id as usize));
            taken
        });
        sent.count() as u64
    }

    fn yield_to(&self, vcpu: u64) -> u64 {
        let vcpu = usize::try_from(vcpu).ok();
        if let Some(permit) =
            self.permit.as_ref().filter(|permit| vcpu.is_some() && permit.prefer(vcpu))
        {
            permit.give_way();
        }
        answer::DONE
    }

    /// It is likely that this vCPU looks for what another one does, once that runs. True if it does not run now.
    fn is_waited_for(&self, vcpu: Option<usize>) -> bool {
        self.permit.as_ref().is_some_and(|permit| permit.prefer(vcpu))
    }

    /// The vCPU has sent an interrupt by its local APIC, to one vCPU if that is named. A guest that knows how to
    /// let others have its CPU does so itself.
    pub(crate) fn has_sent(&self, to: Option<usize>) {
        let waits = self.is_waited_for(to);
        if waits && !(self.has(feature::SCHED_YIELD) && self.steal.is_kept()) {
            self.permit.iter().for_each(CpuPermit::give_way);
        }
    }

    /// The vCPU waits for another one by looking: those that want its CPU come first, whichever they are.
    pub(crate) fn has_spun(&self) {
        match &self.permit {
            Some(permit) if permit.is_wanted() => permit.give_way(),
            _ => thread::yield_now(),
        }
    }

    pub(crate) fn take_unhalt(&self) -> bool {
        self.has(feature::UNHALT) && self.others.woken[self.number].swap(false, Ordering::SeqCst)
    }

    pub(crate) fn set_preempted(&self) {
        self.steal.set_preempted();
    }

    pub(crate) fn note_stolen(&self, ns: u64) {
        self.steal.add(ns);
    }

    pub(crate) fn set_running(&self) -> bool {
        self.steal.set_running()
    }
}
