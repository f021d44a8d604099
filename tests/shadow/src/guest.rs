//! The guest, and the wedge it runs in.
//!
//! The wedge here does what `engine/stub/src/fault.rs` does around the wedge's own `walk`, `install`,
//! `invalidate` and `finish_deferred`; the guest does what an operating system and its programs may.

use crate::{
    process::{self, Mappings, PAGE, Table},
    tables::{self, LARGE, Tables},
    tlb::{self, Tlb},
};
use fast::Process;
use oracle::random::Random;
use ram::Ram;
use std::{array::from_fn, cell::RefCell};
use stub::{
    invlpg,
    lookup::{self, LookupOutcome},
    mmu::{self, Walk},
    orders::obey,
};
use wedge::{Error, Pages};
use wedge_abi::{
    BIAS, FIRST_VERSION, KERNEL_START, LARGE_SETS, LARGE_WAYS, MAX_MADE, MAX_ORDERS, MAX_TEXTS,
    MapCommand, MapReport, RAM, REGIONS, SITES, Shared, TextPage, VcpuPage, keys, place, region,
};
use x86::paging::Access;
use x86_interp::GuestRam;

const READ: u64 = 1;
const WRITE: u64 = 2;
const EXECUTE: u64 = 4;
/// Steps of guest code between two turns of the monitor, at most.
const STRETCH: u64 = 16;
/// First HVA of large pages that nothing is ever mapped in.
const NOBODYS: u64 = 1 << 45;
/// What verified pages of translated code hold.
const GENERATION: u64 = 1;
/// Texts that pages belong to at first, by their addresses, and bytes of each.
const TEXTS: usize = 64;
const TEXT_LEN: u64 = 4 * PAGE;

/// Why the wedge gives up its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A kick.
    None,
    /// An access the wedge does not decide.
    Access(u64, Access),
    /// INVLPG of a GVA.
    Invalidate(u64),
}

/// The guest's state, and what a TLB may hold of it.
pub struct World {
    pub ram: Ram,
    pub pages: Pages,
    pub tables: Tables,
    pub tlb: Tlb,
    /// The page of translated code that the program has gone to last (GVA).
    pub gone_to: u64,
    /// Pages of translated code, place and RAM offset, in the order of their indices.
    pub code: Vec<(u64, u64)>,
    pub random: Random,
    /// The address space, which is the PCID too.
    pub space: u64,
    pub user: bool,
    /// Pages come and go, and come back as they were.
    pub calm: bool,
    pub exit: Exit,
    pub violation: Option<String>,
    /// The next stretch of guest code is this access (GVA) and nothing else.
    pub only: Option<(u64, Access)>,
}

thread_local! {
    /// The guest that runs: wedges are started by the code under test, which knows nothing of it.
    pub static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

/// Looks at, or changes, the guest that runs.
pub fn with<T>(inside: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(|world| inside(world.as_mut().expect("a guest runs")))
}

/// A wedge whose host is a table.
pub struct Wedge {
    maps: Mappings,
    lookups: Table,
    shared: Box<Shared>,
    orders: Vec<MapCommand>,
    failed: bool,
}

impl Wedge {
    /// Obeys orders, then does what follows; false if an order failed.
    fn hand_over(&mut self, then: impl FnOnce(&mut Shared)) -> bool {
        let orders = std::mem::take(&mut self.orders);
        let list = self.shared.orders.list.iter_mut();
        list.zip(&orders).for_each(|(entry, command)| *entry = command.encode());
        self.shared.orders.count = orders.len() as u64;
        self.lookups.show();
        let shared = &mut *self.shared;
        process::enter(&mut self.maps, || {
            // Orders have nothing to do with the vCPU's page.
            obey(&mut stub::Context::of(&mut VcpuPage::default(), shared));
            if shared.orders.failed == 0 {
                then(shared);
            }
            shared.orders.failed == 0
        })
    }
}

impl Process for Wedge {
    // So that tables are compared with copies as often as can be.
    const FEW: usize = 0;

    fn max_mappings() -> usize {
        160
    }
    fn start(ram: wedge::WedgeRam<'_>, _: &Pages, number: usize) -> Result<Self, Error> {
        let (maps, orders) = (Mappings::new(), Vec::new());
        let (lookups, mut shared) = (Table::new(), process::fresh_shared(&ram));
        // In every second wedge each large page takes another one's place.
        if number.is_multiple_of(2) {
            let nobodys =
                |set: usize, way: usize| NOBODYS + (way * LARGE_SETS + set) as u64 * LARGE;
            shared.mapped.larges.sets = from_fn(|set| from_fn(|way| nobodys(set, way)));
            shared.mapped.larges.noted = (LARGE_SETS * LARGE_WAYS) as u64;
        }
        Ok(Self { maps, lookups, shared, orders, failed: false })
    }
    fn order(&mut self, order: MapCommand) -> Result<(), Error> {
        self.orders.push(order);
        if self.orders.len() == MAX_ORDERS {
            self.failed |= !self.hand_over(|_| ());
        }
        Ok(())
    }
    fn run(&mut self) -> Result<bool, Error> {
        if std::mem::take(&mut self.failed) {
            return Ok(false);
        }
        Ok(self.hand_over(|shared| with(|world| world.run(shared))))
    }
    fn take_failure(&mut self) -> bool {
        false // no turn is passed on here
    }
    fn publish(&self, _: Option<u64>) {}
    fn take_made(&mut self) -> Vec<MapReport> {
        let count = std::mem::take(&mut self.shared.made.count) as usize;
        let made = self.shared.made.list.iter().take(count.min(MAX_MADE));
        let decode = |raw| MapReport::decode(raw, self.shared.setup.ram_len);
        made.map(|raw| decode(*raw).expect("it is possible")).collect()
    }
    fn allow(&mut self, mappings: usize, large: bool) {
        (self.shared.mapped.budget, self.shared.mapped.large) = (mappings as u64, large.into());
    }
    fn look_up(&mut self, on: bool) {
        self.shared.mapped.lookups = on.into();
    }
    fn hide(&mut self, _: u64) {}
    fn show_all(&mut self) {}
    fn forget_lookups(&mut self, start: u64, len: u64) {
        self.lookups.inside().forget(start, len);
        self.lookups.inside().forget_code();
    }
    fn watch_forks(&mut self) {}
    fn take_fork(&mut self) -> bool {
        false
    }
    fn has_verified_code(&self) -> bool {
        self.lookups.inside().has_verified()
    }
    fn verify_code(&mut self, page: TextPage, gva: u64, generation: u64) -> bool {
        self.lookups.inside().verify(page, gva, generation)
    }
    fn resolve(&self, place: u64) -> u64 {
        self.lookups.inside().resolve(place)
    }
    fn clear_lookups(&mut self) {
        self.lookups.inside().clear();
    }
    fn protect_lookups(&mut self, offset: u64) {
        self.lookups.inside().protect(RAM as u64 + offset);
    }
    fn displaced(&mut self, _: u64) {}
    fn patched_entry(&self) -> u64 {
        0
    }
    fn keeps(&self) -> bool {
        self.shared.setup.keeps != 0
    }
    fn processes(&self) -> Vec<i32> {
        Vec::new()
    }
    fn searches(&self) -> bool {
        self.shared.setup.searched != 0
    }
    fn hides_code(&self) -> bool {
        self.shared.setup.key != 0
    }
}

impl World {
    /// GPA of the current top table.
    pub fn root(&self) -> u64 {
        self.tables.root(self.space)
    }

    /// The current space's identifier.
    pub fn pcid(&self) -> u64 {
        self.space % tables::PCIDS
    }

    /// The CPU may have looked at the tables.
    pub fn fill(&mut self) {
        self.tlb.fill(&self.ram, self.root(), self.pcid());
    }

    /// A stretch of guest code.
    fn run(&mut self, shared: &mut Shared) {
        self.exit = Exit::None;
        if let Some((gva, access)) = self.only.take() {
            return self.user_access(shared, gva, access);
        }
        self.check_sites(shared);
        self.check(shared);
        for _ in 0..self.random.below(STRETCH) {
            if self.violation.is_none() && self.exit == Exit::None {
                self.step(shared);
                self.check(shared);
            }
        }
        invlpg::finish_deferred(&mut stub::Context::of(self.pages.vcpu_page(), shared));
    }

    fn step(&mut self, shared: &mut Shared) {
        match (self.user, self.random.below(10)) {
            (true, 0) => self.user = false,
            (true, _) => self.user_code(shared),
            // What has been put off is looked at before it is done.
            (false, 1..6) if self.pages.vcpu_page().paging.deferred != 0 => {
                self.open_access(shared)
            }
            (false, 0) => self.return_to_user(shared),
            (false, 1..4) if self.calm => {
                self.tables.toggle(&self.ram, &mut self.random);
                self.fill();
            }
            (false, 1..4) => {
                self.tables.change(&self.ram, &mut self.random);
                self.fill();
            }
            (false, 4..6) => self.invalidate(shared),
            (false, 6) => self.open_access(shared),
            (false, _) => self.kernel_access(shared),
        }
    }

    fn user_code(&mut self, shared: &mut Shared) {
        invlpg::finish_deferred(&mut stub::Context::of(self.pages.vcpu_page(), shared));
        let gva = tables::some_page(&mut self.random, false);
        let (write, fetch) = self.random.pick(&[(false, false), (true, false), (false, true)]);
        if self.random.chance(40) {
            return if fetch {
                self.goes_to(shared, gva)
            } else {
                self.looked_up(shared, gva, write)
            };
        }
        self.user_access(shared, gva, Access { write, fetch, user: true, smap_override: false });
    }

    /// As `fault::user`, until the host lets the access through.
    pub fn user_access(&mut self, shared: &mut Shared, gva: u64, access: Access) {
        for _ in 0..2 {
            if self.passes(gva, gva, access, false) {
                return;
            }
            let mut wedge = stub::Context::of(self.pages.vcpu_page(), shared);
            let asked = mmu::Access { write: access.write, fetch: access.fetch, user: true };
            let walk = mmu::walk(&wedge, gva, asked);
            let copies = executed_copies(gva);
            let mapped = match walk {
                Walk::Found(leaf) => mmu::install(&mut wedge, gva, leaf, asked),
                Walk::Fault(_) => return self.page_fault(gva, access),
                _ => false,
            };
            let left = executed_copies(gva);
            if shared.setup.searched != 0 && copies.iter().any(|copy| !left.contains(copy)) {
                self.violated(format!("{access:?} to {gva:#x} took code away: {copies:x?}"));
            }
            self.fill();
            if !mapped {
                self.exit = Exit::Access(gva, access);
                return;
            }
        }
        self.violated(format!("{access:?} to {gva:#x}: mapped, and faults again"));
    }

    /// An access of user code that is run translated, as `assist::look_up`.
    fn looked_up(&mut self, shared: &mut Shared, gva: u64, write: bool) {
        for _ in 0..2 {
            let entry = lookup::table().get(gva & !(PAGE - 1));
            if let Some(entry) = entry.filter(|entry| !write || entry.is_writable()) {
                if write {
                    let value = self.value();
                    let offset = entry.target() - RAM as u64;
                    self.ram.store64(offset + (gva & (PAGE - 1)), value);
                }
                return;
            }
            let asked = mmu::Access { write, fetch: false, user: true };
            let outcome =
                lookup::fill(&mut stub::Context::of(self.pages.vcpu_page(), shared), gva, asked);
            self.fill();
            let access = Access { write, fetch: false, user: true, smap_override: false };
            match outcome {
                LookupOutcome::Filled => {}
                LookupOutcome::Fault(_) => return self.page_fault(gva, access),
                LookupOutcome::Unknown => {
                    self.exit = Exit::Access(gva, access);
                    return;
                }
            }
        }
        self.violated(format!("a look-up of {gva:#x} is filled, and misses again"));
    }

    /// A translated program goes to another page, as `blocks::verified_user`: there is code of each page of RAM at each address.
    fn goes_to(&mut self, shared: &mut Shared, gva: u64) {
        let page = gva & !(PAGE - 1);
        let asked = mmu::Access { write: false, fetch: true, user: true };
        let walk = mmu::walk(&stub::Context::of(self.pages.vcpu_page(), shared), gva, asked);
        self.fill();
        let access = Access { write: false, fetch: true, user: true, smap_override: false };
        match walk {
            Walk::Found(leaf) => self.verify(page, leaf.offset),
            Walk::Fault(_) => self.page_fault(gva, access),
            Walk::Unknown => self.exit = Exit::Access(gva, access),
        }
    }

    /// A page of translated code may be executed, at its place or, if its text lies elsewhere, at another.
    fn verify(&mut self, page: u64, offset: u64) {
        self.gone_to = page;
        let beside = place((page / TEXT_LEN) as usize % TEXTS, (page % TEXT_LEN) as i64);
        let known = self.code.iter().rposition(|(_, of)| *of == offset);
        let index = known.unwrap_or_else(|| self.note_code(beside, offset));
        if !self.may_run(index, page) {
            let text = TEXTS + self.code.len() % (MAX_TEXTS - TEXTS);
            let index = self.note_code(place(text, 0), offset);
            self.may_run(index, page);
        }
    }

    /// Notes a page of translated code: its index.
    fn note_code(&mut self, place: u64, offset: u64) -> usize {
        self.code.push((place, offset));
        self.code.len() - 1
    }

    fn may_run(&self, index: usize, gva: u64) -> bool {
        let (place, index) = (self.code[index].0, (FIRST_VERSION + index) as u32);
        lookup::table().verify(TextPage { place, index }, gva, GENERATION)
    }

    /// The guest's own page fault: its kernel runs.
    fn page_fault(&mut self, gva: u64, access: Access) {
        self.must_be_denied(gva, access);
        let code = if access.write { 2 } else { 0 } | if access.fetch { 16 } else { 0 };
        let page = self.pages.vcpu_page();
        page.paging.faulted = [1, gva, code, page.regs.cr3];
        self.user = false;
    }

    /// As `fault::before_return`.
    fn return_to_user(&mut self, shared: &mut Shared) {
        self.user = true;
        let page = self.pages.vcpu_page();
        let [_, gva, code, space] = page.paging.faulted;
        if gva == 0 || space != page.regs.cr3 || self.random.chance(20) {
            return;
        }
        page.paging.faulted = [0; 4];
        let access = mmu::Access { write: code & 2 != 0, fetch: code & 16 != 0, user: true };
        let mut wedge = stub::Context::of(page, shared);
        if let Walk::Found(leaf) = mmu::walk(&wedge, gva, access) {
            mmu::install(&mut wedge, gva, leaf, access);
        }
        self.fill();
    }

    /// Kernel code on kernel memory, as `fault::kernel`.
    fn kernel_access(&mut self, shared: &mut Shared) {
        let gva = tables::some_page(&mut self.random, true);
        let access = Access { write: self.random.chance(50), ..Access::default() };
        self.supervisor(shared, gva, gva.wrapping_add(BIAS), access);
    }

    /// Kernel code on user memory, inside STAC..CLAC.
    fn open_access(&mut self, shared: &mut Shared) {
        let deferred = self.pages.vcpu_page().paging.deferred;
        let gva = match deferred != 0 && self.random.chance(50) {
            true => deferred,
            false => tables::some_page(&mut self.random, false),
        };
        // STAC is interpreted then, and the wedge drops the page before it hands over (translator, `invalidation`).
        invlpg::finish_deferred(&mut stub::Context::of(self.pages.vcpu_page(), shared));
        let write = self.random.chance(50);
        let access = Access { write, smap_override: true, ..Access::default() };
        let top = mmu::Access { write: false, fetch: false, user: false };
        let alias = gva.wrapping_sub(BIAS);
        let kernel = alias >= KERNEL_START
            && !matches!(
                mmu::walk(&stub::Context::of(self.pages.vcpu_page(), shared), alias, top),
                Walk::Fault(0)
            );
        self.fill();
        if kernel || self.is_poisoned(gva) {
            self.exit = Exit::Access(gva, access);
        } else {
            self.supervisor(shared, gva, gva, access);
        }
    }

    fn supervisor(&mut self, shared: &mut Shared, gva: u64, hva: u64, access: Access) {
        if self.passes(gva, hva, access, true) {
            return;
        }
        let mut wedge = stub::Context::of(self.pages.vcpu_page(), shared);
        let asked = mmu::Access { write: access.write, fetch: false, user: false };
        let mapped = match mmu::walk(&wedge, gva, asked) {
            Walk::Found(leaf) => mmu::install(&mut wedge, gva, leaf, asked),
            _ => false,
        };
        self.fill();
        if !mapped || !self.passes(gva, hva, access, true) {
            self.exit = Exit::Access(gva, access);
        }
    }

    /// Translated code finds no user memory there.
    fn is_poisoned(&self, gva: u64) -> bool {
        process::word((REGIONS + region(gva) * 8) as u64) != 0
    }

    /// The host lets an access through, which is made then.
    fn passes(&mut self, gva: u64, hva: u64, access: Access, keys_open: bool) -> bool {
        let Some(mapping) = process::mapping(hva) else { return false };
        if gva >> 63 == 1 && !mapping.key {
            self.violated(format!("kernel address {gva:#x} reaches {mapping:x?}"));
        }
        let has = |wanted: bool, right| !wanted || mapping.protection & right != 0;
        let open = keys_open || !mapping.key;
        let passes =
            open && has(true, READ) && has(access.write, WRITE) && has(access.fetch, EXECUTE);
        if passes
            && hva == self.pages.vcpu_page().paging.deferred
            && !self.is_covered(hva, &mapping)
        {
            self.violated(format!(
                "an access to {gva:#x}, which was invalidated, finds {mapping:x?}"
            ));
        }
        if passes && access.write {
            let value = self.value();
            self.ram.store64(mapping.offset + (gva & (PAGE - 1)), value);
        }
        passes
    }

    /// What somebody writes: anything, and now and then what opens protection keys, or a part of it.
    pub fn value(&mut self) -> u64 {
        let any = self.random.bits();
        let keys =
            [0xef_010f, 0x2f_ae0f, 0xef, 0xef01, 0x2f, 0x010f << 48, 0xae0f << 48, 0x0f << 56];
        if self.random.chance(30) { self.random.pick(&keys) } else { any }
    }

    /// INVLPG by translated code.
    fn invalidate(&mut self, shared: &mut Shared) {
        let faulted = self.pages.vcpu_page().paging.faulted[1];
        let kernel = self.random.chance(20);
        // The page of code that a program has gone to last.
        let code = if kernel { 0 } else { self.gone_to };
        let gva = match (faulted != 0 && self.random.chance(50), self.random.chance(30)) {
            (true, _) => faulted,
            (_, true) if code != 0 => code,
            _ => tables::some_page(&mut self.random, kernel),
        };
        if (gva == faulted || gva == code) && self.random.chance(50) {
            let root = self.root();
            self.tables.replace(&self.ram, &mut self.random, root, gva & !(PAGE - 1));
            self.fill();
        }
        if !invlpg::of_user(&mut stub::Context::of(self.pages.vcpu_page(), shared), gva) {
            self.exit = Exit::Invalidate(gva);
            return;
        }
        self.tlb.flush_page(self.pcid(), gva);
        self.fill();
    }

    /// The tables deny the access: whoever raises a page fault for it is right.
    pub fn must_be_denied(&mut self, gva: u64, access: Access) {
        let Some((entry, _)) = tlb::walk(&self.ram, self.root(), gva, false) else { return };
        let level = if access.user { entry.user } else { !entry.user || access.smap_override };
        let allowed =
            level && (!access.write || entry.writable) && (!access.fetch || entry.execute);
        if allowed {
            self.violated(format!("a page fault for {access:?} to {gva:#x}, which has {entry:x?}"));
        }
    }

    /// The program can have memory where the table of patched system calls is only if that is closed.
    fn check_sites(&mut self, shared: &Shared) {
        if shared.mapped.sites_closed == 0 && tlb::has_table(&self.ram, self.root(), SITES as u64) {
            self.violated("the table of patched system calls is open".to_owned());
        }
    }

    /// Looks at every mapping of the wedge.
    fn check(&mut self, shared: &Shared) {
        let mut found = None;
        let deferred = self.pages.vcpu_page().paging.deferred;
        process::each(|hva, mapping| {
            // The wedge drops it before anybody can reach it (`passes`); `mmu::invalidate` says why it may wait.
            let open = mapping.protection != 0 && hva != deferred;
            if open && !self.is_covered(hva, mapping) {
                found = Some(format!("{mapping:x?} at {hva:#x}"));
            }
            if shared.setup.searched != 0 && opens_keys(hva, mapping) {
                found = Some(format!("what opens keys is executable at {hva:#x}: {mapping:x?}"));
            }
        });
        for page in tables::user_pages() {
            let Some(entry) = lookup::table().get(page) else { continue };
            let (offset, write) = (entry.target() - RAM as u64, entry.is_writable());
            if !self.is_granted(page, offset, write) {
                found =
                    Some(format!("a look-up of {page:#x} leads to {offset:#x}, writable: {write}"));
            }
        }
        for (index, (place, offset)) in self.code.iter().enumerate() {
            let open = lookup::table().is_verified(FIRST_VERSION + index, GENERATION);
            let page = lookup::table().resolve(*place);
            let grants = |entry: tlb::Entry| entry.gpa == *offset && entry.user && entry.execute;
            if open && !self.tlb.of(self.pcid(), page).any(grants) {
                found = Some(format!("code of {page:#x} at {offset:#x} may be executed"));
            }
        }
        if let Some(found) = found {
            self.violated(found);
        }
    }

    /// The guest has allowed user code this since it flushed, and nothing is decoded from what may be written.
    fn is_granted(&self, page: u64, offset: u64, write: bool) -> bool {
        let granted = self
            .tlb
            .of(self.pcid(), page)
            .any(|entry| entry.gpa == offset && entry.user && (!write || entry.write));
        granted && !(write && self.ram.is_code(offset))
    }

    fn is_covered(&self, hva: u64, mapping: &process::Mapping) -> bool {
        let gva = if mapping.key { hva.wrapping_sub(BIAS) } else { hva };
        let (write, execute) = (mapping.protection & WRITE != 0, mapping.protection & EXECUTE != 0);
        let granted = self.tlb.of(self.pcid(), gva).any(|entry| {
            entry.gpa == mapping.offset
                && entry.user != mapping.key
                && (!write || entry.write)
                && (!execute || entry.execute)
        });
        let stale = mapping.copy.as_ref().is_some_and(|copy| self.page(mapping.offset) != *copy);
        let code_written = write && self.ram.is_code(mapping.offset);
        let exposed = mapping.key && execute;
        granted && !stale && !code_written && !exposed
    }

    fn page(&self, offset: u64) -> Vec<u8> {
        let mut bytes = vec![0; PAGE as usize];
        self.ram.read(offset, &mut bytes);
        bytes
    }

    fn violated(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }
}

/// HVAs of the copies that may be executed, except a copy of the page at `gva`.
fn executed_copies(gva: u64) -> Vec<u64> {
    let mut copies = Vec::new();
    process::each(|hva, mapping| {
        if mapping.copy.is_some() && mapping.protection & EXECUTE != 0 && hva != gva & !(PAGE - 1) {
            copies.push(hva);
        }
    });
    copies
}

/// User code can execute what nobody has searched, or what opens protection keys.
fn opens_keys(hva: u64, mapping: &process::Mapping) -> bool {
    if mapping.protection & EXECUTE == 0 {
        return false;
    }
    let next = process::mapping(hva + PAGE).filter(|next| next.protection & EXECUTE != 0);
    let (Some(bytes), next) = (&mapping.copy, next.and_then(|next| next.copy)) else { return true };
    let next = next.iter().flat_map(|bytes| bytes.iter().take(2));
    let bytes: Vec<u8> = bytes.iter().chain(next).copied().collect();
    keys::find(&bytes).is_some()
}
