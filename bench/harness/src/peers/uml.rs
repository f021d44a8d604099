//! User-Mode Linux: a kernel ported to be a process. Not unmodified, but the same system calls.

use std::{env, path::PathBuf, process::Command};

use super::{Peer, PeerResult, Setup, Work, foreign, memory, missing, version_of};

/// Names another UML than the one on the path.
const OVERRIDE: &str = "RING3_BENCH_UML";
const PROGRAM: &str = "linux.uml";
/// The first release that can intercept system calls by seccomp.
const SECCOMP_SINCE: (u32, u32) = (6, 16);

pub(super) fn find(setup: &Setup) -> Vec<PeerResult> {
    let program = env::var_os(OVERRIDE).map_or_else(|| PROGRAM.into(), PathBuf::from);
    let mut found = modes(setup, "uml", "", move || Command::new(&program));
    if let Some(root) = setup.newest.clone() {
        let program = move || foreign::rooted(&root, &format!("/usr/bin/{PROGRAM}"));
        found.extend(modes(setup, "uml:newest", foreign::HOST, program));
    }
    found
}

/// One environment for each way it can intercept system calls; it sees the host's files in `host`.
fn modes(
    setup: &Setup,
    name: &str,
    host: &str,
    program: impl Fn() -> Command + Clone + 'static,
) -> Vec<PeerResult> {
    let Some(version) = version_of(program().arg("--version")) else {
        let why = format!("{PROGRAM} is not installed: the package is user-mode-linux");
        return vec![missing(name, why)];
    };
    let arguments = |name: &str, mode: &str| -> Vec<String> {
        let initrd = format!("initrd={host}{}", setup.initrd.display());
        let disk = setup.disk().map(|disk| format!("ubd0r={host}{}", disk.display()));
        let scratch = setup.scratch_disk(name);
        let scratch = scratch.map(|disk| format!("ubd1={host}{}", disk.display()));
        let console = ["con=null", "con0=fd:0,fd:1", "con1=fd:0,fd:1"].map(str::to_owned);
        let words = [initrd, mode.to_owned()].into_iter().chain(console);
        words.chain(disk).chain(scratch).filter(|word| !word.is_empty()).collect()
    };
    let peer = |name: &str, mode: &str| {
        let (program, arguments) = (program.clone(), arguments(name, mode));
        let append = setup.append("console=tty0");
        Ok(Peer::new(name, version.clone(), move |work| {
            let mut command = program();
            let disks = work == Work::Serve;
            let arguments = arguments.iter().filter(|word| disks || !word.starts_with("ubd"));
            command.arg(format!("mem={}M", memory(work))).args(arguments);
            command.args(append(work).split_whitespace());
            command
        }))
    };
    if release(&version) < Some(SECCOMP_SINCE) {
        return vec![peer(name, "")];
    }
    vec![peer(name, "seccomp=off"), peer(&format!("{name}-seccomp"), "seccomp=on")]
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
