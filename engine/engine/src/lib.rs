//! How guest code runs: the contract of an engine, and the loop that drives a vCPU with one.
//!
//! An [`Engine`] executes guest instructions until something outside has to act. [`VcpuLoop`] is
//! that outside: it delivers interrupts when the guest allows them, sleeps while the guest has
//! nothing to do, and ends when the machine stops. It is the same for every engine, so engines
//! differ in speed only.
//!
//! [`Board`] is the machine as the reference CPU sees it; [`Attention`] is how anybody, on any
//! thread, makes a vCPU look up.

mod attention;
mod board;
mod interpreter;
mod log;
mod report;
mod vcpu_loop;

pub use attention::{Attention, Control, Order};
pub use board::{Board, BoardParts, LocalApic};
pub use interpreter::Interpreter;
pub use log::{Event, EventLog};
pub use report::{Report, Statistics};
pub use vcpu_loop::{Ended, VcpuLoop};
pub use x86_interp::{Counters, Exit, pending};

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
    fn vcpu(&self) -> &x86::Vcpu {
        (**self).vcpu()
    }
    fn counters(&self) -> Counters {
        (**self).counters()
    }
    fn traffic(&self) -> (u64, u64) {
        (**self).traffic()
    }
    fn ram(&self) -> &ram::Ram {
        (**self).ram()
    }
    fn failure(&mut self) -> Option<String> {
        (**self).failure()
    }
    fn details(&mut self) -> Vec<(String, u64)> {
        (**self).details()
    }
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
    /// The architectural state, complete and exact whenever [`Engine::run`] is not running.
    fn vcpu(&self) -> &x86::Vcpu;
    /// What has been done so far.
    fn counters(&self) -> Counters;
    /// Accesses to device memory and to ports so far.
    fn traffic(&self) -> (u64, u64);
    /// Guest RAM.
    fn ram(&self) -> &ram::Ram;
    /// Why it cannot go on, if [`Exit::Shutdown`] was not the guest's doing.
    fn failure(&mut self) -> Option<String> {
        None
    }
    /// What this kind of engine counts besides: name and count.
    fn details(&mut self) -> Vec<(String, u64)> {
        Vec::new()
    }
}
