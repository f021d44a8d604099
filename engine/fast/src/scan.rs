//! What user code must not execute as it is, and what stands in its place.
//!
//! Where the host cannot make CPUID fault, user code that executed it would find features whose state
//! the guest kernel does not keep (AVX-512). So it becomes UD2, in a copy of the page that only
//! execution sees, and the interpreter, which sees the guest's own bytes, executes it.
//!
//! The two bytes also occur inside other instructions: code is decoded from many places before
//! them, which soon agree on where instructions start. A CPUID across a page border is not found.

use iced_x86::{Decoder, DecoderOptions};

const CPUID: [u8; 2] = [0x0f, 0xa2];
const UD2: u64 = 0x0b0f;
/// How far before a candidate decoding starts, nearest and farthest.
const NEAREST: usize = 17;
const FARTHEST: usize = 48;

/// Bytes to be put into a copy of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patch {
    /// Offset in the page.
    pub at: usize,
    /// How many, up to eight.
    pub len: u64,
    /// The bytes, first one lowest.
    pub bytes: u64,
}

/// What has to be changed in a page of user code.
pub fn patches(page: &[u8]) -> Vec<Patch> {
    if wedge::cpuid_faults() {
        return Vec::new();
    }
    cpuids(page).map(|at| Patch { at, len: 2, bytes: UD2 }).collect()
}

/// Where the CPUID instructions of a page are, as far as can be told.
fn cpuids(page: &[u8]) -> impl Iterator<Item = usize> + '_ {
    let pairs = page.windows(2).enumerate();
    let candidates = pairs.filter(|(_, pair)| *pair == CPUID).map(|(at, _)| at);
    candidates.filter(|at| is_instruction(page, *at))
}

/// Most of the decodings that pass `at` have an instruction start there.
fn is_instruction(page: &[u8], at: usize) -> bool {
    let first = at.saturating_sub(FARTHEST);
    let last = at.saturating_sub(NEAREST).max(first + 1).min(at + 1);
    let hits = (first..last).filter(|start| starts_at(page, *start, at)).count();
    hits * 2 >= last - first
}

fn starts_at(page: &[u8], start: usize, at: usize) -> bool {
    let mut decoder = Decoder::new(64, &page[start..], DecoderOptions::NONE);
    while decoder.position() < at - start {
        let _ = decoder.decode();
    }
    decoder.position() == at - start
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `mov rax, [rdi+8]; add rax, rbx` over and over.
    fn page() -> Vec<u8> {
        [0x48, 0x8b, 0x47, 0x08, 0x48, 0x01, 0xd8].iter().copied().cycle().take(4096).collect()
    }

    #[test]
    fn an_instruction_is_found() {
        let mut page = page();
        assert_eq!(cpuids(&page).count(), 0);
        page[700..702].copy_from_slice(&CPUID);
        assert_eq!(cpuids(&page).collect::<Vec<_>>(), [700]);
    }

    #[test]
    fn an_immediate_is_not_one() {
        let mut page = page();
        page[700..707].copy_from_slice(&[0x48, 0x05, 0x00, 0x0f, 0xa2, 0x00, 0x90]); // add rax, imm32
        assert_eq!(cpuids(&page).count(), 0);
    }

    #[test]
    fn near_the_start_there_is_less_to_go_by() {
        for at in [0, 14] {
            let mut page = page();
            page[at..at + 2].copy_from_slice(&CPUID);
            assert_eq!(cpuids(&page).collect::<Vec<_>>(), [at]);
        }
    }
}
