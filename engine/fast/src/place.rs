//! Where the reserved part of wedges' address spaces lies, with all that is counted from it, the kernel's memory.
//!
//! A machine inside another of ours starts with another base than that: its wedges are programs there, with pages at
//! just those addresses. Where a program has pages in the way all the same, the machine moves: its wedges end, what was
//! translated is made anew, and everything lies elsewhere. That takes some tenths of a second, once. A program that
//! leaves no base free is interpreted.

use crate::{
    Fast, Slots, USER_END, User,
    claims::{ClaimedRegions, are_met},
    machine::Translation,
    regions::is_mappable,
};
use ram::Ram;
use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};
use wedge::Error;
use wedge_abi::{Base, Claim};
use x86::{
    cpuid::{CpuidResult, depth},
    paging::Roots,
};
use x86_interp::{Leave, System};

/// Where the reserved part may be, as entries of the uppermost page table, the usual ones first. With none of the
/// first four does a Linux kernel's memory lie where it lies with another of them. Below 241 the direct map of Linux
/// would be where programs without PIE are.
const ENTRIES: [u16; 12] = [252, 250, 245, 243, 251, 249, 248, 247, 246, 244, 242, 241];
/// Of them those that are for machines inside of others.
const DEPTHS: usize = 4;
/// The machine does not move before it has run for so many times as long as it has moved already.
const REST: Duration = Duration::from_millis(500);
/// Times at the most.
const MAX_RESTS: u32 = 10;
/// While a program is interpreted, the machine looks this often whether it could move. To look takes microseconds.
const LOOK: Duration = Duration::from_millis(10);

/// The base to start with.
pub fn first() -> Base {
    static DEPTH: OnceLock<u32> = OnceLock::new();
    let depth = *DEPTH.get_or_init(|| depth(cpuid));
    Base::of_entry(ENTRIES[depth as usize % DEPTHS])
}

fn cpuid(leaf: u32, subleaf: u32) -> CpuidResult {
    let r = std::arch::x86_64::__cpuid_count(leaf, subleaf);
    CpuidResult { eax: r.eax, ebx: r.ebx, ecx: r.ecx, edx: r.edx }
}

/// The moves of a machine so far.
#[derive(Default)]
pub struct Moves {
    count: u32,
    last: Option<Instant>,
    /// When the machine last looked for a better place.
    looked: Option<Instant>,
}

impl Moves {
    /// Notes that the machine looks for a better place now; false if it has looked a moment ago. A program that is interpreted
    /// meanwhile has the machine look sooner: it may run directly once no place has turned out better
    /// ([`ClaimedRegions::settle`]).
    fn begin_look(&mut self, is_interpreted: bool) -> bool {
        let pause = if is_interpreted { LOOK } else { self.rest() };
        let is_due = self.looked.is_none_or(|looked| looked.elapsed() >= pause);
        if is_due {
            self.looked = Some(Instant::now());
        }
        is_due
    }

    /// The machine has rested since it moved.
    fn has_rested(&self) -> bool {
        self.last.is_none_or(|last| last.elapsed() >= self.rest())
    }

    /// How long the machine stays where it is after its last move.
    fn rest(&self) -> Duration {
        REST * self.count.clamp(1, MAX_RESTS)
    }

    /// The machine moves now.
    fn note(&mut self) {
        self.count += 1;
        self.last = Some(Instant::now());
    }

    pub fn count(&self) -> u64 {
        self.count.into()
    }
}

/// Where a claim is with another base, if it still is below 2^47.
fn moved(claim: &Claim, from: Base, to: Base) -> Claim {
    let by = to.entry().wrapping_sub(from.entry());
    Claim { entry: claim.entry.wrapping_add(by) & 0x1ff, ..*claim }
}

/// The base that is in the way of the fewest programs, if that is another one than `now`. The program with the page tables
/// `here` must have no memory in its way.
fn better_base(
    claimed: &ClaimedRegions,
    slots: &Slots,
    ram: &Ram,
    (now, here): (Base, Roots),
) -> Option<Base> {
    let others: Vec<_> = slots.roots().map(|cr3| Roots { cr3, ..here }).collect();
    let claims = |base: Base| -> Vec<Claim> {
        claimed.all().iter().map(|claim| moved(claim, now, base)).collect()
    };
    let met = |base: Base, roots: Roots| are_met(ram, roots, claims(base).into_iter());
    let conflicts = |base: &Base| {
        let others = others.iter().filter(|roots| met(*base, **roots)).count();
        others + claimed.conflicts(here.top(), &claims(*base))
    };
    let limit = if met(now, here) { usize::MAX } else { conflicts(&now) };
    let bases = ENTRIES.into_iter().map(Base::of_entry).filter(|base| !met(*base, here));
    let best = bases.map(|base| (conflicts(&base), base)).min_by_key(|(count, _)| *count);
    best.filter(|(count, _)| *count < limit).map(|(_, base)| base)
}

impl Fast {
    /// Looks whether the program that is about to go on, or that the kernel runs for, can be left to wedges.
    pub(crate) fn attend_to_claims(&mut self) -> Result<(), Error> {
        if self.modes.user == User::Interpreted || !self.cpu.vcpu.long_mode() {
            return Ok(());
        }
        let (v, ram) = (&self.cpu.vcpu, self.board.ram());
        self.claims.follow_calls(v, &mut self.slots, &mut self.pages);
        self.claims.decide(v, ram);
        if v.cpl() == 3 && self.claims.are_reached(v) {
            self.make_way()?;
            self.claims.decide(&self.cpu.vcpu, self.board.ram());
        }
        self.cpu.observe(self.left_to_wedges());
        Ok(())
    }

    /// The code that the interpreter leaves to wedges.
    pub(crate) fn left_to_wedges(&self) -> Leave {
        let direct = self.modes.user != User::Interpreted && !self.claims.are_met();
        let kernel = self.modes.kernel_translated.then_some(self.pages.base().kernel_start());
        let translated =
            self.modes.kernel_translated && !self.modes.options.interpret_narrow_guests;
        Leave {
            user: direct.then_some(USER_END),
            narrow: self.narrow.runs(),
            kernel,
            narrow_guest: [translated, translated && direct],
        }
    }

    /// Moves the reserved part out of the way of the program that is about to run, if there is room for it. Other
    /// programs that are known are spared as far as possible.
    fn make_way(&mut self) -> Result<(), Error> {
        if self.checker.is_some() || !self.moves.begin_look(self.claims.are_met()) {
            return Ok(());
        }
        let (from, here) = (self.pages.base(), Roots::from(&self.cpu.vcpu));
        let better = better_base(&self.claims, &self.slots, self.board.ram(), (from, here));
        let Some(base) = better else {
            self.claims.settle(here.top());
            self.claims.note_waiting(&mut self.slots, &mut self.pages);
            return Ok(());
        };
        if !self.moves.has_rested() {
            return Ok(());
        }
        tracing::debug!(
            entry = base.entry(),
            "a program has memory where wedges have theirs: moving"
        );
        self.moves.note();
        self.move_to(base)
    }

    /// What was the kernel's is so there at once: it is going to be asked for, and what programs are given until then is
    /// not to be where it will be.
    fn move_to(&mut self, base: Base) -> Result<(), Error> {
        let translation = self.machine.translation(base).map_err(Error::Start)?;
        self.take_up(translation)
    }

    /// There is no more room in the translation, and others are in it: goes on with the machine's next one.
    pub(crate) fn leave_full_translation(&mut self) -> Result<(), Error> {
        self.code.share().translation.close();
        self.move_to(self.pages.base())
    }

    /// Other vCPUs have other memory where the kernel has code: goes on with a translation of its own.
    pub(crate) fn part_from_others(&mut self) -> Result<(), Error> {
        tracing::debug!(
            "vCPUs have different kernel code at the same addresses: translating for one of them apart"
        );
        self.statistics.parted += 1;
        self.translate_apart()
    }

    /// A 32-bit kernel's code is translated by each vCPU for itself: who shares a translation compares top page tables of 64-bit kernels
    /// ([`crate::tops`]).
    pub(crate) fn part_with_narrow_guest(&mut self) -> Result<(), Error> {
        if self.cpu.vcpu.long_mode() || !self.code.share().translation.several {
            return Ok(());
        }
        tracing::debug!("a 32-bit kernel has several vCPUs: translating for one of them apart");
        self.translate_apart()?;
        self.synchronize()
    }

    fn translate_apart(&mut self) -> Result<(), Error> {
        let own = self.machine.own_translation(self.pages.base()).map_err(Error::Start)?;
        self.take_up(own)
    }

    /// Goes on with another translation, whose base may be another. All wedges end.
    fn take_up(&mut self, translation: Arc<Translation>) -> Result<(), Error> {
        let base = translation.common.base();
        let by = base.bias().wrapping_sub(self.pages.base().bias());
        let kernel = self.slots.kernel_regions();
        self.slots.move_to(base);
        let machine = &self.machine;
        let scans = machine.scans.with_copies_apart(self.modes.options.copies_apart);
        self.slots.share(translation.sites.clone(), scans, machine.low.clone());
        self.pages.move_to(Arc::clone(&translation.common)).map_err(Error::Start)?;
        self.code.begin_again(&mut self.pages, self.board.ram(), translation, &self.modes);
        let regions = kernel.into_iter().map(|hva| hva.wrapping_add(by));
        for hva in regions.filter(|hva| is_mappable(base, *hva)) {
            self.give_to_kernel(hva);
        }
        self.claims.publish(&mut self.slots, &mut self.pages);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
