//! What tests share that compare code by chance with the interpreter, undisturbed and interrupted.

use translator::{Case, case::Place, check, check_interrupted, interp::Interpreter, rig::Rig};

/// Compares code at a place. One of `interrupted` cases is also run with interrupts.
pub fn agree(rig: &mut Rig, place: Place, interrupted: u64) {
    let mut interpreter = Interpreter::at(place).expect("the host gives memory");
    let mut taken = 0;
    for seed in 0..20_000 {
        let case = Case::random_at(seed, place);
        let mut difference = check(rig, &mut interpreter, &case).expect("the rig holds");
        if difference.is_none() && seed % interrupted == 0 {
            let found = check_interrupted(rig, &mut interpreter, &case, &mut taken);
            difference = found.expect("the rig holds");
        }
        assert!(difference.is_none(), "seed {seed}:\n{}{difference:?}", case.listing());
    }
    assert!(taken > 4000, "only {taken} interrupts");
}
