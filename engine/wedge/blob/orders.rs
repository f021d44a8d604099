//! Carrying out the monitor's orders.

use crate::{
    die, here,
    host::{self, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, call, map},
    layout::{
        CLOSE_SITES, COPY, KERNEL_PAGE, MAX_ORDERS, NO_USER, OPEN_SITES, Order, POKE, PROTECT, REFUSED, SITES, SITES_LEN, Shared, TOP, UPPER_USER,
    },
    mmu, sites, text,
};

const PAGE: u64 = 4096;
const READ: u64 = 1;
const EXECUTE: u64 = 4;

/// Carries out what the monitor has ordered, up to the first that fails.
pub fn obey(s: &mut Shared) {
    s.orders.failed = 0;
    let count = (s.orders.count as usize).min(MAX_ORDERS);
    for at in 0..count {
        let Some(order) = s.orders.list.get(at).copied() else { break };
        let result = apply(&order, s);
        if result < 0 {
            s.orders.failed = result;
            break;
        }
    }
    s.orders.count = 0;
}

fn apply(order: &Order, s: &mut Shared) -> i64 {
    let Order { address, len, offset, protection } = *order;
    match protection {
        OPEN_SITES => return sites::open(s),
        CLOSE_SITES => return sites::close(s),
        _ => {}
    }
    let end = address.wrapping_add(len);
    let ours = |from: u64, to: u64| address < to && end > from;
    let reserved = ours(here(NO_USER as usize) as u64, here(UPPER_USER as usize) as u64) || ours(SITES as u64, (SITES + SITES_LEN) as u64);
    if reserved || end > TOP as u64 || end < address {
        die();
    }
    if protection == PROTECT {
        mmu::close(s, address, end);
        return call(host::MPROTECT, address, len, 0, 0, 0);
    }
    mmu::forget(s, address, end);
    if protection == 0 {
        return call(host::MUNMAP, address, len, 0, 0, 0);
    }
    if protection & POKE != 0 {
        return host::poke(address, len, offset);
    }
    if s.setup.searched != 0 && protection & EXECUTE != 0 {
        return open_code(s, order);
    }
    if protection & PROTECT != 0 {
        return call(host::MPROTECT, address, len, protection & 7, 0, 0);
    }
    if protection & KERNEL_PAGE == 0 && !sites::make_way(s, address) {
        die();
    }
    if protection & COPY != 0 {
        s.mapped.copied = 1;
        return map(address, len, 3, MAP_PRIVATE | MAP_POPULATE, offset);
    }
    let (rights, kernel) = (protection & !KERNEL_PAGE, protection & KERNEL_PAGE != 0);
    let populate = if kernel { 0 } else { MAP_POPULATE };
    let result = map(address, len, rights, MAP_SHARED | populate, offset);
    if result < 0 || !kernel || s.setup.key == 0 {
        return result;
    }
    call(host::PKEY_MPROTECT, address, len, rights, s.setup.key, 0)
}

/// Lets user code execute a page, a copy that has just been made and that nothing else can write. A page that
/// could open protection keys is taken away, and the monitor told.
fn open_code(s: &mut Shared, order: &Order) -> i64 {
    let Order { address, len, protection, .. } = *order;
    if protection != PROTECT | READ | EXECUTE || len != PAGE {
        die();
    }
    if text::is_closed(address) {
        return call(host::MPROTECT, address, len, READ | EXECUTE, 0, 0);
    }
    mmu::note(s, Order { protection: REFUSED, ..*order });
    call(host::MUNMAP, address, len, 0, 0, 0)
}
