//! The engine that runs guest user code directly on the CPU.
//!
//! 64-bit user code runs in a [`wedge::Wedge`], one process per guest address space; everything else
//! is interpreted. Whatever user code does beyond computing brings it back here with exact
//! registers, and the rule is simple: a page fault that the guest's page tables can answer is
//! answered with a host mapping; anything else is *interpreted*, one instruction, which raises
//! the right exception or enters the guest kernel as on any CPU.
//!
//! Why the host's mappings are a correct TLB: a mapping is made only from a successful walk of the
//! guest's page tables with the access's own rights, never with more; x86 lets it live until the
//! guest flushes; and every flush the guest executes goes through the interpreter, which reports it
//! ([`x86_interp::Record`]). A page is mapped writable only while its dirty bit is set and the
//! interpreter holds no code decoded from it.

mod registers;
mod shadow;
mod slots;

use bus::Kicker;
use engine::{Attention, Board, Engine};
use ram::Ram;
use shadow::Answer;
use slots::Slots;
use std::sync::Arc;
use wedge::Kick;
use x86::{Fault, Vcpu, reg};
use x86_interp::{Counters, Cpu, Exit, System};

/// DR6.BS: single step.
const SINGLE_STEP: u64 = 1 << 14;

/// The engine.
pub struct Direct {
    cpu: Cpu<Board>,
    board: Board,
    slots: Slots,
    direct: Statistics,
}

/// What direct execution has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Times guest user code was entered.
    pub entries: u64,
    /// System calls it made.
    pub system_calls: u64,
    /// Page faults answered with a mapping.
    pub mapped: u64,
    /// Exits answered by interpreting an instruction.
    pub interpreted: u64,
}

struct WedgeKicker(Kick);

impl Kicker for WedgeKicker {
    fn kick(&self) {
        self.0.kick();
    }
}

impl Direct {
    /// An engine that starts at the given state; `attention` is the board's.
    pub fn new(vcpu: Vcpu, board: Board, attention: &Attention) -> Self {
        let mut cpu = Cpu::new(vcpu);
        cpu.observe();
        let kick = Kick::default();
        attention.forward(Arc::new(WedgeKicker(kick.clone())));
        let slots = Slots::new(board.ram().clone(), kick);
        Self { cpu, board, slots, direct: Statistics::default() }
    }

    /// What direct execution has done.
    pub fn statistics(&self) -> Statistics {
        self.direct
    }

    /// Runs user code until it does something that has to be interpreted, and has that done.
    fn user_code(&mut self) -> Result<(), wedge::Error> {
        let record = self.cpu.take_record();
        self.slots.apply(&record);
        let slot = self.slots.get(self.cpu.vcpu.cr3)?;
        slot.wedge.aim_kicks();
        // Whoever sets a bit after this look finds the aim already taken.
        if self.board.pending() != 0 {
            return Ok(());
        }
        registers::load(&self.cpu.vcpu, slot.wedge.registers());
        self.direct.entries += 1;
        loop {
            let Some(exit) = slot.run()? else {
                slot.forget();
                continue;
            };
            if let wedge::Exit::PageFault { address, error } = exit {
                let roots = x86::paging::Roots::from(&self.cpu.vcpu);
                if slot.answer(self.board.ram(), roots, address, error)? == Answer::Mapped {
                    self.direct.mapped += 1;
                    continue;
                }
            }
            registers::store(slot.wedge.registers(), &mut self.cpu.vcpu);
            self.finish(exit);
            return Ok(());
        }
    }

    /// Goes on after an exit, with the registers stored.
    fn finish(&mut self, exit: wedge::Exit) {
        let v = &mut self.cpu.vcpu;
        match exit {
            wedge::Exit::Kicked => return,
            wedge::Exit::Step => {
                return self.cpu.exception(&mut self.board, Fault::debug(SINGLE_STEP));
            }
            wedge::Exit::SystemCall => {
                self.direct.system_calls += 1;
                v.rip = v.rip.wrapping_sub(2);
            }
            wedge::Exit::Vsyscall { address } => {
                v.gpr[reg::RSP] = v.gpr[reg::RSP].wrapping_sub(8);
                v.rip = address;
            }
            wedge::Exit::Trap { vector: x86::vector::BP } => v.rip = v.rip.wrapping_sub(1),
            wedge::Exit::Trap { .. } | wedge::Exit::PageFault { .. } => {}
        }
        self.direct.interpreted += 1;
        if let Err(fault) = self.cpu.step(&mut self.board) {
            self.cpu.exception(&mut self.board, fault);
        }
    }
}

impl Engine for Direct {
    fn run(&mut self, budget: u64) -> Exit {
        loop {
            let exit = self.cpu.run(&mut self.board, budget);
            if exit != Exit::UserCode {
                return exit;
            }
            if let Err(error) = self.user_code() {
                tracing::error!("{error}");
                return Exit::Shutdown;
            }
        }
    }
    fn interrupt(&mut self, vector: u8) {
        self.cpu.interrupt(&mut self.board, vector);
    }
    fn nmi(&mut self) {
        self.cpu.nmi(&mut self.board);
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
    fn ram(&self) -> &Ram {
        self.board.ram()
    }
}
