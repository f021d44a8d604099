//! User code, directly on the CPU.

use crate::{Fast, state};
use frame::{ExitKind, Frame, KICK, go};
use wedge::Error;
use x86::{
    Fault,
    exception::pf,
    flags,
    paging::{self, Access, Roots},
    vector,
};
use x86_interp::System;

const SIGTRAP: u64 = 5;
const SIGSEGV: u64 = 11;
const SIGSYS: u64 = 31;
/// DR6.BS: single step.
const SINGLE_STEP: u64 = 1 << 14;
/// The page of Linux's old system-call entries (GVA).
const VSYSCALL: u64 = 0xffff_ffff_ff60_0000;

/// Why user code stopped.
enum Stop {
    /// Something may have to be delivered.
    Kicked,
    /// SYSCALL or INT 0x80; RIP is behind it.
    SystemCall,
    /// A call into the vsyscall page; the return address has been popped into RIP.
    Vsyscall(u64),
    /// A page fault at a GVA, with the CPU's error code.
    PageFault(u64, u32),
    /// INT3 or INT1 trapped; RIP is behind it.
    Breakpoint,
    /// A single step, complete.
    Step,
    /// An instruction faulted; RIP is at it.
    Fault,
}

impl Fast {
    /// Runs user code until it does something that has to be interpreted, and has that done.
    pub(crate) fn user_code(&mut self) -> Result<(), Error> {
        if !state::runs_directly(&self.cpu.vcpu) {
            self.interpret();
            return Ok(());
        }
        let f = self.pages.frame();
        state::load(&self.cpu.vcpu, f);
        f.pending = 0;
        match (self.enter(go::USER)?, self.modes.kernel_translated) {
            (ExitKind::UserSignal, _) => self.user_exit(),
            (kind, true) => self.kernel_exit(kind),
            (ExitKind::Kicked, false) => {
                self.take_state();
                Ok(())
            }
            // Whatever user code has the wedge say: no kernel code has run.
            (_, false) => self.user_exit(),
        }
    }

    /// The system call that has just trapped is worth patching; it is made again then.
    pub(crate) fn hot_site(&mut self) -> Result<(), Error> {
        self.pages.frame().cpl = 3;
        self.take_state();
        let back = self.cpu.vcpu.rip;
        self.cpu.vcpu.rip = back.wrapping_sub(2);
        self.slots.patch(&mut self.pages, back)?;
        self.protect_marked()
    }

    /// Goes on after an exit from user code, whose state is in the frame.
    pub(crate) fn user_exit(&mut self) -> Result<(), Error> {
        self.pages.frame().cpl = 3;
        self.take_state();
        let stop = stop(self.pages.frame());
        let v = &mut self.cpu.vcpu;
        match stop {
            Stop::Kicked => return Ok(()),
            Stop::Step => {
                self.cpu.exception(&mut self.board, Fault::debug(SINGLE_STEP));
                return Ok(());
            }
            Stop::PageFault(gva, code) => {
                if !self.answer(gva, access(code))? {
                    self.page_fault(gva, access(code));
                }
                return Ok(());
            }
            Stop::SystemCall => {
                self.statistics.system_calls += 1;
                v.rip = v.rip.wrapping_sub(2);
            }
            Stop::Vsyscall(entry) => state::push_back(v, entry),
            Stop::Breakpoint => v.rip = v.rip.wrapping_sub(1),
            Stop::Fault => {}
        }
        self.interpret();
        Ok(())
    }

    /// Has the guest take its page fault; where the guest's page tables allow the access, the
    /// instruction is interpreted.
    fn page_fault(&mut self, gva: u64, access: Access) {
        let roots = Roots::from(&self.cpu.vcpu);
        let mut ram = self.board.ram();
        match paging::walk(&mut ram, roots, gva, access) {
            Err(fault) => self.cpu.exception(&mut self.board, fault),
            Ok(_) => self.interpret(),
        }
    }
}

/// A user access with the CPU's error code.
fn access(code: u32) -> Access {
    Access {
        write: code & pf::WRITE != 0,
        fetch: code & pf::FETCH != 0,
        user: true,
        smap_override: false,
    }
}

fn stop(f: &Frame) -> Stop {
    match f.signal {
        signal if signal == KICK as u64 => Stop::Kicked,
        SIGSYS if f.address & !0xfff == VSYSCALL => Stop::Vsyscall(f.address),
        SIGSYS => Stop::SystemCall,
        SIGSEGV if f.trap == u64::from(vector::PF) => Stop::PageFault(f.address, f.error as u32),
        SIGTRAP if f.trap == u64::from(vector::DB) && f.rflags & flags::TF != 0 => Stop::Step,
        SIGTRAP => Stop::Breakpoint,
        _ => Stop::Fault,
    }
}
