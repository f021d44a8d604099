//! The CPU: its state, its caches and the loop that runs it.

use crate::{
    block::BlockCache,
    debug::{TrapRule, dr6},
    observe::{Flush, Observer},
    op::{Op, RegRef, mask},
    probe::Probing,
    system::{System, VectorOperands},
    tlb::{Tlb, View},
};
use contract::{CodeNews, Counters, Exit, GuestRam, pending};
use x86::{Activity, Fault, Vcpu, control::cr0, flags, paging, seg, vector};

/// The reference CPU over a [`System`].
pub struct Cpu<S: System> {
    /// Architectural state. After changing it from outside call [`Cpu::state_changed`].
    pub vcpu: Vcpu,
    /// Statistics.
    pub counters: Counters,
    pub(crate) tlb: Tlb,
    pub(crate) view: View,
    /// The rest of the current block must not run: RIP moved, or what it was made from changed.
    pub(crate) leave_block: bool,
    /// The current instruction has written a page of code. The rest of the block must not run then either, but a
    /// repeated string instruction goes on.
    pub(crate) wrote_code: bool,
    /// DR7 has a data breakpoint enabled.
    pub(crate) watching: bool,
    /// DR7 has an instruction breakpoint enabled.
    pub(crate) stepping: bool,
    /// DR6 bits of the #DB that is due after the current instruction.
    pub(crate) traps: u64,
    /// How the current instruction treats traps.
    pub(crate) trap_rule: TrapRule,
    /// The current instruction switched tasks: a fault now is the new task's, with its RIP.
    pub(crate) task_switched: bool,
    pub(crate) blocks: BlockCache<S>,
    pub(crate) observer: Observer,
    /// The probes of a debugger or a tracer.
    pub(crate) probing: Probing,
    /// What the vector unit works on; kept so that it need not be cleared every time.
    pub(crate) operands: VectorOperands,
}

impl<S: System> Cpu<S> {
    /// A CPU in the given state.
    pub fn new(vcpu: Vcpu) -> Self {
        let mut cpu = Self {
            vcpu,
            counters: Counters::default(),
            tlb: Tlb::new(),
            view: View::Supervisor,
            leave_block: false,
            wrote_code: false,
            watching: false,
            stepping: false,
            traps: 0,
            trap_rule: TrapRule::Normal,
            task_switched: false,
            blocks: BlockCache::new(),
            observer: Observer::default(),
            probing: Probing::default(),
            operands: VectorOperands::default(),
        };
        cpu.state_changed();
        cpu
    }

    /// Forgets everything derived from the architectural state.
    pub fn state_changed(&mut self) {
        (self.traps, self.trap_rule) = (0, TrapRule::Normal);
        self.update_view();
        self.update_watch();
        self.flush_tlb();
    }

    /// INIT (SDM table 9-1): registers as after a reset but for those it leaves alone. Nothing runs before
    /// [`Cpu::start_up`].
    pub fn init(&mut self) {
        let old = &self.vcpu;
        let vcpu = Vcpu {
            cr0: cr0::ET | old.cr0 & (cr0::CD | cr0::NW),
            pat: old.pat,
            mtrr: old.mtrr,
            misc_enable: old.misc_enable,
            spec_ctrl: old.spec_ctrl,
            tsc_adjust: old.tsc_adjust,
            tsc_aux: old.tsc_aux,
            xcr0: old.xcr0,
            fpu: old.fpu,
            ..Vcpu::before_start_up()
        };
        self.vcpu = vcpu;
        self.state_changed();
    }

    /// A start-up IPI: a CPU that waits for one begins in real mode at `vector` * 4096; others ignore it.
    pub fn start_up(&mut self, vector: u8) {
        if self.vcpu.activity != Activity::WaitForSipi {
            return;
        }
        let cs = &mut self.vcpu.seg[seg::CS];
        (cs.selector, cs.base) = (u16::from(vector) << 8, u64::from(vector) << 12);
        self.vcpu.rip = 0;
        self.vcpu.activity = Activity::Running;
        self.state_changed();
    }

    /// Another vCPU wakes this one, if it halts.
    pub fn unhalt(&mut self) {
        if self.vcpu.activity == Activity::Halted {
            self.vcpu.activity = Activity::Running;
        }
    }

    /// Drops all translations, as the guest does when it flushes all of its TLB.
    pub fn flush(&mut self) {
        self.flush_tlb();
    }

    /// Puts in what an observer has changed: registers, RFLAGS and the privilege level. Translations
    /// stay.
    pub fn came_back(&mut self) {
        (self.traps, self.trap_rule) = (0, TrapRule::Normal);
        self.update_view();
    }

    /// Runs until something outside has to act, for about `budget` instructions at the most.
    pub fn run(&mut self, sys: &mut S, budget: u64) -> Exit {
        let end = self.counters.instructions.saturating_add(budget);
        loop {
            if let Some(exit) = self.must_exit(sys) {
                return exit;
            }
            if self.probing.is_on()
                && let Some(reached) = self.take_reached(sys)
            {
                return Exit::Probe(reached);
            }
            if self.counters.instructions >= end || self.has_long_record() {
                return Exit::Budget;
            }
            if self.leaves_to_observer() {
                return Exit::Leave;
            }
            if let Err(fault) = self.advance(sys) {
                self.exception(sys, fault);
            }
        }
    }

    /// Executes the block at RIP, or its first instruction where something may come between two. An exception is returned as by
    /// [`Cpu::step`].
    ///
    /// # Errors
    /// The exception an instruction raised.
    #[inline]
    pub fn advance(&mut self, sys: &mut S) -> Result<(), Fault> {
        let alone = self.must_step() || self.is_among_breakpoints();
        if alone { self.step(sys) } else { self.run_block(sys) }
    }

    /// Why [`Cpu::run`] would return at once, if it would.
    #[inline]
    pub fn must_exit(&mut self, sys: &mut S) -> Option<Exit> {
        let waiting = sys.pending();
        if waiting == 0 && self.vcpu.activity == Activity::Running {
            return None;
        }
        self.exit_reason(waiting)
    }

    #[cold]
    fn exit_reason(&self, waiting: u32) -> Option<Exit> {
        let v = &self.vcpu;
        if waiting & pending::EXIT != 0 {
            return Some(Exit::Requested);
        }
        match v.activity {
            Activity::Shutdown => return Some(Exit::Shutdown),
            Activity::WaitForSipi => return Some(Exit::Halted),
            Activity::Running | Activity::Halted => {}
        }
        if waiting & pending::NMI != 0 && !v.nmi_blocked && !v.interrupt_shadow {
            return Some(Exit::NmiWindow);
        }
        if waiting & pending::INTERRUPT != 0 && v.interruptible() {
            return Some(Exit::InterruptWindow);
        }
        (v.activity == Activity::Halted).then_some(Exit::Halted)
    }

    /// Executes one instruction (one iteration burst of a repeated string instruction). An
    /// exception is returned, not delivered; RIP is then the faulting instruction, or for a trap
    /// (#DB of single step, data breakpoints) the next one.
    ///
    /// # Errors
    /// The exception the instruction raised.
    pub fn step(&mut self, sys: &mut S) -> Result<(), Fault> {
        if std::mem::take(&mut self.trap_rule) != TrapRule::Hold {
            self.check_breakpoint()?;
        }
        let single = self.vcpu.rflags & flags::TF != 0;
        self.vcpu.rflags &= !flags::RF;
        self.vcpu.interrupt_shadow = false;
        self.execute(sys, 1)?;
        if single && self.trap_rule == TrapRule::Normal {
            self.traps |= dr6::BS;
        }
        self.take_traps()
    }

    /// The #DB the instruction just executed leaves behind.
    #[inline]
    fn take_traps(&mut self) -> Result<(), Fault> {
        if self.trap_rule == TrapRule::Hold {
            return Ok(());
        }
        self.trap_rule = TrapRule::Normal;
        if self.traps == 0 {
            return Ok(());
        }
        Err(Fault::debug(std::mem::take(&mut self.traps)))
    }

    /// Executes the block at RIP.
    #[inline]
    fn run_block(&mut self, sys: &mut S) -> Result<(), Fault> {
        self.execute(sys, usize::MAX)?;
        self.take_traps()
    }

    /// Executes up to `limit` instructions of the block at RIP.
    #[inline]
    fn execute(&mut self, sys: &mut S, limit: usize) -> Result<(), Fault> {
        if sys.ram().has_stale_code() {
            self.hear_of_code(sys);
        }
        let block = self.fetch(sys)?;
        self.counters.blocks += 1;
        (self.leave_block, self.wrote_code) = (false, false);
        self.task_switched = false;
        let mut done = 0;
        for op in block.ops.iter().take(limit) {
            let start = self.vcpu.rip;
            self.vcpu.rip = start.wrapping_add(u64::from(op.len));
            if let Err(fault) = (op.run)(self, sys, op) {
                self.counters.instructions += done;
                self.abandon(start);
                return Err(fault);
            }
            done += 1;
            if self.leave_block || self.wrote_code {
                break;
            }
        }
        self.counters.instructions += done;
        Ok(())
    }

    /// An instruction ended in an exception: RIP goes back to it, traps of its own are void.
    #[cold]
    fn abandon(&mut self, start: u64) {
        if !self.task_switched {
            self.vcpu.rip = start;
        }
        self.traps = 0;
        self.trap_rule = TrapRule::Normal;
    }

    /// Drops every block made from pages that were written, and the right to write those that other vCPUs make
    /// code from.
    #[cold]
    pub(crate) fn hear_of_code(&mut self, sys: &mut S) {
        let CodeNews { stale, closed, writes } = sys.ram().take_code_news();
        for page in closed {
            self.close_page(page);
        }
        let numbers = writes.into_iter().chain(std::iter::repeat(u64::MAX));
        for (page, number) in stale.into_iter().zip(numbers) {
            self.counters.code_pages_dropped += 1;
            self.observer.stale_page(page, number);
            self.blocks.drop_page(page);
        }
    }

    /// Code is made from a RAM page (by offset): writes to it must come to light.
    pub(crate) fn close_page(&mut self, page: u64) {
        self.observer.code_page(page);
        self.tlb.forbid_writes(page);
    }

    /// Selects the TLB view; after every change of CPL, RFLAGS.AC, CR0.AM.
    #[inline]
    pub(crate) fn update_view(&mut self) {
        let v = &self.vcpu;
        let ac = v.rflags & flags::AC != 0;
        self.view = match (v.cpl() == 3, ac) {
            (true, true) if v.cr0 & cr0::AM != 0 => View::UserAligned,
            (true, _) => View::User,
            (false, true) if self.smap() => View::SupervisorAc,
            (false, _) => View::Supervisor,
        };
    }

    /// Drops all cached translations.
    pub(crate) fn flush_tlb(&mut self) {
        self.observer.flush(Flush::All);
        self.forget_translations();
    }

    /// Drops all cached translations, on behalf of a flush that concerns one address space only.
    pub(crate) fn flush_space(&mut self, pcid: u16) {
        self.observer.flush(Flush::Space { pcid });
        self.forget_translations();
    }

    /// Drops all cached translations although none is stale: another address space comes.
    pub(crate) fn forget_translations(&mut self) {
        self.counters.tlb_flushes += 1;
        self.tlb.flush();
        self.blocks.forget_addresses();
    }

    /// Drops the cached translation of one page.
    pub(crate) fn flush_page(&mut self, linear: u64) {
        self.observer.flush(Flush::Page { pcid: self.pcid(), linear });
        self.tlb.flush_page(linear);
        self.blocks.forget_addresses();
    }

    /// Reads a general register operand of `SIZE` bytes.
    #[inline(always)]
    pub(crate) fn reg<const SIZE: usize>(&self, r: RegRef) -> u64 {
        let value = self.vcpu.gpr[r.index as usize & 15];
        if SIZE == 1 { (value >> r.shift) & 0xff } else { value & mask::<SIZE>() }
    }

    /// Writes a general register operand of `SIZE` bytes: 4 clears the upper half, 1 and 2 keep
    /// the rest.
    #[inline(always)]
    pub(crate) fn set_reg<const SIZE: usize>(&mut self, r: RegRef, value: u64) {
        let slot = &mut self.vcpu.gpr[r.index as usize & 15];
        *slot = match SIZE {
            1 => (*slot & !(0xff << r.shift)) | ((value & 0xff) << r.shift),
            2 => (*slot & !0xffff) | (value & 0xffff),
            _ => value & mask::<SIZE>(),
        };
    }

    /// Offset of the memory operand within its segment.
    #[inline(always)]
    pub(crate) fn effective(&self, op: &Op<S>) -> u64 {
        let a = &op.address;
        let base = self.vcpu.gpr[a.base as usize & 15] & a.base_mask as u64;
        let index = self.vcpu.gpr[a.index as usize & 15] & a.index_mask as u64;
        let rip = self.vcpu.rip & a.rip_mask as u64;
        let sum = base.wrapping_add(index << a.scale).wrapping_add(rip);
        sum.wrapping_add(a.displacement) & a.mask
    }

    /// Linear address of the memory operand, checked against its segment for `size` bytes.
    #[inline(always)]
    pub(crate) fn linear(&self, op: &Op<S>, size: u64, write: bool) -> Result<u64, Fault> {
        let offset = self.effective(op);
        if !op.address.segmented {
            return Ok(offset);
        }
        self.segmented(op.address.seg as usize, offset, size, write)
    }

    /// Linear address of `offset` in a segment, with the checks of the current mode.
    #[inline]
    pub(crate) fn segmented(
        &self,
        segment: usize,
        offset: u64,
        size: u64,
        write: bool,
    ) -> Result<u64, Fault> {
        if self.vcpu.is_64bit() {
            let base = if segment >= seg::FS { self.vcpu.seg[segment].base } else { 0 };
            return Ok(base.wrapping_add(offset));
        }
        self.check_segment(segment, offset, size, write)
    }

    /// A non-canonical address reached through SS is #SS, not #GP (SDM 6.15).
    #[cold]
    pub(crate) fn blame_stack(&self, op: &Op<S>, fault: Fault) -> Fault {
        if fault.vector == vector::GP && op.address.seg as usize == seg::SS {
            return Fault::with_code(vector::SS, 0);
        }
        fault
    }

    /// The address may be put into RIP.
    pub(crate) fn check_target(&self, rip: u64) -> Result<(), Fault> {
        let fits = if self.vcpu.is_64bit() {
            paging::canonical(rip)
        } else {
            rip <= u64::from(self.vcpu.seg[seg::CS].limit)
        };
        if fits { Ok(()) } else { Err(Fault::gp(0)) }
    }

    /// Jumps.
    #[inline(always)]
    pub(crate) fn jump(&mut self, rip: u64) {
        self.vcpu.rip = rip;
        self.leave_block = true;
    }
}
