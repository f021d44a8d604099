//! Programs that have memory where the kernel or the wedge has something in a wedge's process.
//!
//! The machine makes way for them (`place`). Where it cannot, their code is interpreted while they have that memory: right,
//! but slow. The wedge looks at the same page tables before it returns to user code by itself
//! (`engine/stub/src/claims.rs`). Page tables show memory that has been touched. Of memory that a program has been given and has not
//! touched yet, the wedge tells as far as it can.

use crate::Slots;
use ram::Ram;
use rustc_hash::FxHashSet;
use std::{collections::VecDeque, mem::take};
use wedge::Pages;
use wedge_abi::{Claim, MAX_CLAIMS, OpenCall, UserPoint, calls, near_sites};
use x86::{
    Vcpu,
    paging::{self, Roots, WalkMemory},
    reg,
};

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
    /// The program has given the memory back before the machine could move. Its code must not run beside the claim yet: a
    /// read there would find the engine's memory and not fault.
    returned: bool,
}

impl Given {
    /// One of the claims lies in the memory.
    fn is_reached(&self, claims: &[Claim]) -> bool {
        claims.iter().any(|claim| claim.reaches(self.start, self.len))
    }
}

/// Where no program may have pages, and whether the one that runs now has.
#[derive(Default)]
pub struct ClaimedRegions {
    all: Vec<Claim>,
    given: VecDeque<Given>,
    met: bool,
}

impl ClaimedRegions {
    pub fn all(&self) -> &[Claim] {
        &self.all
    }

    /// The program that ran last is interpreted for them.
    pub fn are_met(&self) -> bool {
        self.met
    }

    /// Makes known to wedges what they and the kernel have.
    pub fn publish(&mut self, slots: &mut Slots, pages: &mut Pages) {
        self.replace(slots.claims());
        let claims = &mut pages.vcpu_page().claims;
        claims.count = self.all.len() as u64;
        for (to, from) in claims.list.iter_mut().take(MAX_CLAIMS).zip(&self.all) {
            *to = *from;
        }
        let entries = self.all.iter().map(|claim| claim.entry * 8).cycle();
        claims.entries.iter_mut().zip(entries).for_each(|(to, from)| *to = from);
        self.note_waiting(slots, pages);
    }

    /// Replaces the claims. Memory that was given back is forgotten if none of the new ones lies in it.
    fn replace(&mut self, claims: Vec<Claim>) {
        self.given.retain(|given| !given.returned || given.is_reached(&claims));
        self.all = claims;
    }

    /// Notes what the vCPU's program asks its kernel for, where the call begins, and what it has been given, where it
    /// goes on.
    pub fn follow_calls(&mut self, v: &Vcpu, slots: &mut Slots, pages: &mut Pages) {
        let claims = &mut pages.vcpu_page().claims;
        let registers = [reg::RAX, reg::RDX, reg::RSI, reg::RDI].map(|number| v.gpr[number]);
        if v.cpl() == 3 {
            let to = UserPoint { cr3: v.cr3, rip: v.rip, rsp: v.gpr[reg::RSP] };
            claims.note_outcome(to, registers);
            self.note_given(root(v), slots, pages);
        } else if v.rip == v.lstar {
            let [number, .., rdi] = registers;
            let from = UserPoint { cr3: v.cr3, rip: v.gpr[reg::RCX], rsp: v.gpr[reg::RSP] };
            claims.call = OpenCall { number, from };
            if calls::asks_near_sites(number, rdi) {
                slots.note_low(root(v));
            }
        }
    }

    /// The vCPU's program, for which has been decided, has memory, or has been given some, that is claimed.
    pub fn are_reached(&self, vcpu: &Vcpu) -> bool {
        self.met || self.has_given(root(vcpu))
    }

    /// Decides whether the vCPU's program is interpreted.
    pub fn decide(&mut self, vcpu: &Vcpu, ram: &Ram) {
        self.met = self.meets(vcpu, ram) || self.must_wait(root(vcpu));
    }

    fn meets(&self, vcpu: &Vcpu, ram: &Ram) -> bool {
        are_met(ram, Roots::from(vcpu), self.all.iter().copied())
    }

    /// What there is to know of programs' memory. A program without protection keys to stop it may have written that: it is
    /// its own trouble.
    fn note_given(&mut self, root: u64, slots: &mut Slots, pages: &mut Pages) {
        let claims = &mut pages.vcpu_page().claims;
        let (given, taken, ended) =
            (take(&mut claims.given), take(&mut claims.taken), take(&mut claims.ended));
        if [given[1], taken[1], ended] == [0; 3] {
            return;
        }
        if ended != 0 {
            self.forget(ended);
        }
        self.give(root, given);
        self.take(root, taken);
        if given[1] != 0 && near_sites(given[0]) {
            slots.note_low(root);
        }
        self.note_waiting(slots, pages);
    }

    /// Wedges do not go on by themselves with programs that are to be interpreted.
    pub fn note_waiting(&self, slots: &mut Slots, pages: &mut Pages) {
        pages.vcpu_page().claims.remembers = u64::from(!self.given.is_empty());
        slots.hold_back(self.waiting());
    }

    /// How much of the memory that programs have been given is claimed by these; that of the program with this page table
    /// counts most.
    pub fn conflicts(&self, root: u64, claims: &[Claim]) -> usize {
        let reached = |given: &&Given| given.is_reached(claims);
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
        self.given.retain(|given| given.root != root || !given.returned);
        let of_it = self.given.iter_mut().filter(|given| given.root == root);
        of_it.for_each(|given| given.settled = true);
    }

    /// The uppermost page tables of programs whose code must not run beside the claims.
    fn waiting(&self) -> FxHashSet<u64> {
        let all = self.given.iter().map(|given| given.root);
        all.filter(|root| self.must_wait(*root)).collect()
    }

    /// The program with this page table has ended, and another may come to have it.
    fn forget(&mut self, root: u64) {
        self.given.retain(|given| given.root != root);
    }

    fn reached(&self, root: u64) -> impl Iterator<Item = &Given> {
        let of_it = self.given.iter().filter(move |given| given.root == root);
        of_it.filter(|given| given.is_reached(&self.all))
    }

    fn give(&mut self, root: u64, [start, len]: [u64; 2]) {
        if len == 0 {
            return;
        }
        let same = |old: &&mut Given| (old.root, old.start, old.len) == (root, start, len);
        if let Some(old) = self.given.iter_mut().find(same) {
            old.returned = false;
            return;
        }
        if self.given.len() == MAX_GIVEN {
            self.given.pop_front();
        }
        self.given.push_back(Given { root, start, len, settled: false, returned: false });
    }

    /// The program with this page table has given memory back. That is remembered only until the machine has moved or has
    /// found no better place ([`Given::returned`]).
    fn take(&mut self, root: u64, [start, len]: [u64; 2]) {
        let within = |g: &Given| g.start >= start && g.start + g.len <= start.saturating_add(len);
        let all = &self.all;
        self.given.retain_mut(|given| {
            given.returned |= given.root == root && within(given);
            !given.returned || !given.settled && given.is_reached(all)
        });
    }
}

/// GPA of the vCPU's uppermost page table.
fn root(vcpu: &Vcpu) -> u64 {
    Roots::from(vcpu).top()
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

#[cfg(test)]
mod tests {
    use super::ClaimedRegions;
    use wedge::Pages;
    use wedge_abi::{Claim, OpenCall, SITES, UserPoint, VcpuPage, calls};

    const ROOT: u64 = 0x1000;
    const CLAIMED: u64 = 13 << 39;

    fn vcpu_page(pages: &mut Pages) -> &mut VcpuPage {
        let page = pages.vcpu_page();
        page.claims.list[0] = Claim { entry: 13, first: 1, last: 3 };
        page.claims.count = 1;
        page
    }

    /// Behind the system call of a thread with this stack, of a program with this page table.
    fn behind(cr3: u64, rsp: u64) -> UserPoint {
        UserPoint { cr3, rip: 0x40_1002, rsp }
    }

    /// The program's thread with this stack makes a call with this number.
    fn calls(page: &mut VcpuPage, number: u64, rsp: u64) {
        page.claims.call = OpenCall { number, from: behind(ROOT, rsp) };
    }

    /// A call with this number returns, with these values of RAX, RDX, RSI and RDI, to a program with this page table.
    fn returns(page: &mut VcpuPage, call: u64, registers: [u64; 4], to: u64) -> bool {
        calls(page, call, 0);
        page.claims.note_outcome(behind(to, 0), registers)
    }

    #[test]
    fn what_calls_give_and_take_is_noted() {
        let mut pages = Pages::new().expect("memory");
        let page = vcpu_page(&mut pages);
        assert!(returns(page, calls::MMAP, [CLAIMED, 3, 0x2000, 0], ROOT));
        assert_eq!(page.claims.given, [CLAIMED, 0x2000]);
        assert!(!returns(page, calls::MMAP, [CLAIMED, 0, 0x2000, 0], ROOT), "nobody can use it");
        let low = [SITES as u64 - 0x1000, 0, 0x2000, 0];
        assert!(returns(page, calls::MMAP, low, ROOT), "it is to fault");
        assert_eq!(page.claims.given, [low[0], low[2]]);
        assert!(!returns(page, calls::MMAP, [0x1_0000, 0, 0x10_0000, 0], ROOT), "it is below");
        assert!(!returns(page, calls::MMAP, [14 << 39, 3, 0x2000, 0], ROOT), "it is elsewhere");
        assert!(!returns(page, calls::MMAP, [-12_i64 as u64, 3, 0x2000, 0], ROOT), "an error");
        assert!(!returns(page, calls::MUNMAP, [0, 0, 0x2000, CLAIMED], ROOT), "nothing is known");
        page.claims.remembers = 1;
        assert!(returns(page, calls::MUNMAP, [0, 0, 0x2000, CLAIMED], ROOT));
        assert_eq!(page.claims.taken, [CLAIMED, 0x2000]);
        assert!(
            !page.claims.note_outcome(behind(ROOT, 0), [CLAIMED, 3, 0x2000, 0]),
            "a call returns once"
        );
    }

    #[test]
    fn a_program_that_ends_is_forgotten_and_another_s_registers_mean_nothing() {
        let mut pages = Pages::new().expect("memory");
        let page = vcpu_page(&mut pages);
        assert!(!returns(page, calls::MMAP, [CLAIMED, 3, 0x2000, 0], 2 * ROOT));
        assert!(!returns(page, calls::EXIT_GROUP, [0; 4], 2 * ROOT), "nothing is known of any");
        page.claims.remembers = 1;
        assert!(returns(page, calls::EXIT_GROUP, [0; 4], 2 * ROOT));
        assert_eq!((page.claims.ended, page.claims.given), (ROOT, [0; 2]));
        assert!(!returns(page, calls::EXECVE, [0; 4], ROOT), "it has failed");
    }

    #[test]
    fn what_another_thread_returns_with_is_no_outcome_of_a_call_that_waits() {
        let mut pages = Pages::new().expect("memory");
        let page = vcpu_page(&mut pages);
        let registers = [CLAIMED, 3, 0x2000, 0];
        calls(page, calls::MMAP, 0x7000);
        let pointers = [0, 1, 0x3ac7_d72d_5f98, 0];
        assert!(!page.claims.note_outcome(behind(ROOT, 0x9000), pointers), "of another thread");
        assert!(
            !page.claims.note_outcome(behind(2 * ROOT, 0x7000), registers),
            "of another program"
        );
        calls(page, calls::MMAP, 0xb000);
        assert!(!page.claims.note_outcome(behind(ROOT, 0x9000), pointers), "two wait");
        assert!(page.claims.note_outcome(behind(ROOT, 0x7000), registers));
        assert_eq!(page.claims.given, [CLAIMED, 0x2000]);
        assert!(!page.claims.note_outcome(behind(ROOT, 0x7000), registers), "a call returns once");
        assert!(page.claims.note_outcome(behind(ROOT, 0xb000), registers), "the other one");
    }

    #[test]
    fn calls_that_never_return_here_are_forgotten() {
        let mut pages = Pages::new().expect("memory");
        let page = vcpu_page(&mut pages);
        let registers = [CLAIMED, 3, 0x2000, 0];
        for thread in 1..=5 {
            calls(page, calls::MMAP, thread * 0x1000);
            assert!(!page.claims.note_outcome(behind(ROOT, 0), registers));
        }
        assert!(!page.claims.note_outcome(behind(ROOT, 0x1000), registers), "one too many");
        assert!(page.claims.note_outcome(behind(ROOT, 0x2000), registers));
        for _ in 0..10_000 {
            page.claims.note_outcome(behind(ROOT, 0), registers);
        }
        assert_eq!(page.claims.patience, 0);
        assert!(!page.claims.note_outcome(behind(ROOT, 0x3000), registers), "long ago");
    }

    /// The machine does not move twice within half a second. A program that gets memory and gives it back within that time
    /// would find the engine's memory at the same address.
    #[test]
    fn memory_that_was_given_back_is_waited_for_until_the_machine_has_moved_or_cannot() {
        let claim = |entry| vec![Claim { entry, first: 1, last: 3 }];
        let (given, taken) = ([CLAIMED, 2 << 30], [CLAIMED, 2 << 30]);
        let with_given = || {
            let mut claims = ClaimedRegions::default();
            claims.replace(claim(13));
            claims.give(ROOT, given);
            assert!(claims.must_wait(ROOT));
            claims
        };
        let mut moves = with_given();
        moves.take(ROOT, taken);
        assert!(moves.has_given(ROOT) && moves.must_wait(ROOT));
        moves.replace(claim(14));
        moves.replace(claim(13));
        assert!(!moves.has_given(ROOT), "it is the program's no more");
        let mut stays = with_given();
        stays.take(ROOT, taken);
        stays.settle(ROOT);
        assert!(!stays.has_given(ROOT), "there is no better place");
        let mut settled = with_given();
        settled.settle(ROOT);
        settled.take(ROOT, taken);
        assert!(!settled.has_given(ROOT), "there was none before");
        let mut again = with_given();
        again.take(ROOT, taken);
        again.give(ROOT, given);
        again.replace(claim(14));
        again.replace(claim(13));
        assert!(again.must_wait(ROOT), "it is the program's again");
    }
}
