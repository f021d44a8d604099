//! Translated code of programs: which page of RAM a block is of, and what wedges are told of it.

use super::{Code, PAGE, offset};
use jit::{
    Level, Version,
    cache::{CodeMemory, Position, Variant},
    recover::Bias,
};
use ram::Ram;
use wedge::Pages;
use wedge_abi::{CODE_PAGE_WORDS, FAULTS, FaultState, KERNEL_FAULTS, code_page, fault_slot};
use x86::paging::Roots;

impl Code {
    /// Forgets the pages that programs' code was made from, and what wedges have been told of it.
    pub(super) fn forget_programs(&mut self, pages: &mut Pages) {
        self.versions.clear(&mut self.memory);
        pages.told().code_pages = [0; CODE_PAGE_WORDS];
        pages.told().code_generation = self.versions.generation.into();
    }

    /// Which of the blocks at a GVA belongs to the address space with these page tables. `None` if nothing may be executed at the GVA.
    pub(super) fn variant(
        &mut self,
        pages: &mut Pages,
        ram: &Ram,
        roots: Roots,
        (guest, ac): (u64, bool),
    ) -> Option<Variant> {
        if self.layout.level == Level::Kernel {
            return Some(ac.into());
        }
        let offset = offset(ram, roots, guest, self.access())? & !(PAGE - 1);
        if !self.versions.have_room() {
            self.clear(pages);
        }
        self.versions.index(&mut self.memory, guest, offset).map(Variant::of_page)
    }

    /// The second page of the block at an HVA is the one that these page tables have behind the first, or the block has no second
    /// page. A block with another page is dropped.
    pub(super) fn is_whole(&mut self, ram: &Ram, roots: Roots, host: u64) -> bool {
        let Some(source) = self.cache.source(host).filter(|_| self.layout.level == Level::User)
        else {
            return true;
        };
        let [first, second] = source.pages;
        let behind = (source.guest & !(PAGE - 1)).wrapping_add(PAGE);
        let whole = first == second || offset(ram, roots, behind, self.access()) == Some(second);
        if !whole {
            self.cache.drop_at(&mut self.memory, host);
        }
        whole
    }

    /// The indices of the pages that the block of user code at an HVA is of.
    pub fn versions_of(&mut self, host: u64) -> [Option<u32>; 2] {
        let Some(source) = self.cache.source(host) else { return [None; 2] };
        let page = source.guest & !(PAGE - 1);
        let [first, second] = source.pages;
        let behind = (first != second).then(|| (page.wrapping_add(PAGE), second));
        [Some((page, first)), behind].map(|page| {
            page.and_then(|(gva, offset)| self.versions.index(&mut self.memory, gva, offset))
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
        let variant = self.variant(pages, ram, roots, target);
        variant.is_some_and(|variant| self.cache.find(target.0, variant).is_none())
    }

    /// The pages, by their indices, of which a block at a GVA asks whether they may be executed.
    pub(super) fn version_of(&mut self, guest: u64, sources: [u64; 2]) -> Option<Version> {
        if self.layout.level == Level::Kernel {
            return None;
        }
        let behind = (guest & !(PAGE - 1)).wrapping_add(PAGE);
        let [first, second] = sources;
        let mut index = |gva, offset| self.versions.index(&mut self.memory, gva, offset);
        let (index, second) =
            (index(guest, first)?, (second != first).then(|| index(behind, second)).flatten());
        Some(Version { index, second, generation: self.versions.generation })
    }

    /// Tells wedges that user code has been made from the page of a GVA.
    pub(super) fn tell_of_page(&self, pages: &mut Pages, gva: u64) {
        let (word, bit) = code_page(gva);
        if pages.vcpu_page().told.code_pages[word] >> bit & 1 == 0 {
            pages.told().code_pages[word] |= 1 << bit;
        }
    }

    /// Code has faulted at a host PC: wedges are told how to find the guest's state when that happens again. Other vCPUs may be
    /// reading the table, so an entry is not replaced by that of another PC.
    pub fn tell_fault_state(&mut self, pc: u64, position: &Position) {
        let fixes = &position.mark.fixes;
        let moved = [fixes.rdi, fixes.rsi]
            .iter()
            .flatten()
            .any(|by| self.layout.level == Level::Kernel || *by != Bias::Fixed);
        let [first, second, third, None] = fixes.spilled else { return };
        if moved || !self.told_faults.insert(fault_slot(pc)) {
            return;
        }
        let state = FaultState { rip: position.guest, spilled: [first, second, third] };
        let at = self.fault_at(fault_slot(pc));
        self.memory.write_table(at + 8, state.to_word());
        self.memory.write_table(at, pc);
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
