//! The first process of a guest: sets it up, runs one command for the host, reports how it ended.
//!
//! It must not end: the kernel panics if its first process does. Whatever goes wrong is told to the
//! host if it can be, else to the console, and then the machine is switched off.

#[path = "../src/busy.rs"]
mod busy;
mod changes;
mod clock;
mod cpus;
#[path = "../src/lists.rs"]
mod lists;
mod memory;
mod modules;
mod net;
mod process;
#[allow(dead_code)] // the host's half of it
#[path = "../src/protocol.rs"]
mod protocol;
mod relay;
mod setup;
mod steering;
mod sys;

use std::{fs::File, io::Write, process::ExitCode};

use protocol::{AgentRequest, message};

fn main() -> ExitCode {
    let mut words = std::env::args();
    // The kernel calls it as `modprobe -q -- NAME` (`modules.rs`), and by no argument as its first process.
    if words.next().is_some_and(|own| own.ends_with("modprobe")) {
        let loaded = words.next_back().is_some_and(|name| modules::load(&name).unwrap_or(false));
        return if loaded { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    first_process()
}

fn first_process() -> ! {
    let control = match setup::first() {
        Ok(control) => control,
        Err(problem) => {
            eprintln!("ring3-agent: {problem}");
            sys::power_off();
        }
    };
    let mut report = control.try_clone().unwrap_or_else(|_| sys::power_off());
    if let Err((kind, problem)) = serve(control) {
        tell(&mut report, kind, problem.len() as u32);
        // As above: nobody else to tell.
        let _ = report.write_all(problem.as_bytes());
    }
    // The host switches the machine off once it has read everything.
    sys::sleep_then_power_off()
}

/// Sets up, runs, reports; an error is a message to the host and its text.
fn serve(control: File) -> Result<(), (u8, String)> {
    let failed = |problem| (message::FAILED, problem);
    let bytes = std::fs::read(protocol::REQUEST_FILE)
        .map_err(|error| failed(format!("{}: {error}", protocol::REQUEST_FILE)))?;
    let request = AgentRequest::decode(&bytes).ok_or_else(|| failed("damaged request".to_owned()))?;
    let starting = request.cpus.then(cpus::start).flatten();
    let mut host = control.try_clone().map_err(|error| failed(error.to_string()))?;
    clock::set(&mut host).map_err(|error| failed(format!("clock: {error}")))?;
    let folders = setup::root(&request).map_err(failed)?;
    if let Err(error) = modules::prepare(&request.modules) {
        // The console: a command that needs none is none the worse.
        eprintln!("ring3-agent: modules: {error}");
    }
    net::loopback();
    if request.network {
        net::configure().map_err(failed)?;
    }
    let mut report = control.try_clone().map_err(|error| failed(error.to_string()))?;
    cpus::wait(starting);
    steering::start();
    for (port, folder) in (protocol::CHANGES..).zip(folders) {
        folder.into_iter().for_each(|folder| changes::follow(folder, port));
    }
    sys::lead_session();
    let running = process::start(&request)?;
    tell(&mut report, message::STARTED, 0);
    let (kind, number) = process::finish(running, control);
    tell(&mut report, kind, number);
    Ok(())
}

fn tell(control: &mut File, kind: u8, number: u32) {
    // A host that does not listen any more is about to switch the machine off.
    let _ = control.write_all(&protocol::encode(kind, number));
}
