//! Blocks that an earlier machine has run: they are there from the start, and wake page by page.

use super::{Code, NEAR_END, PAGE};
use engine::Board;
use jit::cache::kept::{MadeBlock, Sleeper, Sleeping};
use x86::paging::Roots;
use x86_interp::System;

/// A page of RAM, and what is in it.
type Page = (u64, Vec<u8>);

/// The guest's bytes that blocks are compared with.
struct Compared<'a> {
    board: &'a Board,
    roots: Roots,
    /// The GVA of the page.
    gva: u64,
    page: Page,
    /// The next page, once a block has needed it: `Some(None)` if there is no RAM.
    behind: Option<Option<Page>>,
    /// No block has been made of the page.
    fresh: bool,
}

impl Code {
    /// HVA of the block at a GVA for a value of RFLAGS.AC, if an earlier machine has made the block and it can wake. The first request
    /// for a page wakes the page's blocks that were made after as many drops; so does the first one after each further drop.
    pub(super) fn woken(
        &mut self,
        board: &Board,
        roots: Roots,
        (guest, ac): (u64, bool),
        marked: &mut Vec<u64>,
    ) -> Option<u64> {
        if !self.cache.has_sleepers() {
            return None;
        }
        let page = guest & !(PAGE - 1);
        let drops = self.pages.get(&page).map_or(0, |offset| self.cache.drops(*offset));
        if self.done.insert((page, drops))
            && let Some(group) = self.cache.sleeping(page, drops)
        {
            self.wake(board, roots, page, &group, marked);
        }
        if let Some(host) = self.cache.find(guest, ac) {
            return Some(host);
        }
        let group = self.group_of(board, roots, (guest, ac), marked)?;
        self.wake(board, roots, page, &group, marked);
        self.cache.find(guest, ac)
    }

    /// Looks for a sleeping block of the GVA `guest` that was made from the bytes that the guest has there. Returns the block's group.
    fn group_of(
        &mut self,
        board: &Board,
        roots: Roots,
        (guest, ac): (u64, bool),
        marked: &mut Vec<u64>,
    ) -> Option<Sleeping> {
        let sleepers = self.cache.sleepers_at(guest, ac);
        sleepers.first()?;
        let (_, bytes) = self.fetch(board, roots, guest, NEAR_END, marked)?;
        let same = |sleeper: Sleeper| {
            let made = self.cache.made_from(sleeper);
            made.is_some_and(|made| bytes.starts_with(made.bytes))
        };
        sleepers.into_iter().find(|(sleeper, _)| same(*sleeper)).map(|(_, group)| group)
    }

    /// Wakes those blocks of a group of the page at a GVA that can be.
    fn wake(
        &mut self,
        board: &Board,
        roots: Roots,
        gva: u64,
        group: &Sleeping,
        marked: &mut Vec<u64>,
    ) {
        self.cache.writes = board.ram().code_writes();
        let Some(page) = self.fetch(board, roots, gva, PAGE, marked) else { return };
        let fresh = !self.cache.has_code_of(page.0);
        let mut with = Compared { board, roots, gva, page, behind: None, fresh };
        let pages = |sleeper| Some((sleeper, self.can_wake(sleeper, &mut with, marked)?));
        let blocks: Vec<_> = group.all().filter_map(pages).collect();
        self.cache.wake(&mut self.memory, group, &blocks);
        // Nearly all of a group lie in the page alone.
        let mut pages: Vec<_> = blocks.into_iter().map(|(_, pages)| pages).collect();
        pages.dedup();
        pages.into_iter().for_each(|pages| self.note_pages(board, roots, gva, pages));
    }

    /// The RAM pages that a block lies in, if the guest has the bytes there that it was made from and nothing else speaks against it.
    fn can_wake(
        &mut self,
        sleeper: Sleeper,
        with: &mut Compared<'_>,
        marked: &mut Vec<u64>,
    ) -> Option<[u64; 2]> {
        let made = self.cache.made_from(sleeper)?;
        let rest = &with.page.1[(made.guest - with.gva) as usize..];
        let (here, behind) = made.bytes.split_at(rest.len().min(made.bytes.len()));
        let is_new = with.fresh || self.cache.find(made.guest, made.ac).is_none();
        if !is_new || !rest.starts_with(here) || !self.runs_unwatched(&made) {
            return None;
        }
        let first = with.page.0;
        if behind.is_empty() {
            return Some([first; 2]);
        }
        let behind = behind.to_vec();
        let next = with.gva.wrapping_add(PAGE);
        let fetch = || self.fetch(with.board, with.roots, next, PAGE, marked);
        let (second, bytes) = with.behind.get_or_insert_with(fetch).as_ref()?;
        bytes.starts_with(&behind).then_some([first, *second])
    }

    /// Nothing within a block is interpreted, stopped at or recorded.
    fn runs_unwatched(&self, made: &MadeBlock<'_>) -> bool {
        let (guest, len) = (made.guest, made.bytes.len());
        let last = guest.saturating_add(len.saturating_sub(1) as u64);
        self.devices.before(guest, len) >= made.len
            && self.breakpoints.at(guest).is_none()
            && self.breakpoints.first_behind(guest, last).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        KnownBlocks,
        code::{CodeKind, layout, tests::endless},
        translate_noted,
    };
    use jit::cache::CodeUser;
    use std::sync::Arc;
    use wedge::Pages;
    use wedge_abi::Base;
    use x86::paging::{P, RW};
    use x86_interp::{GuestRam, Probes};

    const A: u64 = 0xffff_ffff_8100_0000;
    /// An address in the page, and RFLAGS.AC.
    type Block = (u64, bool);

    /// A vCPU that executes what lies in a page that the whole of the upper half is.
    struct Vcpu {
        board: Board,
        roots: Roots,
        pages: Pages,
        code: Code,
        user: CodeUser,
    }

    impl Vcpu {
        fn new(bytes: &[u8], known: &Arc<KnownBlocks>) -> Self {
            let (ram, roots) = endless(bytes);
            let board = crate::test_machine::board(ram, Default::default());
            let pages = Pages::new().expect("the host has memory");
            let (area, kind) = (Arc::clone(pages.kernel()), CodeKind::kernel(false));
            let mut code = Code::new(area, pages.base(), kind, Arc::clone(known));
            let user = code.cache.add_user();
            Self { board, roots, pages, code, user }
        }

        /// Asks for blocks; says for each how many were translated for it and how many woke.
        fn asks(&mut self, blocks: &[Block]) -> Vec<(u64, u64)> {
            let counters = |code: &Code| code.cache.counters;
            let mut ask = |(at, ac): &Block| {
                let before = counters(&self.code);
                let Self { pages, board, roots, code, user } = self;
                let block = code.block(pages, board, *roots, (A + at, *ac), *user, &mut Vec::new());
                block.expect("a block");
                let after = counters(&self.code);
                (after.translated - before.translated, after.woken - before.woken)
            };
            blocks.iter().map(&mut ask).collect()
        }
    }

    /// RET everywhere but for a NOP before some.
    fn bytes() -> Vec<u8> {
        let mut bytes = vec![0xc3; 0x1000];
        (0..0x1000).step_by(8).for_each(|at| bytes[at] = 0x90);
        bytes
    }

    /// What a machine knows after one with these bytes that has run the first blocks, and the others once those had been dropped.
    fn known_after(blocks: &[Block], later: &[Block]) -> Arc<KnownBlocks> {
        let noting = Arc::new(KnownBlocks::to_note());
        let mut first = Vcpu::new(&bytes(), &noting);
        first.asks(blocks);
        first.code.forget_page(A);
        first.asks(later);
        known(&noting)
    }

    fn known(noting: &KnownBlocks) -> Arc<KnownBlocks> {
        let kept = translate_noted(false, &noting.noted());
        Arc::new(KnownBlocks::reading(false, || Some(kept)).expect("a thread"))
    }

    #[test]
    fn known_blocks_wake_with_the_first_of_their_page_that_were_made_after_as_many_drops() {
        let known = known_after(&[(0, false), (8, false), (8, true)], &[(0, false), (16, false)]);
        let mut vcpu = Vcpu::new(&bytes(), &known);
        assert_eq!(vcpu.asks(&[(8, false), (0, false), (8, true)]), [(0, 3), (0, 0), (0, 0)]);
        vcpu.code.forget_page(A);
        let asked = [(0, false), (16, false), (8, false), (24, false)];
        assert_eq!(vcpu.asks(&asked), [(0, 2), (0, 0), (1, 0), (1, 0)], "none wakes twice");
    }

    /// A kernel may have written to the page more often than before, or less.
    #[test]
    fn a_block_that_is_asked_for_wakes_after_however_many_drops() {
        let known = known_after(&[(0, false)], &[(8, false), (16, false)]);
        let mut vcpu = Vcpu::new(&bytes(), &known);
        assert_eq!(vcpu.asks(&[(16, false), (8, false)]), [(0, 3), (0, 0)]);
    }

    #[test]
    fn a_block_wakes_only_where_its_bytes_are() {
        let expected = [(0, [(1, 1), (0, 0)]), (1, [(1, 1), (0, 0)]), (2, [(0, 2), (0, 0)])];
        for (at, expected) in expected {
            let known = known_after(&[(0, false), (8, false)], &[]);
            let mut changed = bytes();
            changed[at] = 0xf4; // hlt
            let mut vcpu = Vcpu::new(&changed, &known);
            assert_eq!(vcpu.asks(&[(0, false), (8, false)]), expected, "changed at {at}");
        }
    }

    /// RET with an operand that ends in the page behind.
    #[test]
    fn a_block_wakes_only_where_all_of_both_its_pages_is_as_it_was() {
        const LAST: Block = (0xffe, false);
        const OTHER: u64 = 0x9000;
        let mut bytes = bytes();
        (bytes[0], bytes[0xffe]) = (0, 0xc2);
        for (behind, expected) in [(0, (0, 1)), (1, (1, 0))] {
            let noting = Arc::new(KnownBlocks::to_note());
            Vcpu::new(&bytes, &noting).asks(&[LAST]);
            let mut vcpu = Vcpu::new(&bytes, &known(&noting));
            let ram = vcpu.board.ram();
            ram.store64(0x4000 + 8, OTHER | P | RW);
            ram.write(OTHER, &[behind]);
            assert_eq!(vcpu.asks(&[LAST]), [expected]);
            vcpu.code.cache.drop_page(&mut vcpu.code.memory, OTHER);
            assert_eq!(vcpu.code.cache.find(A + LAST.0, false), None, "it is of both");
        }
    }

    #[test]
    fn no_block_wakes_that_goes_over_a_breakpoint() {
        let known = known_after(&[(0, false), (8, false)], &[]);
        let mut vcpu = Vcpu::new(&bytes(), &known);
        let breakpoints = [A + 1].into();
        vcpu.code.set_probes(vcpu.user, &Probes { breakpoints, ..Probes::default() });
        assert_eq!(vcpu.asks(&[(8, false), (0, false)]), [(0, 1), (1, 0)]);
    }

    #[test]
    fn blocks_for_another_layout_are_left_alone() {
        let known = known_after(&[(0, false)], &[]);
        let of_several = layout(CodeKind::kernel(true), Base::default());
        assert!(known.take(&of_several).is_none());
    }
}
