//! The table of patched system calls lies among the user's pages: user code can load from it, and would,
//! where the program has memory of its own. So it is closed as soon as the program has pages anywhere near.
//! Loads then fault, and are interpreted; so are the jumps of calls that had been patched before.

use crate::host::{MPROTECT, change};
use frame::{SITES, SITES_LEN, Shared, near_sites};

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
    // SAFETY: the table is the program's to read, not this code's.
    unsafe { change(s, MPROTECT, SITES as u64, SITES_LEN as u64, 0, 0) }
}

/// There are none any more.
pub fn open(s: &mut Shared) -> i64 {
    s.mapped.sites_closed = 0;
    // SAFETY: as in `close`.
    unsafe { change(s, MPROTECT, SITES as u64, SITES_LEN as u64, READ, 0) }
}
