//! A machine that stands still while somebody looks at it.

use std::sync::mpsc::Receiver;

use contract::Engine;
use vmm::{Attendant, Inspector, Probes, Reached, Verdict};

/// All vCPUs stand as long as this exists. Devices in other processes may still finish what the guest has asked of them.
pub struct Still {
    inspector: Inspector,
    /// Where the number of each vCPU's attendant arrives.
    attendants: Vec<Receiver<u64>>,
}

/// Somebody without probes.
struct Nobody;

impl Attendant for Nobody {
    fn reached(&mut self, _: &mut dyn Engine, _: &mut Probes, _: Reached) -> Verdict {
        Verdict::GoOn
    }
}

impl Still {
    /// Has the machine stand: from its first instruction on, if it has not been started. It stands for those who visit it
    /// after this.
    pub fn new(inspector: &Inspector) -> Self {
        let stand = |vcpu| {
            inspector.ask(vcpu, |visited| visited.attend(Box::new(Nobody), Probes::default(), true))
        };
        let attendants = (0..inspector.vcpus()).map(stand).collect();
        Self { inspector: inspector.clone(), attendants }
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        for (vcpu, attendant) in self.attendants.drain(..).enumerate() {
            // The visit that sends the number is done before this one.
            let leave = move |number: u64, visited: &mut vmm::Visited<'_>| visited.dismiss(number);
            self.inspector.ask(vcpu, move |visited| {
                attendant.recv().into_iter().for_each(|number| leave(number, visited));
            });
        }
    }
}
