//! Where a Linux guest's time goes: its stacks, looked at many times a second.
//!
//! A vCPU is sampled by its own thread. The thread finds the callers of the function that is executed, and goes on. Callers in the kernel are
//! found by ORC (`orc`), those in programs by frame pointers (`frame_pointers`). A sample changes nothing in the guest.

mod frame_pointers;
mod orc;
mod orc_search;

use std::{
    io::{self, Write},
    ops::Range,
    sync::{
        Arc,
        mpsc::{Receiver, TryRecvError},
    },
    thread,
    time::{Duration, Instant},
};

use contract::Engine;
use ram::Ram;
use serde::{Deserialize, Serialize};
use vmm::Inspector;
use x86::{paging::Roots, seg};

use crate::{
    lines::say,
    linux::{self, LinuxKernel, Task, VmaLayout},
    memory,
};
use frame_pointers::Returns;
use orc::{Caller, Orc};

/// Samples a second at the most.
pub const MOST_HERTZ: u32 = 1000;
/// Callers of a kind that are looked for.
const DEPTH: usize = 64;
/// After a sample a vCPU is not sampled for so many times what the sample has taken.
const BACKOFF: u32 = 4;

/// What is to be sampled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileRequest {
    /// How often a second.
    pub hertz: u32,
    /// Wait for a kernel if there is none yet.
    pub wait: bool,
}

/// What is sent to the reader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProfileLine {
    /// It begins, on so many vCPUs.
    Started {
        /// Their number.
        vcpus: usize,
    },
    /// A vCPU was looked at.
    Sample(Sample),
    /// So many samples are missing: a vCPU's thread did not come to one in time, or had just waited for one.
    Late(u64),
    /// It cannot be, or is over.
    Error(String),
}

/// What a vCPU executed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Nanoseconds since the profile began.
    pub ns: u64,
    /// The vCPU.
    pub vcpu: usize,
    /// The process; 0 if the CPU was idle.
    pub pid: u32,
    /// Its thread.
    pub tid: u32,
    /// The thread's name.
    pub comm: String,
    /// What it executed first, then who called that.
    pub frames: Vec<StackFrame>,
}

/// A function that was being executed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackFrame {
    /// The address (GVA).
    pub address: u64,
    /// Whose code it is.
    #[serde(flatten)]
    pub code: Code,
}

/// Whose code an address is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// A function of the kernel.
    Kernel {
        /// The function's symbol.
        symbol: String,
        /// Bytes from the symbol to the address.
        offset: u64,
    },
    /// Code of a program that is mapped from a file.
    File {
        /// The file's path.
        path: String,
        /// Bytes from the file's beginning to the address.
        offset: u64,
    },
    /// Kernel code without a symbol: of a module, or made at run time.
    Module,
    /// Code of a program in memory without a file.
    Anonymous,
}

/// The guest's kernel, its unwind tables and its layouts.
struct Sampler {
    kernel: LinuxKernel,
    ram: Ram,
    orc: Option<Orc>,
    maps: Option<VmaLayout>,
    /// The kernel's own code (GVA).
    text: Range<u64>,
    began: Instant,
}

/// Samples for a reader until it goes, or the machine ends.
///
/// # Errors
/// The reader goes.
pub fn serve(
    inspector: &Inspector,
    request: &ProfileRequest,
    output: &mut impl Write,
    gone: impl Fn() -> bool,
) -> io::Result<()> {
    let kernel = match LinuxKernel::wait_for(inspector, request.wait, &gone) {
        Ok(Some((kernel, _))) => kernel,
        Ok(None) => return say(output, &ProfileLine::Error("the machine has ended".to_owned())),
        Err(unknown) => return say(output, &ProfileLine::Error(unknown.to_string())),
    };
    let sampler = Arc::new(Sampler::new(kernel, inspector.ram().clone()));
    say(output, &ProfileLine::Started { vcpus: inspector.vcpus() })?;
    let pause = Duration::from_secs(1) / request.hertz.clamp(1, MOST_HERTZ);
    let mut samplers: Vec<VcpuSampler> = (0..inspector.vcpus()).map(VcpuSampler::new).collect();
    while !gone() {
        let next = Instant::now() + pause;
        let mut late = 0;
        for sampler_of in &mut samplers {
            match sampler_of.poll(&sampler, inspector) {
                SampleResult::Sample(sample) => say(output, &ProfileLine::Sample(sample))?,
                SampleResult::Nothing => {}
                SampleResult::Late => late += 1,
                SampleResult::End => return output.flush(),
            }
        }
        if late != 0 {
            say(output, &ProfileLine::Late(late))?;
        }
        output.flush()?;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

/// Samples one vCPU.
struct VcpuSampler {
    vcpu: usize,
    pending: Option<(Instant, Receiver<Option<Sample>>)>,
    /// The earliest time of the next sample.
    not_before: Instant,
}

/// The result of a sample.
enum SampleResult {
    Sample(Sample),
    Nothing,
    Late,
    End,
}

impl VcpuSampler {
    fn new(vcpu: usize) -> Self {
        Self { vcpu, pending: None, not_before: Instant::now() }
    }

    /// Takes the last sample, and asks for the next. On a busy host a vCPU waits at each sample. The pause between samples is therefore
    /// longer than that wait, or the guest would do nothing else.
    fn poll(&mut self, sampler: &Arc<Sampler>, inspector: &Inspector) -> SampleResult {
        let result = match self.pending.as_ref().map(|(since, answer)| (since, answer.try_recv())) {
            None => SampleResult::Nothing,
            Some((_, Err(TryRecvError::Empty))) => return SampleResult::Late,
            Some((_, Err(TryRecvError::Disconnected))) => return SampleResult::End,
            Some((since, Ok(sample))) => {
                let waited = sample.as_ref().map(|sample| sampler.at(sample.ns) - *since);
                self.not_before = Instant::now() + waited.unwrap_or_default() * BACKOFF;
                self.pending = None;
                sample.map_or(SampleResult::Nothing, SampleResult::Sample)
            }
        };
        if self.pending.is_none() && Instant::now() >= self.not_before {
            self.pending = Some((Instant::now(), sampler.ask(inspector, self.vcpu)));
            return result;
        }
        if matches!(result, SampleResult::Sample(_)) { result } else { SampleResult::Late }
    }
}

impl Sampler {
    fn new(kernel: LinuxKernel, ram: Ram) -> Self {
        let symbol = |name| kernel.symbols.find(name).unwrap_or_default();
        let text = symbol("_stext")..symbol("_end");
        let (orc, maps) = (Orc::read(&kernel, &ram), VmaLayout::of(&kernel).ok());
        Self { kernel, ram, orc, maps, text, began: Instant::now() }
    }

    /// When a sample was taken.
    fn at(&self, ns: u64) -> Instant {
        self.began + Duration::from_nanos(ns)
    }

    fn ask(self: &Arc<Self>, inspector: &Inspector, vcpu: usize) -> Receiver<Option<Sample>> {
        let sampler = Arc::clone(self);
        inspector.queue_on_vcpu(vcpu, move |access| sampler.sample(vcpu, access.engine))
    }

    /// Samples a vCPU; `None` in the few instructions in which the kernel has no current task.
    fn sample(&self, vcpu: usize, engine: &dyn Engine) -> Option<Sample> {
        let ns = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let task = self.task(engine)?;
        let frames = self.frames(engine, &task);
        let Task { pid, tid, comm, .. } = task;
        Some(Sample { ns, vcpu, pid, tid, comm, frames })
    }

    fn task(&self, engine: &dyn Engine) -> Option<Task> {
        let state = engine.vcpu();
        let own = state.seg[seg::GS].base;
        // The entry code has the program's yet.
        let base = if own >> 63 == 1 { own } else { state.kernel_gs_base };
        self.kernel.current_by(&self.ram, base)
    }

    fn frames(&self, engine: &dyn Engine, task: &Task) -> Vec<StackFrame> {
        let state = engine.vcpu();
        let word = |gva| self.kernel.word(&self.ram, gva);
        let mut frames = Vec::new();
        let mut at = orc::innermost(state.rip, &state.gpr);
        if state.cpl() == 3 {
            self.program(engine, task, at, &mut frames);
            return frames;
        }
        let mut registers = Some(&state.gpr);
        while frames.len() < DEPTH {
            frames.push(self.in_kernel(at.ip));
            let caller = self.orc.as_ref().and_then(|orc| orc.caller(at, registers.take(), &word));
            match caller {
                Some(Caller::Kernel(next)) => at = next,
                Some(Caller::Program(next)) => {
                    self.program(engine, task, next, &mut frames);
                    break;
                }
                None => break,
            }
        }
        frames
    }

    /// The page tables of a task's program. While the kernel switches from one task to the next, CR3 already has those of the next.
    fn roots_of(&self, engine: &dyn Engine, task: &Task) -> Roots {
        let roots = Roots::from(engine.vcpu());
        Roots { cr3: self.kernel.tables_of(&self.ram, task).unwrap_or(roots.cr3), ..roots }
    }

    fn in_kernel(&self, address: u64) -> StackFrame {
        let found = self.kernel.symbols.before(address).filter(|_| self.text.contains(&address));
        let code = found.map_or(Code::Module, |(symbol, offset)| {
            let symbol = symbol.to_owned();
            Code::Kernel { symbol, offset }
        });
        StackFrame { address, code }
    }

    /// A program's frames, as long as what they return to is code.
    fn program(
        &self,
        engine: &dyn Engine,
        task: &Task,
        first: orc::OrcFrame,
        frames: &mut Vec<StackFrame>,
    ) {
        let roots = self.roots_of(engine, task);
        let word = |gva| memory::word(&self.ram, roots, gva);
        let find = |address| {
            let maps = self.maps.as_ref()?;
            maps.find(&self.kernel, &self.ram, task.address, address)
        };
        frames.push(in_program(first.ip, find(first.ip)));
        let is_code = |place: &linux::MappedFile| place.is_executable;
        let caller = |back: u64| find(back.wrapping_sub(1)).filter(is_code);
        let returns = Returns::new(first, word, |back| caller(back).is_some());
        for back in returns.take(DEPTH) {
            let Some(place) = caller(back) else { return };
            frames.push(in_program(back, Some(place)));
        }
    }
}

fn in_program(address: u64, place: Option<linux::MappedFile>) -> StackFrame {
    let file = place.and_then(|place| Some((place.path?, place.offset)));
    let code = file.map_or(Code::Anonymous, |(path, offset)| Code::File { path, offset });
    StackFrame { address, code }
}
