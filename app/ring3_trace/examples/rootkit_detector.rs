//! Looks every second whether system calls still lead where they should, and, with the kernel's file (a vmlinuz or a vmlinux), whether
//! the kernel's code is still what that says: rootkit_detector MACHINE [KERNEL]

use std::{env, error::Error, fs, process::ExitCode, thread, time::Duration};

use ring3_trace::{Problem, services::integrity::Integrity};

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let (machine, file) = match &words[..] {
        [machine] => (machine, None),
        [machine, file] => (machine, Some(file)),
        _ => {
            eprintln!("rootkit_detector MACHINE [KERNEL]");
            return ExitCode::from(2);
        }
    };
    match begin(machine, file).and_then(|integrity| Ok(watch(integrity)?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) if matches!(problem.downcast_ref(), Some(Problem::Ended)) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("rootkit_detector: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn begin(machine: &str, file: Option<&String>) -> Result<Integrity, Box<dyn Error>> {
    let Some(file) = file else { return Ok(Integrity::new(machine)?) };
    let kernel = fs::read(file).map_err(|error| format!("{file}: {error}"))?;
    Ok(Integrity::of_file(machine, &boot::unpacked_kernel(&kernel)?)?)
}

fn watch(mut integrity: Integrity) -> Result<(), Problem> {
    let (entries, functions) = integrity.watched();
    println!("{entries} system calls, {functions} functions");
    loop {
        integrity.problems()?.iter().for_each(|problem| println!("{problem}"));
        thread::sleep(Duration::from_secs(1));
    }
}
