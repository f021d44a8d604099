//! ring3, as a library: machines, and commands in guests of their own. The program `ring3` is [`command_line`].
//!
//! [`exec::run`] is what `ring3 exec` does, for programs that start containers or tests in guests. A program that runs a machine
//!
//! - chooses the host, by `host::choose!(host_linux::Linux)`;
//! - asks [`device_server`] first of all: the servers of a machine's devices are this same program, started anew;
//! - has one thread when it runs a machine, and runs one only: its process shuts itself in, and can do little else afterwards.
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! # host::choose!(host_linux::Linux);
//! # fn main() -> ExitCode {
//! if let Some(code) = ring3::device_server() {
//!     return code;
//! }
//! let guest = ring3::exec::Guest { root: true, ..Default::default() };
//! let command = ["uname".into(), "-a".into()];
//! match ring3::exec::run(&guest, ring3::exec::GuestCommand::Given(&command)) {
//!     Ok(status) => status.into(),
//!     Err(failure) => {
//!         eprintln!("{failure}");
//!         failure.code.into()
//!     }
//! }
//! # }
//! ```

mod cli;
mod config;
mod console;
mod control;
mod debian;
mod description;
mod device;
mod disk;
mod doctor;
mod escape;
pub mod exec;
mod failure;
mod fault;
mod foreign;
mod gdb;
mod hvc;
mod injection;
mod isolation;
mod kept_files;
mod kernel;
mod known_blocks;
mod log;
mod machine;
mod net;
mod on_panic;
mod outcome;
mod output;
mod run;
mod run_arguments;
mod sandbox;
mod serve;
mod servers;
mod share;
mod spawner;
mod unpacked;
mod values;

use std::{env, process::ExitCode};

use clap::{CommandFactory, Parser};
use host_linux::limits;

use cli::{Arguments, Command};
use control::ControlOrder;
pub use failure::Failure;

#[cfg(test)]
host::choose!(host_linux::Linux);

/// The command line, from the arguments of this process to its exit code.
pub fn command_line() -> ExitCode {
    if let Some(problem) = limits::stack_refusal() {
        return fail(&Failure::host(problem));
    }
    match config::expand(env::args_os().collect()) {
        Ok(words) => act(Arguments::parse_from(words)),
        Err(failure) => fail(&failure),
    }
}

/// Serves a device, if that is what this process was started for; then it is to exit with this code.
pub fn device_server() -> Option<ExitCode> {
    let begin: Vec<_> = env::args_os().take(2).collect();
    (begin == spawner::DEVICE_SERVER).then(command_line)
}

fn act(arguments: Arguments) -> ExitCode {
    log::start();
    limits::prepare();
    let result = match arguments.command {
        Command::Run(run) => run::run(&run),
        Command::Exec(command) => exec::exec(&command),
        Command::Shell(shell) => exec::shell(&shell),
        Command::Kernel(arguments) => kernel::kernel(&arguments),
        Command::Image(arguments) => disk::image(&arguments),
        Command::Ps(arguments) => control::ps(&arguments),
        Command::Stats(arguments) => control::stats(&arguments),
        Command::Stop(target) => control::order(&target, ControlOrder::Stop),
        Command::Dump(arguments) => control::dump(&arguments),
        Command::Gdb(arguments) => control::gdb(&arguments),
        Command::Drgn(arguments) => control::drgn(&arguments),
        Command::PerfMap(arguments) => control::perf_map(&arguments),
        Command::Trace(arguments) => control::trace(&arguments),
        Command::Top(arguments) => control::top(&arguments),
        Command::Profile(arguments) => control::profile(&arguments),
        Command::Console(target) => control::console(&target),
        Command::Pause(target) => control::order(&target, ControlOrder::Pause),
        Command::Resume(target) => control::order(&target, ControlOrder::Resume),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "ring3", &mut script);
            output::print(&String::from_utf8_lossy(&script))
        }
        Command::Man { command } => manual(&command),
        Command::Fault(arguments) => fault::fault(&arguments),
        Command::Serve(arguments) => serve::serve(&arguments),
        Command::Device(arguments) => device::device(&arguments),
        Command::Doctor(doctor) => output::print(&(doctor::survey(doctor.json) + "\n")),
    };
    log::end();
    match (result, kernels::interrupt::signal()) {
        (Ok(code), _) => ExitCode::from(code),
        (Err(failure), None) => fail(&failure),
        // What it failed for is known to whoever did that.
        (Err(_), Some(number)) => fail(&Failure::host("interrupted").with_code(128 + number as u8)),
    }
}

fn fail(failure: &Failure) -> ExitCode {
    output::complain(&failure.to_string());
    ExitCode::from(failure.code)
}

/// The manual page of ring3, or of the command that `path` names, as roff.
fn manual(path: &[String]) -> Result<u8, Failure> {
    let mut command = Arguments::command();
    command.build(); // gives the commands below their full names
    for name in path {
        let found = command.find_subcommand(name).filter(|found| !found.is_hide_set()).cloned();
        command =
            found.ok_or_else(|| Failure::usage(format!("man: there is no command `{name}`")))?;
    }
    let mut page = Vec::new();
    let rendered = clap_mangen::Man::new(command).render(&mut page);
    rendered.map_err(|error| Failure::host(error.to_string()))?;
    output::print(&String::from_utf8_lossy(&page))
}
