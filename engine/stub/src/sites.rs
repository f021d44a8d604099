//! The table of patched system calls lies among the user's pages: user code can load from it, and would,
//! where the program has memory of its own. So it is closed as soon as the program has pages anywhere near.
//! Loads then fault, and are interpreted; so are the jumps of calls that had been patched before.

use crate::host::{MPROTECT, call};
use frame::{AREA, AREA_LEN, SITES, Shared, near_sites};

const READ: u64 = 1;

/// Pages of the user's are about to be mapped. False if the host does not let the table be closed.
pub fn make_way(s: &mut Shared, address: u64) -> bool {
    !near_sites(address) || close(s) == 0
}

/// There are some, mapped or not.
pub fn close(s: &mut Shared) -> i64 {
    if s.mapped.sites_closed != 0 {
        return 0;
    }
    s.mapped.sites_closed = 1;
    protect(s, 0)
}

/// There are none any more.
pub fn open(s: &mut Shared) -> i64 {
    s.mapped.sites_closed = 0;
    protect(s, READ)
}

/// Gives the table these rights, and the thread-local areas behind the table, too. A process of user code's own has no
/// such areas.
fn protect(s: &Shared, rights: u64) -> i64 {
    let result = call(MPROTECT, SITES as u64, (AREA - SITES) as u64, rights, 0, 0);
    if result != 0 || s.setup.user_secret != 0 {
        return result;
    }
    call(MPROTECT, AREA as u64, AREA_LEN as u64, rights, 0, 0)
}
