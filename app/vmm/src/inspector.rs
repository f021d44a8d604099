//! Inspecting a running machine: its RAM is read from any thread, a vCPU by work that the vCPU's own thread does.

use std::sync::{
    Arc,
    mpsc::{Receiver, sync_channel},
};

use chipset::{CpuInterrupts, Logged, MachineError};
use engine::{Control, LocalApic, RunCommand, VcpuAccess, VcpuRequests};
use ram::Ram;
use x86::Activity;

use crate::LoggedDevice;

/// Access to a running machine, for debuggers and tracers. An inspector does not keep the machine running.
#[derive(Clone)]
pub struct Inspector {
    ram: Ram,
    vcpus: Vec<VcpuHandle>,
    devices: Arc<[LoggedDevice]>,
    control: Control,
}

/// The requests and the local APIC of a vCPU.
#[derive(Clone)]
pub(crate) struct VcpuHandle {
    pub requests: Arc<VcpuRequests>,
    pub apic: Arc<dyn LocalApic>,
    pub interrupts: CpuInterrupts,
}

impl Inspector {
    pub(crate) fn new(
        ram: Ram,
        vcpus: Vec<VcpuHandle>,
        devices: Arc<[LoggedDevice]>,
        control: Control,
    ) -> Self {
        Self { ram, vcpus, devices, control }
    }

    /// Guest RAM.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// Number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.vcpus.len()
    }

    /// The virtio devices.
    pub fn devices(&self) -> &[LoggedDevice] {
        &self.devices
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

    /// Has a vCPU meet an error of the hardware, and all of them take the exception if it is one that is not corrected, as
    /// Intel's do. `None` if there is no such vCPU.
    pub fn machine_check(&self, vcpu: usize, error: MachineError) -> Option<Logged> {
        let logged = self.vcpus.get(vcpu)?.interrupts.log_error(&error);
        let struck = if logged.raises { &*self.vcpus } else { &[] };
        for (number, handle) in struck.iter().enumerate() {
            let (interrupts, own) = (handle.interrupts.clone(), (number == vcpu).then_some(error));
            self.queue_on_vcpu(number, move |access| {
                if access.engine.vcpu().activity != Activity::WaitForSipi {
                    let free = interrupts.begin_machine_check(own.as_ref());
                    access.engine.machine_check(!free);
                }
            });
        }
        Some(logged)
    }

    /// Runs `work` on the thread of a vCPU between two instructions, and waits for the result. `None` if the vCPU has ended.
    pub fn run_on_vcpu<R: Send + 'static>(
        &self,
        vcpu: usize,
        work: impl FnOnce(&mut VcpuAccess<'_>) -> R + Send + 'static,
    ) -> Option<R> {
        self.queue_on_vcpu(vcpu, work).recv().ok()
    }

    /// Queues `work` for the thread of a vCPU and returns at once. The result arrives at the receiver; if the vCPU has ended, the
    /// receiver is disconnected. Work for one vCPU is done in order. Before the machine runs, work waits.
    pub fn queue_on_vcpu<R: Send + 'static>(
        &self,
        vcpu: usize,
        work: impl FnOnce(&mut VcpuAccess<'_>) -> R + Send + 'static,
    ) -> Receiver<R> {
        let (sender, done) = sync_channel(1);
        let work = move |access: &mut VcpuAccess<'_>| {
            // The caller may have dropped the receiver.
            let _ = sender.send(work(access));
        };
        if let Some(handle) = self.vcpus.get(vcpu) {
            // A vCPU that has ended drops the work, and the receiver learns of it.
            let _ = handle.requests.run_on_vcpu(Box::new(work));
        }
        done
    }
}
