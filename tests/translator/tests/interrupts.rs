//! The bounded form of `cargo run --release -p translator -- --interrupt-every 50`. A process of its own: a rig
//! uses fixed addresses.

use jit::Level;
use translator::{Case, check_interrupted, interp::Interpreter, rig::Rig};

#[test]
fn an_interrupt_between_any_two_instructions_finds_the_state_the_interpreter_has() {
    let mut rig = Rig::new(Level::Kernel).expect("the host gives memory and a process");
    let mut interpreter = Interpreter::new(Level::Kernel).expect("the host gives memory");
    let mut taken = 0;
    for seed in 0..2000 {
        let case = Case::random(seed, Level::Kernel);
        let difference = check_interrupted(&mut rig, &mut interpreter, &case, &mut taken);
        let difference = difference.expect("the rig holds");
        assert!(difference.is_none(), "seed {seed}:\n{}{difference:?}", case.listing());
    }
    assert!(taken > 4000, "only {taken} interrupts");
}
