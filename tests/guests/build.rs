//! Builds the programs that run inside guests: static, by calling rustc directly, because cargo cannot
//! build one package's program into another.

use std::{path::Path, process::Command};

const PROGRAMS: [&str; 7] =
    ["hostile_frames", "isolation", "journal", "mapped", "threads", "traps", "visits"];

fn main() {
    println!("cargo::rerun-if-changed=programs");
    println!("cargo::rerun-if-changed=src/visits.rs");
    println!("cargo::rerun-if-changed=../../engine/wedge_abi/src");
    println!("cargo::rerun-if-changed=build.rs");
    let abi =
        format!("--extern=wedge_abi={}", library("wedge_abi", "../../engine/wedge_abi/src/lib.rs"));
    for name in PROGRAMS {
        let needs = if name == "isolation" { &[abi.as_str()][..] } else { &[] };
        build(name, &format!("programs/{name}.rs"), needs);
    }
    build("chance", "programs/chance/main.rs", &BARE);
    let folder = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let script = format!("-Clink-arg=-Wl,-T,{folder}/programs/hostile_kernel/link.ld");
    let kernel = [&KERNEL[..], &[&script]].concat();
    build("hostile_kernel", "programs/hostile_kernel/main.rs", &kernel);
}

/// What makes a kernel: no C library, nothing below the stack pointer, at the end of the address space.
const KERNEL: [&str; 6] = [
    "-Clink-arg=-nostartfiles",
    "-Clink-arg=-nostdlib",
    "-Clink-arg=-static",
    "-Clink-arg=-Wl,--build-id=none",
    "-Ccode-model=kernel",
    "-Cno-redzone=yes",
];

/// What makes a program that has no C library, away from where programs by chance have their memory.
const BARE: [&str; 4] = [
    "-Clink-arg=-nostartfiles",
    "-Clink-arg=-nostdlib",
    "-Clink-arg=-static",
    "-Clink-arg=-Wl,--image-base=0x800000",
];

/// Builds a library that needs nothing but core; its file.
fn library(name: &str, source: &str) -> String {
    build_as(&format!("lib{name}.rlib"), name, source, &["--crate-type=rlib"])
}

fn build(name: &str, source: &str, further: &[&str]) {
    build_as(name, name, source, further);
}

fn build_as(file: &str, name: &str, source: &str, further: &[&str]) -> String {
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let built = Path::new(&out).join(file);
    let mut rustc = Command::new(std::env::var("RUSTC").expect("cargo sets RUSTC"));
    rustc.args(["--edition=2024", "--crate-name", name]).arg(source).args(further);
    rustc.args(["-Ctarget-feature=+crt-static", "-Crelocation-model=static", "-Cpanic=abort"]);
    let status = rustc.args(["-Copt-level=1", "-o"]).arg(&built).status().expect("rustc runs");
    assert!(status.success(), "the guests' program {name} does not build");
    built.display().to_string()
}
