//! The table of patched system calls lies among the user's pages: user code can load from it, and would,
//! where the program has memory of its own. So it is closed as soon as the program has pages anywhere near.
//! Loads then fault, and are interpreted; so are the jumps of calls that had been patched before.

use crate::Context;
use wedge_abi::{AREA, AREA_LEN, SITES, near_sites};

const READ: u64 = 1;

/// Pages of the user's are about to be mapped. False if the host does not let the table be closed.
pub fn make_way(cx: &mut Context<'_>, address: u64) -> bool {
    !near_sites(address) || close(cx) == 0
}

/// There are some, mapped or not.
pub fn close(cx: &mut Context<'_>) -> i64 {
    if cx.shared.mapped.sites_closed != 0 {
        return 0;
    }
    cx.shared.mapped.sites_closed = 1;
    protect(cx, 0)
}

/// There are none any more.
pub fn open(cx: &mut Context<'_>) -> i64 {
    cx.shared.mapped.sites_closed = 0;
    protect(cx, READ)
}

/// Gives the table these rights, and the thread-local areas behind the table, too. A process of user code's own has no
/// such areas.
fn protect(cx: &mut Context<'_>, rights: u64) -> i64 {
    // SAFETY: that is where the table lies.
    let result = unsafe { cx.protect(SITES as u64, (AREA - SITES) as u64, rights) };
    if result != 0 || cx.shared.setup.user_secret != 0 {
        return result;
    }
    protect_areas(cx, rights)
}

/// Opens the page of thread-local areas to loads, or closes that page. The table stays as it is. False if the host refuses.
pub fn show_areas(cx: &mut Context<'_>, shown: bool) -> bool {
    protect_areas(cx, if shown { READ } else { 0 }) == 0
}

fn protect_areas(cx: &mut Context<'_>, rights: u64) -> i64 {
    // SAFETY: the areas lie behind the table.
    unsafe { cx.protect(AREA as u64, AREA_LEN as u64, rights) }
}
