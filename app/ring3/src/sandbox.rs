//! When a machine's process shuts itself in: the machine is ready, and has not executed anything.

use host_linux::limits;
use vmm::{Machine, Running};

use crate::{
    failure::Failure,
    spawner,
    values::{DevicesChoice, SandboxChoice},
};

/// Whether it does.
#[derive(Clone, Copy, Debug)]
pub struct Sandbox(bool);

impl SandboxChoice {
    /// With devices in the machine's process, which need more than it does, there is none.
    pub fn with(self, devices: DevicesChoice) -> Sandbox {
        Sandbox(self == Self::On && devices != DevicesChoice::Inline)
    }
}

impl Sandbox {
    /// Has the machine wait until the process is shut in. Its threads are not started yet: they have no capabilities.
    ///
    /// # Errors
    /// The host refuses.
    pub fn prepare(self, machine: &Machine) -> Result<(), Failure> {
        if !self.0 {
            return Ok(());
        }
        machine.hold();
        limits::remember();
        confinement::give_up_capabilities().map_err(|error| refused(&error.to_string()))
    }

    /// Shuts the process in, and lets the machine go.
    ///
    /// # Errors
    /// The host refuses.
    pub fn enter(self, running: &Running) -> Result<(), Failure> {
        if !self.0 {
            return Ok(());
        }
        spawner::seal().map_err(|error| refused(&error.to_string()))?;
        confinement::enter().map_err(|problem| refused(&problem))?;
        running.pause(false);
        Ok(())
    }
}

fn refused(problem: &str) -> Failure {
    let text = format!("this process cannot shut itself in: {problem}; --sandbox off does without");
    Failure::host(text)
}
