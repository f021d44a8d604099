//! Whether a machine has what a scenario strikes.

use faults::{Flip, MachineAction, Scenario, Target};
use ram::{HIGH_BASE, LOW_MAX};

use super::inject::{Extent, Injection};
use crate::{disk::DiskChoice, failure::Failure, run_arguments::RunArguments};

impl Injection {
    /// What `ring3 run` was told.
    pub fn of_machine(arguments: &RunArguments) -> Result<Option<Self>, Failure> {
        Self::new(&arguments.fault, &Extent::of(arguments))
    }
}

impl Extent {
    /// That of a machine.
    pub fn of(arguments: &RunArguments) -> Self {
        let disks = arguments.disk.iter().map(|disk| matches!(disk, DiskChoice::Image(_)));
        let nets = arguments.net.iter().map(|net| net.is_ours());
        let (disks, nets) = (disks.collect(), nets.collect());
        Self { disks, nets, memory: arguments.memory.0 }
    }
}

/// Says which fault of a scenario can strike nothing.
pub fn check(scenario: &Scenario, extent: &Extent) -> Result<(), String> {
    for target in scenario.targets() {
        is_there(target, extent).map_err(|problem| format!("{target}: {problem}"))?;
    }
    for fault in scenario.timed() {
        let address = match &fault.action {
            MachineAction::Flip(Flip::At(place)) => place.address,
            MachineAction::StuckBit(bit) => bit.address,
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
