//! Programs whose translations are for places, and whose computed jumps at times find another address's block: as `programs`, in a process
//! of its own.

mod support;

use jit::Level;
use translator::{case::Place, rig::Rig};

#[test]
fn programs_at_places_agree_with_the_interpreter() {
    let mut rig = Rig::at_places(false).expect("the host gives memory and a process");
    support::agree(&mut rig, Place::of(Level::User), 20);
    assert!(rig.filled > 2000, "only {} look-ups", rig.filled);
    assert!(rig.astray > 100, "only {} jumps went astray", rig.astray);
}
