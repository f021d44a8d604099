//! Whether a machine has what a scenario strikes.

use std::time::Duration;

use faults::{Flip, MachineAction, Scenario, Target};
use inspect::strike::is_instruction;
use ram::{HIGH_BASE, LOW_MAX};

/// What of a machine can have faults: whether ring3 serves each disk and network itself, bytes of memory, and its time.
pub struct Extent {
    /// Disks.
    pub disks: Vec<bool>,
    /// Networks.
    pub nets: Vec<bool>,
    /// Bytes of memory.
    pub memory: u64,
    /// The machine is stopped after this.
    pub timeout: Option<Duration>,
}

/// Says which fault of a scenario can strike nothing.
pub fn check(scenario: &Scenario, extent: &Extent) -> Result<(), String> {
    for target in scenario.targets() {
        is_there(target, extent).map_err(|problem| format!("{target}: {problem}"))?;
    }
    if let Some(end) = extent.timeout
        && let Some((name, after)) = scenario.begins().into_iter().find(|(_, after)| *after >= end)
    {
        let [after, end] = [after, end].map(|time| time.as_secs_f64());
        return Err(format!("fault `{name}`: after {after} s, but the timeout is {end} s"));
    }
    for fault in scenario.timed() {
        if let MachineAction::WrongResult(name) = &fault.action
            && !is_instruction(name)
        {
            return Err(format!("fault `{}`: there is no instruction `{name}`", fault.name));
        }
        let address = match &fault.action {
            MachineAction::Flip(Flip::At(place)) => place.address,
            MachineAction::StuckBit(bit) => bit.address,
            MachineAction::MemoryError(error) => error.address,
            _ => None,
        };
        if let Some(address) = address.filter(|address| !is_memory(*address, extent.memory)) {
            let name = &fault.name;
            return Err(format!("fault `{name}`: the machine has no memory at {address:#x}"));
        }
    }
    Ok(())
}

fn is_there(target: Target, extent: &Extent) -> Result<(), String> {
    let (all, number, option) = match target {
        Target::Disk(number) => (&extent.disks, number, "--disk"),
        Target::Net(number) => (&extent.nets, number, "--net"),
        Target::Machine | Target::Ram | Target::Clock | Target::Interrupts => return Ok(()),
    };
    match all.get(number) {
        Some(true) => Ok(()),
        Some(false) => {
            Err("another program serves it; faults need one that ring3 serves".to_owned())
        }
        None => Err(format!("the machine has {} {option}; the first is number 0", all.len())),
    }
}

fn is_memory(address: u64, memory: u64) -> bool {
    let low = memory.min(LOW_MAX);
    address < low || (HIGH_BASE..HIGH_BASE + (memory - low)).contains(&address)
}
