//! Running proofs and prices of the host mechanisms the fast engine rests on.
//!
//! Each probe runs in its own process as an ordinary user without capabilities, because each spoils
//! its process (filters, handlers, maps) and because that is where the engine has to live. Results
//! and what follows from them are in docs/probes.md. `probes` runs all; `probes NAME...` some.

// UNSAFETY: this program is about signal frames, raw host calls and hand-made machine code; there
// is no safe part to protect.
#![allow(unsafe_code)]

mod guest;
mod host;
mod measure;
mod probe;
mod report;

/// An ordinary user: nobody.
const ORDINARY: u32 = 65534;

fn main() {
    become_ordinary();
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let mut broken = false;
    for (name, title, run) in probe::ALL {
        if !wanted.is_empty() && !wanted.iter().any(|w| w == name) {
            continue;
        }
        println!("\n{name}: {title}  [ns: median, quiet]");
        let status = host::in_child(|| {
            host::pin(1);
            run();
        });
        if status != 0 {
            println!("  the probe ended with wait status {status:#x}");
            broken = true;
        }
    }
    std::process::exit(i32::from(broken));
}

/// Root gives up its identity and starts over, so that no privilege or /proc ownership lingers.
fn become_ordinary() {
    use std::os::unix::process::CommandExt;
    // SAFETY: plain identity calls.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let me = std::env::current_exe().expect("the running program has a path");
    let error = std::process::Command::new(me)
        .args(std::env::args().skip(1))
        .gid(ORDINARY)
        .uid(ORDINARY)
        .exec();
    panic!("cannot start as an ordinary user: {error}");
}
