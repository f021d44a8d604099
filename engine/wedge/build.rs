//! Builds the wedge blob: a no_std program linked flat at the window's address. The addresses in it are those of
//! the layout (`wedge_abi`), from which the linker script gets its symbols.
//!
//! What it is made of is `engine/stub`, an ordinary library of the workspace, which is compiled here once more. On
//! stable, for the host target, by calling rustc directly: cargo cannot build one package's artefact into another,
//! nor a member for another target than the others. Without SSE,
//! because the wedge runs with the guest's vectors live; the target x86_64-unknown-none would do that
//! without rustc's warning, where it is installed.

use std::{
    path::{Path, PathBuf},
    process::Command,
};
use wedge_abi::{
    ALT_STACK, BLOB, CACHE, GATE, JOURNAL, SHARED, STACK, STACK_LEN, USER_PAGE, VCPU_PAGE,
};

/// How code for the wedge is compiled.
const COMPILING: [&str; 10] = [
    "--edition=2024",
    "-Ctarget-feature=-sse,-sse2",
    "-Cpanic=abort",
    "-Copt-level=2",
    "-Cno-redzone=yes",
    "-Crelocation-model=pic",
    "-Cno-vectorize-loops",
    "-Cno-vectorize-slp",
    "-Coverflow-checks=no",
    "-Cdebuginfo=0",
];

/// How it is linked. Optimised as a whole: calls between crates would otherwise go through a table of addresses.
const LINKING: [&str; 6] = [
    "-nostdlib",
    "-static",
    "-no-pie",
    "-Wl,-Twedge.ld",
    "-Wl,--oformat=binary",
    "-Wl,--build-id=none",
];

/// What the linker script has no constants of.
const ADDRESSES: [(&str, usize); 9] = [
    ("window", BLOB),
    ("shared_page", SHARED),
    ("gate_page", GATE),
    ("vcpu_page", VCPU_PAGE),
    ("user_page", USER_PAGE),
    ("journal_page", JOURNAL),
    ("stack_top", STACK + STACK_LEN),
    ("alt_stack", ALT_STACK),
    ("code_cache", CACHE),
];

fn main() {
    for input in ["../stub/src", "../wedge_abi/src", "../../guest/x86/src", "wedge.ld", "build.rs"]
    {
        println!("cargo::rerun-if-changed={input}");
    }
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let libraries =
        [("wedge_abi", "../wedge_abi/src/lib.rs"), ("x86", "../../guest/x86/src/lib.rs")];
    let mut link = rustc("bin", "wedge", "../stub/src/lib.rs", &out.join("wedge.bin"));
    for (name, source) in libraries {
        let built = out.join(format!("lib{name}.rlib"));
        run(rustc("rlib", name, source, &built));
        link.arg(format!("--extern={name}={}", built.display()));
    }
    link.args(["-Clto=fat", "--cfg=freestanding"]);
    link.args(LINKING.map(|argument| format!("-Clink-arg={argument}")));
    link.args(ADDRESSES.map(|(name, at)| format!("-Clink-arg=-Wl,--defsym={name}={at:#x}")));
    run(link);
}

fn rustc(kind: &str, name: &str, source: &str, to: &Path) -> Command {
    let mut rustc = Command::new(std::env::var("RUSTC").expect("cargo sets RUSTC"));
    rustc.args(COMPILING).arg(format!("--crate-type={kind}")).arg(format!("--crate-name={name}"));
    rustc.arg(source).arg("-o").arg(to);
    rustc
}

fn run(mut rustc: Command) {
    let status = rustc.status().expect("rustc runs");
    assert!(status.success(), "the wedge blob does not build: {rustc:?}");
}
