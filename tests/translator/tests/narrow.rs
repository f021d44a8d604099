//! Translated code of a 32-bit kernel, undisturbed and interrupted.

mod support;

use jit::Level;
use translator::{case::Place, rig::Rig};

#[test]
fn code_of_a_32_bit_kernel_agrees_with_the_interpreter_wherever_it_is_interrupted() {
    let mut rig = Rig::narrow(Level::Kernel).expect("the host gives memory and a process");
    support::agree(&mut rig, Place::narrow(Level::Kernel), 10);
}
