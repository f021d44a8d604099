//! Accounts of this host, and going on as one of them.

#![allow(unsafe_code)]
// UNSAFETY: what is done between two programs of one process is std's to call, and signals are C's.

use std::{
    env,
    ffi::OsString,
    io,
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use rustix::{
    io::{FdFlags, fcntl_setfd},
    process::{Gid, Uid, geteuid},
    thread::{set_thread_gid, set_thread_groups, set_thread_uid},
};
use uzers::os::unix::UserExt;

use crate::inherited;

/// A user this host knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// The login.
    pub name: OsString,
    /// The user's number.
    pub uid: u32,
    gid: u32,
    groups: Vec<u32>,
    home: PathBuf,
    shell: PathBuf,
}

/// Whether this process has root's rights.
pub fn is_root() -> bool {
    geteuid().is_root()
}

impl Account {
    /// The one of this login or, if there is none, of this number.
    pub fn find(name_or_number: &str) -> Option<Self> {
        let named = uzers::get_user_by_name(name_or_number).map(|user| Self::of(&user));
        named.or_else(|| Self::by_uid(name_or_number.parse().ok()?))
    }

    /// The one of this number.
    pub fn by_uid(uid: u32) -> Option<Self> {
        uzers::get_user_by_uid(uid).map(|user| Self::of(&user))
    }

    fn of(user: &uzers::User) -> Self {
        let groups = user.groups().unwrap_or_default();
        Self {
            name: user.name().to_owned(),
            uid: user.uid(),
            gid: user.primary_group_id(),
            groups: groups.iter().map(uzers::Group::gid).collect(),
            home: user.home_dir().to_owned(),
            shell: user.shell().to_owned(),
        }
    }

    /// Starts this process's program anew with the same words, as this user: with its groups, none of root's rights, and its own
    /// home. Returns only if that fails.
    pub fn start_again(&self) -> io::Error {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        let groups: Vec<Gid> = self.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        let mut command = Command::new("/proc/self/exe");
        command.args(env::args_os().skip(1)).envs(self.variables());
        command.env_remove("XDG_RUNTIME_DIR").envs(self.runtime_directory());
        if let Some(name) = env::args_os().next() {
            command.arg0(name);
        }
        leave_streams_closed();
        let become_user = move || {
            restore_signals();
            set_thread_groups(&groups)?;
            set_thread_gid(gid)?;
            set_thread_uid(uid)?;
            Ok(())
        };
        // SAFETY: `exec` calls it in this thread, whose rights the new program gets; it runs as any other code of this process.
        unsafe { command.pre_exec(become_user) };
        command.exec()
    }

    fn variables(&self) -> [(&'static str, OsString); 4] {
        let path = |path: &Path| path.as_os_str().to_owned();
        [
            ("HOME", path(&self.home)),
            ("SHELL", path(&self.shell)),
            ("USER", self.name.clone()),
            ("LOGNAME", self.name.clone()),
        ]
    }

    /// Where the user's login has its sockets, if there is such a place.
    fn runtime_directory(&self) -> Option<(&'static str, PathBuf)> {
        let directory = PathBuf::from(format!("/run/user/{}", self.uid));
        directory.is_dir().then_some(("XDG_RUNTIME_DIR", directory))
    }
}

/// std has put something where a standard stream was closed.
fn leave_streams_closed() {
    let close = |number, stream: &dyn AsFd| {
        if inherited::is_closed(number) {
            // A descriptor that is open takes the mark.
            let _ = fcntl_setfd(stream, FdFlags::CLOEXEC);
        }
    };
    close(0, &io::stdin());
    close(1, &io::stdout());
    close(2, &io::stderr());
}

/// Signals are ignored that were when this process started, and no others.
fn restore_signals() {
    for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
        let action = if inherited::is_ignored(signal) { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: neither action runs anything in this process.
        unsafe { libc::signal(signal, action) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_found_by_name_and_number() {
        let root = Account::find("root").expect("each host has one");
        assert_eq!(Account::find("0").as_ref(), Some(&root));
        assert_eq!(root.uid, 0);
        assert_eq!(Account::find("no such user"), None);
        assert_eq!(Account::find("4294967294"), None);
    }
}
