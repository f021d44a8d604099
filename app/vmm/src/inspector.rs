//! Looking into a machine that runs: its RAM, and its vCPUs by visits.

use std::sync::{
    Arc,
    mpsc::{Receiver, sync_channel},
};

use engine::{Control, LocalApic, RunCommand, VcpuRequests, Visited};
use ram::Ram;

/// A machine, for those who look into it. It holds nothing of the machine up.
#[derive(Clone)]
pub struct Inspector {
    ram: Ram,
    vcpus: Vec<Seat>,
    control: Control,
}

/// What is to be reached of a vCPU.
#[derive(Clone)]
pub(crate) struct Seat {
    pub requests: Arc<VcpuRequests>,
    pub apic: Arc<dyn LocalApic>,
}

impl Inspector {
    pub(crate) fn new(ram: Ram, vcpus: Vec<Seat>, control: Control) -> Self {
        Self { ram, vcpus, control }
    }

    /// Guest RAM.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// Number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.vcpus.len()
    }

    /// Switches the machine off at the mains.
    pub fn stop(&self) {
        self.control.order(RunCommand::Stop);
    }

    /// Reads a register of a vCPU's local APIC, by its place in the register page. Registers that are read have no effects.
    pub fn apic_register(&self, vcpu: usize, offset: u64) -> Option<u32> {
        const IA32_APIC_BASE: u32 = 0x1b;
        let apic = &self.vcpus.get(vcpu)?.apic;
        let base = apic.msr_read(IA32_APIC_BASE).ok()? & !0xfff;
        let mut bytes = [0; 4];
        apic.mmio_read(base + offset, &mut bytes).then(|| u32::from_le_bytes(bytes))
    }

    /// Has `visit` done by the thread of a vCPU between two instructions, and waits for it. `None` if the vCPU has ended.
    pub fn visit<R: Send + 'static>(
        &self,
        vcpu: usize,
        visit: impl FnOnce(&mut Visited<'_>) -> R + Send + 'static,
    ) -> Option<R> {
        self.ask(vcpu, visit).recv().ok()
    }

    /// The same without waiting: where the result will arrive, if it does. Visits of one vCPU are done in order; before the machine runs
    /// they wait for it.
    pub fn ask<R: Send + 'static>(
        &self,
        vcpu: usize,
        visit: impl FnOnce(&mut Visited<'_>) -> R + Send + 'static,
    ) -> Receiver<R> {
        let (sender, done) = sync_channel(1);
        let visit = move |visited: &mut Visited<'_>| {
            // Whoever asked may not want to know.
            let _ = sender.send(visit(visited));
        };
        if let Some(seat) = self.vcpus.get(vcpu) {
            // One that has ended drops the visit, and the receiver learns of it.
            let _ = seat.requests.visit(Box::new(visit));
        }
        done
    }
}
