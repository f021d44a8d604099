//! What taps record at the points of a plan ([`x86::tap`]): all that an event is made of later, when memory may have changed.

use std::collections::{BTreeMap, HashSet};

use ram::Ram;
use x86::{
    reg::{RDI, RSI, RSP},
    tap::{GS_BASE, LOADED, STEP_WORDS, Step},
};

use super::{
    calls::{ArgumentMemory, Call},
    conditions::{self, Alternatives, LoadPlace},
    plan::{TracePlan, Tracepoint},
    probe_hit::{REGISTERS, RIP},
    state::EventSelection,
    tracer::FILENAME,
};
use crate::linux::{Form, LinuxKernel};

/// Values of a program.
const TASK: u8 = LOADED as u8;
const OTHER: u8 = TASK + 1;
const POINTER: u8 = TASK + 2;
const LENGTH: u8 = TASK + 3;
const FRAME: u8 = TASK + 4;
/// Bytes of `struct pt_regs`, and where it has the number of a system call.
const FRAME_LEN: u64 = 168;
const NUMBER: u64 = 120;
/// Bytes of a thread's stack in the kernel, without KASAN.
const STACK_LEN: u64 = 16 << 10;
/// Bytes above the stack pointer at the end of `get_signal`: its caller's frame, with what it has found.
const SIGNAL_FRAME: u64 = 768;
/// System calls there can be.
const CALLS: u64 = 512;
/// Bytes of what a call has filled that are shown.
const FILLED: u64 = 32;

/// The programs of a plan's points: where each begins, and all steps.
pub struct TapPrograms {
    pub points: BTreeMap<u64, u32>,
    pub steps: Vec<[u64; STEP_WORDS]>,
}

/// Compiles the plan's programs. Functions whose ends are not known return to one of `returns`.
pub fn tap_programs(
    (kernel, ram): (&LinuxKernel, &Ram),
    plan: &TracePlan,
    selection: &EventSelection,
    returns: &HashSet<u64>,
) -> TapPrograms {
    // No program has the first step: in a table zero means that there is none.
    let (points, steps) = (BTreeMap::new(), vec![Step::End.encode()]);
    let made = TapPrograms { points, steps };
    let mut compiler = TapCompiler { kernel, ram, plan, selection, returns, made };
    let chosen = if returns.is_empty() { None } else { Some(compiler.calls_by_number()) };
    let all: HashSet<u64> = plan.addresses().chain(returns.iter().copied()).collect();
    for address in all {
        let first = compiler.made.steps.len() as u32;
        compiler.made.points.insert(address, first);
        compiler.at(address, chosen);
    }
    compiler.made
}

struct TapCompiler<'a> {
    kernel: &'a LinuxKernel,
    ram: &'a Ram,
    plan: &'a TracePlan,
    selection: &'a EventSelection,
    returns: &'a HashSet<u64>,
    made: TapPrograms,
}

impl TapCompiler<'_> {
    fn put(&mut self, step: Step) {
        self.made.steps.push(step.encode());
    }

    fn load(&mut self, to: u8, from: u8, offset: u64) {
        self.put(Step::Load { to, from, offset });
    }

    fn note(&mut self, from: u8, offset: u64, len: u64) {
        self.put(Step::Note { from, offset, len });
    }

    fn at(&mut self, address: u64, chosen: Option<u64>) {
        self.current_task();
        self.select_call(address);
        let plan = self.plan;
        for point in plan.at(address) {
            self.begin(address, point);
        }
        for entry in plan.ending_at(address) {
            for point in plan.at(*entry) {
                self.end(point);
            }
        }
        match chosen.filter(|_| self.returns.contains(&address)) {
            Some(table) => {
                self.frame_of_task();
                self.load(OTHER, FRAME, NUMBER);
                self.put(Step::Choose { from: OTHER, table, count: CALLS });
            }
            None => self.put(Step::End),
        }
    }

    /// Records the current task; ends the program if the trace does not select the task.
    fn current_task(&mut self) {
        let [current, _, tgid, comm] = self.kernel.places();
        self.load(TASK, GS_BASE as u8, current);
        if let Some(pid) = self.selection.pid {
            self.load(OTHER, TASK, tgid);
            self.put(Step::Want { from: OTHER, mask: 0xffff_ffff, value: pid.into() });
        }
        if let Some(name) = self.selection.comm.as_deref() {
            for (n, (mask, value)) in name_in_words(name).into_iter().enumerate() {
                self.load(OTHER, TASK, comm + 8 * n as u64);
                self.put(Step::Want { from: OTHER, mask, value });
            }
        }
        if let Some(filter) = &self.selection.filter {
            let [_, tid, pid, comm] = self.kernel.places();
            let place = LoadPlace { base: TASK, to: OTHER };
            self.one_of(&conditions::of_task(filter, place, [pid, tid, comm]));
        }
        self.note(GS_BASE as u8, current, 8);
        self.note_task(TASK);
    }

    /// Ends the program unless all conditions of one of the alternatives are met.
    fn one_of(&mut self, alternatives: &Alternatives) {
        let Some((last, others)) = alternatives.split_last() else {
            return self.put(conditions::NEVER);
        };
        let len =
            |alternative: &Vec<Vec<Step>>| alternative.iter().map(Vec::len).sum::<usize>() as u64;
        let begin = self.made.steps.len() as u64;
        // Each of the others begins with where to go on if it is not met, and ends with where to go on if it is.
        let end = begin + alternatives.iter().map(len).sum::<u64>() + 2 * others.len() as u64;
        for alternative in others {
            let step = self.made.steps.len() as u64 + len(alternative) + 2;
            self.put(Step::Else { step });
            alternative.iter().flatten().for_each(|step| self.put(*step));
            self.put(Step::Goto { step: end });
        }
        last.iter().flatten().for_each(|step| self.put(*step));
    }

    /// Ends the program if the filter does not select the call by its arguments, which are at `base`.
    fn arguments_of_call(&mut self, call: &Call, base: u8, at_end: bool) {
        let selection = self.selection;
        let Some(filter) = &selection.filter else { return };
        let place = LoadPlace { base, to: OTHER };
        self.one_of(&conditions::of_call(filter, call, place, at_end));
    }

    /// Where one call alone begins or ends, what is not meant of it makes no record. Where it ends its arguments are still where they
    /// were, but for calls that give their thread other registers.
    fn select_call(&mut self, address: u64) {
        let plan = self.plan;
        if self.returns.contains(&address) {
            return;
        }
        match (plan.at(address), plan.ending_at(address)) {
            ([Tracepoint::Call(call)], []) => self.arguments_of_call(call, RDI as u8, false),
            ([], [entry]) => {
                if let [Tracepoint::Call(call)] = plan.at(*entry)
                    && self.selection.filter.is_some()
                    && !call.gives_registers()
                {
                    self.frame_of_task();
                    self.arguments_of_call(call, FRAME, true);
                }
            }
            _ => {}
        }
    }

    fn note_task(&mut self, task: u8) {
        let [_, pid, tgid, comm] = self.kernel.places();
        if tgid == pid + 4 {
            self.note(task, pid, 8);
        } else {
            self.note(task, pid, 4);
            self.note(task, tgid, 4);
        }
        self.note(task, comm, 16);
    }

    fn begin(&mut self, address: u64, point: &Tracepoint) {
        match point {
            Tracepoint::Call(call) => self.begin_call(address, call),
            Tracepoint::Return(_) | Tracepoint::Signal => self.will_end(address),
            Tracepoint::Exec => {
                if let Ok(at) = self.kernel.types.offset(FILENAME.0, FILENAME.1) {
                    self.note(RDI as u8, at, 8);
                    self.load(POINTER, RDI as u8, at);
                    self.put(Step::Text { from: POINTER });
                }
            }
            Tracepoint::Fork => self.note_task(RDI as u8),
            Tracepoint::Switch => {
                self.note_task(RDI as u8);
                self.note_task(RSI as u8);
            }
            Tracepoint::Exception(_) => self.note(RDI as u8, RIP, 8),
            Tracepoint::Break(_, parameters) => {
                for (parameter, register) in parameters.iter().zip(REGISTERS) {
                    if parameter.form == Form::Text {
                        self.put(Step::Text { from: register as u8 });
                    }
                }
            }
            Tracepoint::Exit | Tracepoint::Killed | Tracepoint::Interrupt(_) => {}
        }
    }

    /// A function begins whose end is traced: the program ends here unless it is known where the function returns to.
    fn will_end(&mut self, address: u64) {
        self.note(RSP as u8, 0, 8);
        if self.plan.has_exits_of(address) {
            return;
        }
        self.load(OTHER, RSP as u8, 0);
        let mut words: Vec<u64> = self.returns.iter().copied().collect();
        self.put(Step::Among { from: OTHER, count: words.len() as u64 });
        words.resize(words.len().next_multiple_of(STEP_WORDS), 0);
        let steps = words.as_chunks::<STEP_WORDS>().0.to_vec();
        self.made.steps.extend(steps);
    }

    fn begin_call(&mut self, address: u64, call: &Call) {
        let first = call.places().iter().min().copied().unwrap_or_default();
        let last = call.places().iter().max().copied().unwrap_or_default();
        self.note(RDI as u8, first, last + 8 - first);
        if !call.is_last() {
            self.will_end(address);
        }
        self.pieces(RDI as u8, call, false);
    }

    /// What the arguments point to.
    fn pieces(&mut self, frame: u8, call: &Call, at_end: bool) {
        for (n, piece) in call.pieces(at_end) {
            let Some(at) = call.places().get(n) else { continue };
            self.load(POINTER, frame, *at);
            if let Some(next) = call.places().get(n + 1) {
                self.load(LENGTH, frame, *next);
            }
            let (from, count) = (POINTER, LENGTH);
            self.put(match piece {
                ArgumentMemory::Bytes(len) => Step::Note { from, offset: 0, len },
                ArgumentMemory::Times(unit, most) => Step::Times { from, count, unit, most },
                ArgumentMemory::Text => Step::Text { from },
                ArgumentMemory::Texts => Step::Texts { from },
                ArgumentMemory::UpToZero => Step::UpToZero { from, most: 4096 },
                ArgumentMemory::Vectors => Step::Vectors { from, count, bytes: FILLED },
            });
        }
    }

    fn end(&mut self, point: &Tracepoint) {
        match point {
            Tracepoint::Call(call) if call.pieces(true).next().is_some() => {
                self.frame_of_task();
                self.pieces(FRAME, call, true);
            }
            Tracepoint::Signal => self.note(RSP as u8, 0, SIGNAL_FRAME),
            _ => {}
        }
    }

    /// Where the registers of the system call under way are: at the end of the thread's stack.
    fn frame_of_task(&mut self) {
        // Where FRED may be used there is room for more behind them.
        let padding = u64::from(self.kernel.symbols.find("fred_entry_from_user").is_some()) * 16;
        let stack = self.kernel.types.offset("task_struct", "stack").unwrap_or_default();
        self.load(FRAME, TASK, stack);
        self.put(Step::Add { to: FRAME, amount: STACK_LEN - FRAME_LEN - padding });
    }

    /// What each system call's end needs: a table of steps by the call's number.
    fn calls_by_number(&mut self) -> u64 {
        let mut table = vec![0; CALLS as usize];
        let functions = self.kernel.symbols.find("sys_call_table");
        for (n, chosen) in table.iter_mut().enumerate() {
            let entry = functions.and_then(|at| self.kernel.word(self.ram, at + 8 * n as u64));
            for point in entry.map_or(&[][..], |entry| self.plan.at(entry)) {
                let Tracepoint::Call(call) = point else { continue };
                if call.pieces(true).next().is_some() {
                    *chosen = self.made.steps.len() as u64;
                    self.pieces(FRAME, call, true);
                    self.put(Step::End);
                }
            }
        }
        let at = self.made.steps.len() as u64;
        table.resize(table.len().next_multiple_of(STEP_WORDS), 0);
        self.made.steps.extend_from_slice(table.as_chunks::<STEP_WORDS>().0);
        at
    }
}

/// A task's name as words of memory. For each word: which of its bits are compared, and what they are.
fn name_in_words(name: &str) -> Vec<(u64, u64)> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.truncate(15);
    bytes.push(0);
    let word = |part: &[u8]| {
        let mut bytes = [0; 8];
        bytes[..part.len()].copy_from_slice(part);
        let mask = u64::MAX >> (64 - 8 * part.len());
        (mask, u64::from_le_bytes(bytes))
    };
    bytes.chunks(8).map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_compared_as_far_as_it_goes() {
        assert_eq!(name_in_words("sh"), [(0xff_ffff, 0x6873)]);
        let [first, second] = name_in_words("12345678")[..] else { panic!("two words") };
        assert_eq!((first.0, second), (u64::MAX, (0xff, 0)));
        assert_eq!(name_in_words("a name that is too long").len(), 2);
    }
}
