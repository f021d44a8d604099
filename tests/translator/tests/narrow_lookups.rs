//! Translated code of a 32-bit kernel whose memory operands are looked up, undisturbed and interrupted.

mod support;

use jit::Level;
use translator::{case::Place, rig::Rig};

#[test]
fn a_32_bit_kernel_that_looks_up_agrees_with_the_interpreter_wherever_it_is_interrupted() {
    let mut rig = Rig::narrow_with_lookups().expect("the host gives memory and a process");
    support::agree(&mut rig, Place::narrow(Level::Kernel), 10);
    assert!(rig.filled > 2000, "only {} look-ups", rig.filled);
}
