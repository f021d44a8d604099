//! Inputs out of others.

use fastrand::Rng;

/// Bytes of an input at the most.
const LONGEST: usize = 64 << 10;
/// Bytes of one that is made out of nothing.
const FRESH: usize = 2048;
/// Numbers at which things end.
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    7,
    0x7f,
    0x80,
    0xff,
    0xfff,
    0x1000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x0000_7fff_ffff_f000,
    0xffff_8000_0000_0000,
    u64::MAX / 2,
    u64::MAX,
];

/// The next input: one of the pool with changes, or anything.
pub fn next(pool: &[Vec<u8>], random: &mut Rng) -> Vec<u8> {
    let base = random.choice(pool).filter(|_| random.u8(..8) != 0);
    let mut input = base.cloned().unwrap_or_else(|| {
        let len = random.usize(..FRESH);
        (0..len).map(|_| random.u8(..)).collect()
    });
    // A few changes, sometimes many.
    let changes = 1 << random.u32(..6);
    for _ in 0..random.u32(1..=changes) {
        change(&mut input, pool, random);
    }
    input.truncate(LONGEST);
    input
}

fn change(input: &mut Vec<u8>, pool: &[Vec<u8>], random: &mut Rng) {
    let (at, len) = place(input, random);
    match random.u8(..10) {
        0 | 1 => flip(input, random),
        2 | 3 => number(input, random),
        4 => input[at..at + len].iter_mut().for_each(|byte| *byte = random.u8(..)),
        5 => drop(input.drain(at..at + len)),
        6 => {
            let part = input[at..at + len].to_vec();
            input.splice(at..at, part);
        }
        7 => {
            let part: Vec<u8> = (0..random.usize(1..16)).map(|_| random.u8(..)).collect();
            input.splice(at..at, part);
        }
        8 => input.truncate(at),
        _ => {
            let Some(other) = random.choice(pool) else { return };
            let (from, len) = place(other, random);
            input.splice(at..at, other[from..from + len].iter().copied());
        }
    }
}

/// A part of the input, short more often than long; perhaps nothing.
fn place(input: &[u8], random: &mut Rng) -> (usize, usize) {
    if input.is_empty() {
        return (0, 0);
    }
    let at = random.usize(..input.len());
    let most = input.len() - at;
    (at, most.min(1 << random.u32(..8)).min(random.usize(..=most)))
}

fn flip(input: &mut [u8], random: &mut Rng) {
    if let Some(byte) = random.choice(0..input.len()).and_then(|at| input.get_mut(at)) {
        *byte ^= 1 << random.u32(..8);
    }
}

/// Changes a number of one to eight bytes: to one at an edge, or a little.
fn number(input: &mut [u8], random: &mut Rng) {
    let len = 1 << random.u32(..4);
    let Some(last) = input.len().checked_sub(len) else { return };
    let at = random.usize(..=last);
    let mut bytes = [0; 8];
    bytes[..len].copy_from_slice(&input[at..at + len]);
    let before = u64::from_le_bytes(bytes);
    let after = match random.u8(..4) {
        0 => before.wrapping_add(random.u64(..16)),
        1 => before.wrapping_sub(random.u64(..16)),
        _ => *random.choice(&EDGES).unwrap_or(&0),
    };
    let mut bytes = after.to_le_bytes();
    // Networks have the most significant byte first.
    if random.u8(..4) == 0 {
        bytes[..len].reverse();
    }
    input[at..at + len].copy_from_slice(&bytes[..len]);
}
