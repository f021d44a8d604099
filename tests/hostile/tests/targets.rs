//! Each target for some seconds, and what has failed once.

use std::{fs, path::Path};

/// A test for each target.
macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            fuzzer::test(hostile::find(stringify!($name)).expect("a target"));
        })*

        #[test]
        fn every_target_has_a_test() {
            let tested = [$(stringify!($name)),*];
            let names: Vec<_> = hostile::TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(tested.len(), names.len(), "{names:?}");
        }
    };
}

targets! {
    kernel qcow2 block net fs vsock rng console pci fuse usernet sockets monitor server agent chipset interpreter translator
    keeper wedge scenario debugger services linux
}

/// Inputs that have failed are kept in `corpus/TARGET`, and do not fail any more.
#[test]
fn what_has_failed_once_does_not_fail_again() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for folder in fs::read_dir(corpus).expect("a folder") {
        let folder = folder.expect("listed").path();
        let name = folder.file_name().and_then(|name| name.to_str()).expect("a target's name");
        let target = hostile::find(name).expect("a target of that name");
        fuzzer::corpus(&folder).iter().for_each(|input| (target.run)(input));
    }
}
