//! The bounded form of the long run: `cargo run --release -p shadow -- --runs 1000`.

use shadow::Run;

#[test]
fn no_mapping_grants_what_the_tables_do_not() {
    for seed in 0..40 {
        let mut run = Run::new(seed).expect("the host gives memory");
        run.steps(2_000).unwrap_or_else(|violation| panic!("{violation:#}"));
    }
}

/// Here a kernel page that is not global is replaced by one that is, without a flush between, before everything is flushed.
#[test]
fn what_is_known_of_a_mapping_goes_when_another_takes_its_place() {
    let mut run = Run::new(29).expect("the host gives memory");
    run.steps(10_000).unwrap_or_else(|violation| panic!("{violation:#}"));
}
