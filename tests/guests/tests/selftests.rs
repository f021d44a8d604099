//! Self-tests of others' making, run by the program `selftests`. `docs/guests.md` has their figures;
//! `cargo test -p guests --test selftests -- --ignored` runs the long ones.

use std::process::Command;

use anyhow::{Result, ensure};

fn pass(suite: &str) -> Result<()> {
    let output = Command::new(env!("CARGO_BIN_EXE_selftests")).arg(suite).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    ensure!(said.contains("self-tests: 1 passed, 0 failed"), "{said}");
    Ok(())
}

#[test]
fn a_kernel_patches_itself() -> Result<()> {
    pass("static-keys")
}

#[test]
#[ignore = "minutes"]
fn a_kernel_compiles_bpf() -> Result<()> {
    pass("bpf")
}

#[test]
#[ignore = "minutes"]
fn a_kernel_encrypts() -> Result<()> {
    pass("crypto")
}

#[test]
#[ignore = "minutes"]
fn memory_is_sound() -> Result<()> {
    pass("memtest")
}

#[test]
#[ignore = "minutes"]
fn a_hypervisor_runs_its_first_domain() -> Result<()> {
    pass("xen")
}

#[test]
#[ignore = "minutes"]
fn user_programs_find_no_difference() -> Result<()> {
    pass("kselftests")
}

#[test]
#[ignore = "minutes"]
fn a_compiler_makes_the_same_bytes() -> Result<()> {
    pass("compile")
}

#[test]
#[ignore = "minutes"]
fn other_compilers_work_while_programs_run() -> Result<()> {
    pass("runtimes")
}

#[test]
#[ignore = "minutes"]
fn loads_that_check_themselves_find_nothing() -> Result<()> {
    pass("stress")
}

#[test]
#[ignore = "minutes, and packages from Debian's archive"]
fn a_distribution_is_used() -> Result<()> {
    pass("debian")
}
