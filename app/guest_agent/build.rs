//! Builds the agent: a static program, by calling rustc directly, because cargo cannot build one
//! package's program into another.

use std::{path::Path, process::Command};

fn main() {
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let program = Path::new(&out).join("agent");
    println!("cargo::rerun-if-changed=agent");
    println!("cargo::rerun-if-changed=src/lists.rs");
    println!("cargo::rerun-if-changed=src/protocol.rs");
    println!("cargo::rerun-if-changed=build.rs");
    let mut rustc = Command::new(std::env::var("RUSTC").expect("cargo sets RUSTC"));
    rustc.args(["--edition=2024", "--crate-type=bin", "--crate-name=agent", "agent/main.rs"]);
    rustc.args(["-Ctarget-feature=+crt-static", "-Crelocation-model=static", "-Cpanic=abort"]);
    rustc.args(["-Copt-level=s", "-Cstrip=symbols", "-Clto=fat", "-Ccodegen-units=1"]);
    let status = rustc.arg("-o").arg(&program).status().expect("rustc runs");
    assert!(
        status.success(),
        "the guest agent does not build; libc6-dev has what it is linked with"
    );
}
