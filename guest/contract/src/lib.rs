//! What those who run a vCPU and those who execute its code owe each other.
//!
//! An [`Engine`] executes guest instructions until something outside has to act; [`Exit`] lists what that can be.
//! [`pending`] has the events that wait for a vCPU. [`GuestRam`] is guest memory, with the marks that keep
//! translations from becoming stale. Neither the interpreter nor an engine owns these, and nothing here decodes
//! an instruction. The crate is of the guest layer, as the interpreter implements it.

mod memory;
mod probe;
mod vcpu_event;

pub use memory::{CodeNews, GuestRam, RamPage};
pub use probe::{Probes, Reached, Sink, Taps, Watch};
pub use vcpu_event::{VcpuEvent, Watcher};

use x86::Vcpu;

/// Events that wait for a vCPU: bits of a set.
pub mod pending {
    /// A maskable interrupt, as far as priorities go. RFLAGS.IF is the vCPU's.
    pub const INTERRUPT: u32 = 1 << 0;
    /// A non-maskable interrupt.
    pub const NMI: u32 = 1 << 1;
    /// [`super::Engine::run`] must return.
    pub const EXIT: u32 = 1 << 2;
    /// INIT.
    pub const INIT: u32 = 1 << 3;
    /// A start-up IPI (SIPI).
    pub const START_UP: u32 = 1 << 4;
}

/// Why [`Engine::run`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The instruction budget is used up.
    Budget,
    /// [`pending::EXIT`] was set.
    Requested,
    /// A maskable interrupt waits and can be delivered now with [`Engine::interrupt`].
    InterruptWindow,
    /// An NMI waits and can be delivered now with [`Engine::nmi`].
    NmiWindow,
    /// HLT: nothing to do until an interrupt.
    Halted,
    /// Triple fault: an exception while delivering a double fault (SDM 6.15).
    Shutdown,
    /// The engine cannot go on; [`Engine::failure`] says why.
    Failed,
    /// The interpreter stands before code that another engine has asked to run itself.
    Leave,
    /// A debugger or a tracer has a probe here, see [`Engine::set_probes`].
    Probe(Reached),
}

/// Whose doing it is that an engine cannot go on, or that there is no machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The guest's: it has written where only the engine should. As far as that can be told.
    Guest,
    /// The user's: what was asked for cannot be.
    User,
    /// The host's: it refused memory or a process, or killed a process.
    Host,
    /// Ours: a bug.
    Ours,
}

impl Whose {
    /// A word for programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Guest => "guest",
            Self::User => "user",
            Self::Host => "host",
            Self::Ours => "ring3",
        }
    }
}

impl std::fmt::Display for Whose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Guest => "the guest's doing, as far as can be told",
            Self::User => "what was asked for cannot be",
            Self::Host => "the host's doing",
            Self::Ours => "a bug in ring3",
        })
    }
}

/// Why an engine cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Whose doing it is.
    pub whose: Whose,
    /// A message for the user: what has happened, and what to do.
    pub what: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.what, self.whose)
    }
}

/// What the CPU has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Instructions completed.
    pub instructions: u64,
    /// Blocks entered.
    pub blocks: u64,
    /// Blocks decoded.
    pub blocks_decoded: u64,
    /// Page walks.
    pub tlb_misses: u64,
    /// TLB flushes, whole.
    pub tlb_flushes: u64,
    /// Exceptions delivered, by vector.
    pub exceptions: [u64; 32],
    /// Interrupts delivered.
    pub interrupts: u64,
    /// Code pages whose blocks were dropped because the page was written.
    pub code_pages_dropped: u64,
}

/// Host code that a piece of the guest's kernel was translated into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TranslatedCode {
    /// GVA of the guest's first instruction.
    pub gva: u64,
    /// HVA of the host code, in each process that executes it.
    pub hva: u64,
    /// Bytes before it in the memory object that has all such code.
    pub offset: u64,
    /// Bytes of host code.
    pub len: u64,
}

/// Executes guest code on one vCPU.
pub trait Engine {
    /// Runs until something outside has to act, for about `budget` instructions at the most. See
    /// [`Exit`] for what can end it.
    fn run(&mut self, budget: u64) -> Exit;
    /// Delivers a maskable interrupt; only after [`Exit::InterruptWindow`] or [`Exit::Halted`]
    /// with interrupts enabled.
    fn interrupt(&mut self, vector: u8);
    /// Delivers an NMI; only while NMIs are not blocked.
    fn nmi(&mut self);
    /// Delivers a machine check, whatever the vCPU is at. It shuts down if it has them off in CR4, or if it is still
    /// `busy` with the last one.
    fn machine_check(&mut self, busy: bool);
    /// INIT: the registers are as after a reset, and nothing runs before a start-up IPI.
    fn init(&mut self);
    /// A start-up IPI: if the vCPU waits for one, it begins at `vector` * 4096 in real mode.
    fn start_up(&mut self, vector: u8);
    /// Another vCPU wakes this one: if it halts, it goes on behind HLT.
    fn unhalt(&mut self);
    /// Drops all translations of addresses, as a flush of the whole TLB does.
    fn flush(&mut self);
    /// From now on the vCPU runs on this one of the host's CPUs: its place among those that the machine may use.
    fn settle_on(&mut self, cpu: usize) {
        let _ = cpu;
    }
    /// The vCPU goes to the host CPU with this index among those that the machine may use. After a while it may choose another by
    /// itself.
    fn move_to(&mut self, cpu: usize) {
        let _ = cpu;
    }
    /// Index of the host CPU that the vCPU is bound to, among those that the machine may use; none if the engine binds the vCPU to
    /// none.
    fn cpu(&self) -> Option<usize> {
        None
    }
    /// The architectural state, complete and exact whenever [`Engine::run`] is not running.
    fn vcpu(&self) -> &Vcpu;
    /// What has been done so far.
    fn counters(&self) -> Counters;
    /// Accesses to device memory and to ports so far.
    fn traffic(&self) -> (u64, u64);
    /// Guest RAM.
    fn ram(&self) -> &dyn GuestRam;
    /// From now on [`Engine::run`] ends with [`Exit::Probe`] at these and no other.
    fn set_probes(&mut self, probes: &Probes);
    /// Executes one instruction, whatever probes are there, and delivers no interrupt; the guest takes the exception it
    /// raises. Returns the watched memory it has accessed, if any.
    fn step(&mut self) -> Option<Reached>;
    /// Has the guest go on with this state.
    fn set_vcpu(&mut self, vcpu: Vcpu);
    /// The time-stamp counter.
    fn time_stamp(&mut self) -> u64 {
        0
    }
    /// Why it cannot go on, after [`Exit::Failed`].
    fn failure(&mut self) -> Option<Failure> {
        None
    }
    /// The host code that the guest's kernel has been translated into so far, in order of HVAs.
    fn translated(&mut self) -> Vec<TranslatedCode> {
        Vec::new()
    }
    /// What this kind of engine counts besides: name and count.
    fn details(&mut self) -> Vec<(String, u64)> {
        Vec::new()
    }
}

impl<E: Engine + ?Sized> Engine for Box<E> {
    fn run(&mut self, budget: u64) -> Exit {
        (**self).run(budget)
    }
    fn interrupt(&mut self, vector: u8) {
        (**self).interrupt(vector);
    }
    fn nmi(&mut self) {
        (**self).nmi();
    }
    fn machine_check(&mut self, busy: bool) {
        (**self).machine_check(busy);
    }
    fn init(&mut self) {
        (**self).init();
    }
    fn start_up(&mut self, vector: u8) {
        (**self).start_up(vector);
    }
    fn unhalt(&mut self) {
        (**self).unhalt();
    }
    fn flush(&mut self) {
        (**self).flush();
    }
    fn settle_on(&mut self, cpu: usize) {
        (**self).settle_on(cpu);
    }
    fn move_to(&mut self, cpu: usize) {
        (**self).move_to(cpu);
    }
    fn cpu(&self) -> Option<usize> {
        (**self).cpu()
    }
    fn vcpu(&self) -> &Vcpu {
        (**self).vcpu()
    }
    fn counters(&self) -> Counters {
        (**self).counters()
    }
    fn traffic(&self) -> (u64, u64) {
        (**self).traffic()
    }
    fn ram(&self) -> &dyn GuestRam {
        (**self).ram()
    }
    fn set_probes(&mut self, probes: &Probes) {
        (**self).set_probes(probes);
    }
    fn step(&mut self) -> Option<Reached> {
        (**self).step()
    }
    fn set_vcpu(&mut self, vcpu: Vcpu) {
        (**self).set_vcpu(vcpu);
    }
    fn time_stamp(&mut self) -> u64 {
        (**self).time_stamp()
    }
    fn failure(&mut self) -> Option<Failure> {
        (**self).failure()
    }
    fn translated(&mut self) -> Vec<TranslatedCode> {
        (**self).translated()
    }
    fn details(&mut self) -> Vec<(String, u64)> {
        (**self).details()
    }
}
