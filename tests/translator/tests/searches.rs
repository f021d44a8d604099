//! Kernel code whose computed jumps search for where they lead: as `bounded`, without landings.

use jit::Level;
use translator::{Case, check, interp::Interpreter, rig::Rig};

#[test]
fn kernel_code_without_landings_agrees_with_the_interpreter() {
    let mut rig = Rig::that_searches().expect("the host gives memory and a process");
    let mut interpreter = Interpreter::new(Level::Kernel).expect("the host gives memory");
    for seed in 0..5_000 {
        let case = Case::random(seed, Level::Kernel);
        let difference = check(&mut rig, &mut interpreter, &case).expect("the rig holds");
        assert!(difference.is_none(), "seed {seed}:\n{}{difference:?}", case.listing());
    }
}
