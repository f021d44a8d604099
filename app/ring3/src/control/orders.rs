//! What orders of the control socket do to a machine.

use vmm::Running;

use super::{Asked, Order, Status};

/// The state of a machine told to stop.
const STOPPING: &str = "stopping";

/// Does what the control socket asks for; true if that is to end the machine.
pub fn obey(asked: Asked, running: &Running, status: &mut Status) -> bool {
    match asked.order {
        Order::Status | Order::Stats | Order::Dump | Order::Gdb => {}
        Order::Trace | Order::Profile | Order::Top => {}
        Order::Pause => {
            running.pause(true);
            "paused".clone_into(&mut status.state);
        }
        Order::Resume => {
            running.pause(false);
            "running".clone_into(&mut status.state);
        }
        Order::Stop => STOPPING.clone_into(&mut status.state),
    }
    asked.answer(status.clone());
    let ends = asked.order == Order::Stop;
    if ends {
        asked.wait(); // this process ends now, and with it the thread that answers
    }
    ends
}
