//! Translated code of a 32-bit kernel's programs, undisturbed and interrupted.

mod support;

use jit::Level;
use translator::{case::Place, rig::Rig};

#[test]
fn programs_of_a_32_bit_kernel_agree_with_the_interpreter_wherever_they_are_interrupted() {
    let mut rig = Rig::narrow(Level::User).expect("the host gives memory and a process");
    support::agree(&mut rig, Place::narrow(Level::User), 10);
}
