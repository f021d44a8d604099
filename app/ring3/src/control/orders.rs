//! What orders of the control socket do to a machine.

use vmm::RunningMachine;

use super::{Asked, ControlOrder, Status};

/// The state of a machine told to stop.
const STOPPING: &str = "stopping";

/// Does what the control socket asks for; true if that is to end the machine.
pub fn obey(asked: Asked, running: &RunningMachine, status: &mut Status) -> bool {
    match asked.order {
        ControlOrder::Status | ControlOrder::Stats | ControlOrder::Dump | ControlOrder::Gdb => {}
        ControlOrder::Trace | ControlOrder::Profile | ControlOrder::Top | ControlOrder::Code => {}
        ControlOrder::Pause => {
            running.pause(true);
            "paused".clone_into(&mut status.state);
        }
        ControlOrder::Resume => {
            running.pause(false);
            "running".clone_into(&mut status.state);
        }
        ControlOrder::Stop => STOPPING.clone_into(&mut status.state),
    }
    asked.answer(status.clone());
    let ends = asked.order == ControlOrder::Stop;
    if ends {
        asked.wait(); // this process ends now, and with it the thread that answers
    }
    ends
}
