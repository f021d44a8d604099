//! The reference engine: the interpreter on a board.

use contract::{Counters, Engine, Exit, GuestRam, Probes, Reached};
use x86::Vcpu;
use x86_interp::{Cpu, System};

use crate::Board;

/// The reference CPU and the machine around it.
pub struct Interpreter {
    cpu: Cpu<Board>,
    board: Board,
}

impl Interpreter {
    /// An engine that starts at the given state.
    pub fn new(vcpu: Vcpu, board: Board) -> Self {
        Self { cpu: Cpu::new(vcpu), board }
    }
}

impl Engine for Interpreter {
    fn run(&mut self, budget: u64) -> Exit {
        self.cpu.run(&mut self.board, budget)
    }
    fn interrupt(&mut self, vector: u8) {
        self.cpu.interrupt(&mut self.board, vector);
    }
    fn nmi(&mut self) {
        self.cpu.nmi(&mut self.board);
    }
    fn machine_check(&mut self, busy: bool) {
        self.cpu.machine_check(&mut self.board, busy);
    }
    fn init(&mut self) {
        self.cpu.init();
    }
    fn start_up(&mut self, vector: u8) {
        self.cpu.start_up(vector);
    }
    fn unhalt(&mut self) {
        self.cpu.unhalt();
    }
    fn flush(&mut self) {
        self.cpu.flush();
    }
    fn vcpu(&self) -> &Vcpu {
        &self.cpu.vcpu
    }
    fn counters(&self) -> Counters {
        self.cpu.counters
    }
    fn traffic(&self) -> (u64, u64) {
        self.board.traffic()
    }
    fn ram(&self) -> &dyn GuestRam {
        self.board.ram()
    }
    fn set_probes(&mut self, probes: &Probes) {
        self.cpu.set_probes(probes);
        self.board.set_watchers(&probes.watchers);
    }
    fn step(&mut self) -> Option<Reached> {
        self.cpu.step_over(&mut self.board)
    }
    fn set_vcpu(&mut self, vcpu: Vcpu) {
        self.cpu.vcpu = vcpu;
        self.cpu.state_changed();
    }
    fn time_stamp(&mut self) -> u64 {
        self.board.tsc()
    }
}
