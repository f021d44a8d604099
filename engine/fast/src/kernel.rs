//! Translated code: the kernel's, and the user's if asked for.

#[cfg(test)]
mod tests;

use crate::{
    Fast, FaultOutcome,
    code::{Code, NoBlock},
    operand,
    regions::host_bias,
    state, temporary_mm,
    vcpu_code::bias_at,
};
use contract::Reached;
use jit::{Level, cache::Position};
use wedge::Error;
use wedge_abi::{BlockExit, FLEETING, KICK, TAP_ODD, WedgeExit, go};
use x86::{
    exception::pf,
    flags, narrow,
    paging::{self, Access, Roots},
    reg, vector,
};
use x86_interp::{GuestRam, System, pending};

const SIGTRAP: u64 = 5;
const SIGSEGV: u64 = 11;
/// The instruction's only byte.
const PUSHFQ: u8 = 0x9c;
/// Host instructions between two boundaries of the guest's at the most.
const MAX_STEPS: u64 = 100_000;
/// Instructions interpreted with a write to code: Linux's memcpy has its second store four behind its first.
const PATCH: usize = 16;
/// Instructions interpreted behind a call-out of a 32-bit kernel's code.
const BESIDE: usize = 40;

impl Fast {
    /// Runs translated code until it does something that has to be interpreted, and has that done.
    pub(crate) fn translated_code(&mut self, level: Level) -> Result<(), Error> {
        self.start_comparing();
        let Some(host) = self.block_at_rip(level)? else {
            if !self.stops_at_tap() {
                self.interpret_outside();
            }
            return Ok(());
        };
        let alone = self.open_comparison(level, host);
        let base = self.pages.base();
        let page = self.pages.vcpu_page();
        state::load(&self.cpu.vcpu, base, page);
        if level == Level::User {
            state::load_translated_user(&self.cpu.vcpu, page);
        }
        page.run.alone = alone.into();
        let long_mode = self.cpu.vcpu.long_mode();
        page.run.plain_from = match long_mode {
            true => u64::MAX,
            false => self.code.end_of_kernel().max(self.slots.end_of_parts()),
        };
        page.run.seeks_fleeting = (!long_mode && !self.modes.options.map_fleeting).into();
        page.block.jump = host;
        self.note_interrupt();
        let kind = self.enter(go::BLOCK)?;
        self.kernel_exit(kind)
    }

    /// The wedge has left the point at RIP to the monitor. If only its records had no room, there is room now.
    fn leave_at_tap(&mut self) {
        let odd = self.pages.vcpu_page().exit.info == TAP_ODD;
        self.take_state();
        if odd && self.code.has_tap(self.cpu.vcpu.rip) {
            self.cpu.reach(Reached::Breakpoint);
        }
    }

    /// There is no block at a tap, so the point is as any breakpoint.
    fn stops_at_tap(&mut self) -> bool {
        let stops = self.taps.has_taps() && self.code.has_tap(self.cpu.vcpu.rip);
        if stops {
            self.cpu.reach(Reached::Breakpoint);
        }
        stops
    }

    /// Starts comparing all blocks, if that is due.
    pub(crate) fn start_comparing(&mut self) {
        if let Some(checker) = &mut self.checker {
            checker.start_trials(self.statistics.entries, &mut self.code, &mut self.pages);
        }
    }

    /// The block at an HVA is to run next; true if it is to run alone, because it is compared.
    fn open_comparison(&mut self, level: Level, host: u64) -> bool {
        let Some(checker) = &mut self.checker else { return false };
        let (ram, vcpu) = (self.board.ram(), &self.cpu.vcpu);
        let decoded = checker.begin(&mut self.code, ram, vcpu, (level, host));
        let alone = decoded.is_some();
        self.protect(decoded.unwrap_or_default());
        alone
    }

    /// The translated block at RIP.
    pub(crate) fn block_at_rip(&mut self, level: Level) -> Result<Option<u64>, Error> {
        match level {
            Level::Kernel => self.find_block(level),
            Level::User => self.block_of_program(),
        }
    }

    /// The block of user code at RIP, which may run in the current slot from now on. A page that is not where its text is goes to a text
    /// beside it and then, if that is elsewhere, too, to one of its own.
    fn block_of_program(&mut self) -> Result<Option<u64>, Error> {
        self.code.enter_user(&mut self.pages, !self.cpu.vcpu.long_mode());
        let (roots, rip) = (Roots::from(&self.cpu.vcpu), self.cpu.vcpu.rip);
        for alone in [Some(false), Some(true), None] {
            let Some(host) = self.find_block(Level::User)? else { break };
            if self.verify(rip, host)? {
                return Ok(Some(host));
            }
            let ram = self.board.ram();
            let move_away =
                |code: &mut Code| alone.map(|alone| code.move_away(ram, roots, rip, alone));
            self.code.with(Level::User, move_away);
        }
        Ok(None)
    }

    /// The translated block at RIP, found or made.
    fn find_block(&mut self, level: Level) -> Result<Option<u64>, Error> {
        let v = &self.cpu.vcpu;
        let (roots, key) = (Roots::from(v), (level, v.rip, v.rflags & flags::AC != 0));
        let mut marked = Vec::new();
        let block = self.code.block(&mut self.pages, &self.board, roots, key, &mut marked);
        self.protect(marked);
        match block {
            Ok(host) => return Ok(Some(host)),
            Err(NoBlock::Interpret) => {}
            Err(NoBlock::Full) => self.leave_full_translation()?,
            Err(NoBlock::Foreign) => self.part_from_others()?,
        }
        Ok(None)
    }

    /// Lets the block of user code at a GVA and an HVA run in the current slot, whose page tables have led to the block. False if the text
    /// of the block lies elsewhere there.
    fn verify(&mut self, gva: u64, host: u64) -> Result<bool, Error> {
        let (pages, generation) = self.code.code_pages_of((gva, host));
        let slot = self.slots.current()?;
        let verify = |(page, gva)| slot.verify_code(page, gva, generation);
        Ok(pages.into_iter().flatten().all(verify))
    }

    /// Goes on after an exit from translated code.
    pub(crate) fn kernel_exit(&mut self, kind: WedgeExit) -> Result<(), Error> {
        match kind {
            WedgeExit::Block(
                BlockExit::CallOut
                | BlockExit::LoadVectors
                | BlockExit::LoadSpace
                | BlockExit::InvalidatePage
                | BlockExit::Lookup
                | BlockExit::SystemCall
                | BlockExit::EnterSystem
                | BlockExit::SoftwareInterrupt
                | BlockExit::ExitSystem
                | BlockExit::LoadSegment,
            ) => {
                self.note_call_out();
                self.take_state();
                self.show_missing()?;
                match self.cpu.vcpu.cpl() {
                    3 => self.interpret_and_learn(),
                    _ => self.interpret(),
                }
                // All else the wedge can do by itself, if the code behind is translated. So that code is not interpreted.
                if kind == WedgeExit::Block(BlockExit::CallOut) {
                    self.interpret_beside();
                }
                if kind == WedgeExit::Block(BlockExit::LoadSpace) {
                    self.pass_through();
                }
                Ok(())
            }
            WedgeExit::Block(
                BlockExit::Iret
                | BlockExit::IretNarrow
                | BlockExit::Sysret
                | BlockExit::SysretNarrow,
            ) => {
                self.take_state();
                self.show_missing()?;
                self.interpret();
                Ok(())
            }
            WedgeExit::Block(BlockExit::Tap) => {
                self.leave_at_tap();
                Ok(())
            }
            WedgeExit::Lost => self.lost(),
            // The vCPU page has the host's registers, and nothing has run.
            WedgeExit::Kicked if self.pages.vcpu_page().run.go == go::RAW => self.leave_raw(),
            WedgeExit::Block(BlockExit::Miss) => {
                self.missed();
                Ok(())
            }
            WedgeExit::Block(BlockExit::InterruptWindow) | WedgeExit::Kicked => {
                self.take_state();
                Ok(())
            }
            WedgeExit::HotSite => self.hot_site(),
            WedgeExit::UserSignal => self.user_exit(),
            WedgeExit::Interpret => self.interpret_user(),
            WedgeExit::KernelSignal => self.kernel_signal(),
        }
    }

    /// A 32-bit kernel accesses ports several times behind one another, and each access is a call-out. So the instructions behind a
    /// call-out are interpreted, too, as far as they are the kernel's and nothing comes between.
    fn interpret_beside(&mut self) {
        self.interpret_while(BESIDE, |fast| {
            let v = &fast.cpu.vcpu;
            let is_kernels = v.cpl() == 0 && narrow::is_of_narrow_guest(v);
            is_kernels && fast.cpu.must_exit(&mut fast.board).is_none()
        });
    }

    /// Maps the kernel memory that the wedge has missed, if the exit's detail names some. The wedge reads tables of the
    /// CPU's, such as the interrupt descriptor table, that no kernel code ever reads, so no fault maps them.
    pub(crate) fn show_missing(&mut self) -> Result<(), Error> {
        let missing = self.pages.vcpu_page().exit.info;
        if missing >= self.pages.base().kernel_start() {
            self.answer(missing, Access::default())?;
        }
        Ok(())
    }

    fn note_call_out(&mut self) {
        let code = self.pages.vcpu_page().exit.info;
        self.statistics.call_out(code);
        if code == iced_x86::Code::Pause as u64 {
            self.board.has_paused();
        }
        self.in_service.note(code, self.pages.vcpu_page().regs.gpr[reg::RCX]);
    }

    /// Goes no further in the middle of translated code. After a mapping that the host refuses its instruction is interpreted.
    fn leave_raw(&mut self) -> Result<(), Error> {
        let pc = self.pages.vcpu_page().exit.pc;
        let position = self.position(pc);
        match position.filter(|_| self.refused) {
            Some(position) => {
                self.take_recovered(&position);
                Ok(())
            }
            None => self.reach_boundary(),
        }
    }

    /// There is no block at RIP: the next look for it makes one, and what jumps to it is linked. A program that has
    /// jumped to an address that is not canonical is put back to the jump, which then faults.
    fn missed(&mut self) {
        let page = self.pages.vcpu_page();
        let nowhere = page.run.user_translated != 0
            && page.regs.cpl == 3
            && !paging::canonical(page.regs.rip);
        if nowhere {
            (page.regs.rip, page.regs.gpr[reg::RSP]) = (page.exit.next, page.block.spill[3]);
        }
        self.take_state();
        if nowhere {
            self.interpret();
        }
    }

    /// A signal in translated code: the vCPU page has the host's registers.
    fn kernel_signal(&mut self) -> Result<(), Error> {
        loop {
            let page = self.pages.vcpu_page();
            let (signal, trap) = (page.exit.signal, page.exit.trap);
            if signal == KICK as u64 {
                return self.reach_boundary();
            }
            let pc = self.pages.vcpu_page().exit.pc;
            let Some(position) = self.position(pc) else {
                return self.lost();
            };
            let page_fault = signal == SIGSEGV && trap == u64::from(vector::PF);
            if page_fault && !self.cpu.vcpu.long_mode() {
                if self.pages.vcpu_page().exit.info == FLEETING {
                    self.take_recovered(&position);
                    self.code.note_fleeting(position.guest);
                    return Ok(());
                }
                self.show_missing()?;
            }
            if !page_fault || !self.maps_what_is_missing(&position)? {
                if page_fault {
                    self.tell_fault_state(pc);
                }
                self.take_recovered(&position);
                // Where the window would have the user's half are no host addresses; nor where a copy is hidden.
                let nowhere = signal == SIGSEGV && trap == u64::from(vector::GP);
                let temporary = nowhere && self.pages.vcpu_page().regs.ac == 0;
                if nowhere && !temporary {
                    self.slots.current()?.note_hidden_read();
                }
                if temporary {
                    self.temporary_mm.note(&self.cpu.vcpu);
                }
                self.interpret_access();
                if temporary {
                    self.pass_through();
                }
                return Ok(());
            }
            if self.hear_midway() | self.note_interrupt() {
                return self.reach_boundary();
            }
            match self.enter(go::RAW)? {
                WedgeExit::KernelSignal => {}
                kind => return self.kernel_exit(kind),
            }
        }
    }

    /// Has wedges know the state at an instruction that has faulted: a program's, or one of the kernel's inside STAC..CLAC.
    fn tell_fault_state(&mut self, pc: u64) {
        let page = self.pages.vcpu_page();
        let level = match (page.regs.cpl, page.regs.ac) {
            (3, _) => Level::User,
            (0, 1..) if self.cpu.vcpu.long_mode() => Level::Kernel,
            _ => return,
        };
        self.code.tell_fault_state(level, pc);
    }

    /// Maps what a translated instruction has missed. True if the instruction can go on.
    fn maps_what_is_missing(&mut self, position: &Position) -> Result<bool, Error> {
        Ok(match self.kernel_page_fault(position)? {
            FaultOutcome::Interpret => false,
            FaultOutcome::Mapped => true,
            // The instruction's other operand may be the user's, in the region that is the kernel's now.
            FaultOutcome::MappedInNewRegion => self.pages.vcpu_page().regs.ac == 0,
        })
    }

    /// Interprets on while the guest is in a temporary space.
    fn pass_through(&mut self) {
        let is_there = |fast: &mut Self| fast.temporary_mm.goes_on(&fast.cpu.vcpu);
        if !self.interpret_while(temporary_mm::VISIT, is_there) {
            self.temporary_mm.forget();
        }
    }

    /// Interprets block by block until `most` instructions are done. True if the guest has come to a breakpoint before that, or
    /// if `goes_on` has said no.
    fn interpret_while(&mut self, most: usize, goes_on: impl Fn(&mut Self) -> bool) -> bool {
        let end = self.cpu.counters.instructions + most as u64;
        // An instruction that faults does not count, so the blocks are counted, too.
        for _ in 0..most {
            if !goes_on(self) || self.cpu.is_at_breakpoint(&mut self.board) {
                return true;
            }
            if self.cpu.counters.instructions >= end {
                break;
            }
            self.interpret_block();
        }
        false
    }

    /// Interprets what translated code has faulted at: an access to a device, perhaps.
    fn interpret_access(&mut self) {
        let (guest, before) = (self.cpu.vcpu.rip, self.board.traffic().0);
        self.interpret();
        if self.board.traffic().0 != before && self.code.is_kernels(guest) {
            self.code.note_device(guest);
        }
        // Linux writes an instruction by two stores, with interrupts off. By translated code the second would be a fault, too,
        // and the page be mapped for it, and closed again as soon as code on it runs.
        if self.board.ram().has_stale_code() {
            self.interpret_while(PATCH, |fast| temporary_mm::is_undisturbed(&fast.cpu.vcpu));
        }
    }

    /// Interprets an instruction that is not translated: one that accesses devices, perhaps.
    fn interpret_outside(&mut self) {
        let (guest, before) = (self.cpu.vcpu.rip, self.board.traffic().0);
        self.board.take_stored();
        self.interpret();
        if self.board.traffic().0 == before {
            self.code.note_memory(guest);
        } else if let Some(stored) = self.board.take_stored() {
            self.bells.note(&mut self.pages, &self.board, &self.cpu.vcpu, (guest, stored));
        }
    }

    /// Tells translated code whether an interrupt waits: its kick may have come while the wedge was on its
    /// way here, and then there is no other. True if something is to be taken now.
    fn note_interrupt(&mut self) -> bool {
        let waiting = self.board.pending();
        let interrupt = waiting & pending::INTERRUPT != 0;
        let page = self.pages.vcpu_page();
        page.run.pending = interrupt.into();
        interrupt && page.regs.interrupt_flag != 0 || waiting & pending::NMI != 0
    }

    /// Answers the page fault of a translated instruction.
    fn kernel_page_fault(&mut self, position: &Position) -> Result<FaultOutcome, Error> {
        let base = self.pages.base();
        let page = self.pages.vcpu_page();
        let (hva, code) = (page.exit.address, page.exit.error as u32);
        let (user, open) = (page.regs.cpl == 3, page.regs.ac != 0);
        let gva = match (user, open) {
            _ if !self.cpu.vcpu.long_mode() => {
                narrow::accessed(hva, base.bias(), user, user || open)
            }
            (true, _) => Some(hva).filter(|gva| gva >> 47 == 0),
            (false, false) => {
                Some(hva.wrapping_sub(base.bias())).filter(|gva| *gva >= base.kernel_start())
            }
            (false, true) => {
                let mut gpr = page.regs.gpr;
                position.mark.fixes.apply(&mut gpr, &page.block.spill, base.bias());
                let bias = |gva| host_bias(base, gva);
                operand::gva(&self.board, &self.cpu.vcpu, position.guest, &gpr, hva, bias)
            }
        };
        let write = code & pf::WRITE != 0;
        let access = Access { write, fetch: false, user, smap_override: open && !user };
        match gva {
            Some(gva) => self.answer(gva, access),
            None => Ok(FaultOutcome::Interpret),
        }
    }

    /// Takes the state at the start of the guest instruction a host PC belongs to.
    fn take_recovered(&mut self, position: &Position) {
        let base = self.pages.base();
        let page = self.pages.vcpu_page();
        let (mut gpr, spill, bias) = (page.regs.gpr, page.block.spill, bias_at(base, page.exit.pc));
        position.mark.fixes.apply(&mut gpr, &spill, bias);
        page.regs.gpr = gpr;
        page.regs.rip = position.guest;
        self.take_state();
    }

    /// Steps the host to a boundary between guest instructions, or to an exit.
    fn reach_boundary(&mut self) -> Result<(), Error> {
        for _ in 0..MAX_STEPS {
            let pc = self.pages.vcpu_page().exit.pc;
            if let Some(position) = self.position(pc)
                && position.is_boundary(self.code_at(pc))
            {
                self.take_recovered(&position);
                return Ok(());
            }
            if self.code.is_exit(pc) {
                return self.run_to_exit();
            }
            self.statistics.stepped += 1;
            let kind = self.step_host()?;
            let signal = self.pages.vcpu_page().exit.signal;
            let on =
                kind == WedgeExit::KernelSignal && (signal == SIGTRAP || signal == KICK as u64);
            if !on {
                return self.kernel_exit(kind);
            }
        }
        tracing::error!("no boundary of the guest's instructions is reached");
        self.lost()
    }

    /// The guest instruction that a host PC belongs to.
    pub(crate) fn position(&self, pc: u64) -> Option<Position> {
        let position = self.code.position(self.pages.base(), pc)?;
        Some(Position { guest: self.slots.resolve(position.guest), ..position })
    }

    fn code_at(&self, pc: u64) -> [u8; 2] {
        [0, 1].map(|n| self.pages.code_byte(pc + n))
    }

    /// The routine that leaves translated code has been reached: it is run, not stepped through. The wedge
    /// does what is its to do then, but does not go on: what waits has used up its kick.
    fn run_to_exit(&mut self) -> Result<(), Error> {
        loop {
            match self.resume(go::LEAVE)? {
                WedgeExit::Kicked if self.pages.vcpu_page().run.go == go::LEAVE => {}
                kind => return self.kernel_exit(kind),
            }
        }
    }

    /// Runs one host instruction of translated code.
    fn step_host(&mut self) -> Result<WedgeExit, Error> {
        let pc = self.pages.vcpu_page().exit.pc;
        let pushes_flags = self.pages.code_byte(pc) == PUSHFQ;
        self.pages.vcpu_page().block.host_flags |= flags::TF;
        let kind = loop {
            match self.resume(go::STEP)? {
                WedgeExit::Kicked => {}
                kind => break kind,
            }
        };
        let page = self.pages.vcpu_page();
        page.block.host_flags &= !flags::TF;
        if pushes_flags && page.exit.signal == SIGTRAP {
            // What it has pushed shows the TF that is ours.
            page.block.stack[7] &= !flags::TF;
        }
        Ok(kind)
    }

    /// Goes on in the middle of translated code.
    fn resume(&mut self, how: u64) -> Result<WedgeExit, Error> {
        self.hear_midway();
        self.pages.vcpu_page().run.go = how;
        self.slots.current()?.wedge().aim_kicks();
        if !self.take_turns()? {
            return Ok(WedgeExit::Kicked);
        }
        Ok(self.exited())
    }

    /// The wedge stopped at an address that holds no guest code. Nothing that it says is trusted any more.
    fn lost(&mut self) -> Result<(), Error> {
        let page = self.pages.vcpu_page();
        let (pc, signal, trap, address) =
            (page.exit.pc, page.exit.signal, page.exit.trap, page.exit.address);
        let bytes: Vec<u8> = (0..12).map(|n| self.pages.code_byte(pc + n)).collect();
        let position = self.position(pc);
        tracing::error!(
            "stopped at {pc:#x} by signal {signal}, exception {trap}, address {address:#x}: {bytes:02x?}, {position:x?}"
        );
        Err(Error::Lost)
    }
}
