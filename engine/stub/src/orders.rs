//! Carrying out the monitor's orders.

use crate::{
    Context, die, here, hints,
    host::{MAP_POPULATE, MAP_PRIVATE, MAP_SHARED},
    mmu, sites, text,
};
use wedge_abi::{
    Hint, MAX_ORDERS, MAX_RUN, MapCommand, MapReport, NO_USER, Owner, Rights, SITES, SITES_LEN,
    TOP, UPPER_USER,
};

const PAGE: u64 = 4096;
/// ENOMEM: where a part of a range is not mapped, what is before that part has been changed.
const NOT_MAPPED: i64 = -12;
/// ENOMEM, too.
const NO_MEMORY: i64 = -12;

/// Carries out what the monitor has ordered, up to the first that fails.
pub fn obey(cx: &mut Context<'_>) {
    cx.shared.orders.failed = 0;
    let count = (cx.shared.orders.count as usize).min(MAX_ORDERS);
    for at in 0..count {
        let Some(raw) = cx.shared.orders.list.get(at).copied() else { break };
        let Some(command) = MapCommand::decode(raw) else { die() };
        let result = apply(command, cx);
        if result < 0 {
            cx.shared.orders.failed = result;
            break;
        }
    }
    cx.shared.orders.count = 0;
}

fn apply(command: MapCommand, cx: &mut Context<'_>) -> i64 {
    check(command);
    match command {
        MapCommand::OpenSites => sites::open(cx),
        MapCommand::CloseSites => sites::close(cx),
        MapCommand::Protect { start, len, rights: Rights::NONE } => {
            hints::close(&mut cx.shared.mapped, start, start + len);
            // SAFETY: the range has been checked; so in all of this file.
            unsafe { cx.protect(start, len, 0) }
        }
        MapCommand::Unmap { start, len } => {
            hints::forget_mapped(&mut cx.shared.mapped, start, start + len);
            // SAFETY: as above.
            let result = unsafe { cx.unmap(start, len) };
            if result >= 0 && len <= MAX_RUN {
                hints::note_all_dropped(&mut cx.shared.mapped, start, start + len);
            }
            result
        }
        MapCommand::Poke { address, len, bytes } => {
            hints::forget(&mut cx.shared.mapped, address, address + len);
            // SAFETY: as above; the copy has been made by an order before this.
            unsafe { cx.poke(address, len, bytes) }
        }
        MapCommand::Protect { start, len, rights } => {
            hints::forget(&mut cx.shared.mapped, start, start + len);
            protect(cx, start, len, rights)
        }
        MapCommand::Copy { page, offset } => {
            hints::forget(&mut cx.shared.mapped, page, page + PAGE);
            make_way(cx, page);
            cx.shared.mapped.copied = 1;
            // SAFETY: as above.
            unsafe {
                cx.map(page, PAGE, Rights::READ_WRITE.bits(), MAP_PRIVATE | MAP_POPULATE, offset)
            }
        }
        MapCommand::Code { page, offset } => {
            make_way(cx, page);
            let rights = Rights::READ_EXECUTE.bits();
            hints::set(&mut cx.shared.mapped, page, Hint { page: page | rights, offset });
            // SAFETY: as above.
            unsafe { cx.map(page, PAGE, rights, MAP_SHARED | MAP_POPULATE, offset) }
        }
        MapCommand::Keep { page, offset } => {
            hints::keep(&mut cx.shared.mapped, page, offset);
            0
        }
        MapCommand::Large { base } => mmu::note_large(cx, base).map_or(NO_MEMORY, |()| 0),
        MapCommand::Small { page, rights } => {
            let hint = Hint { page: page | rights.bits(), offset: u64::MAX };
            hints::set(&mut cx.shared.mapped, page, hint);
            0
        }
        MapCommand::Map { start, len, offset, rights, owner } => {
            hints::forget_mapped(&mut cx.shared.mapped, start, start + len);
            map_ram(cx, start, len, offset, rights, owner)
        }
    }
}

/// Ends the process if a command concerns what is the wedge's own.
fn check(command: MapCommand) {
    let (start, len) = command.range();
    let end = start.wrapping_add(len);
    let reaches = |from: u64, to: u64| start < to && end > from;
    let reserved = reaches(here(NO_USER as usize) as u64, here(UPPER_USER as usize) as u64)
        || reaches(SITES as u64, (SITES + SITES_LEN) as u64);
    if reserved || end > TOP as u64 || end < start {
        die();
    }
}

fn make_way(cx: &mut Context<'_>, page: u64) {
    if !sites::make_way(cx, page) {
        die();
    }
}

fn map_ram(
    cx: &mut Context<'_>,
    start: u64,
    len: u64,
    offset: u64,
    rights: Rights,
    owner: Owner,
) -> i64 {
    // Where pages are searched, user code executes copies alone.
    if cx.shared.setup.searched != 0 && rights.executes() {
        die();
    }
    match owner {
        Owner::User => {
            make_way(cx, start);
            // SAFETY: as in `apply`.
            unsafe { cx.map(start, len, rights.bits(), MAP_SHARED | MAP_POPULATE, offset) }
        }
        Owner::Kernel => {
            // SAFETY: as in `apply`.
            let result = unsafe { cx.map(start, len, rights.bits(), MAP_SHARED, offset) };
            if result < 0 || cx.shared.setup.key == 0 {
                return result;
            }
            // SAFETY: as in `apply`.
            unsafe { cx.protect_by_key(start, len, rights.bits()) }
        }
    }
}

fn protect(cx: &mut Context<'_>, start: u64, len: u64, rights: Rights) -> i64 {
    if cx.shared.setup.searched != 0 && rights.executes() {
        return open_code(cx, start, len, rights);
    }
    // SAFETY: as in `apply`.
    match unsafe { cx.protect(start, len, rights.bits()) } {
        // Nothing is mapped there, so nothing has too many rights.
        NOT_MAPPED if len == PAGE => 0,
        result => result,
    }
}

/// Lets user code execute a page, a copy that has just been made and that nothing else can write. A page that
/// could open protection keys is taken away, and the monitor told.
fn open_code(cx: &mut Context<'_>, page: u64, len: u64, rights: Rights) -> i64 {
    let hidden = rights == Rights::EXECUTE && cx.shared.setup.key != 0;
    if !hidden && rights != Rights::READ_EXECUTE || len != PAGE {
        die();
    }
    // SAFETY: the copy has been made, and can be read.
    if !unsafe { text::is_closed(page) } {
        mmu::note(cx.shared, MapReport::Refused { page });
        // SAFETY: as in `apply`.
        return unsafe { cx.unmap(page, len) };
    }
    let rights = Rights::READ_EXECUTE.bits();
    if hidden {
        // What is changed in it is not there for user code that loads it. This code sees it.
        // SAFETY: as in `apply`.
        return unsafe { cx.protect_by_key(page, len, rights) };
    }
    // SAFETY: as in `apply`.
    unsafe { cx.protect(page, len, rights) }
}
