//! Looks every second whether system calls still lead where they should: rootkit_detector MACHINE

use std::{env, process::ExitCode, thread, time::Duration};

use ring3_trace::{Problem, services::integrity::Integrity};

fn main() -> ExitCode {
    let Some(machine) = env::args().nth(1) else {
        eprintln!("rootkit_detector MACHINE");
        return ExitCode::from(2);
    };
    match watch(&machine) {
        Ok(()) | Err(Problem::Ended) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("rootkit_detector: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn watch(machine: &str) -> Result<(), Problem> {
    let mut integrity = Integrity::new(machine)?;
    let (entries, functions) = integrity.watched();
    println!("{entries} system calls, {functions} functions");
    loop {
        integrity.problems()?.iter().for_each(|problem| println!("{problem}"));
        thread::sleep(Duration::from_secs(1));
    }
}
