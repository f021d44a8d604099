//! Builds the wedge blob: a no_std program linked flat at the window's address. The addresses in it are those of
//! the layout (`frame`), from which the linker script gets its symbols.
//!
//! On stable, for the host target, by calling rustc directly: cargo cannot build one package's
//! artefact into another, and a workspace member would be built as an ordinary program. Without SSE,
//! because the wedge runs with the guest's vectors live; the target x86_64-unknown-none would do that
//! without rustc's warning, where it is installed.

use frame::{ALT_STACK, BLOB, CACHE, FRAME, GATE, JOURNAL, SHARED, STACK, STACK_LEN, USER_PAGE};
use std::path::Path;
use std::process::Command;

fn main() {
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let blob = Path::new(&out).join("wedge.bin");
    for input in [
        "blob",
        "../frame/src/layout.rs",
        "../frame/src/lookups.rs",
        "../frame/src/keys.rs",
        "build.rs",
    ] {
        println!("cargo::rerun-if-changed={input}");
    }
    let linking = [
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,-Tblob/wedge.ld",
        "-Wl,--oformat=binary",
        "-Wl,--build-id=none",
    ];
    let mut rustc = Command::new(std::env::var("RUSTC").expect("cargo sets RUSTC"));
    rustc.args(["--edition=2024", "--crate-type=bin", "--crate-name=wedge", "blob/wedge.rs"]);
    rustc.args([
        "-Ctarget-feature=-sse,-sse2",
        "-Cpanic=abort",
        "-Copt-level=2",
        "-Cno-redzone=yes",
        "-Crelocation-model=pic",
    ]);
    rustc.args([
        "-Cno-vectorize-loops",
        "-Cno-vectorize-slp",
        "-Coverflow-checks=no",
        "-Cdebuginfo=0",
    ]);
    rustc.args(linking.map(|argument| format!("-Clink-arg={argument}")));
    let addresses = [
        ("window", BLOB),
        ("shared_page", SHARED),
        ("gate_page", GATE),
        ("frame_page", FRAME),
        ("user_page", USER_PAGE),
        ("journal_page", JOURNAL),
        ("stack_top", STACK + STACK_LEN),
        ("alt_stack", ALT_STACK),
        ("code_cache", CACHE),
    ];
    rustc.args(addresses.map(|(name, at)| format!("-Clink-arg=-Wl,--defsym={name}={at:#x}")));
    let status = rustc.arg("-o").arg(&blob).status().expect("rustc runs");
    assert!(status.success(), "the wedge blob does not build");
}
