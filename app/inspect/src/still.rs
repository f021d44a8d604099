//! A machine that stands still while somebody looks at it.

use std::sync::mpsc::Receiver;

use contract::Engine;
use vmm::{Inspector, ProbeHandler, Probes, Reached, Verdict};

/// All vCPUs stand as long as this exists. Devices in other processes may still finish what the guest has asked of them.
pub struct Still {
    inspector: Inspector,
    /// Where the number of each vCPU's handler arrives.
    handlers: Vec<Receiver<u64>>,
}

/// Somebody without probes.
struct Nobody;

impl ProbeHandler for Nobody {
    fn reached(&mut self, _: &mut dyn Engine, _: &mut Probes, _: Reached) -> Verdict {
        Verdict::Resume
    }
}

impl Still {
    /// Has the machine stand: from its first instruction on, if it has not been started. It stands for those who visit it
    /// after this.
    pub fn new(inspector: &Inspector) -> Self {
        let stand = |vcpu| {
            inspector.queue_on_vcpu(vcpu, |access| {
                access.add_handler(Box::new(Nobody), Probes::default(), true)
            })
        };
        let handlers = (0..inspector.vcpus()).map(stand).collect();
        Self { inspector: inspector.clone(), handlers }
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        for (vcpu, handler) in self.handlers.drain(..).enumerate() {
            // The visit that sends the number is done before this one.
            let leave =
                move |number: u64, access: &mut vmm::VcpuAccess<'_>| access.remove_handler(number);
            self.inspector.queue_on_vcpu(vcpu, move |access| {
                handler.recv().into_iter().for_each(|number| leave(number, access));
            });
        }
    }
}
