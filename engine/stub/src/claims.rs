//! Whether the program has pages where the kernel or the wedge has something in this process.
//!
//! Without protection keys its accesses there would not fault. Only the guest's kernel changes page tables,
//! so each return to user code is the time to look. Of the guest's tables this reads the uppermost one, and
//! one below it only where the program has memory in the same 512 GiB as a claim: few programs do.
//!
//! That is too late for the very first access to a region. So what Linux's calls for memory give a program is
//! looked at, too: a guess, since another kernel may mean something else by those numbers, but then nothing
//! is lost but time.

use crate::{Context, walk::PageTable};
use wedge_abi::{Claim, MAX_CLAIMS, OpenCall, QUICK_CLAIMS, Shared, UserPoint, VcpuPage, calls};
use x86::paging::P;

/// The program may have pages in a claimed region. Each system call passes here.
#[inline(always)]
pub fn are_met(cx: &Context<'_>) -> bool {
    let Some(top) = PageTable::at(cx.shared, cx.vcpu.regs.cr3) else { return true };
    let entries =
        cx.vcpu.claims.entries.iter().fold(0, |all, at| all | top.entry(u64::from(*at) / 8));
    (entries & P != 0 || cx.vcpu.claims.count > QUICK_CLAIMS as u64) && one_is_met(cx, top)
}

#[cold]
#[inline(never)]
fn one_is_met(cx: &Context<'_>, top: PageTable) -> bool {
    let count = cx.vcpu.claims.count as usize;
    count > MAX_CLAIMS
        || cx.vcpu.claims.list.iter().take(count).any(|claim| is_met(cx.shared, top, claim))
}

fn is_met(s: &Shared, top: PageTable, claim: &Claim) -> bool {
    let entry = top.entry(claim.entry.into());
    if entry & P == 0 {
        return false;
    }
    let Some(table) = PageTable::at(s, entry) else { return true };
    (claim.first..=claim.last).any(|region| table.entry(region.into()) & P != 0)
}

/// A thread returns to user code at this RIP and RSP. The system call that ends so may have given a program claimed
/// memory or taken some, or the call before may have ended a program. True if the monitor is to know of that.
#[inline(always)]
pub fn are_in_question(vcpu: &mut VcpuPage, rip: u64, rsp: u64) -> bool {
    let OpenCall { number, from } = vcpu.claims.call;
    let other = from.cr3 != vcpu.regs.cr3;
    if calls::is_for_memory(number) || other || vcpu.claims.patience != 0 {
        return have_changed(vcpu, rip, rsp);
    }
    vcpu.claims.call.number = calls::NONE;
    false
}

#[cold]
#[inline(never)]
fn have_changed(vcpu: &mut VcpuPage, rip: u64, rsp: u64) -> bool {
    let [result, _, rdx, _, _, _, rsi, rdi, ..] = vcpu.regs.gpr;
    let to = UserPoint { cr3: vcpu.regs.cr3, rip, rsp };
    vcpu.claims.note_outcome(to, [result, rdx, rsi, rdi])
}

/// Somebody makes a system call, not of 64-bit code: nothing is known of those.
pub fn note_unknown(vcpu: &mut VcpuPage) {
    vcpu.claims.call.number = calls::NONE;
    vcpu.claims.call.from.cr3 = vcpu.regs.cr3;
}
