//! The pages all wedges of a vCPU share: its own ones, and those that all vCPUs of its machine have in common.

use crate::code::{CallSites, CodeArea};
use crate::memory::{MemoryObject, field};
use crate::turns::Turns;
use host::MemoryObject as Object;
use std::{io, mem::offset_of, sync::Arc};
use wedge_abi::{
    Base, COPY_INDEX, LOOKUP_INDEX, LOOKUP_READS, LOOKUP_WRITES, MonitorData, NO_USER, NOWHERE,
    POISON, REGION_BITS, REGION_COUNT, REGIONS_LEN, STEP_WORDS, TAP_BYTES, TAP_PLACES, TAP_STEPS,
    TapTable, Taps, UPPER_USER, VCPU_PAGE_LEN, VcpuPage, region,
};

/// Bytes of the vCPU page that wedges change.
const CHANGED_LEN: usize = offset_of!(VcpuPage, told);

type Bytes = MemoryObject<[u8; 0]>;

/// What all wedges of a machine execute whose reserved part lies at the same base.
#[derive(Debug)]
pub struct Common {
    base: Base,
    code: Arc<CodeArea>,
    sites: CallSites,
}

impl Common {
    /// Nothing yet.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn new(base: Base) -> io::Result<Self> {
        let code = Arc::new(CodeArea::of_kernel(base)?);
        Ok(Self { base, code, sites: CallSites::new(base)? })
    }

    /// Where the reserved part lies.
    pub fn base(&self) -> Base {
        self.base
    }

    /// The kernel's translated code.
    pub fn code(&self) -> &Arc<CodeArea> {
        &self.code
    }
}

/// The pages. The monitor writes them; wedges can write the vCPU page and the turns only.
#[derive(Debug)]
pub struct Pages {
    common: Arc<Common>,
    user: Arc<CodeArea>,
    vcpu_page: MemoryObject<VcpuPage>,
    /// What the monitor works with: [`Pages::publish`] and [`Pages::fetch`] copy it.
    copy: Box<VcpuPage>,
    /// Its last part has changed since it was published.
    told_changed: bool,
    regions: Bytes,
    taps: MemoryObject<Taps>,
    turns: Turns,
    pub(crate) user_dispatch: bool,
    pub(crate) unpatched: bool,
    pub(crate) traced: bool,
    pub(crate) keeps: bool,
    strict: bool,
    keys: bool,
    pub(crate) narrow: bool,
}

impl Pages {
    /// Fresh pages of a vCPU that has nothing in common with others, for the usual base.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn new() -> io::Result<Self> {
        Self::with(Arc::new(Common::new(Base::default())?))
    }

    /// Fresh pages of a vCPU.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn with(common: Arc<Common>) -> io::Result<Self> {
        let base = common.base;
        let mut pages = Self {
            user: Arc::new(CodeArea::of_user(base)?),
            common,
            vcpu_page: MemoryObject::new("ring3-vcpu", VCPU_PAGE_LEN)?,
            copy: Box::default(),
            told_changed: true,
            regions: MemoryObject::new("ring3-regions", REGIONS_LEN)?,
            taps: MemoryObject::new("ring3-taps", size_of::<Taps>())?,
            turns: Turns::new()?,
            user_dispatch: false,
            unpatched: false,
            traced: false,
            keeps: true,
            strict: false,
            keys: crate::keys(),
            narrow: false,
        };
        write_biases(base, pages.regions.object())?;
        pages.regions.seal()?;
        let page = pages.vcpu_page();
        page.block.bias = base.bias();
        page.block.nowhere = NOWHERE;
        page.block.region_mask = (REGION_COUNT as u64 - 1) << REGION_BITS;
        page.block.user_region_mask = page.block.region_mask >> 1 & page.block.region_mask;
        page.block.copy_index = COPY_INDEX;
        page.system.vector_mask = 7;
        page.block.lookup_masks = [LOOKUP_INDEX, LOOKUP_READS, LOOKUP_WRITES];
        Ok(pages)
    }

    /// Has other things in common from now on, whose base may be another. There must be no wedges.
    ///
    /// # Errors
    /// If the host has no memory; then nothing has changed.
    pub fn move_to(&mut self, common: Arc<Common>) -> io::Result<()> {
        let bias = common.base.bias();
        let mut new = Self::with(common)?;
        *new.vcpu_page() = self.vcpu_page().clone();
        new.vcpu_page().block.bias = bias;
        new.told_changed = true;
        new.turns = self.turns.clone();
        (new.user_dispatch, new.keeps) = (self.user_dispatch, self.keeps);
        (new.unpatched, new.traced) = (self.unpatched, self.traced);
        (new.strict, new.keys, new.narrow) = (self.strict, self.keys, self.narrow);
        std::mem::swap(&mut new.taps, &mut self.taps);
        *self = new;
        Ok(())
    }

    /// Where the reserved part lies.
    pub fn base(&self) -> Base {
        self.common.base
    }

    /// The monitor's copy of the vCPU page: what it was when guest code last stopped, and what guest code
    /// goes on with. Nobody else writes it.
    pub fn vcpu_page(&mut self) -> &mut VcpuPage {
        &mut self.copy
    }

    /// The part of it that only the monitor writes, to be changed.
    pub fn told(&mut self) -> &mut MonitorData {
        self.told_changed = true;
        &mut self.copy.told
    }

    /// Guest code is about to run: wedges get the vCPU page as the monitor has it.
    pub fn publish(&mut self) {
        let all = std::mem::take(&mut self.told_changed);
        self.vcpu_page.copy_out(&self.copy, if all { size_of::<VcpuPage>() } else { CHANGED_LEN });
    }

    /// Guest code has stopped: takes from the vCPU page what wedges change.
    pub fn fetch(&mut self) {
        self.vcpu_page.copy_in(&mut self.copy, CHANGED_LEN);
    }

    /// Wedges started from now on get user code's system calls by syscall user dispatch.
    ///
    /// # Errors
    /// If the host has none.
    pub fn use_dispatch(&mut self) -> io::Result<()> {
        if !host::current().facts().user_dispatch {
            return Err(io::Error::other(
                "the host has no syscall user dispatch (Linux 5.11 and later do); leave out --system-calls dispatch",
            ));
        }
        self.user_dispatch = true;
        Ok(())
    }

    /// Wedges started from now on get each of user code's system calls by trap: no site is patched.
    pub fn leave_sites(&mut self) {
        self.unpatched = true;
    }

    /// Wedges started from now on are traced by threads of this process, which see each of their signals first.
    pub fn trace(&mut self) {
        self.traced = true;
    }

    /// Wedges started from now on unmap what the guest's page tables do not say any more, rather than close
    /// it.
    pub fn unmap_flushed(&mut self) {
        self.keeps = false;
    }

    /// Wedges started from now on have their user code run in a process of its own. Where there are
    /// protection keys these do the same.
    pub fn keep_user_apart(&mut self) {
        self.strict = !self.keys;
    }

    /// Wedges started from now on do without protection keys. To be said before [`Pages::keep_user_apart`].
    pub fn leave_keys(&mut self) {
        self.keys = false;
    }

    /// Protection keys close the kernel's memory to user code.
    pub fn keys(&self) -> bool {
        self.keys
    }

    /// Wedges started from now on run 32-bit user code, if the host lets them; whether it does. Not where user
    /// code has a process of its own.
    pub fn run_narrow(&mut self) -> bool {
        self.narrow = !self.strict && host::current().runs_32_bit();
        self.narrow
    }

    pub(crate) fn is_strict(&self) -> bool {
        self.strict
    }

    /// User code executes copies of pages only, that have been searched for what loads protection keys: they close something, or
    /// programs that are closed off could trip over them.
    pub(crate) fn searches(&self) -> bool {
        self.keys || self.strict && crate::keys_load()
    }

    /// Whose turn it is.
    pub fn turns(&self) -> &Turns {
        &self.turns
    }

    /// The kernel's translated code.
    pub fn kernel(&self) -> &Arc<CodeArea> {
        &self.common.code
    }

    /// Translated user code.
    pub fn user(&self) -> &Arc<CodeArea> {
        &self.user
    }

    /// The patched system calls.
    pub fn sites(&self) -> &CallSites {
        &self.common.sites
    }

    /// The byte of translated code at an HVA, zero where there is none.
    pub fn code_byte(&self, hva: u64) -> u8 {
        self.kernel().byte_at(hva).or_else(|| self.user.byte_at(hva)).unwrap_or(0)
    }

    /// From now on kernel memory may lie in the region of an HVA, where user addresses would.
    pub fn give_to_kernel(&mut self, hva: u64) {
        self.set_region(region(hva), POISON);
    }

    fn set_region(&mut self, region: usize, bias: u64) {
        self.regions.write(region * 8, &bias.to_le_bytes());
    }

    /// Gives the vCPU these taps and no others: points (GVA, first step) and the steps of their programs. False if there is
    /// no room for them; then it has none.
    pub fn set_taps(
        &mut self,
        points: impl Iterator<Item = (u64, u64)>,
        steps: &[[u64; STEP_WORDS]],
    ) -> bool {
        let mut table = vec![[0; 2]; TAP_PLACES];
        let mut all = points.take(TAP_PLACES / 2 + 1);
        let placed = all.try_for_each(|(gva, step)| TapTable::place(&mut table, gva, step));
        let used = table.iter().filter(|[gva, _]| *gva != 0).count();
        let fits = placed.is_some() && used <= TAP_PLACES / 2 && steps.len() <= TAP_STEPS;
        if !fits {
            table.fill([0; 2]);
        }
        self.taps.write(offset_of!(Taps, points), &bytes_of(table.as_flattened()));
        if fits {
            self.taps.write(offset_of!(Taps, steps), &bytes_of(steps.as_flattened()));
        }
        fits
    }

    /// Takes what taps have recorded, but for what was passed last if it is `undone`. What it is is the guest's.
    pub fn take_records(&mut self, undone: bool) -> Vec<u8> {
        let used = self.taps.get(field!(Taps, used));
        if used == 0 {
            return Vec::new();
        }
        let used = if undone { used.min(self.taps.get(field!(Taps, last))) } else { used };
        let mut records = vec![0; used.min(TAP_BYTES as u64) as usize];
        self.taps.read(offset_of!(Taps, records), &mut records);
        self.taps.set(field!(Taps, used), 0);
        records
    }

    /// The table of biases, as translated code and wedges map it.
    pub fn regions(&self) -> &dyn Object {
        self.regions.object()
    }

    pub(crate) fn vcpu_page_object(&self) -> &dyn Object {
        self.vcpu_page.object()
    }
    pub(crate) fn taps(&self) -> &dyn Object {
        self.taps.object()
    }
}

/// What translated code adds to the addresses (48 bits) of a region while no kernel memory lies where
/// user addresses would.
fn bias_of(base: Base, address: u64) -> u64 {
    let kernel = base.kernel_start() & ((1 << 48) - 1);
    let reserved = base.at(NO_USER)..base.at(UPPER_USER);
    match address {
        _ if address >= kernel => base.bias(),
        _ if address >> 47 != 0 || reserved.contains(&address) => POISON,
        _ => 0,
    }
}

/// Writes the table of biases by region, page by page. Pages of zeros stay untouched: they take no memory.
fn write_biases(base: Base, table: &dyn Object) -> io::Result<()> {
    const IN_PAGE: usize = 4096 / 8;
    for first in (0..REGION_COUNT).step_by(IN_PAGE) {
        let biases = (first..first + IN_PAGE).map(|at| bias_of(base, (at as u64) << REGION_BITS));
        let biases: Vec<_> = biases.collect();
        if biases.iter().any(|bias| *bias != 0) {
            table.write(first as u64 * 8, &bytes_of(&biases))?;
        }
    }
    Ok(())
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
