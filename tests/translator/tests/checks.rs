//! Programs whose accesses are checked unless they are looked up, for places: as `programs`, in a process of its own.

mod support;

use jit::Level;
use translator::{case::Place, rig::Rig};

#[test]
fn programs_whose_accesses_are_checked_agree_with_the_interpreter() {
    let mut rig = Rig::at_places(true).expect("the host gives memory and a process");
    support::agree(&mut rig, Place::of(Level::User), 20);
    assert!(rig.filled > 2000, "only {} look-ups", rig.filled);
}
