//! Software interrupts and single steps: a program of the guest (`programs/traps.rs`) sees of them what it sees on this host.

use std::{collections::HashMap, fs, os::unix::fs::PermissionsExt, process::Command};

use anyhow::{Context, Result, ensure};
use guests::ring3;
use tempfile::TempDir;

static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/traps"));

/// What the program says when `command`, whose last argument it becomes, runs it.
fn says(command: &mut Command) -> Result<String> {
    let directory = TempDir::new()?;
    let program = directory.path().join("traps");
    fs::write(&program, PROGRAM)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let output = command.arg(&program).current_dir(directory.path()).output()?;
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{:?}: {messages}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

/// What it has to say: what it says on the host, but for INT1, which leaves RIP where INT3 does (SDM, INT n). Hosts that
/// are virtual machines may leave it at the instruction.
fn expected() -> Result<Vec<String>> {
    let native = says(&mut Command::new("env"))?;
    let cases: HashMap<&str, &str> =
        native.lines().filter_map(|line| line.split_once(':')).collect();
    let expected = |line: &str| {
        let (name, seen) = line.split_once(':').context("not a case")?;
        if !name.contains(" int1 ") {
            return Ok(format!("{name}:{seen}"));
        }
        let like = cases.get(name.replace(" int1 ", " int3 ").as_str());
        Ok(format!("{name}:{}", as_int1(like.context("int1 without int3")?)))
    };
    native.lines().map(expected).collect()
}

/// What is seen of an INT3, as it is seen of an INT1: another code, and the address is RIP.
fn as_int1(seen: &str) -> String {
    let signals =
        seen.split(" | ").map(|signal| match signal.strip_prefix("5 code 80 addr 0 rip ") {
            Some(rest) => {
                let (rip, rest) = rest.split_once(' ').unwrap_or((rest, ""));
                format!("5 code 1 addr {rip} rip {rip} {}", rest.replace("trap 3", "trap 1"))
            }
            None => signal.to_owned(),
        });
    signals.collect::<Vec<_>>().join(" | ")
}

fn as_on_the_host(engine: &str) -> Result<()> {
    let expected = expected()?;
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--engine", engine, "--memory", "512M", "--timeout", "400", "--"]);
    let said = says(&mut command)?;
    ensure!(said.lines().count() == expected.len() && expected.len() > 3000, "it says less");
    let pairs = expected.iter().zip(said.lines());
    let different: Vec<_> = pairs.filter(|(expected, said)| expected != said).collect();
    let first: Vec<_> = different.iter().take(10).collect();
    ensure!(first.is_empty(), "{} cases are not as on the host: {first:#?}", different.len());
    Ok(())
}

#[test]
fn in_programs_that_run_directly() -> Result<()> {
    as_on_the_host("fast")
}

#[test]
fn in_programs_that_run_directly_beside_an_interpreted_kernel() -> Result<()> {
    as_on_the_host("direct")
}

#[test]
fn in_interpreted_programs() -> Result<()> {
    as_on_the_host("jit")
}
