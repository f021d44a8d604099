//! Which names a server of a folder can reach: those in the folder.
//!
//! Two means, each where the host has it:
//!
//! - A mount namespace in which there is nothing but the folder and the server's own descriptors ([`move_in`]). It needs root
//!   (CAP_SYS_ADMIN). Devices in the folder are none there, nothing in it can be executed, and a folder that is shared for reading is
//!   mounted so. Afterwards the capabilities go that do not concern files and their owners.
//! - Landlock ([`lock`]), which needs no privilege: files outside of the folder cannot be opened, made, renamed or removed, whatever name
//!   they are asked for by, and no process outside can be traced or sent a signal.
//!
//! An ordinary user's server has the second only: with a user namespace the guest would see the files of all other users
//! as nobody's. What Landlock leaves open is attributes: the server could look at those of files outside and, if the folder is
//! shared for writing, change the modes and times of the user's own files.

// UNSAFETY: unshare and mount_setattr have no safe wrappers in rustix.
#![allow(unsafe_code)]

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, RestrictionStatus,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use rustix::{
    fs::CWD,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
        OpenTreeFlags, UnmountFlags, fsconfig_create, fsmount, fsopen, mount_change, move_mount,
        open_tree, unmount,
    },
    process::{chdir, pivot_root},
    thread::{
        CapabilitySet, CapabilitySets, UnshareFlags, capabilities, set_capabilities, unshare_unsafe,
    },
};

/// Where the room is built: a folder that every host has and that the server does not need under its old name.
const SITE: &str = "/proc";
/// Where the shared folder is in it.
const FOLDER: &str = "/folder";
/// Where the library looks for descriptors.
const DESCRIPTORS: &str = "/proc/self/fd";
const MOUNTS: &str = "/proc/self/mountinfo";

/// Moves into a mount namespace of the folder's own, if the host lets us, and gives up what a file server has no use for. Returns where the
/// folder is from then on. There must be no other thread.
///
/// # Errors
/// We have root's rights and cannot give them up.
pub fn move_in(folder: &Path, readonly: bool) -> io::Result<PathBuf> {
    let sets = capabilities(None)?;
    let mut place = folder.to_owned();
    if sets.effective.contains(CapabilitySet::SYS_ADMIN) {
        match furnish(folder, readonly) {
            Ok(()) => place = FOLDER.into(),
            Err(error) => tracing::warn!(%error, "no mount namespace for a shared folder"),
        }
    }
    give_up(sets)?;
    Ok(place)
}

/// Keeps the rights to files of any owner and to become any user, of those there are.
fn give_up(sets: CapabilitySets) -> io::Result<()> {
    let kept = CapabilitySet::CHOWN
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::FOWNER
        | CapabilitySet::FSETID
        | CapabilitySet::SETUID
        | CapabilitySet::SETGID
        | CapabilitySet::MKNOD
        | CapabilitySet::SETFCAP;
    let (effective, permitted) = (sets.effective & kept, sets.permitted & kept);
    let inheritable = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective, permitted, inheritable })?)
}

fn furnish(folder: &Path, readonly: bool) -> io::Result<()> {
    // SAFETY: what is unsafe about unshare is a table of descriptors that some thread believes shared; mounts are not that.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS)? };
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(CWD, folder, clone | OpenTreeFlags::AT_RECURSIVE)?;
    restrict(&tree, readonly)?;
    let descriptors = open_tree(CWD, DESCRIPTORS, clone)?;
    let built = build(&tree, &descriptors);
    if built.is_err() {
        // What was covered is needed again.
        let _ = unmount(SITE, UnmountFlags::DETACH);
    }
    built
}

/// Takes from all mounts of a folder what a file server has no use for.
fn restrict(tree: &OwnedFd, readonly: bool) -> io::Result<()> {
    /// `struct mount_attr` of linux/mount.h.
    #[repr(C)]
    struct Attributes {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    const MOUNT_SETATTR: libc::c_long = 442;
    let mut set = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    set.set(MountAttrFlags::MOUNT_ATTR_RDONLY, readonly);
    let set = u64::from(set.bits());
    let attributes = Attributes { set, clear: 0, propagation: 0, user_namespace: 0 };
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    let (tree, size) = (tree.as_raw_fd(), size_of_val(&attributes));
    // SAFETY: the call reads a name that ends and a structure of the size that is told.
    let done = unsafe {
        libc::syscall(MOUNT_SETATTR, tree, c"".as_ptr(), flags, &raw const attributes, size)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// An empty root with the folder and our descriptors in it, in place of the one there is.
fn build(tree: &OwnedFd, descriptors: &OwnedFd) -> io::Result<()> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let empty = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, empty)?;
    put(&root, SITE)?;
    for (mount, place) in [(tree, FOLDER), (descriptors, DESCRIPTORS)] {
        let place = format!("{SITE}{place}");
        fs::create_dir_all(&place)?;
        put(mount, &place)?;
    }
    // The library opens it, and reads it only to make file handles, which it does not make for us.
    fs::write(format!("{SITE}{MOUNTS}"), "")?;
    chdir(SITE)?;
    pivot_root(".", ".")?;
    // What was the root is above the one that is.
    unmount(".", UnmountFlags::DETACH)?;
    Ok(chdir("/")?)
}

fn put(mount: &OwnedFd, place: &str) -> io::Result<()> {
    let whole = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(mount.as_fd(), "", CWD, place, whole)?)
}

/// Has files below `folder` alone be opened, made, renamed and removed from now on; false where the host has no Landlock. There must be
/// no other thread.
///
/// # Errors
/// The host has it, and refuses.
pub fn lock(folder: &Path) -> Result<bool, String> {
    let folder = PathFd::new(folder).map_err(|error| error.to_string())?;
    let status = restrict_names(folder).map_err(|error| error.to_string())?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

fn restrict_names(folder: PathFd) -> Result<RestrictionStatus, RulesetError> {
    let everything = AccessFs::from_all(ABI::V5);
    let granted = everything & !(AccessFs::Execute | AccessFs::IoctlDev);
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(everything)?
        .scope(Scope::AbstractUnixSocket | Scope::Signal)?
        .create()?
        .add_rule(PathBeneath::new(folder, granted))?
        .restrict_self()
}
