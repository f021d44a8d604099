//! INVLPG without the monitor: of a user's page, and of a page of a 32-bit kernel's.

use crate::{
    Context, bias, hints, larges, lookup,
    mmu::{EXECUTE, LARGE, PAGE, drop_large, note, note_dropped, note_once, owns, used_page},
    walk::last_table,
};
use wedge_abi::{MAX_MADE, MapReport, Rights};
use x86::narrow::{KERNEL_START, wide};

/// Drops the page whose INVLPG was put off ([`of_user`]). That is done before user code runs, before kernel code may reach the user's
/// memory (AC is set), and before anybody else has the turn.
pub fn finish_deferred(cx: &mut Context<'_>) {
    let page = core::mem::take(&mut cx.vcpu.paging.deferred);
    if page != 0 {
        drop_page(cx, page);
    }
}

/// Takes a page of the user's away, if it is not known to be away. What is left of its mapping makes the next one cheaper:
/// the host need not free its page tables.
fn drop_page(cx: &mut Context<'_>, page: u64) -> bool {
    // At each munmap of memory that has an entry of the top table to itself, Linux 6.1 flushes a page of it, used or not.
    if hints::is_dropped(&cx.shared.mapped, page) {
        return true;
    }
    // SAFETY: a page of the user's.
    let done = unsafe { cx.protect(page, PAGE, 0) == 0 || cx.unmap(page, PAGE) == 0 };
    if done {
        hints::note_dropped(&mut cx.shared.mapped, page);
    } else {
        hints::forget(&mut cx.shared.mapped, page, page + PAGE);
    }
    done
}

/// The guest still maps a page to what is mapped there, and has used it: the translation is loaded anew at
/// once, as a TLB may do, and only what the page allows changes.
fn reload(cx: &mut Context<'_>, page: u64) -> bool {
    let now = last_table(cx, page).and_then(|table| used_page(cx.shared, table, page, false));
    let is = hints::slot(&mut cx.shared.mapped, page).copied();
    let (Some(now), Some(is)) = (now, is) else { return false };
    let same = is.page & !7 == page && is.offset == now.offset;
    if !same || (is.page | now.rights) & EXECUTE != 0 {
        return false;
    }
    let (offset, rights) = (now.offset, Rights::from_bits(now.rights));
    if is.page & 7 != now.rights {
        // SAFETY: a page of the user's that is mapped.
        if unsafe { cx.protect(page, PAGE, now.rights) } != 0 {
            return false;
        }
        if let Some(hint) = hints::slot(&mut cx.shared.mapped, page) {
            hint.page = page | now.rights;
        }
    }
    // The interpreter has translations of its own, with the rights there were.
    note(cx.shared, MapReport::Shown { page, offset, rights });
    true
}

/// INVLPG of a user's page. False if it is the monitor's to do.
pub fn of_user(cx: &mut Context<'_>, gva: u64) -> bool {
    let page = gva & !(PAGE - 1);
    lookup::forget(gva);
    if cx.shared.mapped.large != 0
        || cx.shared.made.count as usize >= MAX_MADE
        || gva >> 47 != 0
        || !owns(page, false)
    {
        return false;
    }
    let base = page & !(LARGE - 1);
    let large = larges::has(&cx.shared.mapped.larges, base);
    let [_, faulted, _, space] = cx.vcpu.paging.faulted;
    let answered = space == cx.vcpu.regs.cr3 && faulted & !(PAGE - 1) == page;
    if !large && answered && cx.vcpu.paging.deferred == 0 && cx.vcpu.regs.ac == 0 {
        // The page whose fault the guest is answering: it is about to be mapped anew, by one host call that
        // takes the old mapping away as well. Nobody can tell that the old mapping is still there: user code
        // does not run before `finish_deferred`, and kernel code reaches the user's memory only with AC set.
        // Whatever sets AC finishes it first: STAC (`jit::emit`), IRET and entries (`assist`), the monitor.
        cx.vcpu.paging.deferred = page;
        note_dropped(cx.shared, page, PAGE);
        cx.vcpu.counters.invalidations += 1;
        return true;
    }
    if !large && reload(cx, page) {
        cx.vcpu.counters.invalidations += 1;
        return true;
    }
    let (page, len) = if large { (base, LARGE) } else { (page, PAGE) };
    let done = if large { drop_large(cx, page) } else { drop_page(cx, page) };
    if !done {
        return false;
    }
    note_dropped(cx.shared, page, len);
    cx.vcpu.counters.invalidations += 1;
    true
}

/// Carries out a 32-bit kernel's INVLPG of a kernel page (GVA), also in other wedges: the monitor has them drop the page before they run.
/// False leaves the instruction to the monitor. That is so where there may be translated code or a large page in pieces, and where this
/// wedge does not know what is mapped.
pub fn of_narrow_kernel(cx: &mut Context<'_>, gva: u64) -> bool {
    let page = gva & !(PAGE - 1);
    if page < KERNEL_START.max(cx.vcpu.run.plain_from) || cx.shared.made.count as usize >= MAX_MADE
    {
        return false;
    }
    let hva = wide(page).wrapping_add(bias());
    if !hints::is_dropped(&cx.shared.mapped, hva) && !unmap_narrow(cx, hva) {
        return false;
    }
    lookup::forget(page);
    // The interpreter may have a translation of its own.
    note_once(cx.shared, MapReport::KernelDropped { page: hva });
    cx.vcpu.counters.invalidations += 1;
    true
}

/// Unmaps a kernel page (HVA). False if this wedge does not know that the page is mapped, or the host refuses.
fn unmap_narrow(cx: &mut Context<'_>, hva: u64) -> bool {
    // What the page was mapped with may be cut in two.
    if !hints::is_open(&cx.shared.mapped, hva) || cx.shared.mapped.budget == 0 {
        return false;
    }
    cx.shared.mapped.budget -= 1;
    // SAFETY: a page of the kernel's.
    let done = unsafe { cx.unmap(hva, PAGE) == 0 };
    if done {
        hints::note_dropped(&mut cx.shared.mapped, hva);
    }
    done
}
