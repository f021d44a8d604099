//! When a machine's process shuts itself in: the machine is ready, and has not executed anything.

use host_linux::limits;
use vmm::{Ended, Machine, RunningMachine};

use crate::{
    failure::Failure,
    machine::tell_engine,
    spawner,
    values::{DevicesChoice, EngineArguments, SandboxChoice},
};

/// Whether a machine's process shuts itself in.
#[derive(Clone, Copy, Debug)]
pub struct Sandbox(bool);

impl SandboxChoice {
    /// With devices in the machine's process, which need more than it does, there is none.
    pub fn with(self, devices: DevicesChoice) -> Sandbox {
        Sandbox(self == Self::On && devices != DevicesChoice::Inline)
    }
}

impl Sandbox {
    /// Refuses what a process that is shut in cannot do.
    ///
    /// # Errors
    /// The engine is to trace its processes.
    pub fn permits(self, engine: &EngineArguments) -> Result<(), Failure> {
        match self.0 && engine.traced() {
            true => Err(Failure::usage(
                "--system-calls ptrace: a process that is shut in traces nobody; give --sandbox off, too",
            )),
            false => Ok(()),
        }
    }

    /// Makes the machine wait until this process is shut in, and gives up capabilities and names. The machine's threads start later,
    /// and so have none.
    ///
    /// # Errors
    /// The host refuses.
    pub fn prepare(self, machine: &Machine) -> Result<(), Failure> {
        if !self.0 {
            return Ok(());
        }
        machine.hold();
        limits::remember();
        confinement::give_up_capabilities().map_err(|error| refused(&error.to_string()))?;
        // A host without Landlock has the filter.
        confinement::forget_names().map(drop).map_err(|problem| refused(&problem))
    }

    /// Starts the machine, and shuts this process in before the machine begins to run.
    ///
    /// # Errors
    /// The host refuses.
    pub fn start(
        self,
        machine: Machine,
        on_end: impl FnOnce(Ended) + Send + 'static,
    ) -> Result<RunningMachine, Failure> {
        let running = machine.last_of_process().start(on_end)?;
        self.enter(&running)?;
        tell_engine(&running);
        Ok(running)
    }

    fn enter(self, running: &RunningMachine) -> Result<(), Failure> {
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
