//! Stopping all vCPUs of a machine while its memory or its registers are read.

use std::sync::mpsc::Receiver;

use contract::Engine;
use vmm::{Inspector, ProbeHandler, Probes, Reached, VcpuAccess, Verdict};

/// Keeps all vCPUs stopped until dropped. Devices in other processes may still finish what the guest has asked of them.
pub struct StoppedVcpus {
    inspector: Inspector,
    /// For each vCPU: receives the number of the handler that keeps the vCPU stopped.
    handlers: Vec<Receiver<u64>>,
}

/// A handler without probes.
struct NoProbes;

impl ProbeHandler for NoProbes {
    fn reached(&mut self, _: &mut dyn Engine, _: &mut Probes, _: Reached) -> Verdict {
        Verdict::Resume
    }
}

impl StoppedVcpus {
    /// Stops all vCPUs: before the first instruction, if the machine has not been started. Work that is queued after this finds
    /// its vCPU stopped.
    pub fn new(inspector: &Inspector) -> Self {
        let stop = |access: &mut VcpuAccess<'_>| {
            access.add_handler(Box::new(NoProbes), Probes::default(), true)
        };
        let handlers = (0..inspector.vcpus()).map(|vcpu| inspector.queue_on_vcpu(vcpu, stop));
        Self { handlers: handlers.collect(), inspector: inspector.clone() }
    }
}

impl Drop for StoppedVcpus {
    fn drop(&mut self) {
        for (vcpu, handler) in self.handlers.drain(..).enumerate() {
            // The work that sends the number is done before this.
            self.inspector.queue_on_vcpu(vcpu, move |access| {
                handler.recv().into_iter().for_each(|number| access.remove_handler(number));
            });
        }
    }
}
