//! Translated code of programs, undisturbed and interrupted: what `bounded` and `interrupts` do with a kernel's, in one
//! process, as a rig uses fixed addresses.

mod support;

use jit::Level;
use translator::{case::Place, rig::Rig};

#[test]
fn programs_agree_with_the_interpreter_wherever_they_are_interrupted() {
    let mut rig = Rig::new(Level::User).expect("the host gives memory and a process");
    support::agree(&mut rig, Place::of(Level::User), 10);
}
