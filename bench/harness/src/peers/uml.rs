//! User-Mode Linux: a kernel ported to be a process. Not unmodified, but the same system calls.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use super::{Found, MEMORY, Peer, Setup, missing, version_of};

/// Where a UML newer than the distribution's may be.
const OVERRIDE: &str = "RING3_BENCH_UML";
const PROGRAM: &str = "linux.uml";
/// The first release that can intercept system calls by seccomp.
const SECCOMP_SINCE: (u32, u32) = (6, 16);

pub(super) fn find(setup: &Setup) -> Vec<Found> {
    let program = env::var_os(OVERRIDE).map_or_else(|| PROGRAM.into(), PathBuf::from);
    let Some(version) = version_of(&program, "--version") else {
        let what = program.display();
        return vec![missing(
            "uml",
            format!("{what} is not installed: the package is user-mode-linux"),
        )];
    };
    if release(&version) < Some(SECCOMP_SINCE) {
        return vec![peer(setup, "uml", &program, &version, "")];
    }
    vec![
        peer(setup, "uml:ptrace", &program, &version, "seccomp=off"),
        peer(setup, "uml:seccomp", &program, &version, "seccomp=on"),
    ]
}

fn peer(setup: &Setup, name: &str, program: &Path, version: &str, option: &'static str) -> Found {
    let (program, initrd) = (program.to_owned(), setup.initrd.clone());
    let disk = setup.disk().map(|disk| format!("ubd0r={}", disk.display()));
    let append = setup.append("console=tty0");
    Ok(Peer::new(name, version, move |work| {
        let mut command = Command::new(&program);
        command.arg(format!("mem={MEMORY}M")).arg(format!("initrd={}", initrd.display()));
        command.args(["con=null", "con0=fd:0,fd:1", "con1=fd:0,fd:1"]);
        command.args(&disk);
        command.args(Some(option).filter(|option| !option.is_empty()));
        command.args(append(work).split_whitespace());
        command
    }))
}

/// Major and minor number of a release such as `6.1.90`.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_as_numbers() {
        assert_eq!(release("6.1.90"), Some((6, 1)));
        assert!(release("6.1.90") < Some(SECCOMP_SINCE));
        assert!(release("7.2") > Some(SECCOMP_SINCE));
    }
}
