//! The sandbox of a device server: what it can reach by name, and as whom. A folder's server reaches the folder, all others nothing.
//!
//! Three means, each where the host has it:
//!
//! - Namespaces of its own: no mounts, network, or processes of others. A folder's server moves into a mount namespace that has
//!   nothing but the folder and the server's own descriptors ([`enter_folder`]). The move needs root (CAP_SYS_ADMIN).
//!   Devices in the folder are none there, nothing in it can be executed, and a folder that is shared for reading is mounted so. The
//!   others move into an empty one ([`enter_empty`]), an ordinary user's by way of a user namespace.
//! - Capabilities: a folder's server keeps those that concern files and their owners, the others none.
//! - Landlock ([`allow_only`], [`allow_nothing`]), which needs no privilege: files outside of the folder cannot be opened, made, renamed or
//!   removed, whatever name they are asked for by; no process outside can be traced or sent a signal, by whatever means; no abstract
//!   socket outside can be connected to.
//!
//! A folder's server of an ordinary user has Landlock only: with a user namespace the guest would see the files of all other users
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
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus,
    Scope,
};
use rustix::{
    fs::CWD,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
        OpenTreeFlags, UnmountFlags, fsconfig_create, fsmount, fsopen, mount_change, move_mount,
        open_tree, unmount,
    },
    process::{chdir, getegid, geteuid, pivot_root},
    thread::{
        CapabilitySet, CapabilitySets, UnshareFlags, capabilities, set_capabilities, unshare_unsafe,
    },
};

/// Where the sandbox's root is built: a folder that every host has and that the server does not need under its old name.
const NEW_ROOT: &str = "/proc";
/// Where the shared folder is in it.
const FOLDER: &str = "/folder";
/// Where the library looks for descriptors.
const DESCRIPTORS: &str = "/proc/self/fd";
const MOUNTS: &str = "/proc/self/mountinfo";

/// Moves into a mount namespace of the folder's own, if the host lets us, and gives up what a file server has no use for. Returns where the
/// folder is from then on. With `privileged` the guest may make device nodes and programs that run with rights of their own, as far as we
/// may. There must be no other thread.
///
/// # Errors
/// We have root's rights and cannot give them up.
pub fn enter_folder(folder: &Path, readonly: bool, privileged: bool) -> io::Result<PathBuf> {
    let sets = capabilities(None)?;
    let mut place = folder.to_owned();
    if sets.effective.contains(CapabilitySet::SYS_ADMIN) {
        match enter_namespace(folder, readonly) {
            Ok(()) => place = FOLDER.into(),
            Err(error) => tracing::warn!(%error, "no mount namespace for a shared folder"),
        }
    }
    give_up(sets, privileged)?;
    Ok(place)
}

/// Moves where there are no files, with `network` no network either, and gives up all rights. There must be no other thread.
/// Whatever the host does not allow is left out: the filter refuses the calls in any case.
///
/// # Errors
/// We have root's rights and cannot give them up.
pub fn enter_empty(network: bool) -> io::Result<()> {
    let (user, group) = (geteuid(), getegid());
    let mut wanted = UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    wanted.set(UnshareFlags::NEWNET, network);
    let privileged = capabilities(None)?.effective.contains(CapabilitySet::SYS_ADMIN);
    wanted.set(UnshareFlags::NEWUSER, !privileged);
    // SAFETY: as in `enter_namespace`.
    let moved = unsafe { unshare_unsafe(wanted) }.map_err(io::Error::from).and_then(|()| empty());
    if let Err(error) = moved {
        tracing::info!(%error, ?user, ?group, "no namespaces for a device");
    }
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    Ok(set_capabilities(None, none)?)
}

/// An empty root in place of the one there is.
fn empty() -> io::Result<()> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    put(&empty_root()?, NEW_ROOT)?;
    take_for_root()
}

/// Keeps the rights to files of any owner and to become any user, of those there are. Without privilege those go that make device
/// nodes and programs with rights of their own.
fn give_up(sets: CapabilitySets, privileged: bool) -> io::Result<()> {
    let mut kept = CapabilitySet::CHOWN
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::FOWNER
        | CapabilitySet::SETUID
        | CapabilitySet::SETGID;
    // With FSETID a program that is written would keep its owner's rights.
    let more = CapabilitySet::FSETID | CapabilitySet::MKNOD | CapabilitySet::SETFCAP;
    kept.set(more, privileged);
    let (effective, permitted) = (sets.effective & kept, sets.permitted & kept);
    let inheritable = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective, permitted, inheritable })?)
}

fn enter_namespace(folder: &Path, readonly: bool) -> io::Result<()> {
    // SAFETY: what is unsafe about unshare is a table of descriptors that some thread believes shared; mounts are not that.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS)? };
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(CWD, folder, clone | OpenTreeFlags::AT_RECURSIVE)?;
    restrict(&tree, readonly)?;
    let descriptors = open_tree(CWD, DESCRIPTORS, clone)?;
    let built = build(&tree, &descriptors);
    if built.is_err() {
        // What was covered is needed again.
        let _ = unmount(NEW_ROOT, UnmountFlags::DETACH);
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
    put(&empty_root()?, NEW_ROOT)?;
    for (mount, place) in [(tree, FOLDER), (descriptors, DESCRIPTORS)] {
        let place = format!("{NEW_ROOT}{place}");
        fs::create_dir_all(&place)?;
        put(mount, &place)?;
    }
    // The library opens it, and reads it only to make file handles, which it does not make for us.
    fs::write(format!("{NEW_ROOT}{MOUNTS}"), "")?;
    take_for_root()
}

fn empty_root() -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Makes what is mounted at `NEW_ROOT` the root.
fn take_for_root() -> io::Result<()> {
    chdir(NEW_ROOT)?;
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
pub fn allow_only(folder: &Path) -> Result<bool, String> {
    let folder = PathFd::new(folder).map_err(|error| error.to_string())?;
    let status = restrict_names(folder).map_err(|error| error.to_string())?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Has no files be opened, made, renamed and removed at all from now on, nor ports be listened at; false where the host has no Landlock.
/// There must be no other thread.
///
/// # Errors
/// The host has it, and refuses.
pub fn allow_nothing() -> Result<bool, String> {
    let locked = || rules()?.handle_access(AccessNet::BindTcp)?.create()?.restrict_self();
    let status = locked().map_err(|error: RulesetError| error.to_string())?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

fn restrict_names(folder: PathFd) -> Result<RestrictionStatus, RulesetError> {
    let granted = AccessFs::from_all(FILES) & !(AccessFs::Execute | AccessFs::IoctlDev);
    rules()?.create()?.add_rule(PathBeneath::new(folder, granted))?.restrict_self()
}

/// The Landlock whose rights to files we name.
const FILES: ABI = ABI::V5;

/// Nothing is allowed of what Landlock knows of files, signals and abstract sockets.
fn rules() -> Result<Ruleset, RulesetError> {
    let rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
    let rules = rules.handle_access(AccessFs::from_all(FILES))?;
    rules.scope(Scope::AbstractUnixSocket | Scope::Signal)
}
