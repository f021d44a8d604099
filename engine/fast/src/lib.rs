//! The fast engine: guest user code directly on the CPU, guest kernel code translated.
//!
//! Guest code runs in [`wedge::Wedge`]s, one process per guest address space. Whatever it does
//! beyond computing and calling its own kernel brings it back here, and the rule is simple: a page fault
//! that the guest's page tables can answer is answered with a host mapping; a jump to kernel code
//! that is not translated yet has it translated; anything else is *interpreted*, one instruction, which
//! raises the right exception or reaches the right device as on any CPU.
//!
//! Why the host's mappings are a correct TLB: a mapping is made only from a successful walk of the
//! guest's page tables with the access's own rights, never with more; x86 lets it live until the
//! guest flushes; and every flush the guest executes goes through the interpreter, which reports it
//! ([`x86_interp::Record`]). A page is mapped writable only while its dirty bit is set and nothing is
//! decoded or translated from it.
//!
//! - `lib.rs`: who runs next.
//! - `user`, `kernel`: one stretch of guest code, and what ended it.
//! - `state`: the architectural state to the vCPU page and back.
//! - `shadow`, `slots`, `regions`: host mappings; `process`: what they ask of a wedge. They are public for
//!   their model test, `tests/shadow`.
//! - `machine`: what all vCPUs share. `known_blocks`: what an earlier machine has run. `code`, `vcpu_code`: translations, the kernel's and, if asked for, the user's; `tops`:
//!   whether vCPUs may share them.
//! - `claims`: programs that have memory where wedges have something else; `place`: where they have it.
//! - `probes`: breakpoints of a debugger, and taps.
//! - `user_text`, `narrow`: what there is to know of user code. `cpuid_answers`, `in_service`: what wedges answer for the monitor.
//! - `pages`: a vCPU's pages. `flush_counts`: where the guest's kernel counts its flushes.
//! - `bells`: doorbells that wedges ring, and interrupts that they take.
//! - `temporary_mm`: spaces that kernels enter for a moment.
//! - `lockstep`: translated blocks against the interpreter, if asked for.

mod affinity;
mod bells;
mod breakpoints;
mod claims;
mod code;
mod cpuid_answers;
mod devices;
mod evicted;
mod fault_counts;
mod fleeting;
mod flush_counts;
#[cfg(test)]
mod hostile_tests;
mod in_service;
mod kernel;
#[cfg(test)]
mod kick_tests;
mod known_blocks;
#[cfg(test)]
mod listener;
mod lockstep;
mod low;
mod machine;
mod narrow;
#[cfg(test)]
mod narrow_crossing_tests;
#[cfg(test)]
mod narrow_kernel_tests;
mod operand;
mod options;
mod pages;
mod place;
mod plausible;
mod probes;
mod process;
mod regions;
mod scan;
mod scan_cache;
mod shadow;
mod sites;
mod slots;
mod state;
mod statistics;
#[cfg(test)]
mod stranger_tests;
mod temporary_mm;
#[cfg(test)]
mod test_machine;
mod tops;
mod user;
mod user_text;
mod vcpu_code;
mod versions;

#[cfg(test)]
host::choose!(host_linux::Linux);

use affinity::Affinity;
pub use affinity::Placement;
use bells::KnownBells;
use claims::ClaimedRegions;
use contract::{Failure, TranslatedCode, VcpuEvent, Whose};
use cpuid_answers::CpuidAnswers;
use engine::{Board, Engine, VcpuRequests};
pub use flush_counts::{FlushCounts, RunningKernel};
use in_service::InServiceReads;
use jit::Level;
pub use known_blocks::{KnownBlocks, translate_noted};
use lockstep::Checker;
pub use lockstep::LockStep;
pub use machine::Machine;
use narrow::NarrowCode;
pub use options::{Modes, Options, Scattered, Switches, User};
use place::Moves;
use probes::TapRecorder;
pub use process::Process;
use ram::Ram;
pub use shadow::{Answer, Space};
pub use slots::{Selection, Slots};
pub use statistics::FastStatistics;
use std::sync::Arc;
use temporary_mm::TemporaryMm;
use user_text::Int1Traps;
use vcpu_code::VcpuCode;
use wedge::{Common, Error, Pages, Wedge};
use wedge_abi::WedgeExit;
use x86::{
    Vcpu,
    paging::{Access, Roots},
};
use x86_interp::{Counters, Cpu, Exit, GuestRam, Probes, Reached, Record, System, pending};

/// Who starts the processes that guest code runs in.
pub mod wedges {
    pub use wedge::{become_wedge, limit_mappings, prepare, start_by};
}

/// User code from here on is interpreted, by blocks: the host has no such addresses. Kernels that Xen runs
/// in ring 3 are there.
const USER_END: u64 = 1 << 47;

/// The engine.
pub struct Fast {
    cpu: Cpu<Board>,
    board: Board,
    machine: Arc<Machine>,
    pages: Pages,
    slots: Slots,
    code: VcpuCode,
    modes: Modes,
    narrow: NarrowCode,
    statistics: FastStatistics,
    affinity: Affinity,
    temporary_mm: TemporaryMm,
    claims: ClaimedRegions,
    moves: Moves,
    cpuid: CpuidAnswers,
    int1_traps: Int1Traps,
    checker: Option<Box<Checker>>,
    taps: TapRecorder,
    /// The host has refused a mapping. The instruction that goes on would ask for it again, and is interpreted.
    refused: bool,
    /// After so many PAUSEs translated code lets others have the CPU; zero for never.
    pauses: u64,
    in_service: InServiceReads,
    bells: KnownBells,
    /// Why it cannot go on.
    failure: Option<Failure>,
}

/// Why this host cannot run the fast engine, if it cannot; tried, not guessed.
///
/// # Errors
/// What is missing, in words.
pub fn check_host(ram: &Ram) -> Result<(), String> {
    if !std::arch::is_x86_feature_detected!("bmi2") {
        return Err("the CPU has no BMI2".to_owned());
    }
    if !host::current().facts().bases {
        return Err(
            "the host does not let programs use FSGSBASE (Linux 5.9 and later do)".to_owned()
        );
    }
    let common = Common::new(place::first()).map_err(|error| error.to_string())?;
    let pages = Pages::with(Arc::new(common)).map_err(|error| error.to_string())?;
    let mut slots = Slots::<Wedge>::new(ram.clone(), pages.base(), true);
    slots
        .select(Selection::uncounted(0, Roots::default()), &pages)
        .map_err(|error| error.to_string())
}

/// Guest user code is kept from the guest kernel's memory: the host has protection keys. Without them
/// only the host is closed to it.
pub fn kernel_is_closed() -> bool {
    wedge::keys()
}

/// What came of a page fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultOutcome {
    /// No mapping: the instruction that has faulted is to be interpreted.
    Interpret,
    Mapped,
    /// Mapped in a region that was user code's before: addresses that translated code has computed before may be wrong.
    MappedInNewRegion,
}

impl Fast {
    /// An engine for one of the machine's vCPUs, which starts at the given state; `requests` is the board's. An engine
    /// whose translations are compared with the interpreter shares none with other vCPUs.
    ///
    /// # Errors
    /// If the host has no memory for the vCPU's pages.
    pub fn new(
        vcpu: Vcpu,
        board: Board,
        requests: &VcpuRequests,
        modes: Modes,
        (machine, placement): (&Arc<Machine>, &Placement),
    ) -> Result<Self, Error> {
        let cpu = Cpu::new(vcpu);
        let options = modes.options;
        let alone = options.lock_step.is_some();
        let machine = if alone { Machine::new(1) } else { Arc::clone(machine) };
        let translation = machine.translation(place::first()).map_err(Error::Start)?;
        let mut pages = pages::pages(&translation.common, modes)?;
        let may_be_narrow = !options.interpret_narrow && modes.user == User::Direct;
        let narrow = NarrowCode::new(may_be_narrow && pages.run_narrow());
        requests.forward(pages::kicker(&pages));
        let mut slots = Slots::new(board.ram().clone(), pages.base(), modes.kernel_translated);
        let scans = machine.scans.with_copies_apart(options.copies_apart);
        slots.share(translation.sites.clone(), scans, machine.low.clone());
        slots.count_by(Arc::clone(&machine.counts), options.switches == Switches::Checked);
        if !options.young_directly && user::may_look_up(modes) {
            slots.look_for_youths();
        }
        let code = VcpuCode::new(&pages, board.ram(), translation, &modes);
        let statistics = FastStatistics::default();
        let checker = options.lock_step.map(|options| Checker::new(options, board.ram().clone()));
        let checker = checker.transpose().map_err(Error::Start)?.map(Box::new);
        let mut new = Self {
            cpu,
            board,
            machine,
            pages,
            slots,
            code,
            modes,
            narrow,
            statistics,
            affinity: Affinity::new(placement),
            temporary_mm: TemporaryMm::default(),
            claims: ClaimedRegions::default(),
            moves: Moves::default(),
            cpuid: CpuidAnswers::default(),
            int1_traps: Int1Traps::default(),
            checker,
            taps: TapRecorder::default(),
            refused: false,
            pauses: 0,
            in_service: InServiceReads::default(),
            bells: KnownBells::new(options.leave_bells),
            failure: None,
        };
        new.claims.publish(&mut new.slots, &mut new.pages);
        new.cpu.observe(new.left_to_wedges());
        Ok(new)
    }

    /// From now on translated code that has paused so often lets others have the CPU.
    pub fn give_way_after(&mut self, pauses: u64) {
        self.pauses = pauses;
    }

    /// Brings everything derived from guest memory up to date and selects the current slot.
    pub(crate) fn synchronize(&mut self) -> Result<(), Error> {
        self.follow_record();
        let (counts, vcpu) = (&self.machine.counts, &self.cpu.vcpu);
        counts.heed(vcpu, self.board.ram());
        let mut selection = self.selection();
        if !self.slots.has(selection.pcid) {
            let word = |gva| narrow::kernel_word(vcpu, self.board.ram(), gva);
            selection.version = counts.version(vcpu, selection, word);
        }
        self.slots.select(selection, &self.pages)
    }

    /// The space that is loaded.
    fn selection(&self) -> Selection {
        Selection::uncounted(self.cpu.pcid().into(), Roots::from(&self.cpu.vcpu))
    }

    /// Brings everything derived from guest memory up to date.
    fn follow_record(&mut self) {
        let record = self.cpu.take_record(&mut self.board);
        let pcid = self.cpu.pcid().into();
        if !record.is_empty() {
            self.statistics.flushes += record.flushes.len() as u64;
            self.tell_of(&record);
            let roots = Roots::from(&self.cpu.vcpu);
            self.code.apply(self.board.ram(), roots, &record);
            self.slots.apply(&record, roots, pcid);
            if let Some(checker) = &mut self.checker {
                checker.note_stale(&record.stale_pages);
            }
        }
    }

    fn tell_of(&self, record: &Record) {
        let (times, pages) = (record.flushes.len() as u64, record.stale_pages.len() as u64);
        if times != 0 {
            self.board.tell(VcpuEvent::Flush { times });
        }
        if pages != 0 {
            self.board.tell(VcpuEvent::Drop { pages });
        }
    }

    /// Runs guest code in the current slot, going on as `how` says; why it stopped.
    fn enter(&mut self, how: u64) -> Result<WedgeExit, Error> {
        if !self.code.share().come_in(Roots::from(&self.cpu.vcpu)) {
            self.part_from_others()?;
            return Ok(WedgeExit::Kicked);
        }
        self.cpuid.check(&self.cpu.vcpu, &mut self.pages);
        let page = self.pages.vcpu_page();
        page.system.none_in_service = self.in_service.answered(&mut self.board);
        page.bells = self.bells.publish(&self.board, page.bells);
        page.run.go = how;
        page.run.pauses = self.pauses;
        let narrow = self.modes.user == User::Direct && state::may_cross_narrow(&self.cpu.vcpu);
        page.run.fast = (self.modes.user == User::Direct
            && self.modes.kernel_translated
            && !self.claims.are_met()
            && state::may_cross(&self.cpu.vcpu, self.narrow.runs())
            || narrow)
            .into();
        self.slots.current()?.wedge().aim_kicks();
        self.statistics.entries += 1;
        // Whoever sets a bit, or has news of code, after this look finds the aim already taken.
        if self.board.pending() & pending::EXIT != 0 || self.board.ram().has_stale_code() {
            return Ok(WedgeExit::Kicked);
        }
        if !self.take_turns()? {
            self.refused = true;
            return Ok(WedgeExit::Kicked);
        }
        Ok(self.exited())
    }

    /// Why guest code has stopped: what its wedge says is decoded here and nowhere else.
    fn exited(&mut self) -> WedgeExit {
        let exit = WedgeExit::from(&self.pages.vcpu_page().exit);
        self.statistics.exit(exit);
        if exit == WedgeExit::Kicked {
            self.board.tell(VcpuEvent::Kick);
        }
        exit
    }

    /// Gives the current slot its turn. What has become of translations since is the interpreter's, too: those
    /// that wedges have dropped by themselves, and the space they have gone to. False if orders could not be
    /// carried out.
    fn take_turns(&mut self) -> Result<bool, Error> {
        let roots = Roots::from(&self.cpu.vcpu);
        self.pages.publish();
        self.pages.turns().pass_by_count(self.machine.counts.offset());
        let done = self.slots.run(self.modes.kernel_translated, roots)?;
        self.pages.fetch();
        self.take_interrupt();
        self.taps.hand_on_turn(&mut self.pages, &mut self.board);
        let reached = if roots.long_mode() { u64::MAX } else { u32::MAX.into() };
        for gva in self.slots.take_invalidated() {
            self.cpu.forget_page(gva & reached);
        }
        if self.modes.kernel_translated {
            self.cpu.adopt_space(self.pages.vcpu_page().regs.cr3);
            // The rest of the state has not been taken yet, and so nobody knows the version.
            self.slots.select(self.selection(), &self.pages)?;
        }
        Ok(done)
    }

    /// The wedge may have taken an interrupt by itself: the local APIC hears of it before anything else looks at it.
    fn take_interrupt(&mut self) {
        let taken = std::mem::take(&mut self.pages.vcpu_page().bells.taken);
        if taken != 0 {
            self.board.took(taken as u8);
        }
    }

    /// Answers a page fault with a mapping, if the guest's page tables can.
    fn answer(&mut self, gva: u64, access: Access) -> Result<FaultOutcome, Error> {
        let mut mapped = FaultOutcome::Mapped;
        let roots = Roots::from(&self.cpu.vcpu);
        let is_narrow = access.user && !self.cpu.vcpu.is_64bit();
        self.slots.current()?.set_narrow(is_narrow);
        loop {
            let answer = self.slots.answer(roots, gva, access)?;
            // What was searched and must not be executed has been marked, too.
            let marked = self.slots.current()?.take_marked();
            self.protect(marked);
            let plain = self.slots.current()?.take_plain();
            plain.into_iter().for_each(|print| self.pages.kernel().note_plain(print));
            match answer {
                Answer::Mapped => {
                    self.statistics.mapped += 1;
                    self.board.tell(VcpuEvent::Map { gva });
                    return Ok(mapped);
                }
                Answer::Interpret => return Ok(FaultOutcome::Interpret),
                Answer::NeedsRegion(hva) => {
                    self.give_to_kernel(hva);
                    self.claims.publish(&mut self.slots, &mut self.pages);
                    mapped = FaultOutcome::MappedInNewRegion;
                }
            }
        }
    }

    /// Kernel memory is to be mapped in the region of an HVA.
    pub(crate) fn give_to_kernel(&mut self, hva: u64) {
        self.pages.give_to_kernel(hva);
        self.slots.give_to_kernel(hva);
    }

    /// Nobody may write pages unnoticed that code or changed copies have just been made of.
    fn protect(&mut self, pages: Vec<u64>) {
        for page in pages {
            self.cpu.forbid_writes(page);
            self.slots.protect(page);
        }
    }

    /// In the middle of what a wedge runs: from now on it may not write unnoticed what other vCPUs make code from.
    /// True if something it runs is stale: it is to go no further than it must.
    fn hear_midway(&mut self) -> bool {
        let (closed, stale) = self.cpu.hear_midway(&mut self.board);
        for page in closed {
            self.slots.protect(page);
        }
        stale
    }

    /// Copies the guest's registers from the vCPU page to the interpreter's vCPU.
    fn take_state(&mut self) {
        let page = self.pages.vcpu_page();
        if !self.modes.kernel_translated {
            state::only_user(page, &self.cpu.vcpu);
        }
        if page.run.user_translated != 0 && page.regs.cpl == 3 {
            state::from_translated_user(page);
        }
        state::store(page, &mut self.cpu, &mut self.board);
        // The CPU has noted where the last x87 instruction's translation lies.
        let noted = self.cpu.vcpu.fpu.fip;
        self.cpu.vcpu.fpu.fip = self.position(noted).map_or(noted, |at| at.guest);
        if let Some(checker) = &mut self.checker {
            checker.end(&mut self.code, &self.pages, self.board.ram(), &self.cpu.vcpu);
        }
    }

    /// Interprets one instruction.
    fn interpret(&mut self) {
        self.statistics.interpreted += 1;
        if let Err(fault) = self.cpu.step(&mut self.board) {
            self.cpu.exception(&mut self.board, fault);
        }
    }

    /// Interprets a block, or one instruction where something may come between two.
    fn interpret_block(&mut self) {
        let before = self.cpu.counters.instructions;
        if let Err(fault) = self.cpu.advance(&mut self.board) {
            self.cpu.exception(&mut self.board, fault);
        }
        self.statistics.interpreted += self.cpu.counters.instructions - before;
    }

    fn run_on(&mut self, budget: u64) -> Exit {
        loop {
            if let Some(exit) = self.cpu.must_exit(&mut self.board) {
                return exit;
            }
            if let Err(error) = self.attend_to_claims() {
                return self.fail(error);
            }
            if self.cpu.has_long_record() {
                self.follow_record();
            }
            if !self.cpu.leaves_to_observer() {
                match self.cpu.run(&mut self.board, budget) {
                    Exit::Leave => continue,
                    exit => return exit,
                }
            }
            if let Err(error) = self.guest_code() {
                return self.fail(error);
            }
            let difference = self.checker.as_mut().and_then(|checker| checker.take_report());
            if let Some(what) = difference {
                self.failure = Some(Failure { whose: Whose::Ours, what });
                return Exit::Failed;
            }
        }
    }

    fn fail(&mut self, error: Error) -> Exit {
        self.failure = Some(Failure { whose: error.whose(), what: error.to_string() });
        Exit::Failed
    }

    fn guest_code(&mut self) -> Result<(), Error> {
        self.synchronize()?;
        self.part_with_narrow_guest()?;
        if std::mem::take(&mut self.refused) {
            self.interpret();
            return Ok(());
        }
        match self.cpu.vcpu.cpl() {
            3 => self.user_code(),
            _ => self.translated_code(Level::Kernel),
        }
    }
}

impl Engine for Fast {
    fn run(&mut self, budget: u64) -> Exit {
        self.affinity.begin(|| self.slots.processes());
        self.affinity.look(|| self.slots.processes());
        let exit = self.run_on(budget);
        if exit == Exit::Halted {
            self.affinity.end();
            self.code.share().rest();
        }
        exit
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
    fn settle_on(&mut self, cpu: usize) {
        self.affinity.settle_on(cpu, || self.slots.processes());
    }
    fn move_to(&mut self, cpu: usize) {
        self.affinity.move_to(cpu, || self.slots.processes());
    }
    fn cpu(&self) -> Option<usize> {
        Some(self.affinity.cpu())
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
        self.taps.hand_on(false, &mut self.pages, &mut self.board);
        // The interpreter passes no taps, so compared code has none.
        let translates = self.modes.kernel_translated && self.checker.is_none();
        let probes = &self.taps.replace(probes, translates, &mut self.pages);
        self.board.set_watchers(&probes.watchers);
        self.cpu.set_probes(&probes.but_taps());
        self.code.set_probes(&mut self.pages, probes);
        let user = probes.pages().into_iter().filter(|page| page >> 63 == 0).collect();
        for page in self.slots.set_probed(user) {
            // The wedge asks before it has the page executed.
            self.pages.kernel().note_site(page);
        }
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
    fn failure(&mut self) -> Option<Failure> {
        self.failure.take()
    }
    fn translated(&mut self) -> Vec<TranslatedCode> {
        self.code.translated()
    }
    fn details(&mut self) -> Vec<(String, u64)> {
        let page = self.pages.vcpu_page();
        let wedges = statistics::of_wedges(&page.counters);
        let moves = [("moves out of a program's way", self.moves.count())];
        let searches = self.slots.searches();
        let counts = self
            .statistics
            .rows()
            .into_iter()
            .chain(wedges)
            .chain(moves)
            .chain(self.code.rows())
            .chain(searches);
        let named = counts.map(|(name, count)| (name.to_owned(), count));
        let compared = self.checker.iter().flat_map(|checker| checker.rows());
        named.chain(compared).chain(self.statistics.call_outs()).collect()
    }
}
