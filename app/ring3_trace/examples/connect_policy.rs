//! Lets programs of a guest connect to these addresses only: connect_policy MACHINE ADDRESS:PORT...

use std::{env, net::SocketAddr, process::ExitCode};

use ring3_trace::{Problem, services::policy::Policy};

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let Some((machine, addresses)) = words.split_first() else {
        eprintln!("connect_policy MACHINE ADDRESS:PORT...");
        return ExitCode::from(2);
    };
    let allowed: Result<Vec<SocketAddr>, _> = addresses.iter().map(|text| text.parse()).collect();
    let Ok(allowed) = allowed else {
        eprintln!("connect_policy: an address is IP:PORT");
        return ExitCode::from(2);
    };
    match watch(machine, allowed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("connect_policy: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn watch(machine: &str, allowed: Vec<SocketAddr>) -> Result<(), Problem> {
    let mut policy = Policy::new(machine, move |address| allowed.contains(address))?;
    while let Some(attempt) = policy.next_attempt()? {
        let verdict = if attempt.allowed { "lets" } else { "denies" };
        println!("{verdict} {} ({}) {}", attempt.event.comm, attempt.event.pid, attempt.address);
    }
    Ok(())
}
