//! ring3, by each of its engines.

use std::{path::Path, process::Command};

use super::{Door, Found, Peer, Setup, Work, memory, missing, version_of};

pub(super) fn find(setup: &Setup) -> Vec<Found> {
    setup.ring3.iter().flat_map(|ring3| engines_of(setup, &ring3.suffix, &ring3.program)).collect()
}

fn engines_of(setup: &Setup, suffix: &str, program: &Path) -> Vec<Found> {
    let Some(version) = version_of(Command::new(program).arg("--version")) else {
        return vec![missing(
            &format!("ring3{suffix}"),
            format!("{} does not run", program.display()),
        )];
    };
    let engines = engines(program).into_iter();
    engines.map(|engine| Ok(peer(setup, suffix, program, &version, &engine))).collect()
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

fn peer(setup: &Setup, suffix: &str, program: &Path, version: &str, engine: &str) -> Peer {
    let (kernel, initrd) = (setup.kernel.clone(), setup.initrd.clone());
    let (program, name) = (program.to_owned(), format!("ring3:{engine}{suffix}"));
    let (engine, append) = (engine.to_owned(), setup.append("console=ttyS0"));
    let disks: Vec<_> = [
        setup.disk().map(|path| format!("{},readonly", path.display())),
        setup.scratch_disk(&name).map(|path| path.display().to_string()),
    ]
    .into_iter()
    .flatten()
    .collect();
    let door = setup.door();
    Peer::new(name, version, move |work| {
        let mut command = Command::new(&program);
        command.args(["run", "--engine", &engine, "--memory", &format!("{}M", memory(work))]);
        command.arg("--kernel").arg(&kernel).arg("--initrd").arg(&initrd);
        command.args(["--append", &append(work)]);
        if work == Work::Serve {
            command.args(disks.iter().flat_map(|disk| ["--disk", disk]));
            command.args(door.iter().flat_map(network));
        }
        command
    })
    .with_door(door)
}

/// A network by translation of addresses, in which one of the machine's ports is one of the host's.
fn network(door: &Door) -> [String; 2] {
    let forward = format!("hostfwd=tcp:127.0.0.1:{}-:{}", door.outside, door.inside);
    ["--net".to_owned(), format!("user,{forward}")]
}

#[cfg(test)]
mod tests {
    use super::parse_engines;

    #[test]
    fn engines_are_those_of_the_help() {
        let text = "error: invalid value '?'\n  [possible values: auto, interp, direct]\n";
        assert_eq!(parse_engines(text), ["interp", "direct"]);
        assert!(parse_engines("something else").is_empty());
    }
}
