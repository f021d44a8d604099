//! A program of another's that runs its own arguments in a guest, by the library.

use std::{env, ffi::OsString, process::ExitCode};

use ring3::exec::{Guest, GuestCommand, MemorySize, run};

host::choose!(host_linux::Linux);

fn main() -> ExitCode {
    if let Some(code) = ring3::device_server() {
        return code;
    }
    let words: Vec<OsString> = env::args_os().skip(1).collect();
    let guest = Guest { memory: MemorySize(512 << 20), ..Guest::default() };
    match run(&guest, GuestCommand::Given(&words)) {
        Ok(status) => status.into(),
        Err(failure) => {
            eprintln!("in-a-guest: {failure}");
            failure.code.into()
        }
    }
}
