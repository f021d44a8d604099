//! Programs that have memory where the kernel or the wedge has something in a wedge's process.
//!
//! The machine makes way for them (`place`). Where it cannot, their code is interpreted while they have that memory: right,
//! but slow. The wedge looks at the same page tables before it returns to user code by itself
//! (`engine/wedge/blob/claims.rs`). Page tables show memory that has been touched. Of memory that a program has been given and has not
//! touched yet, the wedge tells as far as it can.

use crate::{Fast, USER_END, User};
use frame::{Claim, MAX_CLAIMS, near_sites};
use ram::Ram;
use std::{collections::VecDeque, mem::take};
use wedge::Error;
use x86::paging::{self, Roots, WalkMemory};
use x86_interp::{Leave, System};

/// Memory given to programs that is remembered; more recent is what matters.
const MAX_GIVEN: usize = 64;
/// Larger ones are reservations, of which a program uses little: sanitizers make them. The machine moves for them if it can, but no
/// program is interpreted for one.
const RESERVATION: u64 = 64 << 30;

/// Memory that a program has been given where there is a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Given {
    /// GPA of the program's uppermost page table.
    root: u64,
    start: u64,
    len: u64,
    /// There is no better place for the machine.
    settled: bool,
}

/// Where no program may have pages, and whether the one that runs now has.
#[derive(Default)]
pub struct Claims {
    all: Vec<Claim>,
    given: VecDeque<Given>,
    met: bool,
}

impl Claims {
    pub fn all(&self) -> &[Claim] {
        &self.all
    }

    /// The program that ran last is interpreted for them.
    pub fn are_met(&self) -> bool {
        self.met
    }

    /// How much of the memory that programs have been given is claimed by these; that of the program with this page table
    /// counts most.
    pub fn conflicts(&self, root: u64, claims: &[Claim]) -> usize {
        let reached = |given: &&Given| claims.iter().any(|c| c.reaches(given.start, given.len));
        let weight = |given: &Given| if given.root == root { MAX_GIVEN } else { 1 };
        self.given.iter().filter(reached).map(weight).sum()
    }

    /// The program with this page table has been given memory that is claimed.
    fn has_given(&self, root: u64) -> bool {
        self.reached(root).next().is_some()
    }

    /// The same, and its code must not run beside the claim.
    fn must_wait(&self, root: u64) -> bool {
        self.reached(root).any(|given| given.len < RESERVATION || !given.settled)
    }

    /// The machine stays where it is, although this program has been given memory there.
    pub fn settle(&mut self, root: u64) {
        let of_it = self.given.iter_mut().filter(|given| given.root == root);
        of_it.for_each(|given| given.settled = true);
    }

    fn reached(&self, root: u64) -> impl Iterator<Item = &Given> {
        let claimed = |given: &&Given| self.all.iter().any(|c| c.reaches(given.start, given.len));
        self.given.iter().filter(move |given| given.root == root).filter(claimed)
    }

    fn give(&mut self, root: u64, [start, len]: [u64; 2]) {
        let given = Given { root, start, len, settled: false };
        let same = |old: &Given| (old.root, old.start, old.len) == (root, start, len);
        if len == 0 || self.given.iter().any(same) {
            return;
        }
        if self.given.len() == MAX_GIVEN {
            self.given.pop_front();
        }
        self.given.push_back(given);
    }

    fn take(&mut self, root: u64, [start, len]: [u64; 2]) {
        let within = |g: &Given| g.start >= start && g.start + g.len <= start.saturating_add(len);
        self.given.retain(|given| given.root != root || !within(given));
    }
}

/// The page tables lead to a claimed region.
pub fn are_met(ram: &Ram, roots: Roots, mut claims: impl Iterator<Item = Claim>) -> bool {
    claims.any(|claim| is_met(ram, roots, &claim))
}

fn is_met(mut ram: &Ram, roots: Roots, claim: &Claim) -> bool {
    let mut entry =
        |table: u64, index: u16| ram.read_u64((table & paging::ADDRESS) + u64::from(index) * 8);
    let upper = entry(roots.cr3, claim.entry);
    let mut leads = |region| entry(upper, region) & paging::P != 0;
    upper & paging::P != 0 && (claim.first..=claim.last).any(&mut leads)
}

impl Fast {
    /// Makes known to wedges what they and the kernel have.
    pub(crate) fn publish_claims(&mut self) {
        self.claims.all = self.slots.claims();
        let f = self.pages.frame();
        f.claim_count = self.claims.all.len() as u64;
        for (to, from) in f.claims.iter_mut().take(MAX_CLAIMS).zip(&self.claims.all) {
            *to = *from;
        }
        let entries = self.claims.all.iter().map(|claim| claim.entry * 8).cycle();
        f.claim_entries.iter_mut().zip(entries).for_each(|(to, from)| *to = from);
    }

    /// Looks whether the program that is about to go on can be left to wedges.
    pub(crate) fn attend_to_claims(&mut self) -> Result<(), Error> {
        if self.cpu.vcpu.cpl() != 3 || self.modes.user == User::Interpreted {
            return Ok(());
        }
        self.note_given();
        let root = self.cpu.vcpu.cr3 & paging::ADDRESS;
        if self.meets_claims() || self.claims.has_given(root) {
            self.make_way()?;
        }
        self.claims.met = self.meets_claims() || self.claims.must_wait(root);
        self.cpu.observe(self.left_to_wedges());
        Ok(())
    }

    /// What the wedge says of the program's memory. A program without protection keys to stop it may have written that: it is
    /// its own trouble.
    fn note_given(&mut self) {
        let f = self.pages.frame();
        let (given, taken) = (take(&mut f.given), take(&mut f.taken));
        let root = self.cpu.vcpu.cr3 & paging::ADDRESS;
        self.claims.give(root, given);
        self.claims.take(root, taken);
        if given[1] != 0 && near_sites(given[0]) {
            self.slots.note_low(root);
        }
    }

    fn meets_claims(&self) -> bool {
        let (ram, roots) = (self.board.ram(), Roots::from(&self.cpu.vcpu));
        are_met(ram, roots, self.claims.all.iter().copied())
    }

    /// The code that the interpreter leaves to wedges.
    pub(crate) fn left_to_wedges(&self) -> Leave {
        let direct = self.modes.user != User::Interpreted && !self.claims.met;
        let kernel = self.modes.kernel_translated.then_some(self.pages.base().kernel_start());
        Leave { user: direct.then_some(USER_END), kernel }
    }
}
