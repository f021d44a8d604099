//! The bounded form of the long run: `cargo run --release -p translator -- --sequences 1000000`.

mod kernel;

use jit::Level;
use translator::rig::Rig;

#[test]
fn translated_code_agrees_with_the_interpreter() {
    let mut rig = Rig::new(Level::Kernel).expect("the host gives memory and a process");
    kernel::agree(&mut rig, 0..20_000);
}
