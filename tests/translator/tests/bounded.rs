//! The bounded form of the long run: `cargo run --release -p translator -- --sequences 1000000`.

use std::sync::{Mutex, PoisonError};
use translator::{Case, check, check_interrupted, interp::Interpreter, rig::Rig};

/// Rigs of one process use the same fixed addresses.
static ADDRESSES: Mutex<()> = Mutex::new(());

#[test]
fn translated_code_agrees_with_the_interpreter() {
    let _mine = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    let mut rig = Rig::new().expect("the host gives memory and a process");
    let mut interpreter = Interpreter::new().expect("the host gives memory");
    for seed in 0..20_000 {
        let case = Case::random(seed);
        let difference = check(&mut rig, &mut interpreter, &case).expect("the rig holds");
        assert!(difference.is_none(), "seed {seed}:\n{}{difference:?}", case.listing());
    }
}

#[test]
fn an_interrupt_between_any_two_instructions_finds_the_state_the_interpreter_has() {
    let _mine = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    let mut rig = Rig::new().expect("the host gives memory and a process");
    let mut interpreter = Interpreter::new().expect("the host gives memory");
    let mut taken = 0;
    for seed in 0..2000 {
        let case = Case::random(seed);
        let difference = check_interrupted(&mut rig, &mut interpreter, &case, &mut taken);
        let difference = difference.expect("the rig holds");
        assert!(difference.is_none(), "seed {seed}:\n{}{difference:?}", case.listing());
    }
    assert!(taken > 4000, "only {taken} interrupts");
}
