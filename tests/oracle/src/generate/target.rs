//! Addresses for operands: mostly inside a window, on and off their alignment, and sometimes
//! across its edges or nowhere at all.

use crate::layout::{CODE, DATA, HIGH, PAGE, RODATA, STACK};
use crate::random::Random;

/// Between something and nothing.
const EDGES: [u64; 6] = [DATA.base, RODATA.end(), STACK.base, STACK.end(), HIGH.base, HIGH.end()];

/// An address for an operand of `size` bytes.
pub fn data(random: &mut Random, size: u64) -> u64 {
    let size = size.clamp(1, 512);
    match random.below(100) {
        0..70 => inside(random, DATA.base, DATA.len, size),
        70..76 => across(random, DATA.base + PAGE, size),
        76..80 => across(random, RODATA.base, size),
        80..84 => inside(random, RODATA.base, RODATA.len, size),
        84..90 => inside(random, HIGH.base, HIGH.len, size),
        90..92 => {
            let edge = random.pick(&EDGES);
            across(random, edge, size)
        }
        92..94 => inside(random, STACK.base, STACK.len, size),
        94..96 => inside(random, CODE.base, CODE.len, size),
        96 => DATA.base.wrapping_sub(random.below(3 * PAGE)),
        97 => random.pick(&[0x7fff_ffff_ffff, 0xffff_8000_0000_0000]) - random.below(64),
        98 => 1 << 47 | random.bits() >> 8,
        _ => random.bits(),
    }
}

/// Anywhere in a window, three times out of four naturally aligned.
fn inside(random: &mut Random, base: u64, len: u64, size: u64) -> u64 {
    let offset = random.below(len - size + 1);
    let alignment = size.next_power_of_two().min(64);
    if random.chance(75) { base + (offset & !(alignment - 1)) } else { base + offset }
}

/// So that the operand crosses `boundary`, or touches it.
fn across(random: &mut Random, boundary: u64, size: u64) -> u64 {
    boundary - size + random.below(size + 1)
}

/// A stack pointer.
pub fn stack(random: &mut Random) -> u64 {
    let middle = STACK.base + 0x200 + random.below(STACK.len - 0x400);
    match random.below(32) {
        0..24 => middle & !7,
        24..28 => middle,
        28 => STACK.base + random.below(32),
        29 => STACK.end() - random.below(32),
        30 => STACK.base + PAGE - 16 + random.below(32),
        _ => data(random, 8),
    }
}

/// Where an indirect jump may go: into the HLTs of the code window, or to a page that does not
/// execute or does not exist.
pub fn jump(random: &mut Random) -> u64 {
    match random.below(16) {
        0 => data(random, 1),
        1 => 1 << 47 | random.bits() >> 8,
        _ => CODE.base + 0x400 + random.below(0x400),
    }
}

/// Where the code of a case starts: in the middle, across the page boundary, or so that it runs
/// out of the window.
pub fn start(random: &mut Random) -> u64 {
    match random.below(64) {
        0..56 => CODE.base + random.below(0x100),
        56..63 => CODE.base + PAGE - random.below(40),
        _ => CODE.end() - 1 - random.below(40),
    }
}
