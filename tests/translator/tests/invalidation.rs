//! STAC opens user memory to kernel code: not while an invalidation of a user page is put off. A process of its
//! own: a rig uses fixed addresses.

use jit::Level;
use translator::{Case, rig::Rig};

/// STAC, NOP.
const CODE: [u8; 4] = [0x0f, 0x01, 0xcb, 0x90];
const STAC_LEN: u64 = 3;

#[test]
fn stac_is_interpreted_while_an_invalidation_is_put_off() {
    let mut rig = Rig::new(Level::Kernel).expect("the host gives memory and a process");
    let mut case = Case::random(1, Level::Kernel);
    case.code = CODE.to_vec();
    case.rflags &= !x86::flags::AC;
    let start = case.place.code;
    for (page, rip) in [(0, start + CODE.len() as u64), (0x7000_1234_5000, start)] {
        rig.put_off(page);
        let ending = rig.run(&case).expect("the rig holds");
        assert_eq!((ending.rip, ending.gpr), (rip, case.gpr), "put off: {page:#x}");
        assert_eq!(ending.rflags & x86::flags::STATUS, case.rflags & x86::flags::STATUS);
    }
    case.code.drain(..STAC_LEN as usize);
    let ending = rig.run(&case).expect("the rig holds");
    assert_eq!(ending.rip, start + 1, "other instructions do not look at it");
}
