//! Answering page faults from the guest's page tables, without the monitor.
//!
//! The same as the monitor does (`fast::shadow`), for the ordinary cases: 4 KiB pages of RAM, and 2 MiB ones
//! of the user's, that nothing is decoded from, or that are only read. Of what may be executed only the pages in which the monitor
//! would change nothing ([`text`]), and none where protection keys are in use. What is mapped is noted for
//! the monitor, which has to take it away again when code appears in it.

pub use crate::walk::{Access, Leaf, Walk, mark, walk};
use crate::walk::{RESERVED, entry, last_table, ram_offset};
use crate::{
    Context, bias,
    hints::{self, KEPT},
    host::{MAP_EMPTY, MAP_POPULATE, MAP_SHARED},
    larges, reach, sites, text,
};
use core::sync::atomic::Ordering;
use wedge_abi::{
    BORDER, CODE_MARKS, COPIED_PAGE, EMPTY_PAGE, Hint, MAX_MADE, MAX_RUN, MapReport, Owner, POISON,
    REGIONS, Rights, SITES, Shared, TOP, region,
};
use x86::paging::{A, ADDRESS, D, G, NX, P, RW, US};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const LARGE: u64 = 1 << 21;
const AROUND: u64 = 16;
/// Pages mapped at once at the most.
const REACH: u64 = MAX_RUN / PAGE;
const READ: u64 = 1;
const WRITE: u64 = 2;
pub(crate) const EXECUTE: u64 = 4;

/// Maps what a walk has found, and its neighbours. False if that is the monitor's to decide.
pub fn install(cx: &mut Context<'_>, gva: u64, leaf: Leaf, access: Access) -> bool {
    let kernel = gva >> 63 == 1;
    let hva = if kernel { gva.wrapping_add(bias()) } else { gva };
    let page = hva & !(PAGE - 1);
    if kernel == leaf.user || kernel && (!leaf.global || leaf.large) || !owns(hva, kernel) {
        return false;
    }
    if cx.shared.mapped.copied != 0 && !kernel && leaf.executable && !leaf.writable && !access.fetch
    {
        return false; // the program reads its code, of which it has changed copies
    }
    if leaf.large && !access.fetch && map_large(cx, hva, leaf) {
        return true;
    }
    if access.fetch && !kernel && !leaf.large && show_kept(cx, page, leaf) {
        return true;
    }
    let copied = is_copied(cx.shared, gva, leaf);
    match mark(cx.shared, leaf.offset) {
        _ if copied => {}
        0 if is_worth_asking(cx.shared, leaf, kernel) => return false,
        0 => {}
        EMPTY_PAGE if !kernel && !leaf.writable && !leaf.large && !access.fetch => {
            return map_empty(cx, page, leaf.offset);
        }
        _ if !kernel && !leaf.large && is_only_read(cx.shared, leaf.offset, rights(leaf)) => {}
        _ => return false,
    }
    let mut run = Run::of(gva & !(PAGE - 1), leaf, copied);
    if !run.is_as_it_may_be() {
        run.rights &= !EXECUTE;
    }
    if access.fetch && run.rights & EXECUTE == 0 {
        return false;
    }
    if leaf.large {
        return make_of_large(cx, page, PAGE, run.offset, run.rights);
    }
    let Some(table) = last_table(cx, gva) else { return make_run(cx, run, kernel) };
    if !kernel && show_again(cx, table, run) {
        return true;
    }
    let run = extend(cx.shared, table, begin(cx.shared, table, run, kernel), kernel);
    if !make_run(cx, run, kernel) {
        return false;
    }
    around(cx, table, run, kernel);
    true
}

/// Pages to be mapped at once: contiguous in RAM, with the same rights.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    gva: u64,
    len: u64,
    pub(crate) offset: u64,
    pub(crate) rights: u64,
    /// The shared copies of these pages are to be mapped.
    copied: bool,
}

impl Run {
    /// A run of one page, the one at a GVA, or of that page's copy.
    fn of(gva: u64, leaf: Leaf, copied: bool) -> Self {
        let rights = if copied { READ | EXECUTE } else { rights(leaf) };
        Self { gva, len: PAGE, offset: leaf.offset, rights, copied }
    }

    /// Offset of what is to be mapped in the memory object, behind RAM if that is copies.
    fn shown(&self, s: &Shared) -> u64 {
        self.offset + if self.copied { s.setup.ram_len } else { 0 }
    }

    /// If its first page may be executed, then as it is.
    fn is_as_it_may_be(&self) -> bool {
        self.copied || self.rights & EXECUTE == 0 || text::is_plain(self.gva, self.offset)
    }

    /// The other one, of one page, continues it.
    fn continues(&self, next: &Run) -> bool {
        let adjacent = next.offset == self.offset + self.len && next.rights == self.rights;
        adjacent && next.copied == self.copied && next.is_as_it_may_be()
    }
}

fn make_run(cx: &mut Context<'_>, run: Run, kernel: bool) -> bool {
    let hva = if kernel { run.gva.wrapping_add(bias()) } else { run.gva };
    let owner = if kernel { Owner::Kernel } else { Owner::User };
    let shown = run.shown(cx.shared);
    let Run { len, offset, rights, .. } = run;
    make(cx, New { hva, len, offset, shown, rights, owner, piece: false })
}

/// The page at a GVA has a shared copy, which has been searched and nobody writes, and no system calls are patched in the page.
fn is_copied(s: &Shared, gva: u64, leaf: Leaf) -> bool {
    leaf.code && !leaf.large && mark(s, leaf.offset) == COPIED_PAGE && !text::has_sites(gva)
}

/// A page that is mapped for reading twice in a row is likely to be the guest's empty one, which the
/// monitor can mark.
fn is_worth_asking(s: &mut Shared, leaf: Leaf, kernel: bool) -> bool {
    if kernel || leaf.writable || leaf.executable {
        return false;
    }
    core::mem::replace(&mut s.mapped.shared_page, leaf.offset) == leaf.offset
}

/// Maps an empty page for reading, as far as it fills the pages behind this one, too: memory without
/// content is as good, and one mapping for all of them. The monitor takes it away when the page is written.
fn map_empty(cx: &mut Context<'_>, page: u64, offset: u64) -> bool {
    let mut len = PAGE;
    if let Some(table) = last_table(cx, page) {
        let again = |gva: u64| {
            let value = entry(cx.shared, table, gva >> 12 & 0x1ff)
                .map_or(0, |entry| entry.load(Ordering::Relaxed));
            let shown = value & (P | A | US | RW) == P | A | US && value & RESERVED == 0;
            shown && ram_offset(cx.shared, value & ADDRESS) == Some(offset)
        };
        while len < MAX_RUN && (page + len) & (LARGE - 1) != 0 && again(page + len) {
            len += PAGE;
        }
    }
    make_empty(cx, page, len, offset)
}

/// What the guest's last-level table says about a page that it has used already, if that is ordinary and
/// nothing is made of the page.
pub(crate) fn used_page(s: &Shared, table: u64, gva: u64, kernel: bool) -> Option<Run> {
    said_page(s, table, gva, kernel).filter(|said| is_free(s, said, kernel))
}

/// The wedge may map a page, or the page's copy, without the monitor.
fn is_free(s: &Shared, run: &Run, kernel: bool) -> bool {
    run.copied || mark(s, run.offset) == 0 || !kernel && is_only_read(s, run.offset, run.rights)
}

/// These rights do not let the page be written, and the page has no mark but that code was made from it. Not where code is
/// searched: there the monitor has such pages executed, as copies that a mapping would take away.
fn is_only_read(s: &Shared, offset: u64, rights: u64) -> bool {
    s.setup.searched == 0 && rights & WRITE == 0 && mark(s, offset) & !CODE_MARKS == 0
}

/// The same of any page.
fn said_page(s: &Shared, table: u64, gva: u64, kernel: bool) -> Option<Run> {
    let value = entry(s, table, gva >> 12 & 0x1ff)?.load(Ordering::Relaxed);
    let used =
        value & (P | A | US) == P | A | if kernel { 0 } else { US } && (kernel || table & US != 0);
    let executable = s.setup.searched == 0 && !kernel && (value | table) & NX == 0;
    // What may be written and executed is the monitor's to map.
    if !used || executable && value & RW != 0 || value & RESERVED != 0 || kernel && value & G == 0 {
        return None;
    }
    let offset = ram_offset(s, value & ADDRESS)?;
    let writable = value & RW != 0 && value & D != 0 && table & RW != 0;
    let code = s.setup.searched != 0 && !kernel && (value | table) & NX == 0 && value & RW == 0;
    let user = !kernel;
    let leaf = Leaf { offset, large: false, writable, user, executable, code, global: true };
    Some(Run::of(gva, leaf, is_copied(s, gva, leaf)))
}

/// The first page of a run of the kernel's that one page is in: a thread's stack is used from its end.
fn begin(s: &Shared, table: u64, run: Run, kernel: bool) -> Run {
    let mut first = run;
    while kernel && first.gva & (AROUND * PAGE - 1) != 0 {
        match used_page(s, table, first.gva - PAGE, kernel) {
            Some(page) if page.continues(&first) => first = page,
            _ => break,
        }
    }
    first
}

/// Adds what follows the run in the same table and continues it.
fn extend(s: &Shared, table: u64, mut run: Run, kernel: bool) -> Run {
    while run.len < REACH * PAGE && (run.gva + run.len) & (LARGE - 1) != 0 {
        let next = run.gva + run.len;
        match used_page(s, table, next, kernel) {
            Some(page) if run.continues(&page) => run.len += PAGE,
            _ => break,
        }
    }
    run
}

/// The kernel's pages are executed by translation only, and the user's are not written and executed at a
/// time.
fn rights(leaf: Leaf) -> u64 {
    let executes = leaf.user && leaf.executable && !leaf.writable;
    READ | if leaf.writable { WRITE } else { 0 } | if executes { EXECUTE } else { 0 }
}

/// The region of an HVA is the user's or the kernel's, as asked. What lies right before or behind a region of the
/// kernel's is nobody's: an access that begins there would not end at the border.
pub(crate) fn owns(hva: u64, kernel: bool) -> bool {
    let sites = hva.wrapping_sub(SITES as u64 & !(LARGE - 1)) < LARGE;
    if kernel {
        return owner(hva) == POISON;
    }
    let before = is_last(hva) || owner(hva + BORDER) == 0;
    let behind = hva < BORDER || owner(hva - BORDER) == 0;
    !sites && owner(hva) == 0 && before && behind
}

/// What translated code adds to an address.
fn owner(hva: u64) -> u64 {
    // SAFETY: the table has an entry for every region.
    unsafe { crate::word(reach(REGIONS) + region(hva) * 8) }
}

/// Behind it there are no addresses of the host's.
fn is_last(hva: u64) -> bool {
    (hva + BORDER) >> 47 != 0
}

/// A user's 2 MiB page that nothing is decoded from, as one mapping.
fn map_large(cx: &mut Context<'_>, hva: u64, leaf: Leaf) -> bool {
    let offset = leaf.offset & !(LARGE - 1);
    let whole = offset.is_multiple_of(LARGE) && offset + LARGE <= cx.shared.setup.ram_len;
    if !whole || (0..LARGE / PAGE).any(|n| mark(cx.shared, offset + n * PAGE) != 0) {
        return false;
    }
    // What may be executed is looked at page by page.
    make_of_large(cx, hva & !(LARGE - 1), LARGE, offset, rights(leaf) & !EXECUTE)
}

/// Maps a user's 2 MiB page or one page of it, which an INVLPG of any other part of it drops, too.
fn make_of_large(cx: &mut Context<'_>, hva: u64, len: u64, offset: u64, rights: u64) -> bool {
    let base = hva & !(LARGE - 1);
    if base + LARGE > TOP as u64 {
        return false;
    }
    let (owner, piece) = (Owner::User, len < LARGE);
    let new = New { hva, len, offset, shown: offset, rights, owner, piece };
    note_large(cx, base).is_some() && make(cx, new)
}

/// Something of the user's large page at `base` (HVA) is mapped, or about to be. If there is no room to note that, another
/// large page is taken away, as after a flush. `None` if the host does not do that.
pub fn note_large(cx: &mut Context<'_>, base: u64) -> Option<()> {
    if let Some(other) = larges::in_the_way(&mut cx.shared.mapped.larges, base) {
        if cx.shared.made.count as usize >= MAX_MADE || !drop_large(cx, other) {
            return None;
        }
        note_dropped(cx.shared, other, LARGE);
    }
    larges::add(&mut cx.shared.mapped.larges, base).then_some(())
}

/// Takes away what is mapped of the user's large page at `base` (HVA).
pub(crate) fn drop_large(cx: &mut Context<'_>, base: u64) -> bool {
    // SAFETY: pages of the user's.
    let done = unsafe { cx.unmap(base, LARGE) == 0 };
    if done {
        hints::forget_mapped(&mut cx.shared.mapped, base, base + LARGE);
    }
    done
}

/// What is mapped there shows the page already, but is closed or allows less: its protection is changed,
/// which costs a third of a mapping, and that of closed pages beside it in the same call.
fn show_again(cx: &mut Context<'_>, table: u64, run: Run) -> bool {
    if cx.shared.setup.keeps == 0 || !sites::make_way(cx, run.gva) {
        return false;
    }
    let (mut from, mut to) = (run.gva, run.gva + PAGE);
    if hints::shows(&cx.shared.mapped, run.gva, run.shown(cx.shared), 0) {
        (from, to) = like_around(cx.shared, table, run.gva, run.rights);
    } else if run.rights != READ | WRITE
        || !hints::shows(&cx.shared.mapped, run.gva, run.offset, READ)
    {
        return false;
    }
    show(cx, from, to, run.rights)
}

/// Opens a page of code that the monitor has looked at, perhaps a changed copy, and closed pages beside it.
fn show_kept(cx: &mut Context<'_>, page: u64, leaf: Leaf) -> bool {
    let kept =
        rights(leaf) & EXECUTE != 0 && hints::shows(&cx.shared.mapped, page, leaf.offset | KEPT, 0);
    if !kept || cx.shared.setup.keeps == 0 || !sites::make_way(cx, page) {
        return false;
    }
    let (from, to) = match last_table(cx, page) {
        Some(table) => like_around(cx.shared, table, page, rights(leaf)),
        None => (page, page + PAGE),
    };
    show(cx, from, to, rights(leaf))
}

/// A closed page, and those around it that are to be opened with the same rights: their addresses.
fn like_around(s: &Shared, table: u64, page: u64, rights: u64) -> (u64, u64) {
    let (mut from, mut to) = (page, page + PAGE);
    let first = page & !(AROUND * PAGE - 1);
    while from > first && is_like(s, table, from - PAGE, rights) {
        from -= PAGE;
    }
    while to < first + AROUND * PAGE && is_like(s, table, to, rights) {
        to += PAGE;
    }
    (from, to)
}

/// A closed page that shows what the guest's table says, to be opened with these rights.
fn is_like(s: &Shared, table: u64, page: u64, rights: u64) -> bool {
    let Some(said) = said_page(s, table, page, false).filter(|said| said.rights == rights) else {
        return false;
    };
    let plain = || is_free(s, &said, false) && said.is_as_it_may_be();
    hints::shows(&s.mapped, page, said.shown(s), 0) && plain()
        || rights & EXECUTE != 0 && hints::shows(&s.mapped, page, said.offset | KEPT, 0)
}

/// Changes the protection of pages that are mapped, and tells the monitor.
fn show(cx: &mut Context<'_>, from: u64, to: u64, rights: u64) -> bool {
    let pages = (to - from) / PAGE;
    let room = MAX_MADE as u64 - cx.shared.made.count.min(MAX_MADE as u64);
    // SAFETY: pages of the user's that are mapped.
    if room < pages || unsafe { cx.protect(from, to - from, rights) } != 0 {
        return false;
    }
    for page in (from..to).step_by(PAGE as usize) {
        let Some(hint) = hints::slot(&mut cx.shared.mapped, page) else { continue };
        hint.page = page | rights;
        let offset = hint.offset & !KEPT;
        let report = match offset.checked_sub(cx.shared.setup.ram_len) {
            Some(offset) => MapReport::ShownCode { page, offset },
            None => MapReport::Shown { page, offset, rights: Rights::from_bits(rights) },
        };
        note(cx.shared, report);
        if cx.vcpu.paging.deferred == page {
            cx.vcpu.paging.deferred = 0;
        }
    }
    cx.vcpu.counters.shown += pages;
    true
}

/// Maps pages around a run that the guest has used already and that are not mapped yet.
fn around(cx: &mut Context<'_>, table: u64, run: Run, kernel: bool) {
    let (first, end) = window(cx.shared, table, run, kernel);
    // A page on its own costs as much now as when it is asked for; it will be, if the one before the
    // run has been.
    let ahead = kernel || hints::is_open(&cx.shared.mapped, run.gva.wrapping_sub(PAGE));
    let mut at = first;
    while at < end {
        let done = at >= run.gva && at < run.gva + run.len;
        let page = if done { None } else { used_page(cx.shared, table, at, kernel) };
        let hva = if kernel { at.wrapping_add(bias()) } else { at };
        let new = page.filter(|page| !hints::is_open_with(&cx.shared.mapped, hva, page.rights));
        let more = new.map(|page| extend(cx.shared, table, page, kernel));
        // Looking at a page of code takes longest, so that comes last.
        let Some(more) = more.filter(|more| (more.len > PAGE || ahead) && more.is_as_it_may_be())
        else {
            at += PAGE;
            continue;
        };
        if !make_run(cx, more, kernel) {
            return;
        }
        at += more.len;
    }
}

/// Where pages around a run are looked for. The kernel's end at the first hole: behind it another thread has its
/// stack, and one slot after the other would get the stacks of all.
fn window(s: &Shared, table: u64, run: Run, kernel: bool) -> (u64, u64) {
    let first = run.gva & !(AROUND * PAGE - 1);
    let end = first + AROUND * PAGE;
    if !kernel {
        return (first, end);
    }
    let (mut from, mut to) = (run.gva, run.gva + run.len);
    while from > first && said_page(s, table, from - PAGE, kernel).is_some() {
        from -= PAGE;
    }
    while to < end && said_page(s, table, to, kernel).is_some() {
        to += PAGE;
    }
    (from, to)
}

/// A mapping to be made.
#[derive(Clone, Copy)]
struct New {
    hva: u64,
    len: u64,
    /// Offset of the pages in RAM.
    offset: u64,
    /// Offset in the memory object of what is mapped: the pages, or their copies ([`Run::shown`]).
    shown: u64,
    rights: u64,
    owner: Owner,
    piece: bool,
}

/// Maps RAM or the copies of its pages, and notes that for the monitor.
fn make(cx: &mut Context<'_>, new: New) -> bool {
    let New { hva, len, offset, shown, rights, owner, piece } = new;
    let copied = shown != offset;
    let kernel = matches!(owner, Owner::Kernel);
    let populate = if is_filled_at_once(cx, len, kernel) { MAP_POPULATE } else { 0 };
    if !may_make(cx, hva, kernel) {
        return false;
    }
    // SAFETY: the range is its owner's ([`owns`]).
    let mapped = unsafe {
        cx.map(hva, len, rights, MAP_SHARED | populate, shown) >= 0
            && (!kernel || cx.shared.setup.key == 0 || cx.protect_by_key(hva, len, rights) == 0)
    };
    if !mapped {
        return false;
    }
    let start = hva;
    let report = match Rights::from_bits(rights) {
        _ if copied => MapReport::Code { start, len, offset },
        rights => MapReport::Mapped { start, len, offset, rights, owner, piece },
    };
    count_made(cx, report);
    for page in (hva..hva + len.min(REACH * PAGE)).step_by(PAGE as usize) {
        hint_at(cx, page, Hint { page: page | rights, offset: shown + (page - hva) });
    }
    true
}

/// Whether the host is to fill in all pages of a mapping when the mapping is made. It goes from page to page then, so filling in costs more
/// than faults do, each of which fills in sixteen pages. That pays where pages are used at once: for a single page, and for the kernel's.
/// Programs use only a part of longer runs. Of the kernel's large pages most is not used, nor has the host memory for it.
fn is_filled_at_once(cx: &Context<'_>, len: u64, kernel: bool) -> bool {
    match kernel {
        true => len < LARGE && cx.shared.setup.key == 0,
        false => len == PAGE,
    }
}

/// Maps memory without content in place of an empty page, and notes it for the monitor.
fn make_empty(cx: &mut Context<'_>, start: u64, len: u64, offset: u64) -> bool {
    // SAFETY: the range is the user's.
    if !may_make(cx, start, false) || unsafe { cx.map(start, len, READ, MAP_EMPTY, offset) } < 0 {
        return false;
    }
    count_made(cx, MapReport::Empty { start, len, offset });
    for page in (start..start + len).step_by(PAGE as usize) {
        // It shows nothing of RAM.
        hint_at(cx, page, Hint { page: page | READ, offset: u64::MAX });
    }
    true
}

/// There is room for one more mapping, and the table of patched calls is out of its way.
fn may_make(cx: &mut Context<'_>, hva: u64, kernel: bool) -> bool {
    cx.shared.mapped.budget != 0
        && (cx.shared.made.count as usize) < MAX_MADE
        && (kernel || sites::make_way(cx, hva))
}

fn count_made(cx: &mut Context<'_>, report: MapReport) {
    cx.shared.mapped.budget -= 1;
    cx.vcpu.counters.mapped += 1;
    note(cx.shared, report);
}

/// A page is mapped now: so what was put off for it is done.
fn hint_at(cx: &mut Context<'_>, page: u64, is: Hint) {
    hints::set(&mut cx.shared.mapped, page, is);
    if cx.vcpu.paging.deferred == page {
        cx.vcpu.paging.deferred = 0;
    }
}

/// Tells the monitor of it, if there is room.
pub fn note(s: &mut Shared, report: MapReport) {
    let at = s.made.count as usize;
    if let Some(made) = s.made.list.get_mut(at) {
        *made = report.encode();
        s.made.count += 1;
    }
}

/// Tells the monitor that a range of the user's (HVA, bytes) is dropped.
pub(crate) fn note_dropped(s: &mut Shared, start: u64, len: u64) {
    note_once(s, MapReport::Dropped { start, len });
}

/// Tells the monitor something, if that is not the last thing it was told.
pub(crate) fn note_once(s: &mut Shared, report: MapReport) {
    let last = (s.made.count as usize).checked_sub(1).and_then(|at| s.made.list.get(at));
    if last.is_none_or(|last| *last != report.encode()) {
        note(s, report);
    }
}
