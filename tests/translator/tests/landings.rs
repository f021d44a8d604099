//! Computed jumps to places near each other, of which one is in the landing slot of the next. A process of its own: a rig uses fixed
//! addresses.

use jit::Level;
use translator::{Case, check, check_interrupted, interp::Interpreter, rig::Rig};
use x86::flags;

const CODE: &[&[u8]] = &[
    &[0x48, 0x8d, 0x05, 2, 0, 0, 0, 0xff, 0xe0], // lea rax, [behind the jump]; jmp rax
    &[0xeb, 4],                                  // jmp over the next two
    &[0x50, 0x59],                               // push rax; pop rcx
    &[0xeb, 9],                                  // jmp over the next two
    &[0x48, 0x8d, 0x05, 0xf5, 0xff, 0xff, 0xff, 0xff, 0xe0], // lea rax, [push rax]; jmp rax
    &[0xe8, 1, 0, 0, 0, 0xf4],                   // call behind hlt
    &[0x48, 0xff, 0xc1, 0xc3],                   // inc rcx; ret
];

#[test]
fn a_landing_lets_in_only_who_means_it() {
    let mut rig = Rig::new(Level::Kernel).expect("the host gives memory and a process");
    let mut interpreter = Interpreter::new(Level::Kernel).expect("the host gives memory");
    let mut taken = 0;
    // Of four distances from the start of a slot, some have two of the places in one slot.
    for skipped in 0..4 {
        let mut case = Case::random(skipped, Level::Kernel);
        case.code = [&[0x90; 4][..skipped as usize], &CODE.concat()].concat();
        case.rflags &= !(flags::AC | flags::DF);
        case.pending = false;
        rig.keeps = false;
        for _ in 0..3 {
            let difference = check(&mut rig, &mut interpreter, &case).expect("the rig holds");
            assert!(difference.is_none(), "{skipped}:\n{}{difference:?}", case.listing());
            rig.keeps = true; // now there are landings to jump to
        }
        let difference = check_interrupted(&mut rig, &mut interpreter, &case, &mut taken);
        let difference = difference.expect("the rig holds");
        assert!(difference.is_none(), "{skipped}:\n{}{difference:?}", case.listing());
    }
    assert!(taken > 30, "only {taken} interrupts");
}
