//! The translated code that a vCPU executes: the kernel's, which is its machine's, and the user's, which is its own.

use crate::{
    Modes, User,
    code::{self, Code, CodeKind, NoBlock, Operands},
    machine::{Share, Translation},
    shadow::Role,
};
use contract::{TranslatedCode, VcpuEvent};
use engine::Board;
use jit::{
    Level,
    cache::{CacheCounters, Position, Source},
};
use ram::Ram;
use rustc_hash::{FxBuildHasher, FxHashMap};
use std::{hash::BuildHasher, sync::Arc};
use wedge::Pages;
use wedge_abi::{Base, STUBS, TextPage, USER_CACHE, placed_key, version_key};
use x86::{
    Vcpu,
    paging::{Access, Roots},
    reg,
};
use x86_interp::{GuestRam, Probes, Record};

/// The kernel's code and, if user code is translated, that of programs.
pub struct VcpuCode {
    kernel: Share,
    user: Option<Code>,
    /// No block has one of these breakpoints in it.
    probes: Probes,
    /// Memory operands of user code are looked up.
    look_up: bool,
    /// User code is for places, not for addresses.
    placed: bool,
    /// User code is a 32-bit guest's: for addresses, and its memory operands are where the host has them mapped.
    narrow: bool,
    /// Of each page of user code how many new processes have needed that page first.
    firsts: FxHashMap<First, u8>,
}

/// A page of user code, by [`placed_key`] or [`version_key`], and the name of the program that needs that page first.
type First = (u64, Option<u64>);

/// So many processes save together, by translation, what it takes to translate the program's start.
const OFTEN: u8 = 8;
/// The most bytes of a program's name.
const NAME: usize = 128;
const PAGE: u64 = 4096;
/// So many pages that new processes have needed first are kept in mind.
const MAX_FIRSTS: usize = 1 << 14;

/// A code cache of a vCPU's own for its user code.
fn user_code(pages: &Pages, look_up: bool, placed: bool) -> Code {
    let operands = match (look_up, pages.keys()) {
        (false, _) => Operands::Mapped,
        (true, false) => Operands::LookedUp,
        (true, true) => Operands::Checked,
    };
    let kind = CodeKind::user(operands, placed);
    Code::new(Arc::clone(pages.user()), pages.base(), kind, Arc::default())
}

impl VcpuCode {
    /// With the kernel's code of the pages, and none of the user's yet. Where user code runs directly, its translations will look memory
    /// operands up. They will be for places, unless the options want them for addresses.
    pub(crate) fn new(pages: &Pages, ram: &Ram, kernel: Arc<Translation>, modes: &Modes) -> Self {
        let translated = modes.user == User::Translated;
        Self {
            kernel: Share::new(kernel, ram),
            user: translated.then(|| user_code(pages, false, false)),
            probes: Probes::default(),
            look_up: !translated,
            placed: !translated && !modes.options.fixed_programs,
            narrow: false,
            firsts: FxHashMap::default(),
        }
    }

    /// Takes up another translation, which the pages have. What is made from now on goes over no breakpoint either.
    pub(crate) fn begin_again(
        &mut self,
        pages: &mut Pages,
        ram: &Ram,
        kernel: Arc<Translation>,
        modes: &Modes,
    ) {
        let probes = std::mem::take(&mut self.probes);
        *self = Self::new(pages, ram, kernel, modes);
        self.set_probes(pages, &probes);
    }

    /// The machine's part of the kernel's code.
    pub(crate) fn share(&mut self) -> &mut Share {
        &mut self.kernel
    }

    /// From now on no block of either level goes over these breakpoints. Those of the kernel's code may be taps.
    pub fn set_probes(&mut self, pages: &mut Pages, probes: &Probes) {
        self.probes = probes.clone();
        let user = self.kernel.user;
        self.kernel.lock().set_probes(user, probes);
        let plain = probes.without_taps();
        self.user.iter_mut().for_each(|code| code.set_probes(user, &plain));
        let has_code = |code: &&mut Code| code.cache.size().0 != 0;
        if self.has_probes_at_places() {
            self.user.iter_mut().filter(has_code).for_each(|code| code.clear(pages));
        }
    }

    /// Programs have breakpoints, and their code is for places, of which a breakpoint's is not known. So no translated code of programs
    /// may run.
    pub fn has_probes_at_places(&self) -> bool {
        self.placed && self.probes.pages().into_iter().any(|page| page >> 63 == 0)
    }

    /// This vCPU has a tap at a GVA.
    pub fn has_tap(&self, gva: u64) -> bool {
        self.probes.tap(gva).is_some()
    }

    /// Does something with a level's code, if it is translated.
    pub fn with<T>(&mut self, level: Level, what: impl FnOnce(&mut Code) -> T) -> Option<T> {
        match level {
            Level::Kernel => Some(what(&mut self.kernel.lock())),
            Level::User => self.user.as_mut().map(what),
        }
    }

    /// Does something with all there is.
    pub fn each(&mut self, mut what: impl FnMut(&mut Code)) {
        what(&mut self.kernel.lock());
        self.user.iter_mut().for_each(what);
    }

    /// Kernel code has been translated from no page at this GVA or beyond.
    pub fn end_of_kernel(&self) -> u64 {
        self.kernel.lock().end()
    }

    /// HVA of the block of a level at a GVA, for a value of RFLAGS.AC; see [`Code::block`].
    pub fn block(
        &mut self,
        pages: &mut Pages,
        board: &Board,
        roots: Roots,
        (level, guest, ac): (Level, u64, bool),
        marked: &mut Vec<u64>,
    ) -> Result<u64, NoBlock> {
        let user = self.kernel.user;
        let block = |code: &mut Code| {
            let before = code.cache.counters.translated;
            let block = code.block(pages, board, roots, (guest, ac), user, marked);
            (block, code.cache.counters.translated - before)
        };
        let (block, blocks) = self.with(level, block).unwrap_or((Err(NoBlock::Interpret), 0));
        if blocks != 0 {
            board.tell(VcpuEvent::Translate { gva: guest, blocks });
        }
        block
    }

    /// What has happened to the kernel's code, by name; told by one of those who share it.
    pub fn rows(&self) -> [(&'static str, u64); 5] {
        let first = self.kernel.user.is_first();
        let counters =
            if first { self.kernel.lock().cache.counters } else { CacheCounters::default() };
        [
            ("blocks translated", counters.translated),
            ("known blocks woken", counters.woken),
            ("jumps linked", counters.linked),
            ("translations dropped", counters.dropped),
            ("cache clearings", counters.cleared),
        ]
    }

    /// The kernel's blocks, with those that have been dropped and may be executed yet.
    pub fn translated(&self) -> Vec<TranslatedCode> {
        let kernel = self.kernel.lock();
        let code = |(hva, offset, source): (u64, u64, Source)| TranslatedCode {
            gva: source.guest,
            hva,
            offset,
            len: source.host_len.into(),
        };
        kernel.cache.sources().map(code).collect()
    }

    /// User code comes next, translated.
    pub fn enter_user(&mut self, pages: &mut Pages, narrow: bool) {
        if self.narrow != narrow {
            (self.narrow, self.user) = (narrow, None);
        }
        let (look_up, placed) = (self.look_up && !narrow, self.placed && !narrow);
        let (probes, whose) = (&self.probes, self.kernel.user);
        let user = self.user.get_or_insert_with(|| {
            let mut new = user_code(pages, look_up, placed);
            new.set_probes(whose, &probes.without_taps());
            new
        });
        let generation = user.versions.generation.into();
        let told = &pages.vcpu_page().told;
        if (told.code_generation, told.placed) != (generation, placed.into()) {
            (pages.told().code_generation, pages.told().placed) = (generation, placed.into());
        }
    }

    /// More than [`OFTEN`] new processes have begun in the page of user code that this process is in, at the same address if code is for
    /// addresses. If this process is a program, only programs of the same name count: nearly all begin in the dynamic linker. `None` if the
    /// page is not there.
    pub fn has_seen_often(&mut self, ram: &Ram, vcpu: &Vcpu, role: Role) -> Option<bool> {
        let roots = Roots::from(vcpu);
        let access = Access { write: false, fetch: true, user: true, smap_override: false };
        let offset = code::offset(ram, roots, vcpu.rip, access)?;
        if self.firsts.len() >= MAX_FIRSTS {
            self.firsts.clear();
        }
        let page = if self.placed { placed_key(offset) } else { version_key(vcpu.rip, offset) };
        let name = (role == Role::Program).then(|| name_of(ram, roots, vcpu.gpr[reg::RSP]));
        let times = self.firsts.entry((page, name.flatten())).or_default();
        *times = times.saturating_add((role != Role::Parent).into());
        Some(*times > OFTEN)
    }

    /// The pages that the block of user code at a GVA and an HVA was made from, each with the page's GVA. And what the words of pages hold
    /// that have been verified.
    pub fn code_pages_of(&mut self, block: (u64, u64)) -> ([Option<(TextPage, u64)>; 2], u64) {
        let of = |user: &mut Code| (user.code_pages_of(block), user.versions.generation.into());
        self.user.as_mut().map(of).unwrap_or_default()
    }

    /// Code has faulted at a host PC, and the guest takes the fault. Each process that is
    /// forked does so at the same places.
    pub fn tell_fault_state(&mut self, level: Level, pc: u64) {
        self.with(level, |code| code.tell_fault_state(pc));
    }

    /// The guest instruction that a host PC belongs to, at a GVA or a place.
    pub fn position(&self, base: Base, pc: u64) -> Option<Position> {
        if !(base.at(wedge_abi::CACHE as u64)..base.at(STUBS as u64)).contains(&pc) {
            return None;
        }
        if is_user(base, pc) {
            return self.user.as_ref().and_then(|user| user.position(pc));
        }
        self.kernel.lock().position(pc)
    }

    /// A host PC lies in the routines that leave translated code.
    pub fn is_exit(&self, pc: u64) -> bool {
        self.kernel.lock().is_exit(pc) || self.user.as_ref().is_some_and(|user| user.is_exit(pc))
    }

    /// Kernel code can be at a GVA.
    pub fn is_kernels(&self, guest: u64) -> bool {
        self.kernel.lock().covers(guest)
    }

    /// Kernel code at a GVA has faulted at a device.
    pub fn note_device(&mut self, guest: u64) {
        let mut kernel = self.kernel.lock();
        if kernel.devices.note_fault(guest) {
            kernel.forget_page(guest);
        }
    }

    /// Kernel code at a GVA has been interpreted, and has accessed no device.
    pub fn note_memory(&mut self, guest: u64) {
        let mut kernel = self.kernel.lock();
        if kernel.devices.leaves_out(guest) {
            kernel.devices.note_memory(guest);
        }
    }

    /// Kernel code at a GVA has faulted in a page that is mapped only for a moment.
    pub fn note_fleeting(&mut self, guest: u64) {
        self.kernel.lock().note_fleeting(guest);
    }

    /// Drops what the interpreter has reported stale.
    pub fn apply(&mut self, ram: &Ram, roots: Roots, record: &Record) {
        if !record.stale_pages.is_empty() || !record.flushes.is_empty() {
            let user = self.kernel.user;
            self.each(|code| code.apply(ram, roots, user, record));
        }
    }
}

/// A digest of a program's first argument, by which programs are told apart. The program has been loaded and has not run, and `stack` is
/// its stack pointer (System V ABI, AMD64, 3.4.1).
fn name_of(ram: &Ram, roots: Roots, stack: u64) -> Option<u64> {
    let word = |at: u64| {
        let mut bytes = [0; 8];
        read_user(ram, roots, at, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    };
    let mut name = [0; NAME];
    read_user(ram, roots, word(stack.wrapping_add(8))?, &mut name)?;
    let len = name.iter().position(|byte| *byte == 0)?;
    Some(FxBuildHasher.hash_one(&name[..len]))
}

/// Reads the bytes at a GVA of a program's, up to the end of its page. `None` if they are not there.
fn read_user(ram: &Ram, roots: Roots, gva: u64, bytes: &mut [u8]) -> Option<()> {
    let access = Access { write: false, fetch: false, user: true, smap_override: false };
    let offset = code::offset(ram, roots, gva, access)?;
    let here = bytes.len().min((PAGE - gva % PAGE) as usize);
    ram.read(offset, &mut bytes[..here]);
    Some(())
}

fn is_user(base: Base, pc: u64) -> bool {
    (base.at(USER_CACHE as u64)..base.at(STUBS as u64)).contains(&pc)
}

/// What translated code at a host PC adds to addresses.
pub fn bias_at(base: Base, pc: u64) -> u64 {
    if is_user(base, pc) { 0 } else { base.bias() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::paging::{P, RW, US};

    const STACK: u64 = 0x7000;

    /// A program's stack at the GVA and RAM offset [`STACK`]: one argument, at a GVA. At `name` lies what the offset 0x8ff0 has.
    fn digest(arguments: u64, name: u64, bytes: &[u8]) -> Option<u64> {
        let ram = Ram::new(2 << 20).expect("memory");
        let leaf = |gva: u64| (0x4000 + (gva >> 12) * 8, gva | P | RW | US);
        let tables = [(0x1000, 0x2000), (0x2000, 0x3000), (0x3000, 0x4000)];
        let tables = tables.map(|(at, next)| (at, next | P | RW | US));
        for (at, entry) in tables.into_iter().chain([leaf(STACK), leaf(0x8000)]) {
            ram.store64(at, entry);
        }
        ram.store64(STACK, arguments);
        ram.store64(STACK + 8, name);
        ram.write(0x8ff0, bytes);
        name_of(&ram, Roots::from(&crate::test_machine::kernel_state(0, 0)), STACK)
    }

    #[test]
    fn programs_are_told_apart_by_their_first_argument() {
        let name = |bytes| digest(1, 0x8ff0, bytes);
        let cat = name(b"cat\0");
        assert!(cat.is_some() && cat != name(b"car\0"));
        assert_eq!(cat, name(b"cat\0beside"));
        assert_eq!(cat, digest(2, 0x8ff1, b"1cat\0"), "wherever it lies");
        assert!(name(b"it ends the page").is_some(), "and goes on behind");
        assert_eq!([digest(1, 0x9000, b"cat\0"), digest(0, 0, b"")], [None; 2], "no memory");
    }
}
