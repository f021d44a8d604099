//! What the tests of kernel code share.

use jit::Level;
use std::ops::Range;
use translator::{Case, check, interp::Interpreter, rig::Rig};

/// Compares kernel code by chance, of these seeds, with the interpreter.
pub fn agree(rig: &mut Rig, seeds: Range<u64>) {
    let mut interpreter = Interpreter::new(Level::Kernel).expect("the host gives memory");
    for seed in seeds {
        let case = Case::random(seed, Level::Kernel);
        let difference = check(rig, &mut interpreter, &case).expect("the rig holds");
        assert!(difference.is_none(), "seed {seed}:\n{}{difference:?}", case.listing());
    }
}
