//! What a machine has noted of its kernel's blocks, translated for later machines.

use super::anything;
use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "keeper", seeds, run };

/// A block as a machine notes it: GVA, number of drops, length of the instructions, length of the code, RFLAGS.AC, and the code.
fn noted(guest: u64, times: u16, ac: bool, code: &[u8]) -> Vec<u8> {
    let len = (code.len() as u16).to_le_bytes();
    [&guest.to_le_bytes()[..], &times.to_le_bytes(), &len, &len, &[ac.into()], code].concat()
}

/// Anything, and blocks that lead to each other.
fn seeds() -> Vec<Vec<u8>> {
    const A: u64 = 0xffff_ffff_8100_0000;
    let jump: [&[u8]; 3] = [&[0x74, 0x0e, 0xeb, 0x0c], &[0xe8, 0xfb, 0xff, 0xff, 0xff], &[0xc3]];
    let blocks =
        |at: u64| [0, 1].map(|times| noted(A + at * 16, times, at == 2, jump[at as usize]));
    let linked = (0..3).flat_map(blocks).flatten().collect();
    let opens = noted(A, 0, false, &[0x3d, 0x0f, 0x01, 0xef, 0xc3, 0xf4]);
    (0..2).map(|seed| anything(seed, 256)).chain([linked, opens]).collect()
}

/// What is made of it can be executed by any machine, and has nothing that opens protection keys.
fn run(bytes: &[u8]) {
    for several in [false, true] {
        let kept = vmm::translate_noted(several, bytes);
        let (_, rest) = table(&kept);
        let (code, _) = table(rest);
        assert_eq!(wedge_abi::keys::find(code), None, "code that opens keys");
    }
}

/// The first table of bytes, and what follows it.
fn table(bytes: &[u8]) -> (&[u8], &[u8]) {
    let (len, rest) = bytes.split_first_chunk().expect("a length");
    rest.split_at(u32::from_le_bytes(*len) as usize)
}
