//! What is left to the monitor once its machine is ready.
//!
//! Its files and sockets are open, and what it needs beyond is done by a process that it asks. So it needs a short list of calls
//! ([`policy`]), which all of its threads are held to, and hardly a capability. Landlock says once more that names lead nowhere. What a
//! guest that takes it over can still do is in docs/isolation.md.

mod policy;

use std::collections::BTreeMap;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetError,
    RulesetStatus, Scope,
};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// Gives up all capabilities but one, for this thread and those it makes from now on. That one is to say on which CPUs a process
/// runs which has others, as a folder's server of root's.
///
/// # Errors
/// The host refuses.
pub fn give_up_capabilities() -> std::io::Result<()> {
    let CapabilitySets { effective, permitted, .. } = capabilities(None)?;
    let kept = CapabilitySet::SYS_NICE;
    let inheritable = CapabilitySet::empty();
    let sets =
        CapabilitySets { effective: effective & kept, permitted: permitted & kept, inheritable };
    Ok(set_capabilities(None, sets)?)
}

/// The Landlock whose rights to files we name.
const FILES: ABI = ABI::V5;

/// Has this thread, and those it makes from now on, open, make and remove no file, listen at and connect to no port, and connect to no
/// abstract socket; false where the host has no Landlock. Signals stay with the filter: wedges are no children of this thread's.
///
/// # Errors
/// The host has it, and refuses.
pub fn forget_names() -> Result<bool, String> {
    let forget = || -> Result<RulesetStatus, RulesetError> {
        let rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
        let rules = rules.handle_access(AccessFs::from_all(FILES))?;
        let rules = rules.handle_access(AccessNet::from_all(FILES))?;
        Ok(rules.scope(Scope::AbstractUnixSocket)?.create()?.restrict_self()?.ruleset)
    };
    forget().map(|status| status != RulesetStatus::NotEnforced).map_err(|error| error.to_string())
}

/// Shuts this process in, all of its threads and for good.
///
/// # Errors
/// The host has no such filters; it says why.
pub fn enter() -> Result<(), String> {
    let calls = policy::calls(std::process::id()).map_err(|error| error.to_string())?;
    let refuse = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    apply(calls.into_iter().collect(), refuse, SeccompAction::Allow)?;
    // The C library makes threads by clone3, whose flags no filter can see, and by clone where there is no clone3. The
    // last filter decides which error it is.
    let missing = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    apply(clone3, SeccompAction::Allow, missing)
}

fn apply(
    calls: BTreeMap<i64, Vec<seccompiler::SeccompRule>>,
    otherwise: SeccompAction,
    listed: SeccompAction,
) -> Result<(), String> {
    let program = || -> Result<BpfProgram, BackendError> {
        SeccompFilter::new(calls, otherwise, listed, TargetArch::x86_64)?.try_into()
    };
    let program = program().map_err(|error| error.to_string())?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| error.to_string())
}
