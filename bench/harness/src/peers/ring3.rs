//! ring3, by each of its engines, and the fast one also with programs closed off from the guest's kernel (`ring3:strict`) and in
//! slow ways, to be compared with (`ring3:ptrace`, `ring3:trap`, `ring3:unmap`).

use std::{path::Path, process::Command};

use super::{Peer, PeerResult, PortForward, Setup, Work, memory, missing, version_of};

pub(super) fn find(setup: &Setup) -> Vec<PeerResult> {
    setup.ring3.iter().flat_map(|ring3| engines_of(setup, &ring3.suffix, &ring3.program)).collect()
}

fn engines_of(setup: &Setup, suffix: &str, program: &Path) -> Vec<PeerResult> {
    let Some(version) = version_of(Command::new(program).arg("--version")) else {
        return vec![missing(
            &format!("ring3{suffix}"),
            format!("{} does not run", program.display()),
        )];
    };
    let environments = environments(&engines(program), isolates(program));
    let peer = |environment| Ok(peer(setup, suffix, program, &version, environment));
    environments.into_iter().map(peer).collect()
}

/// An environment: its name behind `ring3:`, and what the program is told.
type Environment = (String, Vec<String>);

/// One for each engine. A ring3 that knows of isolation is told which is meant: without that it depends on the host.
fn environments(engines: &[String], isolates: bool) -> Vec<Environment> {
    let told = |engine: &str, isolation: &str| -> Vec<String> {
        let isolation = ["--guest-isolation", isolation];
        let isolation = isolation.iter().filter(|_| isolates && engine == FAST);
        ["--engine", engine].iter().chain(isolation).map(|word| (*word).to_owned()).collect()
    };
    let plain = engines.iter().map(|engine| (engine.clone(), told(engine, FAST)));
    let strict = engines.iter().filter(|engine| isolates && *engine == FAST);
    let strict = strict.map(|engine| (STRICT.to_owned(), told(engine, STRICT)));
    let has_slow = isolates && engines.iter().any(|engine| engine == FAST);
    let slow = SLOW.iter().filter(|_| has_slow).map(|(name, options)| {
        let options = options.iter().map(|word| (*word).to_owned());
        ((*name).to_owned(), told(FAST, FAST).into_iter().chain(options).collect())
    });
    plain.chain(strict).chain(slow).collect()
}

/// The engine that runs programs directly; the isolation that costs nothing has the same name.
const FAST: &str = "fast";
const STRICT: &str = "strict";
/// Slow ways to do what the fast engine does: names, and what the program is told besides.
const SLOW: [(&str, &[&str]); 3] = [
    ("ptrace", &["--system-calls", "ptrace", "--sandbox", "off"]),
    ("trap", &["--system-calls", "trap"]),
    ("unmap", &["--flushed", "unmap"]),
];

/// Whether a ring3 can be told how programs are kept from their kernel.
fn isolates(program: &Path) -> bool {
    let output = Command::new(program).args(["run", "--help"]).output();
    output.is_ok_and(|done| String::from_utf8_lossy(&done.stdout).contains("--guest-isolation"))
}

/// The engines a ring3 offers, as its help lists them, without the one that only chooses.
fn engines(program: &Path) -> Vec<String> {
    let output = Command::new(program).args(["run", "--engine", "?"]).output();
    let text = output.map(|done| String::from_utf8_lossy(&done.stderr).into_owned());
    parse_engines(&text.unwrap_or_default())
}

/// From the refusal of an unknown engine: `[possible values: auto, interp, direct]`.
fn parse_engines(refusal: &str) -> Vec<String> {
    let list = refusal.split_once("[possible values: ").and_then(|(_, rest)| rest.split_once(']'));
    let names = list.map(|(list, _)| list.split(',').map(str::trim)).into_iter().flatten();
    names.filter(|name| *name != "auto").map(str::to_owned).collect()
}

fn peer(
    setup: &Setup,
    suffix: &str,
    program: &Path,
    version: &str,
    (name, options): Environment,
) -> Peer {
    let (kernel, initrd) = (setup.kernel.clone(), setup.initrd.clone());
    let (program, name) = (program.to_owned(), format!("ring3:{name}{suffix}"));
    let append = setup.append("console=ttyS0");
    let disks: Vec<_> = [
        setup.disk().map(|path| format!("{},readonly", path.display())),
        setup.scratch_disk(&name).map(|path| path.display().to_string()),
    ]
    .into_iter()
    .flatten()
    .collect();
    let (forward, has_programs) = (setup.forward(), setup.disk().is_some());
    Peer::new(name, version, move |work| {
        let mut command = Command::new(&program);
        command.arg("run").args(&options).args(["--memory", &format!("{}M", memory(work))]);
        command.arg("--kernel").arg(&kernel).arg("--initrd").arg(&initrd);
        command.args(["--append", &append(work)]);
        let disks = work.disks(&disks, has_programs);
        command.args(disks.iter().flat_map(|disk| ["--disk", disk]));
        if work == Work::ServeOnTwo {
            command.args(["--cpus", "2"]);
        }
        if work == Work::Serve {
            command.args(forward.iter().flat_map(network));
        }
        command
    })
    .with_forward(forward)
}

/// A network by translation of addresses, in which one of the machine's ports is one of the host's.
fn network(forward: &PortForward) -> [String; 2] {
    let rule = format!("hostfwd=tcp:127.0.0.1:{}-:{}", forward.host, forward.guest);
    ["--net".to_owned(), format!("user,{rule}")]
}

#[cfg(test)]
mod tests {
    use super::{environments, parse_engines};

    #[test]
    fn programs_are_closed_off_in_an_environment_of_its_own() {
        let engines = ["interp", "fast"].map(str::to_owned);
        let of = |isolates| environments(&engines, isolates);
        let names =
            |all: &[(String, _)]| -> Vec<_> { all.iter().map(|one| one.0.clone()).collect() };
        assert_eq!(names(&of(false)), ["interp", "fast"]);
        assert_eq!(of(false)[1].1, ["--engine", "fast"]);
        assert_eq!(names(&of(true)), ["interp", "fast", "strict", "ptrace", "trap", "unmap"]);
        assert_eq!(of(true)[5].1[4..], ["--flushed", "unmap"]);
        assert_eq!(of(true)[0].1, ["--engine", "interp"]);
        assert_eq!(of(true)[1].1, ["--engine", "fast", "--guest-isolation", "fast"]);
        assert_eq!(of(true)[2].1, ["--engine", "fast", "--guest-isolation", "strict"]);
    }

    #[test]
    fn engines_are_those_of_the_help() {
        let text = "error: invalid value '?'\n  [possible values: auto, interp, direct]\n";
        assert_eq!(parse_engines(text), ["interp", "direct"]);
        assert!(parse_engines("something else").is_empty());
    }
}
