//! Which points of the kernel's code an event is.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use ram::Ram;
use vmm::{Probes, Watch};

use super::{TraceError, breakpoints, calls::Call, fields, function_exits, requests};
use crate::linux::{LinuxKernel, Parameter};

/// What an event's point in the kernel's code means.
#[derive(Clone, Debug)]
pub enum Tracepoint {
    /// A system call begins.
    Call(Arc<Call>),
    /// A program begins: the first argument says which.
    Exec,
    /// A thread ends.
    Exit,
    /// A thread has been made.
    Fork,
    /// A context switch: from the first argument to the second.
    Switch,
    /// An interrupt.
    Interrupt(String),
    /// An exception.
    Exception(String),
    /// A place that was asked for.
    Break(String, Vec<Parameter>),
    /// A function whose result was asked for.
    Return(String),
    /// The kernel looks for a signal to deliver: the argument says where it puts it.
    Signal,
    /// A process ends, perhaps by a signal.
    Killed,
}

impl Tracepoint {
    /// The end of the function at this point is traced.
    pub fn ends(&self) -> bool {
        match self {
            Self::Call(call) => !call.is_last(),
            Self::Return(_) | Self::Signal => true,
            _ => false,
        }
    }
}

/// Points, and where the functions end whose results are wanted (GVA).
#[derive(Clone, Debug, Default)]
pub struct TracePlan {
    points: HashMap<u64, Vec<Tracepoint>>,
    /// Ends of functions of which all ends are known, with the functions' entries.
    exits: HashMap<u64, Vec<u64>>,
    /// The entries of those functions.
    ending: HashSet<u64>,
    /// Watched memory.
    watches: Vec<Watch>,
    /// Kinds of events of vCPUs that are traced.
    vcpu_events: HashSet<&'static str>,
    /// Requests of virtio devices are traced.
    has_requests: bool,
}

/// Kinds of events other than executed instructions.
const VCPU_EVENTS: [&str; 5] = ["port", "mmio", "msr", "vector", "engine"];

/// Bytes that are watched at the most.
const MOST_WATCHED: u64 = 1 << 20;

/// The address of `SYMBOL`, `SYMBOL+OFFSET` or `0xADDRESS`.
fn address_of(kernel: &LinuxKernel, event: &str, place: &str) -> Result<u64, TraceError> {
    let number = |digits: &str| {
        let number = u64::from_str_radix(digits.trim_start_matches("0x"), 16);
        number.map_err(|_| TraceError::Event(event.to_owned()))
    };
    if place.starts_with("0x") {
        return number(place);
    }
    let (name, offset) = place.split_once('+').unwrap_or((place, "0"));
    let at = kernel.symbols.find(name).ok_or_else(|| TraceError::Symbol(name.to_owned()))?;
    Ok(at.wrapping_add(number(offset)?))
}

/// The address of a place, and its point.
pub fn break_at(kernel: &LinuxKernel, place: &str) -> Result<(u64, Tracepoint), TraceError> {
    let address = address_of(kernel, &format!("break:{place}"), place)?;
    // Behind its beginning a function's arguments may be anywhere.
    let known = kernel.symbols.find(place).map(|_| kernel.types.parameters(place));
    Ok((address, Tracepoint::Break(place.to_owned(), known.unwrap_or_default())))
}

impl TracePlan {
    /// The points of these events.
    pub fn new(kernel: &LinuxKernel, ram: &Ram, events: &[String]) -> Result<Self, TraceError> {
        let mut plan = Self::default();
        events.iter().try_for_each(|event| plan.add(kernel, ram, event))?;
        // With all system calls traced, the one place they return to is cheaper than the ends of each.
        if !events.iter().any(|event| event == "syscall") {
            plan.add_exits(kernel, ram);
        }
        Ok(plan)
    }

    /// Takes the places that were asked for out of the plan.
    pub fn take_breaks(&mut self) -> HashMap<u64, Tracepoint> {
        let mut breaks = HashMap::new();
        for (address, points) in &mut self.points {
            let is_break = |point: &mut Tracepoint| matches!(point, Tracepoint::Break(..));
            breaks.extend(points.extract_if(.., is_break).map(|point| (*address, point)));
        }
        self.points.retain(|_, points| !points.is_empty());
        breaks
    }

    /// The probes for all points.
    pub fn probes(&self) -> Probes {
        Probes { watches: self.watches.clone(), ..breakpoints(self.addresses()) }
    }

    /// Kinds of events of vCPUs that are traced.
    pub fn vcpu_events(&self) -> &HashSet<&'static str> {
        &self.vcpu_events
    }

    /// Requests of virtio devices are traced.
    pub fn has_requests(&self) -> bool {
        self.has_requests
    }

    /// All points, and all ends.
    pub fn addresses(&self) -> impl Iterator<Item = u64> {
        self.points.keys().chain(self.exits.keys()).copied()
    }

    /// The functions that end at an address.
    pub fn ending_at(&self, address: u64) -> &[u64] {
        self.exits.get(&address).map_or(&[], Vec::as_slice)
    }

    /// The points at an address.
    pub fn at(&self, address: u64) -> &[Tracepoint] {
        self.points.get(&address).map_or(&[], Vec::as_slice)
    }

    /// A function whose end is traced may end at this address.
    pub fn is_exit(&self, address: u64) -> bool {
        self.exits.contains_key(&address)
    }

    /// All ends of the function with this entry have probes.
    pub fn has_exits_of(&self, entry: u64) -> bool {
        self.ending.contains(&entry)
    }

    /// Some of the events have a field of this name.
    pub fn knows(&self, name: &str) -> bool {
        let calls = self.points.values().flatten().filter_map(|point| match point {
            Tracepoint::Call(call) => Some(call),
            _ => None,
        });
        let functions = self.points.values().flatten().filter_map(|point| match point {
            Tracepoint::Break(_, parameters) => Some(parameters),
            _ => None,
        });
        let named = |parameter: &Parameter| parameter.name == name;
        fields::is_common(name)
            || self.has_requests && requests::has_field(name)
            || functions.into_iter().flatten().any(named)
            || calls.into_iter().any(|call| call.parameter(name).is_some())
    }

    /// A function returns to a place that others return to, too: system calls all to the same. Its own ends cost the others nothing.
    fn add_exits(&mut self, kernel: &LinuxKernel, ram: &Ram) {
        for (entry, points) in &self.points {
            if points.iter().any(Tracepoint::ends)
                && let Some(exits) = function_exits::of(kernel, ram, *entry)
            {
                for exit in exits {
                    self.exits.entry(exit).or_default().push(*entry);
                }
                self.ending.insert(*entry);
            }
        }
    }

    fn put(&mut self, address: u64, point: Tracepoint) {
        self.points.entry(address).or_default().push(point);
    }

    fn add(&mut self, kernel: &LinuxKernel, ram: &Ram, event: &str) -> Result<(), TraceError> {
        let symbol = |name: &str| {
            kernel.symbols.find(name).ok_or_else(|| TraceError::Symbol(name.to_owned()))
        };
        match event.split_once(':') {
            None if event == "syscall" => self.add_all_calls(kernel, ram),
            Some(("syscall", name)) => {
                for (address, call) in Call::find(kernel, ram, name)? {
                    self.put(address, Tracepoint::Call(Arc::new(call)));
                }
            }
            None if event == "exec" => self.put(symbol("begin_new_exec")?, Tracepoint::Exec),
            None if event == "exit" => self.put(symbol("do_exit")?, Tracepoint::Exit),
            None if event == "fork" => self.put(symbol("wake_up_new_task")?, Tracepoint::Fork),
            None if event == "switch" => self.put(symbol("__switch_to")?, Tracepoint::Switch),
            None if event == "signal" => {
                self.put(symbol("get_signal")?, Tracepoint::Signal);
                self.put(symbol("do_group_exit")?, Tracepoint::Killed);
            }
            None if event == "irq" => {
                self.put(symbol("common_interrupt")?, Tracepoint::Interrupt("device".to_owned()));
                self.add_starting(kernel, "sysvec_", Tracepoint::Interrupt);
            }
            None if event == "exception" => {
                self.add_starting(kernel, "exc_", Tracepoint::Exception);
            }
            Some(("return", name)) => self.put(symbol(name)?, Tracepoint::Return(name.to_owned())),
            Some(("break", place)) => {
                let (address, point) = break_at(kernel, place)?;
                self.put(address, point);
            }
            Some(("watch", place)) => {
                let (place, len) = place.split_once(':').unwrap_or((place, "8"));
                let len = len.parse().ok().filter(|len| (1..=MOST_WATCHED).contains(len));
                let len = len.ok_or_else(|| TraceError::Event(event.to_owned()))?;
                let gva = address_of(kernel, event, place)?;
                self.watches.push(Watch { gva, len, read: false, write: true });
            }
            None if event == "virtio" => self.has_requests = true,
            None if VCPU_EVENTS.contains(&event) => {
                self.vcpu_events.extend(VCPU_EVENTS.iter().find(|kind| **kind == event));
            }
            _ => return Err(TraceError::Event(event.to_owned())),
        }
        Ok(())
    }

    fn add_all_calls(&mut self, kernel: &LinuxKernel, ram: &Ram) {
        for (address, call) in Call::all(kernel, ram) {
            self.put(address, Tracepoint::Call(Arc::new(call)));
        }
    }

    /// The C functions that these names are the beginning of. `exc_nmi` may come where no task can be told.
    fn add_starting(
        &mut self,
        kernel: &LinuxKernel,
        prefix: &str,
        point: fn(String) -> Tracepoint,
    ) {
        let plain = |name: &str| !name.contains('.') && !name.ends_with("_noist");
        let found: Vec<_> = kernel.symbols.starting(prefix).collect();
        for (name, address) in found.into_iter().filter(|(name, _)| plain(name)) {
            self.put(address, point(name[prefix.len()..].to_owned()));
        }
    }
}
