//! User code, directly on the CPU or translated.

use crate::{
    Fast, FaultOutcome, Modes, User, regions, state,
    user_text::{INT3, INTO, LONGEST, UserText},
};
use jit::Level;
use wedge::Error;
use wedge_abi::{KICK, REGION_BITS, VcpuPage, WedgeExit, go};
use x86::{
    Fault,
    exception::pf,
    flags,
    paging::{self, Access, Roots},
    reg, vector,
};
use x86_interp::System;

const SIGILL: u64 = 4;
const SIGTRAP: u64 = 5;
/// The host's code for a SIGTRAP that is neither a single step nor a breakpoint of the debug registers.
const TRAP_BRKPT: u64 = 1;
const SIGSEGV: u64 = 11;
const SIGSYS: u64 = 31;
/// DR6.BS: single step.
const SINGLE_STEP: u64 = 1 << 14;
/// Instructions interpreted at a time where user code cannot run directly.
const STAY: usize = 10_000;
/// log2 of the bytes of a page.
const PAGE_BITS: u32 = 12;
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
    /// INT3, INTO or INT n trapped, by one of its two encodings: the opcode of the one without an operand. RIP is behind it.
    SoftwareInterrupt(u8),
    /// INT1 trapped.
    Int1,
    /// A single step, complete.
    Step,
    /// SYSENTER; RIP and RSP are lost.
    Enter,
    /// The CPU refused an instruction; RIP is at it.
    Undefined,
    /// An instruction faulted; RIP is at it.
    Fault,
}

impl Fast {
    /// Runs user code until it does something that has to be interpreted, and has that done.
    pub(crate) fn user_code(&mut self) -> Result<(), Error> {
        if !self.cpu.vcpu.long_mode() {
            return self.translated_user_code();
        }
        let areas = self.narrow.areas(&self.cpu.vcpu, self.board.ram());
        if !state::runs_directly(&self.cpu.vcpu, &areas) {
            self.interpret();
            return Ok(());
        }
        if self.modes.user == User::Translated {
            return self.translated_user_code();
        }
        if self.looks_up()? && state::can_look_up(&self.cpu.vcpu) {
            return self.translated_code(Level::User);
        }
        let base = self.pages.base();
        let page = self.pages.vcpu_page();
        state::load(&self.cpu.vcpu, base, page);
        page.system.areas = areas;
        page.run.pending = 0;
        match (self.enter(go::USER)?, self.modes.kernel_translated) {
            (WedgeExit::UserSignal, _) => self.user_exit(),
            (WedgeExit::Interpret, _) => self.interpret_user(),
            (kind, true) => self.kernel_exit(kind),
            (WedgeExit::Kicked, false) => {
                self.take_state();
                Ok(())
            }
            // Whatever user code has the wedge say: no kernel code has run.
            (_, false) => self.user_exit(),
        }
    }

    /// User code of the current slot is run translated, with look-ups. Not where user code has processes of its own: its translation would run beside the kernel.
    fn looks_up(&mut self) -> Result<bool, Error> {
        let scattered = self.modes.options.scattered;
        let filled = self.pages.vcpu_page().counters.lookups;
        let slot = self.slots.current()?;
        let may = may_look_up(self.modes) && !self.code.has_probes_at_places();
        if !may || !self.cpu.vcpu.is_64bit() {
            slot.looks_nothing_up();
            return Ok(false);
        }
        let (v, ram, code) = (&self.cpu.vcpu, self.board.ram(), &mut self.code);
        Ok(slot.looks_up(scattered, filled, |role| code.has_seen_often(ram, v, role)))
    }

    /// User code has not gone on at an instruction.
    pub(crate) fn interpret_user(&mut self) -> Result<(), Error> {
        self.pages.vcpu_page().regs.cpl = 3;
        self.take_state();
        self.interpret();
        Ok(())
    }

    fn translated_user_code(&mut self) -> Result<(), Error> {
        if state::can_be_translated(&self.cpu.vcpu) {
            return self.translated_code(Level::User);
        }
        self.interpret();
        Ok(())
    }

    /// The system call that has just trapped is worth patching; it is made again then.
    pub(crate) fn hot_site(&mut self) -> Result<(), Error> {
        self.pages.vcpu_page().regs.cpl = 3;
        self.take_state();
        let back = self.cpu.vcpu.rip;
        self.cpu.vcpu.rip = back.wrapping_sub(2);
        self.slots.patch(&self.pages, back)?;
        let marked = self.slots.current()?.take_marked();
        self.protect(marked);
        Ok(())
    }

    /// Goes on after an exit from user code, whose state is in the vCPU page.
    pub(crate) fn user_exit(&mut self) -> Result<(), Error> {
        self.pages.vcpu_page().regs.cpl = 3;
        self.take_state();
        self.show_missing()?;
        let stop = stop(self.pages.vcpu_page());
        let text = UserText::of(&self.cpu.vcpu, self.board.ram());
        let v = &mut self.cpu.vcpu;
        match stop {
            Stop::Kicked => return Ok(()),
            Stop::Step => {
                self.cpu.exception(&mut self.board, Fault::debug(SINGLE_STEP));
                return Ok(());
            }
            // The instruction may be the jump that stands for a patched system call.
            Stop::PageFault(gva, _) if regions::is_in_sites(gva) => {}
            Stop::PageFault(gva, code) => {
                return self.user_page_fault(gva, access(code));
            }
            Stop::Enter => {
                self.statistics.system_calls += 1;
                if let Err(fault) = self.cpu.enter_system() {
                    self.cpu.exception(&mut self.board, fault);
                }
                return Ok(());
            }
            Stop::SystemCall => {
                self.statistics.system_calls += 1;
                v.rip = v.rip.wrapping_sub(2);
            }
            Stop::Vsyscall(entry) => state::push_back(v, entry),
            Stop::SoftwareInterrupt(opcode) => v.rip = text.interrupt_before(v.rip, opcode),
            Stop::Int1 => v.rip = self.int1_traps.start(&text, v.rip),
            Stop::Undefined | Stop::Fault => {}
        }
        match stop {
            Stop::Undefined => self.interpret_refused(),
            Stop::Fault => self.interpret_and_learn(),
            _ => self.interpret(),
        }
        Ok(())
    }

    /// Maps what user code has missed, or has the fault taken.
    fn user_page_fault(&mut self, gva: u64, access: Access) -> Result<(), Error> {
        if self.loads_itself(gva, access)? || self.answer(gva, access)? == FaultOutcome::Interpret {
            self.page_fault(gva, access);
        }
        Ok(())
    }

    /// The instruction at RIP loads from its own page, which is closed to loads. Such a page is mapped to be executed or
    /// to be loaded from, and the instruction needs both.
    fn loads_itself(&mut self, gva: u64, access: Access) -> Result<bool, Error> {
        let rip = self.cpu.vcpu.rip;
        let own = [rip, rip.wrapping_add(LONGEST - 1)].map(|at| at >> PAGE_BITS);
        let loads = !access.write && !access.fetch && own.contains(&(gva >> PAGE_BITS));
        Ok(loads && self.slots.current()?.is_closed_to_loads(gva))
    }

    /// Interprets an instruction that the CPU has refused. Makers of CPUs differ in how many of its bytes they fetch
    /// first. Where this CPU has not looked at the next page, the guest gets no page fault for that page.
    fn interpret_refused(&mut self) {
        let page = self.cpu.vcpu.rip >> PAGE_BITS;
        self.statistics.interpreted += 1;
        let Err(fault) = self.cpu.step(&mut self.board) else { return };
        let fetch =
            fault.vector == vector::PF && fault.code.is_some_and(|code| code & pf::FETCH != 0);
        let missing = fetch && fault.address >> PAGE_BITS != page;
        self.cpu.exception(&mut self.board, if missing { Fault::ud() } else { fault });
    }

    /// Interprets one instruction; what CPUID answers, the wedge may answer the next time.
    pub(crate) fn interpret_and_learn(&mut self) {
        let asked = [self.cpu.vcpu.gpr[reg::RAX] as u32, self.cpu.vcpu.gpr[reg::RCX] as u32];
        let cpuid = UserText::of(&self.cpu.vcpu, self.board.ram()).is_cpuid(self.cpu.vcpu.rip);
        self.interpret();
        if cpuid {
            self.cpuid.tell(asked, &self.cpu.vcpu, &mut self.pages);
        }
    }

    /// Has the guest take its page fault; where the guest's page tables allow the access, the
    /// instruction is interpreted.
    fn page_fault(&mut self, gva: u64, access: Access) {
        let roots = Roots::from(&self.cpu.vcpu);
        let mut ram = self.board.ram();
        match paging::walk(&mut ram, roots, gva, access) {
            Err(fault) => self.cpu.exception(&mut self.board, fault),
            Ok(_) if access.fetch => {
                self.stay(if self.slots.may_show_region(gva) { PAGE_BITS } else { REGION_BITS })
            }
            Ok(_) => self.interpret(),
        }
    }

    /// Interprets user code that cannot be shown to the CPU while it is in the same page or region, of so many `bits`: each
    /// of its instructions would come back here. Xen has memory where the regions of the programs of its domains are.
    fn stay(&mut self, bits: u32) {
        let here = self.cpu.vcpu.rip >> bits;
        for _ in 0..STAY {
            if self.cpu.is_at_breakpoint(&mut self.board) {
                return;
            }
            self.interpret();
            let v = &self.cpu.vcpu;
            if v.cpl() != 3 || v.rip >> bits != here {
                return;
            }
            if self.cpu.must_exit(&mut self.board).is_some() {
                return;
            }
        }
    }
}

/// User code may be run translated, with look-ups.
pub(crate) fn may_look_up(modes: Modes) -> bool {
    modes.user == User::Direct
        && modes.kernel_translated
        && modes.options.lock_step.is_none()
        && !modes.is_strict()
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

fn stop(page: &VcpuPage) -> Stop {
    match page.exit.signal {
        signal if signal == KICK as u64 => Stop::Kicked,
        SIGSYS if page.exit.address & !0xfff == VSYSCALL => Stop::Vsyscall(page.exit.address),
        SIGSYS if page.exit.address == u64::MAX => Stop::Enter,
        SIGSYS => Stop::SystemCall,
        SIGSEGV if page.exit.trap == u64::from(vector::PF) => {
            Stop::PageFault(page.exit.address, page.exit.error as u32)
        }
        SIGSEGV if page.exit.trap == u64::from(vector::OF) => Stop::SoftwareInterrupt(INTO),
        SIGTRAP if page.exit.trap == u64::from(vector::BP) => Stop::SoftwareInterrupt(INT3),
        SIGTRAP if page.regs.rflags & flags::TF != 0 && page.exit.code != TRAP_BRKPT => Stop::Step,
        SIGTRAP => Stop::Int1,
        SIGILL if page.exit.trap == u64::from(vector::UD) => Stop::Undefined,
        _ => Stop::Fault,
    }
}
