//! As whom the server asks the host, where it may choose.

use rustix::{
    io::Errno,
    process::{Gid, Uid},
    thread::{
        CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_res_gid,
        set_thread_res_uid,
    },
};

/// Becomes nobody again when it is dropped: root, whom it was before.
struct Another;

impl Drop for Another {
    fn drop(&mut self) {
        let (user, group) = (Uid::ROOT, Gid::ROOT);
        let back = set_thread_res_uid(None::<Uid>, user, None::<Uid>).and(set_thread_res_gid(
            None::<Gid>,
            group,
            None::<Gid>,
        ));
        if let Err(error) = back {
            // As somebody else it could not serve others, and must not serve as if it could.
            tracing::error!(%error, "a folder's server cannot become root again");
            std::process::abort();
        }
    }
}

/// Does something as a user of the guest. For user 0 that is whoever we are.
///
/// # Errors
/// We may not become that user, or there is none of that number.
pub(crate) fn as_user<T>(
    user: u32,
    group: u32,
    what: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, Errno> {
    if (user, group) == (0, 0) {
        return what();
    }
    // To the host it would mean "as before".
    if user == u32::MAX || group == u32::MAX {
        return Err(Errno::INVAL);
    }
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    // First the group: another user may not change it.
    set_thread_res_gid(None::<Gid>, group, None::<Gid>)?;
    let _back = Another;
    set_thread_res_uid(None::<Uid>, user, None::<Uid>)?;
    what()
}

/// Does something as one whose writing takes the set-user-ID and set-group-ID bits from a file.
///
/// # Errors
/// The host refuses.
pub(crate) fn without_keeping_bits<T>(
    apply: bool,
    what: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, Errno> {
    let sets = if apply { Some(capabilities(None)?) } else { None };
    let Some(sets) = sets.filter(|sets| sets.effective.contains(CapabilitySet::FSETID)) else {
        return what();
    };
    let effective = sets.effective - CapabilitySet::FSETID;
    set_capabilities(None, CapabilitySets { effective, ..sets })?;
    let outcome = what();
    set_capabilities(None, sets)?;
    outcome
}
