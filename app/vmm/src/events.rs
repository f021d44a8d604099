//! What ends a machine: the first of the guest's requests, a crash, or an order from outside.

use std::sync::{Mutex, OnceLock, PoisonError};

use chipset::{MachineEvent, MachineEvents};
use engine::{Control, Failure, Report, RunCommand};

/// How a machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The guest switched it off.
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest wrote this value to the debug exit port.
    DebugExit(u8),
    /// The guest's kernel could not even handle a double fault.
    TripleFault(Box<Report>),
    /// The engine could not go on.
    Failed(Failure),
    /// It was stopped from outside.
    Stopped,
}

/// Takes the guest's requests and stops the vCPU. The first one counts.
#[derive(Default)]
pub(crate) struct Events {
    control: OnceLock<Control>,
    first: Mutex<Option<Ended>>,
}

impl Events {
    /// Sets who is to be stopped; before the guest runs.
    pub(crate) fn control(&self, control: Control) {
        // Set once, by the builder.
        let _ = self.control.set(control);
    }

    /// The first request.
    pub(crate) fn take(&self) -> Option<Ended> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl MachineEvents for Events {
    fn raise(&self, event: MachineEvent) {
        let ended = match event {
            MachineEvent::PowerOff => Ended::PowerOff,
            MachineEvent::Reset => Ended::Reset,
            MachineEvent::DebugExit(value) => Ended::DebugExit(value),
        };
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(ended);
        if let Some(control) = self.control.get() {
            control.order(RunCommand::Stop);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::VcpuRequests;
    use std::sync::Arc;

    #[test]
    fn the_first_request_counts_and_stops_the_vcpu() {
        let events = Events::default();
        let control = Control::new(Arc::new(VcpuRequests::default()));
        events.control(control.clone());
        events.raise(MachineEvent::DebugExit(3));
        events.raise(MachineEvent::PowerOff);
        assert_eq!(control.current(), RunCommand::Stop);
        assert_eq!(events.take(), Some(Ended::DebugExit(3)));
    }
}
