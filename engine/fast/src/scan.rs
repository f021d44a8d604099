//! Looking for CPUID in user code, where the host cannot make it fault.
//!
//! User code that executed the CPU's own CPUID would find features whose state the guest kernel does
//! not keep (AVX-512). So a page that holds a CPUID is not mapped executable, and what runs on it is
//! interpreted; such pages are start-up code. The two bytes also occur inside other instructions:
//! code is decoded from many places before them, which soon agree on where instructions start.

use iced_x86::{Decoder, DecoderOptions};

const CPUID: [u8; 2] = [0x0f, 0xa2];
/// How far before a candidate decoding starts, nearest and farthest.
const NEAREST: usize = 17;
const FARTHEST: usize = 48;

/// The page holds a CPUID instruction, as far as can be told.
pub fn holds_cpuid(page: &[u8]) -> bool {
    let last = page.last() == Some(&CPUID[0]);
    last || candidates(page).any(|at| is_instruction(page, at))
}

fn candidates(page: &[u8]) -> impl Iterator<Item = usize> + '_ {
    page.windows(2).enumerate().filter(|(_, pair)| *pair == CPUID).map(|(at, _)| at)
}

/// Most of the decodings that pass `at` have an instruction start there.
fn is_instruction(page: &[u8], at: usize) -> bool {
    if at < FARTHEST {
        return true; // too little before it to tell
    }
    let hits = (at - FARTHEST..at - NEAREST).filter(|start| starts_at(page, *start, at)).count();
    hits * 2 >= FARTHEST - NEAREST
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
        assert!(!holds_cpuid(&page));
        page[700..702].copy_from_slice(&CPUID);
        assert!(holds_cpuid(&page));
    }

    #[test]
    fn an_immediate_is_not_one() {
        let mut page = page();
        page[700..707].copy_from_slice(&[0x48, 0x05, 0x00, 0x0f, 0xa2, 0x00, 0x90]); // add rax, imm32
        assert!(!holds_cpuid(&page));
    }

    #[test]
    fn at_the_edges_it_is_assumed() {
        let mut first = page();
        first[3..5].copy_from_slice(&CPUID);
        assert!(holds_cpuid(&first));
        let mut last = page();
        last[4095] = CPUID[0];
        assert!(holds_cpuid(&last));
    }
}
