//! What the tests of programs share.

use jit::Level;
use translator::{Case, check, check_interrupted, interp::Interpreter, rig::Rig};

/// Compares programs by chance with the interpreter. One of `interrupted` programs is also run with interrupts.
pub fn agree(rig: &mut Rig, interrupted: u64) {
    let mut interpreter = Interpreter::new(Level::User).expect("the host gives memory");
    let mut taken = 0;
    for seed in 0..20_000 {
        let case = Case::random(seed, Level::User);
        let mut difference = check(rig, &mut interpreter, &case).expect("the rig holds");
        if difference.is_none() && seed % interrupted == 0 {
            let found = check_interrupted(rig, &mut interpreter, &case, &mut taken);
            difference = found.expect("the rig holds");
        }
        assert!(difference.is_none(), "seed {seed}:\n{}{difference:?}", case.listing());
    }
    assert!(taken > 4000, "only {taken} interrupts");
}
