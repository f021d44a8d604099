//! The host side: a forked child with a biased kernel window, a code cache and a vCPU page.
//!
//! Parent and child share every page, so the parent prepares a case (state into the vCPU page, code into
//! the cache) and reads the outcome without copying. The child knows one loop: wait, enter
//! translated code, tell. A signal in translated code stores the registers it interrupted and resumes
//! at the routine that leaves; the parent recovers the exact state from the host PC.
// UNSAFETY: maps memory at fixed addresses, forks, handles signals and calls generated code.
#![allow(unsafe_code)]

mod child;
mod shared;

use child::serve;
use shared::{
    CACHE_LEN, COPIES_LEN, IN_HOST, LANDINGS, LAYOUT, LOOKUPS, LOOKUPS_LEN, NEVER, OF_USER,
    ORIGINS, ORIGINS_LEN, REGIONS_LEN, SHOWN, TABLES_LEN, TEXT, TEXT_PLACE, VCPU_PAGE_LEN,
    VERIFIED, VERIFIED_LEN, VERSION, VIEW, bytes_at, mailbox, map, memfd, vcpu_page,
};

use crate::case::{Case, DATA_LEN, Place, USER, USER_LEN};
use anyhow::{Context, Result, bail, ensure};
use jit::{
    Layout, Level,
    cache::{Cache, CodeMemory, How, Variant},
    stubs::table_slot,
};
use std::ptr;
use wedge_abi::{
    BlockExit, COMPUTED, FRONT_LEN, LOOKUP_WRITE, Lookup, NOWHERE, distance, is_place, lookup_slot,
};
use x86::{flags, fpu::xstate};

/// Blocks of a case that are translated.
const MAX_BLOCKS: usize = 32;

/// How an interrupted run went.
#[derive(Clone, Debug)]
pub struct Interrupted {
    /// Host instructions executed until then.
    pub after: u64,
    /// Where it was taken, between two guest instructions or two iterations of one.
    pub taken: Ending,
    /// How the run ended that went on from there.
    pub end: Ending,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// A fault rather than an exit.
    pub fault: bool,
    /// An exit in which a waiting interrupt is taken.
    pub window: bool,
    /// GVA of the next instruction, or of the faulting one.
    pub rip: u64,
    /// General registers.
    pub gpr: [u64; 16],
    /// RFLAGS as the guest sees them.
    pub rflags: u64,
    /// XMM0..XMM15.
    pub xmm: [[u8; 16]; 16],
    /// Kernel data, then user data.
    pub memory: Vec<u8>,
    /// FS base, GS base and the GS base that SWAPGS exchanges.
    pub bases: [u64; 3],
}

/// The pair of processes.
pub struct Rig {
    place: Place,
    layout: Layout,
    /// Added to a GVA to get its HVA.
    bias: u64,
    cache: Cache,
    child: libc::pid_t,
    to_child: i32,
    from_child: i32,
    /// What of a 32-bit kernel's is looked up ([`How::sought`]).
    sought: u64,
    /// Look-ups that were filled.
    pub filled: u64,
    /// Blocks stay from one run to the next, which is of the same code.
    pub keeps: bool,
    /// Pages that have entries.
    shown: Vec<u64>,
    /// Where computed jumps come (HVA), by the GVAs that they have led to, if blocks are for places.
    fronts: Vec<(u64, u64)>,
    /// How often a computed jump has found another address's block before it found its own.
    pub astray: u64,
}

struct View;

impl CodeMemory for View {
    fn write_code(&mut self, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= CACHE_LEN);
        // SAFETY: the view of the cache is CACHE_LEN bytes at VIEW, and the child is not running.
        unsafe { bytes_at(VIEW + offset, bytes.len()) }.copy_from_slice(bytes);
    }
    fn is_closed(&self, _: u64, _: &[u8]) -> bool {
        true
    }
    fn write_table(&mut self, offset: u64, value: u64) {
        assert!(offset + 8 <= TABLES_LEN);
        // SAFETY: the tables are TABLES_LEN bytes at LAYOUT.table, writable.
        unsafe { bytes_at(LAYOUT.table + offset, 8) }.copy_from_slice(&value.to_le_bytes());
    }
    fn table_word(&self, offset: u64) -> u64 {
        assert!(offset + 8 <= TABLES_LEN);
        // SAFETY: as above.
        unsafe { *((LAYOUT.table + offset) as *const u64) }
    }
}

impl Rig {
    /// Maps everything for code of a level and forks the child.
    ///
    /// # Errors
    /// If the host refuses a mapping or a process.
    pub fn new(level: Level) -> Result<Self> {
        Self::with(if level == Level::User { OF_USER } else { LAYOUT })
    }

    /// The same for kernel code whose computed jumps search.
    ///
    /// # Errors
    /// As there.
    pub fn that_searches() -> Result<Self> {
        Self::with(Layout { landings: None, ..LAYOUT })
    }

    /// The same for a program's code whose memory operands are looked up, and which looks first whether it may be executed.
    ///
    /// # Errors
    /// As there.
    pub fn with_lookups() -> Result<Self> {
        let (lookups, verified) = (Some(LOOKUPS), Some(VERIFIED));
        Self::with(Layout { lookups, verified, ..OF_USER })
    }

    /// The same for a program's code whose blocks are for places, not for addresses. With `checks`, whatever is not looked up is checked.
    ///
    /// # Errors
    /// As there.
    pub fn at_places(checks: bool) -> Result<Self> {
        let (lookups, verified, origins) = (Some(LOOKUPS), Some(VERIFIED), Some(ORIGINS));
        Self::with(Layout { checks, lookups, verified, origins, ..OF_USER })
    }

    /// The same for the code of a 32-bit guest.
    ///
    /// # Errors
    /// As there.
    pub fn narrow(level: Level) -> Result<Self> {
        let layout = if level == Level::User { OF_USER } else { LAYOUT };
        Self::at(layout, Place::narrow(level))
    }

    /// The same for a 32-bit kernel whose accesses are all looked up that can be.
    ///
    /// # Errors
    /// As there.
    pub fn narrow_with_lookups() -> Result<Self> {
        let layout = Layout { lookups: Some(LOOKUPS), ..LAYOUT };
        let mut rig = Self::at(layout, Place::narrow(Level::Kernel))?;
        rig.sought = u64::MAX;
        Ok(rig)
    }

    fn with(layout: Layout) -> Result<Self> {
        Self::at(layout, Place::of(layout.level))
    }

    fn at(layout: Layout, place: Place) -> Result<Self> {
        let bias = match place {
            Place { narrow: true, level: Level::Kernel, .. } => wedge_abi::narrow_bias(layout.bias),
            _ => layout.bias,
        };
        let write = libc::PROT_READ | libc::PROT_WRITE;
        let code = memfd(CACHE_LEN)?;
        map(code, 0, LAYOUT.cache, CACHE_LEN, libc::PROT_READ | libc::PROT_EXEC)?;
        map(code, 0, VIEW, CACHE_LEN, write)?;
        let rest = memfd(VCPU_PAGE_LEN + TABLES_LEN)?;
        map(rest, 0, LAYOUT.vcpu_page, VCPU_PAGE_LEN, write)?;
        map(rest, VCPU_PAGE_LEN, LAYOUT.table, TABLES_LEN, write)?;
        map(rest, VCPU_PAGE_LEN, LANDINGS, wedge_abi::LANDINGS_LEN as u64, libc::PROT_READ)?;
        let data = memfd(4096 + DATA_LEN + USER_LEN)?;
        map(data, 0, place.code.wrapping_add(bias), 4096, write)?;
        map(data, 4096, place.data.wrapping_add(bias), DATA_LEN, write)?;
        map(data, 4096 + DATA_LEN, USER, USER_LEN, write)?;
        map(data, 0, SHOWN, 4096 + DATA_LEN + USER_LEN, write)?;
        let lookups = LOOKUPS_LEN + VERIFIED_LEN + ORIGINS_LEN;
        map(memfd(lookups)?, 0, LOOKUPS, lookups, write)?;
        let tables = REGIONS_LEN + COPIES_LEN;
        map(memfd(tables)?, 0, LAYOUT.regions, tables, write)?;
        fill_regions();
        let cache = Cache::new(layout, &mut View);
        let (child_in, to_child) = pipe()?;
        let (from_child, child_out) = pipe()?;
        // SAFETY: the child runs nothing but `serve`, which allocates nothing.
        let child = unsafe { libc::fork() };
        match child {
            0 => serve(child_in, child_out, place.code.wrapping_add(bias)),
            -1 => bail!("cannot fork: {}", std::io::Error::last_os_error()),
            _ => Ok(Self {
                place,
                layout,
                bias,
                cache,
                child,
                to_child,
                from_child,
                sought: 0,
                filled: 0,
                keeps: false,
                shown: Vec::new(),
                fronts: Vec::new(),
                astray: 0,
            }),
        }
    }

    /// Runs a case until it faults or exits for more than a block that is not translated yet.
    ///
    /// # Errors
    /// If the child is gone or stands where no block is.
    pub fn run(&mut self, case: &Case) -> Result<Ending> {
        self.start(case);
        self.go_on(case)?;
        self.ending()
    }

    /// Runs a case with an interrupt `steps` host instructions after its start: the state at the next
    /// boundary, as the engine would take it, and how the rest ends that begins there. `None` if the case
    /// ends before.
    ///
    /// # Errors
    /// As for [`Rig::run`].
    pub fn run_interrupted(&mut self, case: &Case, steps: u64) -> Result<Option<Interrupted>> {
        self.start(case);
        mailbox().steps = steps;
        self.go_on(case)?;
        let t = mailbox();
        t.steps = NEVER;
        if t.interrupted == 0 {
            return Ok(None);
        }
        let after = t.stepped;
        let taken = Ending { fault: false, window: true, ..self.ending()? };
        let page = vcpu_page();
        (page.regs.gpr, page.regs.rip) = (taken.gpr, taken.rip);
        page.block.host_flags = taken.rflags & IN_HOST | 0x202;
        (t.signal, t.interrupted) = (0, 0);
        self.go_on(case)?;
        Ok(Some(Interrupted { after, taken, end: self.ending()? }))
    }

    /// A page whose invalidation is put off, zero if there is none, in all runs to come.
    pub fn put_off(&self, page: u64) {
        vcpu_page().paging.deferred = page;
    }

    /// Where guest code has its own memory at a GVA.
    fn hva(&self, gva: u64) -> u64 {
        gva.wrapping_add(self.bias)
    }

    fn start(&mut self, case: &Case) {
        if !self.keeps {
            self.cache.clear(&mut View);
            self.fronts.clear();
        }
        for page in std::mem::take(&mut self.shown) {
            self.set_lookup(page, Lookup::default());
        }
        self.verify(0);
        // SAFETY: mapped for good; the child waits.
        unsafe {
            let text = bytes_at(self.hva(self.place.code), 4096);
            text.fill(0xcc);
            text[..case.code.len()].copy_from_slice(&case.code);
            let (kernel, user) = case.memory.split_at(DATA_LEN as usize);
            bytes_at(self.hva(self.place.data), kernel.len()).copy_from_slice(kernel);
            bytes_at(USER, user.len()).copy_from_slice(user);
        }
        self.prepare(case);
    }

    fn prepare(&self, case: &Case) {
        let page = vcpu_page();
        page.regs.gpr = case.gpr;
        page.regs.rip = self.place.code;
        [page.regs.es, page.regs.cs, page.regs.ss, page.regs.ds, page.regs.fs, page.regs.gs] =
            case.selectors.map(u64::from);
        ((page.regs.fs_base, page.regs.gs_base), page.regs.kernel_gs_base) =
            (case.bases(), case.kernel_gs_base);
        page.system.tsc_aux = case.tsc_aux;
        page.block.region_mask = 0x1ff << 39;
        page.block.user_region_mask = 0xff << 39;
        page.block.copy_index = 0x1ff << 12;
        page.system.vector_mask = xstate::SUPPORTED;
        page.block.lookup_masks =
            [wedge_abi::LOOKUP_INDEX, wedge_abi::LOOKUP_READS, wedge_abi::LOOKUP_WRITES];
        page.regs.interrupt_flag = case.rflags & flags::IF;
        page.regs.ac = case.rflags & flags::AC;
        page.block.host_flags = case.rflags & IN_HOST | 0x202;
        page.block.bias = self.bias;
        page.block.nowhere = NOWHERE;
        let base = self.place.base();
        page.block.percpu = if self.place.narrow { base } else { self.hva(base) };
        page.run.pending = case.pending.into();
        prepare_vectors(case);
    }

    fn go_on(&mut self, case: &Case) -> Result<()> {
        for _ in 0..MAX_BLOCKS {
            let Some(host) = self.block(case)? else { break };
            let page = vcpu_page();
            page.block.jump = host;
            page.block.host_flags &= !flags::TF;
            if mailbox().steps != NEVER {
                page.block.host_flags |= flags::TF;
                self.list_boundaries();
            }
            self.child_runs()?;
            self.resolve_places();
            // The first block was not let in.
            self.verify(VERSION.generation);
            while mailbox().signal == 0 && vcpu_page().exit.kind == BlockExit::Lookup as u64 {
                if !self.fill() {
                    return Ok(());
                }
                self.child_runs()?;
                self.resolve_places();
            }
            if mailbox().signal != 0 || vcpu_page().exit.kind != BlockExit::Miss as u64 {
                break;
            }
        }
        Ok(())
    }

    /// Fills the look-up that has missed, as the wedge does; false if the access is not allowed, or across pages.
    fn fill(&mut self) -> bool {
        let exit = &vcpu_page().exit;
        let (gva, bytes) = (exit.operand, exit.info & (LOOKUP_WRITE - 1));
        let (page, inside) = (gva & !0xfff, gva & 0xfff);
        let write = exit.info & LOOKUP_WRITE != 0;
        let Some((offset, writable)) = self.offset(page).filter(|_| inside + bytes <= 4096) else {
            return false;
        };
        if write && !writable {
            return false;
        }
        self.set_lookup(page, Lookup::new(page, SHOWN + offset, writable));
        self.shown.push(page);
        self.filled += 1;
        if mailbox().steps != NEVER {
            vcpu_page().block.host_flags |= flags::TF;
        }
        true
    }

    /// What the word of the page of code holds.
    fn verify(&self, generation: u32) {
        if self.layout.verified.is_some() {
            let at = VERIFIED + u64::from(VERSION.index) * 8;
            // SAFETY: mapped for good; the child waits.
            unsafe { *(at as *mut u64) = generation.into() };
        }
        if let Some(origins) = self.layout.origins {
            let at = origins + TEXT as u64 * 8;
            // SAFETY: as above.
            unsafe { *(at as *mut u64) = self.origin() };
        }
    }

    /// GVA of the origin of the text that the page of code belongs to.
    fn origin(&self) -> u64 {
        self.place.code.wrapping_sub(distance(TEXT_PLACE) as u64)
    }

    /// The address in the cache's key for the block at a GVA: the GVA itself, or its place.
    fn known_by(&self, gva: u64) -> u64 {
        let offset = gva.wrapping_sub(self.place.code);
        if self.layout.origins.is_some() { TEXT_PLACE.wrapping_add(offset) } else { gva }
    }

    /// The GVA of a place; what is no place stays.
    fn resolve(&self, word: u64) -> u64 {
        let at = |place| self.origin().wrapping_add(distance(place) as u64);
        if is_place(word) { at(word) } else { word }
    }

    /// Translated code has exited: addresses in place of places, as the wedge has them. Where a computed jump has led is an address.
    fn resolve_places(&self) {
        let page = vcpu_page();
        page.exit.next = self.resolve(page.exit.next);
        if page.exit.kind == BlockExit::Miss as u64 && page.exit.info == COMPUTED {
            page.exit.info = 0;
        } else {
            page.regs.rip = self.resolve(page.regs.rip);
        }
    }

    /// Has computed jumps to a GVA find a block, as the wedge does. Every other time, they find each other's.
    fn publish(&mut self, gva: u64, host: u64, variant: Variant) {
        if self.layout.origins.is_none() {
            return self.cache.publish(&mut View, gva, variant);
        }
        let front = host - FRONT_LEN;
        match self.fronts.iter().position(|(of, _)| *of == gva) {
            Some(_) => self.astray += 1,
            None => self.fronts.push((gva, front)),
        }
        let others = self.fronts.iter().cycle().skip(self.astray as usize % 2);
        for ((gva, _), (_, front)) in self.fronts.iter().zip(others) {
            let (key, value) = table_slot(*gva);
            View.write_table(value as u64, *front);
            View.write_table(key as u64, gva.wrapping_neg());
        }
    }

    /// Where a page lies in the memory that is shown, and whether it may be written.
    fn offset(&self, page: u64) -> Option<(u64, bool)> {
        let inside = |start: u64, len: u64| Some(page.wrapping_sub(start)).filter(|at| *at < len);
        let data = inside(self.place.data, DATA_LEN).map(|at| (4096 + at, true));
        let user = inside(USER, USER_LEN).filter(|_| self.place.level == Level::User);
        let user = user.map(|at| (4096 + DATA_LEN + at, true));
        inside(self.place.code, 4096).map(|at| (at, false)).or(data).or(user)
    }

    fn set_lookup(&self, page: u64, lookup: Lookup) {
        let at = LOOKUPS + (lookup_slot(page) * size_of::<Lookup>()) as u64;
        // SAFETY: the table is mapped for good; the child waits.
        unsafe { *(at as *mut Lookup) = lookup };
    }

    /// Tells the child where the engine takes interrupts.
    fn list_boundaries(&self) {
        let (_, used) = self.cache.size();
        let all = LAYOUT.cache + jit::stubs::LEN..LAYOUT.cache + used;
        let boundaries = all.filter(|pc| self.is_boundary(*pc));
        let t = mailbox();
        t.boundary_count = 0;
        for (slot, pc) in t.boundaries.iter_mut().zip(boundaries) {
            *slot = pc;
            t.boundary_count += 1;
        }
    }

    fn is_boundary(&self, pc: u64) -> bool {
        // SAFETY: the cache is mapped for good, and more than two bytes longer than what is in use.
        let code = unsafe { *(pc as *const [u8; 2]) };
        self.cache.position(pc).is_some_and(|found| found.is_boundary(code))
    }

    /// The block at RIP, if that lies in the case's code.
    fn block(&mut self, case: &Case) -> Result<Option<u64>> {
        let (rip, alignment) = (vcpu_page().regs.rip, vcpu_page().regs.ac != 0);
        let version = self.layout.verified.map(|_| VERSION);
        let variant = version.map_or(alignment.into(), |of| Variant::of_page(of.index));
        let known_by = self.known_by(rip);
        if let Some(host) = self.cache.find(known_by, variant) {
            self.publish(rip, host, variant);
            return Ok(Some(host));
        }
        let Some(bytes) = case.code.get(rip.wrapping_sub(self.place.code) as usize..) else {
            return Ok(None);
        };
        if bytes.is_empty() {
            return Ok(None);
        }
        let narrow = self.place.narrow;
        let sought = self.sought;
        let how = How { ac: alignment, version, narrow, sought, ..How::default() };
        let made = self.cache.add(&mut View, known_by, bytes, bytes.len(), how, [0; 2]);
        let host = made.map_err(|refused| anyhow::anyhow!("not translated: {refused:?}"))?;
        if self.layout.origins.is_some() {
            self.publish(rip, host, variant);
        }
        Ok(Some(host))
    }

    fn child_runs(&mut self) -> Result<()> {
        let mut byte = [1u8];
        // SAFETY: pipes of ours, one byte.
        let ok = unsafe {
            libc::write(self.to_child, byte.as_ptr().cast(), 1) == 1
                && libc::read(self.from_child, byte.as_mut_ptr().cast(), 1) == 1
        };
        ensure!(ok, "the child process is gone");
        Ok(())
    }

    fn ending(&self) -> Result<Ending> {
        let (page, mailbox) = (vcpu_page(), mailbox());
        let mut gpr = page.regs.gpr;
        let mut rip = page.regs.rip;
        if mailbox.signal != 0 {
            let position =
                self.cache.position(mailbox.pc).context("a fault outside every block")?;
            position.mark.fixes.apply(&mut gpr, &page.block.spill, self.bias);
            rip = self.resolve(position.guest);
        }
        let rflags = page.block.host_flags & IN_HOST
            | page.regs.interrupt_flag
            | page.regs.ac
            | flags::FIXED;
        let mut xmm = [[0; 16]; 16];
        for (register, bytes) in xmm.iter_mut().zip(mailbox.guest_fx[160..].chunks_exact(16)) {
            register.copy_from_slice(bytes);
        }
        // SAFETY: mapped for good; the child waits.
        let memory = unsafe {
            let kernel = bytes_at(self.hva(self.place.data), DATA_LEN as usize);
            [&*kernel, bytes_at(USER, USER_LEN as usize)].concat()
        };
        let bases = [page.regs.fs_base, page.regs.gs_base, page.regs.kernel_gs_base];
        let fault = mailbox.signal != 0;
        let window = !fault && page.exit.kind == BlockExit::InterruptWindow as u64;
        Ok(Ending { fault, window, rip, gpr, rflags, xmm, memory, bases })
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // SAFETY: our own child.
        unsafe {
            libc::kill(self.child, libc::SIGKILL);
            libc::waitpid(self.child, ptr::null_mut(), 0);
        }
    }
}

/// The kernel's addresses get the bias, the user's none.
fn fill_regions() {
    for region in 0..512 {
        let bias = if region < 256 { 0 } else { LAYOUT.bias };
        // SAFETY: the table is mapped for good, and the child is not there yet.
        unsafe { bytes_at(LAYOUT.regions + region * 8, 8) }.copy_from_slice(&bias.to_le_bytes());
    }
}

fn prepare_vectors(case: &Case) {
    let t = mailbox();
    (t.signal, t.steps, t.stepped, t.last, t.interrupted) = (0, NEVER, 0, 0, 0);
    t.guest_fx = [0; 512];
    t.guest_fx[0..2].copy_from_slice(&0x37fu16.to_le_bytes());
    t.guest_fx[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
    for (register, bytes) in case.xmm.iter().zip(t.guest_fx[160..].chunks_exact_mut(16)) {
        bytes.copy_from_slice(register);
    }
}

fn pipe() -> Result<(i32, i32)> {
    let mut ends = [0; 2];
    // SAFETY: two descriptors into an array of two.
    ensure!(unsafe { libc::pipe(ends.as_mut_ptr()) } == 0, "no pipe");
    Ok((ends[0], ends[1]))
}
