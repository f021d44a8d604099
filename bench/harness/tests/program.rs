//! Builds the guest program and runs every row of it on this host.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use harness::{program, protocol::Row, session::Session};

const PATIENCE: Duration = Duration::from_secs(60);

fn start(directory: &Path) -> Session {
    let program = program::build(directory).expect("it builds");
    let mut command = Command::new(program);
    command.env("BENCH_SCRATCH", directory);
    Session::start(command, PATIENCE).expect("it starts")
}

#[test]
fn every_row_measures_something_and_finds_it_right() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut session = start(directory.path());
    let rows = session.rows(PATIENCE).expect("they are listed");
    assert!(rows.len() > 30, "{}", rows.len());
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let possible = |row: &&Row| {
        !program::runs_programs(&row.name) && (cpus > 1 || row.group != program::TWO_CPUS)
    };
    for row in rows.iter().filter(possible) {
        let begun = Instant::now();
        let (batch, _) = session
            .batch(&row.name, Duration::from_millis(2), PATIENCE)
            .unwrap_or_else(|failure| panic!("{}: {failure}", row.name));
        assert!(batch.ns > 0 && batch.iterations > 0, "{batch:?}");
        assert!(Duration::from_nanos(batch.ns) <= begun.elapsed(), "{batch:?}");
    }
}

#[test]
fn rows_of_programs_are_those_that_are_announced() {
    let directory = tempfile::tempdir().expect("a directory");
    let rows = start(directory.path()).rows(PATIENCE).expect("they are listed");
    let programs = rows.iter().filter(|row| row.group == program::ROWS[0]);
    let names: Vec<_> = programs.map(|row| row.name.as_str()).collect();
    assert_eq!(names, program::ROWS[1..]);
}

#[test]
fn a_server_that_is_not_there_is_an_error_and_no_end() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut session = start(directory.path());
    let failure = session.serve("nonsense", 1, PATIENCE).expect_err("no such server");
    assert!(failure.to_string().contains("cannot enter or start"), "{failure}");
    session.unserve().expect("nothing to end");
    session.batch("getppid", Duration::from_millis(1), PATIENCE).expect("it goes on");
}

#[test]
fn what_is_not_there_is_an_error_and_no_end() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut session = start(directory.path());
    let failure = session.batch("nonsense", Duration::from_millis(1), PATIENCE);
    assert_eq!(failure.expect_err("no such row").to_string(), "no such row");
    session.batch("getppid", Duration::from_millis(1), PATIENCE).expect("it goes on");
}
