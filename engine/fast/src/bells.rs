//! Doorbells that wedges ring by themselves, and the interrupts that they take.
//!
//! When an interpreted store has rung a doorbell, the monitor asks the device what the doorbell does. If a wedge may do that, the monitor
//! tells the vCPU's wedges of the store and of the doorbell. Wedges no longer ring once anything about a device may have changed
//! ([`ram::Ram::change_bells`]).

#[cfg(test)]
mod tests;

use crate::operand;
use engine::Board;
use iced_x86::{Code, Instruction, OpKind, Register};
use ram::words as in_ram;
use wedge::Pages;
use wedge_abi::{Bell, BellState, Bells, NO_CLASS, Ring, words};
use x86::Vcpu;
use x86_interp::System;

/// How long a wedge waits for an answer, and how long if everything has been answered, in us.
const PATIENCE: u64 = 120;
const MOMENT: u64 = 5;

const _: () = assert!(words::LEN as u64 == in_ram::LEN && words::EPOCH as u64 == in_ram::EPOCH);
const _: () = assert!(words::STEP == in_ram::STEP && words::WATCHED == in_ram::WATCHED);
const _: () = assert!(words::FIRST_QUEUE == in_ram::FIRST_QUEUE);
const _: () = assert!(words::NOT_WATCHED == in_ram::NOT_WATCHED && words::EARLY == in_ram::EARLY);
const _: () = assert!(words::NOBODY == in_ram::NOBODY && words::LOOKING == in_ram::LOOKING);
const _: () = assert!(words::ANSWERED == in_ram::ANSWERED && words::SILENT == in_ram::SILENT);

/// The doorbells that a vCPU's wedges have been told of.
#[derive(Default)]
pub struct KnownBells {
    /// Wedges ring none.
    off: bool,
    /// How many doorbells wedges have been told of.
    bells: usize,
    /// How many instructions that ring they have been told of.
    rings: usize,
}

impl KnownBells {
    /// None yet, and none ever if they are `off`.
    pub fn new(off: bool) -> Self {
        Self { off, ..Self::default() }
    }

    /// The instruction at `rip`, which is interpreted each time, has just stored to a device.
    pub fn note(
        &mut self,
        pages: &mut Pages,
        board: &Board,
        vcpu: &Vcpu,
        (rip, stored): (u64, u64),
    ) {
        if self.off || board.is_watched() {
            return;
        }
        self.follow(pages, board);
        let known = &pages.vcpu_page().told.bells;
        let has_ring = known.rings.iter().any(|ring| ring.rip == rip);
        let has_bell = known.bells.iter().any(|bell| bell.gpa == stored);
        if has_ring && has_bell {
            return;
        }
        let (Some(ring), Some(bell)) = (ring(board, vcpu, rip), bell(board, stored)) else {
            return;
        };
        let told = &mut pages.told().bells;
        if !has_ring {
            add(&mut told.rings, &mut self.rings, ring);
        }
        if !has_bell {
            add(&mut told.bells, &mut self.bells, bell);
        }
    }

    /// Forgets all doorbells if something about a device may have changed. Call this before a device is asked: what changes in between
    /// then voids the device's answer.
    fn follow(&mut self, pages: &mut Pages, board: &Board) {
        let epoch = board.ram().bells_epoch();
        let told = &pages.vcpu_page().told.bells;
        if told.epoch != epoch || told.patience == 0 {
            (self.bells, self.rings) = (0, 0);
            let us = board.tsc_hz() / 1_000_000;
            let (patience, moment) = (PATIENCE * us, MOMENT * us);
            pages.told().bells = Bells { epoch, patience, moment, ..Bells::default() };
        }
    }

    /// Guest code is about to run: which interrupts the wedge may take.
    pub fn publish(&self, board: &Board, before: BellState) -> BellState {
        let none = BellState { above: NO_CLASS, end: u64::MAX, ..before };
        if self.off || self.bells == 0 || board.is_watched() {
            return none;
        }
        let open = board.direct().and_then(|(gpa, above)| {
            let end = board.ram().offset(gpa, 1).ok()?;
            Some(BellState { above: above.into(), end, ..before })
        });
        open.unwrap_or(none)
    }
}

/// Adds one; the oldest of many makes room.
fn add<T: Copy, const N: usize>(to: &mut [T; N], count: &mut usize, new: T) {
    to[*count % N] = new;
    *count += 1;
}

/// The doorbell that a store to a GPA has rung, if wedges may ring it.
fn bell(board: &Board, gpa: u64) -> Option<Bell> {
    let (bell, vector) = board.bell(gpa)?;
    let ram = board.ram();
    Some(Bell {
        gpa,
        words: bell.words.checked_sub(ram.words_start())?,
        queue: bell.queue as u64,
        offered: ram.offset(bell.offered, 2).ok()?,
        used: ram.offset(bell.used, 2).ok()?,
        vector: vector.into(),
    })
}

/// The instruction at `rip`, if all it does is to store a register of 16 bits to where another one points.
fn ring(board: &Board, vcpu: &Vcpu, rip: u64) -> Option<Ring> {
    let insn = operand::instruction(board, vcpu, rip);
    let plain = insn.code() == Code::Mov_rm16_r16
        && insn.op0_kind() == OpKind::Memory
        && insn.memory_index() == Register::None
        && insn.memory_base().is_gpr64()
        && !has_segment(&insn);
    plain.then(|| Ring {
        rip,
        len: insn.len() as u64,
        base: insn.memory_base().number() as u64,
        displacement: insn.memory_displacement64(),
    })
}

/// Its operand has the base of FS or GS added.
fn has_segment(insn: &Instruction) -> bool {
    matches!(insn.segment_prefix(), Register::FS | Register::GS)
}
