//! Carrying out the monitor's orders.

use crate::{
    die, here,
    host::{self, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, change, map},
    mmu, sites, text,
};
use frame::{
    MAX_ORDERS, MapCommand, MapReport, NO_USER, Owner, Rights, SITES, SITES_LEN, Shared, TOP,
    UPPER_USER,
};

const PAGE: u64 = 4096;

/// Carries out what the monitor has ordered, up to the first that fails.
pub fn obey(s: &mut Shared) {
    s.orders.failed = 0;
    let count = (s.orders.count as usize).min(MAX_ORDERS);
    for at in 0..count {
        let Some(raw) = s.orders.list.get(at).copied() else { break };
        let Some(command) = MapCommand::decode(raw) else { die() };
        let result = apply(command, s);
        if result < 0 {
            s.orders.failed = result;
            break;
        }
    }
    s.orders.count = 0;
}

fn apply(command: MapCommand, s: &mut Shared) -> i64 {
    check(command);
    match command {
        MapCommand::OpenSites => sites::open(s),
        MapCommand::CloseSites => sites::close(s),
        MapCommand::Protect { start, len, rights: Rights::NONE } => {
            mmu::close(s, start, start + len);
            // SAFETY: `check` has seen to it that nothing of the wedge's is there.
            unsafe { change(s, host::MPROTECT, start, len, 0, 0) }
        }
        MapCommand::Unmap { start, len } => {
            mmu::forget(s, start, start + len);
            // SAFETY: as above.
            unsafe { change(s, host::MUNMAP, start, len, 0, 0) }
        }
        MapCommand::Poke { address, len, bytes } => {
            mmu::forget(s, address, address + len);
            // SAFETY: as above.
            unsafe { host::poke(s, address, len, bytes) }
        }
        MapCommand::Protect { start, len, rights } => {
            mmu::forget(s, start, start + len);
            protect(s, start, len, rights)
        }
        MapCommand::Copy { page, offset } => {
            mmu::forget(s, page, page + PAGE);
            make_way(s, page);
            s.mapped.copied = 1;
            let (rights, flags) = (Rights::READ_WRITE.bits(), MAP_PRIVATE | MAP_POPULATE);
            // SAFETY: as above.
            unsafe { map(s, page, PAGE, rights, flags, offset) }
        }
        MapCommand::Keep { page, offset } => {
            mmu::keep(s, page, offset);
            0
        }
        MapCommand::Map { start, len, offset, rights, owner } => {
            mmu::forget(s, start, start + len);
            map_ram(s, start, len, offset, rights, owner)
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

fn make_way(s: &mut Shared, page: u64) {
    if !sites::make_way(s, page) {
        die();
    }
}

fn map_ram(s: &mut Shared, start: u64, len: u64, offset: u64, rights: Rights, owner: Owner) -> i64 {
    // Where pages are searched, user code executes copies alone.
    if s.setup.searched != 0 && rights.executes() {
        die();
    }
    match owner {
        Owner::User => {
            make_way(s, start);
            // SAFETY: of a command that `check` has looked at.
            unsafe { map(s, start, len, rights.bits(), MAP_SHARED | MAP_POPULATE, offset) }
        }
        Owner::Kernel => {
            // SAFETY: as above.
            let result = unsafe { map(s, start, len, rights.bits(), MAP_SHARED, offset) };
            if result < 0 || s.setup.key == 0 {
                return result;
            }
            // SAFETY: as above.
            unsafe { change(s, host::PKEY_MPROTECT, start, len, rights.bits(), s.setup.key) }
        }
    }
}

fn protect(s: &mut Shared, start: u64, len: u64, rights: Rights) -> i64 {
    if s.setup.searched != 0 && rights.executes() {
        return open_code(s, start, len, rights);
    }
    // SAFETY: of a command that `check` has looked at.
    unsafe { change(s, host::MPROTECT, start, len, rights.bits(), 0) }
}

/// Lets user code execute a page, a copy that has just been made and that nothing else can write. A page that
/// could open protection keys is taken away, and the monitor told.
fn open_code(s: &mut Shared, page: u64, len: u64, rights: Rights) -> i64 {
    let hidden = rights == Rights::EXECUTE && s.setup.key != 0;
    if !hidden && rights != Rights::READ_EXECUTE || len != PAGE {
        die();
    }
    if !text::is_closed(page) {
        mmu::note(s, MapReport::Refused { page });
        // SAFETY: of a command that `check` has looked at.
        return unsafe { change(s, host::MUNMAP, page, len, 0, 0) };
    }
    let rights = Rights::READ_EXECUTE.bits();
    if hidden {
        // What is changed in it is not there for user code that loads it. This code sees it.
        // SAFETY: as above.
        return unsafe { change(s, host::PKEY_MPROTECT, page, len, rights, s.setup.key) };
    }
    // SAFETY: as above.
    unsafe { change(s, host::MPROTECT, page, len, rights, 0) }
}
