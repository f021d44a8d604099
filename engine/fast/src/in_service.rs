//! Reads of the local APIC's in-service register for the interrupts from 0x80 on. Wedges answer them while none of these
//! is in service.

use engine::Board;
use iced_x86::Code;
use x86::msr::X2APIC_IN_SERVICE_80;
use x86_interp::System;

/// Whether the kernel of a vCPU makes such reads. Only then does the monitor look what wedges may answer.
#[derive(Default)]
pub struct InServiceReads {
    /// The kernel has made one.
    asks: bool,
}

impl InServiceReads {
    /// The kernel has called out with an instruction of this code, and this RCX.
    pub fn note(&mut self, code: u64, rcx: u64) {
        self.asks |= code == Code::Rdmsr as u64 && rcx as u32 == X2APIC_IN_SERVICE_80;
    }

    /// The code of the instruction that the wedge may answer with zero, or no instruction's.
    pub fn answered(&self, board: &mut Board) -> u64 {
        let none = self.asks && board.msr_read(X2APIC_IN_SERVICE_80) == Ok(0);
        if none { Code::Rdmsr as u64 } else { u64::MAX }
    }
}
