//! The bounded form of the long run: `cargo run --release -p shadow -- --runs 1000`.

use shadow::Run;

/// Seeds and steps of runs that have shown mistakes. In 29 a kernel page that is not global is replaced by one that is, without a
/// flush between, before everything is flushed.
const FOUND: [(u64, u64); 1] = [(29, 10_000)];

#[test]
fn no_mapping_grants_what_the_tables_do_not() {
    // One after the other: the host's table is at fixed addresses.
    for (seed, steps) in (0..40).map(|seed| (seed, 2_000)).chain(FOUND) {
        let mut run = Run::new(seed).expect("the host gives memory");
        run.steps(steps).unwrap_or_else(|violation| panic!("{violation:#}"));
    }
}
