//! Taking turns with the monitor, and carrying out its orders.

use crate::{
    die, frame,
    host::{self, call, load_vectors, map, store_vectors},
    layout::{
        COPY, ExitKind, KERNEL_PAGE, MAX_ORDERS, MONITOR, NO_USER, Order, POKE, PROTECT, SITES, SITES_LEN, Shared, TOP, UPPER_USER, WEDGE, go,
        mode,
    },
    mmu, run, shared,
};
use core::sync::atomic::Ordering;

/// Tells the monitor why guest code stopped, and goes on when and as it says.
pub fn exit(kind: ExitKind) -> ! {
    frame().reason = kind as u64;
    hand_over_and_run()
}

pub fn hand_over_and_run() -> ! {
    let f = frame();
    f.mode = mode::WEDGE;
    mmu::finish_deferred(f);
    // The monitor looks at everything a kick can be about.
    f.kicked = 0;
    store_vectors(f.vectors.0.as_mut_ptr());
    hand_over(shared());
    load_vectors(f.vectors.0.as_ptr());
    run::restart(run::run)
}

/// Gives the monitor its turn, and obeys its orders when it is ours again.
fn hand_over(s: &mut Shared) {
    loop {
        s.turn.store(MONITOR, Ordering::SeqCst);
        call(host::FUTEX, &raw const s.turn as u64, 1, 1, 0, 0);
        while s.turn.load(Ordering::SeqCst) != WEDGE {
            call(host::FUTEX, &raw const s.turn as u64, 0, MONITOR as u64, 0, 0);
        }
        obey(s);
        if s.failed == 0 && frame().go != go::NOTHING {
            return;
        }
    }
}

fn obey(s: &mut Shared) {
    s.failed = 0;
    let count = (s.order_count as usize).min(MAX_ORDERS);
    for at in 0..count {
        let Some(order) = s.orders.get(at).copied() else { break };
        let result = apply(&order, s);
        if result < 0 {
            s.failed = result;
            break;
        }
    }
    s.order_count = 0;
}

/// Writes bytes into a private copy that has just been mapped.
fn poke(address: u64, len: u64, bytes: u64) -> i64 {
    for n in 0..len.min(8) {
        // SAFETY: an address outside the window; if it is not mapped, this process ends.
        unsafe { *((address + n) as *mut u8) = (bytes >> (n * 8)) as u8 };
    }
    0
}

fn apply(order: &Order, s: &mut Shared) -> i64 {
    let Order { address, len, offset, protection } = *order;
    let end = address.wrapping_add(len);
    let ours = |from: u64, to: u64| address < to && end > from;
    let reserved = ours(NO_USER, UPPER_USER) || ours(SITES as u64, (SITES + SITES_LEN) as u64);
    if reserved || end > TOP as u64 || end < address {
        die();
    }
    mmu::forget(s, address, end);
    if protection == 0 {
        return call(host::MUNMAP, address, len, 0, 0, 0);
    }
    if protection & POKE != 0 {
        return poke(address, len, offset);
    }
    if protection & PROTECT != 0 {
        return call(host::MPROTECT, address, len, protection & 7, 0, 0);
    }
    if protection & COPY != 0 {
        // MAP_PRIVATE | MAP_FIXED | MAP_POPULATE
        return map(address, len, 3, 0x8012, s.ram, offset);
    }
    let (rights, kernel) = (protection & !KERNEL_PAGE, protection & KERNEL_PAGE != 0);
    // MAP_SHARED | MAP_FIXED, and MAP_POPULATE for user pages of less than a large page.
    let populate = if len < 1 << 21 && !kernel { 0x8000 } else { 0 };
    let result = map(address, len, rights, 0x11 | populate, s.ram, offset);
    if result < 0 || !kernel || s.key == 0 {
        return result;
    }
    call(host::PKEY_MPROTECT, address, len, rights, s.key, 0)
}
