//! `ring3`: the command line on Linux. The library of the same name does the rest.

use std::process::ExitCode;

host::choose!(host_linux::Linux);

fn main() -> ExitCode {
    ring3::command_line()
}
