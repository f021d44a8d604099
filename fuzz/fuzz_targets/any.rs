//! The target that the variable TARGET names, guided by coverage.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

static TARGET: LazyLock<hostile::Target> = LazyLock::new(|| {
    let name = std::env::var("TARGET").expect("TARGET names a target");
    hostile::find(&name).expect("a target of that name")
});

fuzz_target!(|input: &[u8]| (TARGET.run)(input));
