//! Kernel code whose computed jumps search for where they lead: as `bounded`, without landings.

mod kernel;

use translator::rig::Rig;

#[test]
fn kernel_code_without_landings_agrees_with_the_interpreter() {
    let mut rig = Rig::that_searches().expect("the host gives memory and a process");
    kernel::agree(&mut rig, 0..5_000);
}
