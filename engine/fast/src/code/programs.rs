//! Translated code of programs: which page of RAM a block is of, at which place, and what wedges are told of it.

use super::{Code, PAGE, offset};
use jit::{
    Level, Version,
    cache::{CodeMemory, Position, Variant},
    recover::Bias,
};
use ram::Ram;
use wedge::Pages;
use wedge_abi::{
    FAULTS, FaultState, KERNEL_FAULTS, KernelFaultState, STRING_BIASES, TextPage, fault_slot,
};
use x86::paging::Roots;

impl Code {
    /// Forgets the pages that programs' code was made from, and what wedges have been told of it.
    pub(super) fn forget_programs(&mut self, pages: &mut Pages) {
        self.versions.clear(&mut self.memory);
        pages.told().code_generation = self.versions.generation.into();
    }

    /// The cache's key for the block at a GVA in the address space with these page tables. `None` if nothing may be executed there.
    pub(super) fn key(
        &mut self,
        pages: &mut Pages,
        ram: &Ram,
        roots: Roots,
        (guest, ac): (u64, bool),
    ) -> Option<(u64, Variant)> {
        if self.layout.level == Level::Kernel {
            return Some((guest, ac.into()));
        }
        let offset = offset(ram, roots, guest, self.access())? & !(PAGE - 1);
        if !self.versions.have_room() {
            self.clear(pages);
        }
        let page = self.code_page(ram, roots, guest, offset)?;
        Some((page.place | guest & (PAGE - 1), Variant::of_page(page.index)))
    }

    /// The page of user code at a GVA, which has this RAM offset.
    fn code_page(&mut self, ram: &Ram, roots: Roots, gva: u64, page: u64) -> Option<TextPage> {
        let access = self.access();
        let near = |gva: u64| offset(ram, roots, gva, access);
        self.versions.page(&mut self.memory, gva, page, near)
    }

    /// Gives the page of user code at a GVA to another text, or to one of its own: in the address space with these page tables its text
    /// lies elsewhere. False if there is nothing to move.
    pub fn move_away(&mut self, ram: &Ram, roots: Roots, gva: u64, alone: bool) -> bool {
        let access = self.access();
        let near = |gva: u64| offset(ram, roots, gva, access);
        let Some(offset) = near(gva & !(PAGE - 1)) else { return false };
        self.versions.move_away(&mut self.memory, (gva, offset), alone, near)
    }

    /// Whether a block of user code (its GVA and HVA) has the right second page, or none: the page that these page tables have behind its first
    /// one. A block with another second page is dropped.
    pub(super) fn is_whole(&mut self, ram: &Ram, roots: Roots, (gva, host): (u64, u64)) -> bool {
        let Some(source) = self.cache.source(host).filter(|_| self.layout.level == Level::User)
        else {
            return true;
        };
        let [first, second] = source.pages;
        let behind = (gva & !(PAGE - 1)).wrapping_add(PAGE);
        let whole = first == second || offset(ram, roots, behind, self.access()) == Some(second);
        if !whole {
            self.cache.drop_at(&mut self.memory, host);
        }
        whole
    }

    /// The pages that the block of user code at a GVA and an HVA was made from, each with the page's GVA.
    pub fn code_pages_of(&mut self, (gva, host): (u64, u64)) -> [Option<(TextPage, u64)>; 2] {
        let Some(source) = self.cache.source(host) else { return [None; 2] };
        let (place, gva) = (source.guest & !(PAGE - 1), gva & !(PAGE - 1));
        let [first, second] = source.pages;
        let behind = (first != second).then_some((PAGE, second));
        [Some((0, first)), behind].map(|page| {
            let (by, offset) = page?;
            let page = self.versions.page_of(&mut self.memory, place.wrapping_add(by), offset)?;
            Some((page, gva.wrapping_add(by)))
        })
    }

    /// Something may be executed at a GVA, for a value of the virtual AC, that there is no block of.
    pub(super) fn is_new(
        &mut self,
        pages: &mut Pages,
        ram: &Ram,
        roots: Roots,
        target: (u64, bool),
    ) -> bool {
        let key = self.key(pages, ram, roots, target);
        key.is_some_and(|(guest, variant)| self.cache.find(guest, variant).is_none())
    }

    /// The address in the cache's key for a new block at a GVA, and the pages that the block asks about, which are these pages of RAM.
    /// `None` if there are as many pages as can be.
    pub(super) fn version_of(
        &mut self,
        ram: &Ram,
        roots: Roots,
        guest: u64,
        [first, second]: [u64; 2],
    ) -> Option<(u64, Option<Version>)> {
        if self.layout.level == Level::Kernel {
            return Some((guest, None));
        }
        let page = self.code_page(ram, roots, guest, first)?;
        let mut version =
            Version { index: page.index, second: None, generation: self.versions.generation };
        if second != first {
            let behind = page.place.wrapping_add(PAGE);
            version.second = Some(self.versions.page_of(&mut self.memory, behind, second)?.index);
        }
        Some((page.place | guest & (PAGE - 1), Some(version)))
    }

    /// Where the newest block leads for certain, as GVAs with the virtual RFLAGS.AC. `gva` is the block's own.
    pub(super) fn ahead(&self, gva: u64) -> Vec<(u64, bool)> {
        let by = gva.wrapping_sub(self.cache.newest().guest);
        self.cache.ahead().iter().map(|(to, ac)| (to.wrapping_add(by), *ac)).collect()
    }

    /// Code has faulted at a host PC: wedges are told how to find the guest's state when that happens again. Other vCPUs may be
    /// reading the table, so an entry is not replaced by that of another PC.
    pub fn tell_fault_state(&mut self, pc: u64) {
        let Some(position) = self.cache.position(pc) else { return };
        let Some(word) = self.fault_word(&position) else { return };
        if self.told_faults.insert(fault_slot(pc)) {
            let at = self.fault_at(fault_slot(pc));
            self.memory.write_table(at + 8, word);
            self.memory.write_table(at, pc);
        }
    }

    /// The state at the start of the instruction at a position, as a word for wedges. `None` if it has no room there.
    fn fault_word(&self, position: &Position) -> Option<u64> {
        let fixes = &position.mark.fixes;
        let [first, second, third, None] = fixes.spilled else { return None };
        let state = FaultState { rip: position.guest, spilled: [first, second, third] };
        let biases = [fixes.rsi, fixes.rdi];
        if self.layout.level == Level::User {
            // What is fixed is zero.
            let stay = biases.iter().all(|by| matches!(by, None | Some(Bias::Fixed)));
            return stay.then(|| state.to_word());
        }
        let is_usual =
            |(by, register): (Option<Bias>, u8)| by.is_none_or(|by| by == Bias::Register(register));
        let usual = biases.into_iter().zip(STRING_BIASES).all(is_usual);
        let moved = biases.map(|by| by.is_some());
        usual.then(|| KernelFaultState { state, moved }.to_word())
    }

    /// Offset of a slot of the wedges' table of faults.
    fn fault_at(&self, slot: usize) -> u64 {
        let table = if self.layout.level == Level::Kernel { KERNEL_FAULTS } else { FAULTS };
        (table + slot * 16) as u64
    }

    /// Empties the wedges' table of faults. Nobody may be executing the code.
    pub(super) fn forget_faults(&mut self) {
        for slot in std::mem::take(&mut self.told_faults) {
            self.memory.write_table(self.fault_at(slot), 0);
        }
    }
}
