//! Lock-step: each block of translated code against the interpreter, in a running guest.
//!
//! Before a block runs, the interpreter runs it from the same state in a [`scratch`] machine, whose
//! writes go nowhere; that gives the state before each instruction, a [`trace`]. Then the
//! translated block runs, alone: it is linked to nothing, and the wedge does nothing by itself.
//! Wherever it comes back (a fault or an interrupt can end it early) the interpreter must have
//! come by with the same registers and the same writes; that is the [`verdict`]. The first difference stops the
//! machine with a [`report`].
//!
//! A block that has been compared a few times becomes one like any other, so that a whole boot
//! takes seconds. Not compared is what comes behind an instruction that answers differently each
//! time, or reads an undefined flag; where another device or thread has changed memory that the
//! block read; writes of translated code to where the interpreter does not write, unless somebody reads
//! them; and what the wedge does by itself when nobody compares.
//!
//! Of several vCPUs one is compared, and the others run meanwhile. What another vCPU writes between the two runs of a block is mostly
//! seen: the block has read it, and it is something else now. It is not seen where it is the same again, as a lock that was taken for a
//! moment, and where the block itself writes those bytes. So a difference of a block that accesses memory is looked at again each time the
//! block runs, and counts if it stays.

mod report;
mod scratch;
mod trace;
mod verdict;

#[cfg(test)]
mod tests;

use crate::{code::Code, vcpu_code::VcpuCode};
use jit::{Level, cache::Source};
use ram::Ram;
use report::DifferenceReport;
use scratch::Scratch;
use std::{
    collections::{HashMap, VecDeque},
    io,
    str::FromStr,
};
use trace::{REASONS, Trace, Uncompared};
use verdict::{Comparison, StateField};
use wedge::Pages;
use x86::Vcpu;
use x86_interp::{Cpu, GuestRam};

const PAGE: u64 = 4096;
/// Blocks remembered for a report.
const PAST: usize = 16;
/// So many differences in a row are the translation's, even if others write the memory that the block changes.
const DOUBTS: u32 = 16;

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockStep {
    /// How often each block; `None`: each time it runs.
    pub runs: Option<u32>,
    /// Turns of the wedge before the first comparison.
    pub from: u64,
    /// All blocks are compared anew after so many turns.
    pub every: Option<u64>,
    /// The vCPU whose blocks are compared; the others run as ever.
    pub cpu: u32,
    /// There are others. What they may have caused is a difference only if it stays.
    pub among_others: bool,
}

impl Default for LockStep {
    fn default() -> Self {
        Self { runs: Some(4), from: 0, every: None, cpu: 0, among_others: false }
    }
}

impl FromStr for LockStep {
    type Err = String;

    /// `runs=N|all,from=N,every=N,cpu=N`, each of them or none.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let number = || {
                let number = value.parse::<u32>().ok().filter(|number| *number > 0);
                number.ok_or_else(|| format!("{key}={value}: not a number above 0"))
            };
            match key {
                "runs" if value == "all" => options.runs = None,
                "runs" => options.runs = Some(number()?),
                "from" => options.from = number()?.into(),
                "every" => options.every = Some(number()?.into()),
                "cpu" => {
                    let cpu = value.parse();
                    options.cpu = cpu.map_err(|_| format!("cpu={value}: not a number"))?;
                }
                _ => {
                    return Err(format!(
                        "`{part}`: there are runs=N|all, from=N, every=N and cpu=N"
                    ));
                }
            }
        }
        Ok(options)
    }
}

/// A block that is running alone.
struct Open {
    level: Level,
    host: u64,
    source: Source,
    code: Vec<u8>,
    trace: Trace,
}

/// The comparison of a vCPU's blocks.
pub struct Checker {
    options: LockStep,
    /// The turn at which all blocks are compared anew.
    next: Option<u64>,
    machine: Scratch,
    cpu: Cpu<Scratch>,
    open: Option<Open>,
    past: VecDeque<(u64, u64)>,
    /// Differences in a row that another vCPU may have caused, of blocks by HVA.
    doubts: HashMap<u64, u32>,
    /// Pages of code that have been written since the last block.
    stale: Vec<u64>,
    compared: u64,
    instructions: u64,
    not_compared: [u64; REASONS.len()],
    report: Option<String>,
}

impl Checker {
    pub fn new(options: LockStep, ram: Ram) -> io::Result<Self> {
        Ok(Self {
            options,
            next: Some(options.from),
            machine: Scratch::new(ram)?,
            cpu: Cpu::new(Vcpu::default()),
            open: None,
            past: VecDeque::new(),
            doubts: HashMap::new(),
            stale: Vec::new(),
            compared: 0,
            instructions: 0,
            not_compared: [0; REASONS.len()],
            report: None,
        })
    }

    /// Code pages at these offsets have been written.
    pub fn note_stale(&mut self, pages: &[u64]) {
        self.stale.extend(pages);
    }

    /// The report of a difference that has been found.
    pub fn take_report(&mut self) -> Option<String> {
        self.report.take()
    }

    /// Starts comparing all blocks, if that is due after so many turns. No block may be in use.
    pub fn start_trials(&mut self, turns: u64, code: &mut VcpuCode, pages: &mut Pages) {
        if self.is_due(turns) {
            code.each(|code| code.start_trials(pages, self.options.runs));
        }
    }

    /// The block of a level at an HVA runs next. A block on trial is run by the interpreter first, and alone afterwards.
    /// Returns the pages that the interpreter has decoded code from, and `None` if the block is not on trial.
    pub fn begin(
        &mut self,
        code: &mut VcpuCode,
        ram: &Ram,
        vcpu: &Vcpu,
        (level, host): (Level, u64),
    ) -> Option<Vec<u64>> {
        let on_trial =
            |code: &mut Code| code.cache.source(host).filter(|_| code.cache.on_trial(host));
        let source = code.with(level, on_trial).flatten()?;
        Some(self.open(ram, vcpu, (level, host), source))
    }

    /// Translated code has come back with this state. The block that ran alone, if one did, is compared.
    pub fn end(&mut self, code: &mut VcpuCode, pages: &Pages, ram: &Ram, vcpu: &Vcpu) {
        let Some(open) = self.open.take() else { return };
        let targets = code.with(open.level, |code| code.cache.targets(open.host));
        let Some(targets) = targets else { return };
        let targets: Vec<u64> = targets.into_iter().map(|(target, _)| target).collect();
        let verdict = open.trace.judge(vcpu, ram, &targets);
        if self.doubts(&open, &verdict) {
            // It stays on trial.
            return self.count(&open, &Comparison::NotCompared(Uncompared::Changed), vcpu.rip);
        }
        self.count(&open, &verdict, vcpu.rip);
        if let Comparison::Different(fields) = &verdict {
            self.explain(&open, fields, vcpu.rip, pages);
        }
        let nothing_to_compare = open.trace.moments.len() == 1;
        if verdict != Comparison::Idle || nothing_to_compare {
            code.with(open.level, |code| code.ran_alone(open.host));
        }
    }

    /// What has been done.
    pub fn rows(&self) -> Vec<(String, u64)> {
        let done =
            [("blocks compared", self.compared), ("instructions compared", self.instructions)];
        let not = REASONS.into_iter().zip(self.not_compared);
        done.into_iter().chain(not).map(|(name, count)| (name.to_owned(), count)).collect()
    }

    /// From this turn on all blocks are compared anew.
    fn is_due(&mut self, turns: u64) -> bool {
        let due = self.next.is_some_and(|next| turns >= next);
        if due {
            self.next = self.options.every.map(|every| turns + every);
        }
        due
    }

    /// Has the interpreter run the block that is to run; gives pages it has decoded code from.
    fn open(
        &mut self,
        ram: &Ram,
        vcpu: &Vcpu,
        (level, host): (Level, u64),
        source: Source,
    ) -> Vec<u64> {
        let code = code(ram, &source);
        self.machine.start_over(&std::mem::take(&mut self.stale));
        let trace = Trace::record(&mut self.cpu, &mut self.machine, vcpu, (level, &code));
        self.open = Some(Open { level, host, source, code, trace });
        self.machine.take_marked()
    }

    /// Whether another vCPU may have caused the difference of the block. If it comes again and again, none has.
    fn doubts(&mut self, open: &Open, verdict: &Comparison) -> bool {
        let doubtful = matches!(verdict, Comparison::Different(_))
            && self.options.among_others
            && open.trace.meets_others();
        if matches!(verdict, Comparison::Same(_)) {
            self.doubts.remove(&open.host);
        }
        if !doubtful {
            return false;
        }
        let doubts = self.doubts.entry(open.host).or_default();
        *doubts += 1;
        *doubts < DOUBTS
    }

    fn explain(&mut self, open: &Open, fields: &[StateField], rip: u64, pages: &Pages) {
        let byte = |n| pages.code_byte(open.host + n);
        let host: Vec<u8> = (0..open.source.host_len.into()).map(byte).collect();
        let past = self.past.iter().map(|(from, to)| format!("{from:016x} to {to:016x}"));
        let report = DifferenceReport {
            fields,
            trace: &open.trace,
            rip,
            guest: (open.source.guest, &open.code),
            host: (open.host, &host),
            past: past.collect(),
        };
        self.report = Some(report.text());
    }

    fn count(&mut self, open: &Open, verdict: &Comparison, rip: u64) {
        match verdict {
            Comparison::Same(instructions) => {
                self.compared += 1;
                self.instructions += *instructions as u64;
            }
            Comparison::NotCompared(reason) => self.not_compared[*reason as usize] += 1,
            Comparison::Idle | Comparison::Different(_) => {}
        }
        if self.past.len() == PAST {
            self.past.pop_front();
        }
        self.past.push_back((open.source.guest, rip));
    }
}

/// The block's bytes.
fn code(ram: &Ram, source: &Source) -> Vec<u8> {
    let mut code = vec![0; source.guest_len as usize];
    let into = source.guest & (PAGE - 1);
    let here = code.len().min((PAGE - into) as usize);
    let (first, second) = code.split_at_mut(here);
    ram.read(source.pages[0] + into, first);
    if !second.is_empty() {
        ram.read(source.pages[1], second);
    }
    code
}
