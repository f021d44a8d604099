//! Whether the program has pages where the kernel or the wedge has something in this process.
//!
//! Without protection keys its accesses there would not fault. Only the guest's kernel changes page tables, so each
//! return to user code is the time to look. Of the guest's tables this reads the uppermost one, and one below it
//! only where the program has memory in the same 512 GiB as a claim: few programs do.
//!
//! That is too late for the very first access to a region. So what Linux's calls for memory give a program is looked at, too:
//! a guess, since another kernel may mean something else by those numbers, but then nothing is lost but time.

use crate::{
    layout::{Claim, Frame, MAX_CLAIMS, QUICK_CLAIMS, Shared, near_sites},
    mmu,
};

const PRESENT: u64 = 1;
/// Linux's numbers of calls for memory.
const MMAP: u64 = 9;
const MPROTECT: u64 = 10;
const MUNMAP: u64 = 11;
const MREMAP: u64 = 25;
const SHMAT: u64 = 30;
const PAGE: u64 = 4096;

/// The program may have pages in a claimed region. Each system call passes here.
#[inline(always)]
pub fn are_met(f: &Frame, s: &Shared) -> bool {
    let Some(top) = mmu::table(s, f.cr3) else { return true };
    let entries = f.claim_entries.iter().fold(0, |all, at| all | mmu::table_entry(top, u64::from(*at) / 8));
    (entries & PRESENT != 0 || f.claim_count > QUICK_CLAIMS as u64) && one_is_met(f, s, top)
}

#[cold]
#[inline(never)]
fn one_is_met(f: &Frame, s: &Shared, top: u64) -> bool {
    let count = f.claim_count as usize;
    count > MAX_CLAIMS || f.claims.iter().take(count).any(|claim| is_met(s, top, claim))
}

fn is_met(s: &Shared, top: u64, claim: &Claim) -> bool {
    let entry = mmu::table_entry(top, claim.entry.into());
    if entry & PRESENT == 0 {
        return false;
    }
    let Some(table) = mmu::table(s, entry) else { return true };
    (claim.first..=claim.last).any(|region| mmu::table_entry(table, region.into()) & PRESENT != 0)
}

/// The system call that returns has given the program claimed memory, or taken some: the monitor is to know.
#[inline(always)]
pub fn are_in_question(f: &mut Frame) -> bool {
    f.call <= SHMAT && f.call >= MMAP && have_changed(f)
}

#[cold]
#[inline(never)]
fn have_changed(f: &mut Frame) -> bool {
    let [result, _, rdx, _, _, _, rsi, rdi, ..] = f.gpr;
    let (start, len) = match f.call {
        MMAP if rdx != 0 => (result, rsi),
        MPROTECT if rdx != 0 && result == 0 => (rdi, rsi),
        MUNMAP if result == 0 => (rdi, rsi),
        MREMAP => (result, rdx),
        SHMAT => (result, PAGE),
        _ => return false,
    };
    let claimed = f.claims.iter().take(f.claim_count as usize).any(|claim| claim.reaches(start, len));
    if start >> 47 != 0 || !claimed && !near_sites(start) {
        return false;
    }
    *(if f.call == MUNMAP { &mut f.taken } else { &mut f.given }) = [start, len];
    true
}
