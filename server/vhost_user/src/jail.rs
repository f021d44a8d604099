//! What is left to a server once it has opened what it serves.
//!
//! Its files are open, its memory comes by the protocol; what it may still ask of the host is a short list ([`policy`](crate::policy)).
//! Which names there are for it is settled before, by [`sandbox`](crate::sandbox): a folder's, or none.

use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use crate::policy::{self, Served};

const EPERM: u32 = libc::EPERM.cast_unsigned();

/// Shuts this process in, all of its threads and for good.
///
/// # Errors
/// The host has no such filters; it says why.
pub fn enter(served: Served) -> Result<(), String> {
    let filter = filter(served).map_err(|error| error.to_string())?;
    seccompiler::apply_filter_all_threads(&filter).map_err(|error| error.to_string())
}

fn filter(served: Served) -> Result<BpfProgram, BackendError> {
    let (refuse, allow) = (SeccompAction::Errno(EPERM), SeccompAction::Allow);
    let rules = policy::of(served)?.into_iter().collect();
    SeccompFilter::new(rules, refuse, allow, TargetArch::x86_64)?.try_into()
}
