//! The bounded form of the long run: `cargo run --release -p translator -- --sequences 1000000`.

use jit::Level;
use translator::{Case, check, interp::Interpreter, rig::Rig};

#[test]
fn translated_code_agrees_with_the_interpreter() {
    let mut rig = Rig::new(Level::Kernel).expect("the host gives memory and a process");
    let mut interpreter = Interpreter::new(Level::Kernel).expect("the host gives memory");
    for seed in 0..20_000 {
        let case = Case::random(seed, Level::Kernel);
        let difference = check(&mut rig, &mut interpreter, &case).expect("the rig holds");
        assert!(difference.is_none(), "seed {seed}:\n{}{difference:?}", case.listing());
    }
}
