//! Programs whose memory operands are looked up: as `programs`, in a process of its own.

use jit::Level;
use translator::{Case, check, check_interrupted, interp::Interpreter, rig::Rig};

#[test]
fn programs_whose_operands_are_looked_up_agree_with_the_interpreter() {
    let mut rig = Rig::with_lookups().expect("the host gives memory and a process");
    let mut interpreter = Interpreter::new(Level::User).expect("the host gives memory");
    let mut taken = 0;
    for seed in 0..20_000 {
        let case = Case::random(seed, Level::User);
        let mut difference = check(&mut rig, &mut interpreter, &case).expect("the rig holds");
        if difference.is_none() && seed % 20 == 0 {
            let found = check_interrupted(&mut rig, &mut interpreter, &case, &mut taken);
            difference = found.expect("the rig holds");
        }
        assert!(difference.is_none(), "seed {seed}:\n{}{difference:?}", case.listing());
    }
    assert!(taken > 4000, "only {taken} interrupts");
    assert!(rig.filled > 2000, "only {} look-ups", rig.filled);
}
