//! Starting a wedge and taking turns with it.

use crate::{
    Pages,
    body::{Objects, Parts},
    memory::{MemoryObject, field},
    starter::{self, passed},
    strict::{self, BothSides},
    turns::{Move, Turns},
};
use contract::Whose;
use host::End;
use std::{io, os::fd::BorrowedFd, sync::OnceLock};
use wedge_abi::{
    BLOB, Base, Lookups, MAX_MADE, MAX_ORDERS, MONITOR, MapCommand, MapReport, RAM, RAM_MAX, Setup,
    Shared, SpaceVersion, TextPage, forks,
};

pub(crate) static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wedge.bin"));
pub(crate) const PAGE: usize = 4096;

/// Why a wedge cannot be started or has stopped working.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host refused something.
    #[error("cannot start a process for guest code: {0}")]
    Start(#[from] io::Error),
    /// The process has ended by itself.
    #[error("a process running guest code ended unexpectedly")]
    Gone,
    /// The process stopped at an address that holds no guest code. Nothing that it says is trusted any more.
    #[error(
        "guest code stopped where there is none: a program in the guest has written to the engine's memory \
         (--guest-isolation strict keeps it out), or this is a bug in ring3"
    )]
    Lost,
    /// The guest's kernel counts what it takes back of a process's memory, and has taken back this page (GVA) without counting.
    #[error(
        "the guest's kernel has changed page tables at {0:#x} and not counted it; run it with --switches compared, and report this"
    )]
    Miscounted(u64),
    /// Guest code is to run, or to be mapped, while no space has been selected.
    #[error("no address space has been selected for guest code")]
    NoSpace,
    /// It was killed: nobody here does that.
    #[error(
        "a process running guest code was killed by signal {0}, perhaps for want of memory on the host (its kernel's log says so): \
         give the guest less (--memory), or the host more, and start it again"
    )]
    Killed(i32),
}

impl Error {
    /// Whose doing it is. What a wedge does wrong may be its guest's, which owns its memory.
    pub fn whose(&self) -> Whose {
        match self {
            Self::Start(_) | Self::Killed(_) => Whose::Host,
            Self::Gone | Self::Lost => Whose::Guest,
            Self::NoSpace | Self::Miscounted(_) => Whose::Ours,
        }
    }
}

/// Guest RAM, as a wedge needs it.
#[derive(Clone, Copy, Debug)]
pub struct WedgeRam<'a> {
    /// Its memory object.
    pub memory: &'a dyn host::MemoryObject,
    /// Its bytes, at most [`RAM_MAX`].
    pub len: u64,
    /// How many of them lie at GPA 0 and up; the rest begins at 4 GiB.
    pub low: u64,
    /// Memory object with a byte a page, not zero if the monitor decides what becomes of it.
    pub marks: &'a dyn host::MemoryObject,
    /// Offset of the pages of words in the memory object.
    pub words: u64,
    /// The wedge walks the guest's page tables, for which it has all of RAM in its window.
    pub walked: bool,
}

/// A wedge process.
#[derive(Debug)]
pub struct Wedge {
    pid: i32,
    shared: MemoryObject<Shared>,
    orders: Vec<MapCommand>,
    turns: Turns,
    number: usize,
    ram_len: u64,
    /// Orders could not be carried out, and guest code has not run since.
    failed: bool,
    /// Read before guest code has run.
    patched_entry: u64,
    keeps: bool,
    searches: bool,
    keys: bool,
    base: Base,
    lookups: MemoryObject<Lookups>,
    /// Pages that kernel code must not read as they are mapped.
    hidden: Vec<u64>,
    /// As the wedge has been told it.
    displaced: [u64; 64],
    user: Option<i32>,
}

impl Wedge {
    /// Starts the wedge with a number (from 1 to [`wedge_abi::MAX_WEDGES`]) over guest RAM and a vCPU's pages,
    /// from the thread that is going to take turns with it.
    ///
    /// # Errors
    /// If the host refuses a process, memory or the sandbox.
    pub fn start(ram: WedgeRam<'_>, pages: &Pages, number: usize) -> Result<Self, Error> {
        if ram.len > RAM_MAX as u64 {
            return Err(Error::Start(io::ErrorKind::OutOfMemory.into()));
        }
        host::current().fault_cpuid();
        let shared = MemoryObject::<Shared>::new("ring3-wedge-orders", size_of::<Shared>())?;
        let lookups = MemoryObject::<Lookups>::new("ring3-lookups", size_of::<Lookups>())?;
        lookups.all().hide_sites();
        let sides = if pages.is_strict() { Some(BothSides::new()?) } else { None };
        let setup = setup(&ram, pages, number)?;
        shared.set(field!(Shared, setup), setup);
        let parts = Parts {
            base: pages.base(),
            objects: objects(&ram, pages, &shared, &lookups)?,
            ram_len: ram.len as usize,
            words: ram.words,
            walked: ram.walked,
            keyed: pages.keys(),
            user: sides.as_ref().map(BothSides::of_kernel).transpose()?,
        };
        let turns = pages.turns().clone();
        let (pid, user) =
            start_processes(&parts, &setup, sides.as_ref(), (&turns, number), pages.traced)?;
        let mut wedge = Self {
            pid,
            shared,
            orders: Vec::new(),
            turns,
            number,
            ram_len: ram.len,
            failed: false,
            patched_entry: 0,
            keeps: pages.keeps,
            searches: pages.searches(),
            keys: pages.keys(),
            base: pages.base(),
            lookups,
            hidden: Vec::new(),
            displaced: [0; 64],
            user,
        };
        wedge.wait()?; // until it is ready
        wedge.processes().for_each(|process| host::current().share(process));
        wedge.patched_entry = wedge.shared.get(field!(Shared, ready.patched_entry));
        Ok(wedge)
    }

    /// Changes the mappings before guest code runs the next time. A full list is carried out at once.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn order(&mut self, order: MapCommand) -> Result<(), Error> {
        self.orders.push(order);
        if self.orders.len() == MAX_ORDERS {
            // The orders behind one that fails are not carried out: what they were to take away is there.
            self.failed |= !self.hand_over(true)?;
        }
        Ok(())
    }

    /// The process, and that of user code if it has one of its own.
    pub fn processes(&self) -> impl Iterator<Item = i32> + use<> {
        [Some(self.pid), self.user].into_iter().flatten()
    }

    /// What the page tables do not say any more is closed, not unmapped.
    pub fn keeps(&self) -> bool {
        self.keeps
    }

    /// User code executes copies of pages only, that have been searched for what loads protection keys.
    pub fn searches(&self) -> bool {
        self.searches
    }

    /// Its own memory, and whatever user code is not to load, has a protection key.
    pub fn has_keys(&self) -> bool {
        self.keys
    }

    /// Guest code is about to run here: kicks reach it from now on.
    pub fn aim_kicks(&self) {
        self.turns.aim(self.number);
    }

    /// Guest code may go on here, in the space of a PCID, without the monitor; with `None` it may not. It may
    /// not either while there are orders.
    pub fn publish(&self, pcid: Option<u64>) {
        let idle = self.orders.is_empty() && !self.failed;
        self.turns.publish(self.number, pcid.filter(|_| idle));
    }

    /// Guest code may go on here, in the space of this version, without the monitor, or may not; as for [`Wedge::publish`].
    pub fn publish_version(&self, version: Option<SpaceVersion>) {
        let idle = self.orders.is_empty() && !self.failed;
        self.turns.publish_version(self.number, version.filter(|_| idle));
    }

    /// The version at which guest code has left this one's space last, if that is known. Guest code can write it.
    pub fn left(&self) -> Option<SpaceVersion> {
        self.turns.left(self.number)
    }

    /// Whether wedges of this vCPU have left spaces at new versions, or have moved PCIDs, since the last call.
    pub fn take_moved(&self) -> bool {
        self.turns.take_moved()
    }

    /// What wedges have done with the PCID of this one's space since the last call.
    pub fn take_move(&self) -> Option<Move> {
        self.turns.take_move(self.number)
    }

    /// Runs guest code as the vCPU page says until it stops; false if the orders could not all be
    /// carried out (too many mappings, no memory), in which case no guest code has run.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn run(&mut self) -> Result<bool, Error> {
        if std::mem::take(&mut self.failed) {
            return Ok(false);
        }
        let done = self.hand_over(false);
        // Whoever kicks from now on finds guest code standing still; the wedge would be woken for nothing,
        // and give up its next turn.
        self.turns.aim(MONITOR);
        done
    }

    /// Whether orders have failed since the last call or run, in this process or in that of user code. If another wedge
    /// has passed the turn on to this one, [`Wedge::run`] of the other one does not tell of the failure.
    pub fn take_failure(&mut self) -> bool {
        let failed = self.shared.get(field!(Shared, orders.failed)) != 0;
        if failed {
            self.shared.set(field!(Shared, orders.failed), 0);
        }
        failed
    }

    /// What the wedge has done by itself since the last call. What no wedge does has been written by guest
    /// code, and is left out.
    pub fn take_made(&mut self) -> Vec<MapReport> {
        let count = self.shared.get(field!(Shared, made.count));
        self.shared.set(field!(Shared, made.count), 0);
        let list = field!(Shared, made.list);
        let raw = (0..MAX_MADE.min(count as usize)).filter_map(|at| list.at(at));
        raw.filter_map(|at| MapReport::decode(self.shared.get(at), self.ram_len)).collect()
    }

    /// Where stubs of patched system calls go on: HVA, the same in all wedges.
    pub fn patched_entry(&self) -> u64 {
        self.patched_entry
    }

    /// An instruction at `rip` (GVA), behind a system call, has been displaced by a patch.
    pub fn displaced(&mut self, rip: u64) {
        let low = rip as usize & 0xfff;
        if let Some(word) = field!(Shared, patched.displaced).at(low / 64) {
            self.displaced[low / 64] |= 1 << (low % 64);
            self.shared.set(word, self.displaced[low / 64]);
        }
    }

    /// How many mappings the wedge may make by itself, and whether large user pages may be mapped.
    pub fn allow(&mut self, mappings: usize, large: bool) {
        self.shared.set(field!(Shared, mapped.budget), mappings as u64);
        self.shared.set(field!(Shared, mapped.large), large.into());
    }

    /// User code is to be run translated, with look-ups, or not.
    pub fn look_up(&mut self, on: bool) {
        self.shared.set(field!(Shared, mapped.lookups), on.into());
    }

    /// From now on the wedge notes when the process forks.
    pub fn watch_forks(&mut self) {
        self.shared.set(field!(Shared, mapped.forks), forks::NONE);
    }

    /// The process has forked since the last call, if the wedge notes that.
    pub fn take_fork(&mut self) -> bool {
        let has = self.shared.get(field!(Shared, mapped.forks)) == forks::SOME;
        if has {
            self.watch_forks();
        }
        has
    }

    /// Kernel code must not read the page at this GVA as it is mapped.
    pub fn hide(&mut self, page: u64) {
        self.hidden.push(page);
        self.lookups.all().hide(page);
    }

    /// Kernel code may read all pages as they are mapped.
    pub fn show_all(&mut self) {
        if self.hidden.is_empty() {
            return;
        }
        let tables = self.lookups.all();
        self.hidden.drain(..).for_each(|page| tables.show(page));
        tables.hide_sites();
    }

    /// The user's pages in a range (GVA) have no look-ups any more.
    pub fn forget_lookups(&mut self, start: u64, len: u64) {
        self.lookups.all().forget(start, len);
        self.lookups.all().forget_code();
    }

    /// Some page of translated user code may be executed.
    pub fn has_verified_code(&self) -> bool {
        self.lookups.all().has_verified()
    }

    /// A page of translated user code may be executed at a GVA, as the guest's page tables say now. False if its text lies elsewhere.
    pub fn verify_code(&mut self, page: TextPage, gva: u64, generation: u64) -> bool {
        self.lookups.all().verify(page, gva, generation)
    }

    /// The GVA of a place of user code ([`Lookups::resolve`]). The wedge may say what it likes.
    pub fn resolve(&self, place: u64) -> u64 {
        self.lookups.all().resolve(place)
    }

    /// There are no look-ups any more.
    pub fn clear_lookups(&mut self) {
        self.lookups.all().clear();
    }

    /// No look-up leads to the RAM page at this offset any more and lets it be written.
    pub fn protect_lookups(&mut self, offset: u64) {
        if !self.lookups.all().is_empty() {
            let hva = self.base.at(RAM as u64) + offset;
            self.lookups.all().protect(hva);
        }
    }

    /// Carries out what has been ordered and, unless `orders_only`, runs guest code.
    fn hand_over(&mut self, orders_only: bool) -> Result<bool, Error> {
        let list = field!(Shared, orders.list);
        for (at, command) in self.orders.iter().enumerate() {
            let Some(entry) = list.at(at) else { break };
            self.shared.set(entry, command.encode());
        }
        self.shared.set(field!(Shared, orders.count), self.orders.len() as u64);
        self.shared.set(field!(Shared, orders.only), orders_only.into());
        self.orders.clear();
        self.take_turns()?;
        Ok(!self.take_failure())
    }

    pub(crate) fn take_turns(&mut self) -> Result<(), Error> {
        self.turns.give(self.number);
        self.wait()
    }

    /// Waits for our turn; a dead process is noticed within a second.
    fn wait(&mut self) -> Result<(), Error> {
        while !self.turns.wait() {
            match self.turns.lost_one() {
                Some(End::Killed(signal)) => return Err(Error::Killed(signal)),
                Some(End::Exited(_)) => return Err(Error::Gone),
                None => {}
            }
        }
        Ok(())
    }
}

impl Drop for Wedge {
    fn drop(&mut self) {
        self.turns.end(self.number);
    }
}

/// What a wedge maps.
fn objects<'a>(
    ram: &WedgeRam<'a>,
    pages: &'a Pages,
    shared: &'a MemoryObject<Shared>,
    lookups: &'a MemoryObject<Lookups>,
) -> Result<Objects<'a>, Error> {
    Ok(Objects {
        ram: passed(ram.memory)?,
        marks: passed(ram.marks)?,
        shared: passed(shared.object())?,
        vcpu_page: passed(pages.vcpu_page_object())?,
        turns: passed(pages.turns().object())?,
        taps: passed(pages.taps())?,
        tables: passed(pages.kernel().tables())?,
        cache: passed(pages.kernel().cache())?,
        user_tables: passed(pages.user().tables())?,
        user_cache: passed(pages.user().cache())?,
        stubs: passed(pages.sites().stubs())?,
        regions: passed(pages.regions())?,
        sites: passed(pages.sites().table())?,
        lookups: passed(lookups.object())?,
    })
}

/// Starts the process, and that of user code if it is to have one of its own; returns their numbers.
fn start_processes(
    parts: &Parts,
    setup: &Setup,
    sides: Option<&BothSides>,
    (turns, number): (&Turns, usize),
    traced: bool,
) -> Result<(i32, Option<i32>), Error> {
    let mut user = None;
    if let Some(sides) = sides {
        let child = sides.start(parts, setup)?;
        user = Some(child.number());
        turns.adopt_user(number, child);
    }
    let started = starter::start(parts).inspect_err(|_| turns.end(number))?;
    let pid = started.number();
    if traced {
        started.trace()?;
    }
    turns.adopt(number, started);
    Ok((pid, user))
}

/// What a wedge is told before it starts.
fn setup(ram: &WedgeRam<'_>, pages: &Pages, number: usize) -> io::Result<Setup> {
    let (ram_len, ram_low) = if ram.walked { (ram.len, ram.low) } else { (0, 0) };
    let key = u64::from(pages.keys());
    Ok(Setup {
        secret: strict::secret()?,
        user_secret: if pages.is_strict() { strict::secret()? } else { 0 },
        number: number as u64,
        blob_end: pages.base().at((BLOB + IMAGE.len()) as u64),
        key,
        searched: pages.searches().into(),
        user_dispatch: pages.user_dispatch.into(),
        unpatched: pages.unpatched.into(),
        narrow: pages.narrow.into(),
        keeps: pages.keeps.into(),
        ram_len,
        ram_low,
    })
}

/// The blob as a memory object, made once.
pub(crate) fn image() -> io::Result<BorrowedFd<'static>> {
    static OBJECT: OnceLock<MemoryObject<[u8; 0]>> = OnceLock::new();
    if let Some(object) = OBJECT.get() {
        return passed(object.object());
    }
    let object = MemoryObject::new("ring3-wedge", IMAGE.len().next_multiple_of(PAGE))?;
    object.write(0, IMAGE);
    object.seal()?;
    passed(OBJECT.get_or_init(|| object).object())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_says_whose_it_is() {
        for (error, whose) in [
            (Error::Start(io::ErrorKind::OutOfMemory.into()), Whose::Host),
            (Error::Killed(9), Whose::Host),
            (Error::Gone, Whose::Guest),
            (Error::Lost, Whose::Guest),
            (Error::NoSpace, Whose::Ours),
        ] {
            assert_eq!(error.whose(), whose, "{error}");
        }
    }

    /// They are the guest's while the blob runs. The search of code has four, which it keeps and gives back.
    #[test]
    fn the_blob_leaves_vector_registers_as_they_are() {
        use iced_x86::{Code::Movdqu_xmm_xmmm128, Code::Movdqu_xmmm128_xmm, Register};
        const USED: [Register; 4] =
            [Register::XMM0, Register::XMM1, Register::XMM2, Register::XMM3];
        let end = IMAGE.windows(8).position(|bytes| bytes == b"end-text").expect("a mark");
        let decoder = iced_x86::Decoder::with_ip(64, &IMAGE[..end], BLOB as u64, 0);
        let is_vector = |register: &Register| {
            register.is_vector_register() || register.is_mm() || register.is_k() || register.is_st()
        };
        let named = |instruction: &iced_x86::Instruction| -> Vec<Register> {
            let operands = 0..instruction.op_count();
            operands.map(|n| instruction.op_register(n)).filter(is_vector).collect()
        };
        let all: Vec<_> = decoder.into_iter().filter(|one| !named(one).is_empty()).collect();
        assert!(all.iter().flat_map(named).all(|register| USED.contains(&register)), "{all:?}");
        let (kept, given_back) = (&all[..4], &all[all.len() - 4..]);
        for (n, register) in USED.into_iter().enumerate() {
            for (one, code) in [(kept[n], Movdqu_xmmm128_xmm), (given_back[n], Movdqu_xmm_xmmm128)]
            {
                assert_eq!((one.code(), one.memory_base()), (code, Register::RSP));
                assert_eq!(one.memory_displacement64(), 16 * n as u64);
                assert_eq!(named(&one), [register]);
            }
        }
    }

    /// User code can jump to each of them: `gates` has two WRPKRUs, `patched` and `signal` one each, `host` two
    /// XRSTORs and `user` three, which say what keeps it from gaining anything. There must be none inside
    /// other instructions.
    #[test]
    fn the_blob_opens_keys_only_where_it_means_to() {
        let opens = |bytes: &&[u8]| wedge_abi::keys::find(bytes).is_some();
        assert_eq!(IMAGE.windows(3).filter(opens).count(), 9);
    }
}
