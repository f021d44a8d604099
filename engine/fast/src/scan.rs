//! What user code must not execute as it is, and what stands in its place.
//!
//! - Where the host cannot make CPUID fault, user code that executed it would find features whose state
//!   the guest kernel does not keep (AVX-512). So it becomes HLT, which faults, and the interpreter, which sees the
//!   guest's own bytes, executes it.
//! - Where the host has more vector state than the guest knows, XSAVE and XRSTOR with a wide mask reach
//!   beyond the area that the guest's CPUID told the program to provide. Where the mask is a constant
//!   just before it (ld.so's resolver), it is cut to what the guest knows; any other becomes HLT, and so does every XRSTOR where
//!   it could load protection keys: whoever jumps to it brings a mask of their own.
//! - LAR and LSL answer from the host's descriptor tables, and LSL of Linux's segment for that purpose
//!   and RDPID give the host's number of the CPU. They become HLT. RDTSCP gives that number, too, but
//!   clocks are read by it; it stays.
//! - RDPKRU and WRPKRU, which the guest's CPU does not have, become HLT where the host's has them. What is left of their bytes and
//!   XRSTOR's, in the middle of others, keeps a page from being executed at all (`shadow/closed.rs`).
//!
//! The changes are made in a private copy of the page, which the program's own loads see, too, once it has executed the page
//! (`shadow/texts.rs` says how readers of code get on). The bytes looked for also occur inside other instructions, where decoding tells, and in data among code, where it does not: see
//! [`crate::plausible`]. An instruction across a page border is not found.

use crate::plausible::{ENOUGH, ENOUGH_WRITTEN, LONGEST, Page};
use std::iter;

const CPUID: [u8; 2] = [0x0f, 0xa2];
/// First byte of what stands in the place of others: it faults in user code, and the host is quicker
/// about that fault than about UD2's.
const HLT: u64 = 0xf4;
/// First bytes of XSAVE and XRSTOR, which a ModR/M byte with 4 or 5 in its middle follows.
const XSAVE: [u8; 2] = [0x0f, 0xae];
/// First bytes of RDPKRU and WRPKRU, which one of the others follows.
const KEYS: [u8; 2] = [0x0f, 0x01];
const KEYS_ENDS: [u8; 2] = [0xee, 0xef];
const LAR: [u8; 2] = [0x0f, 0x02];
const LSL: [u8; 2] = [0x0f, 0x03];
/// RDPID behind its prefix, which a ModR/M byte follows.
const RDPID: [u8; 2] = [0x0f, 0xc7];
const REPEAT: u8 = 0xf3;
/// `xor edx, edx` behind `mov eax, imm32`: XSAVE's mask.
const MASK: [u8; 2] = [0x31, 0xd2];
/// How far before XSAVE its mask is loaded at the most.
const MASK_REACH: usize = 128;
/// The vector state the guest knows.
const KNOWN: u8 = 7;
/// Prefixes looked at before an opcode.
const MAX_PREFIXES: usize = 3;

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

/// What has to be changed in a page of user code. What a program has `written` itself holds more tables
/// than questions that the host would answer wrongly: nobody makes those at run time.
pub fn patches(page: Page<'_>, written: bool) -> Vec<Patch> {
    let enough = if written { ENOUGH_WRITTEN } else { ENOUGH };
    let answers = host_answers(page).filter(|_| !written);
    let mut found: Vec<_> = answers.map(|at| Patch { at, len: 1, bytes: HLT }).collect();
    if !host::current().facts().cpuid_faults {
        found.extend(cpuids(page, enough).map(|at| Patch { at, len: 1, bytes: HLT }));
    }
    if wedge::keys_load() {
        found.extend(keys(page).map(|at| Patch { at, len: 1, bytes: HLT }));
    }
    if host::current().facts().more_vectors {
        found.extend(xsaves(page, enough).map(|at| narrow(page.bytes, at, wedge::keys_load())));
    }
    found
}

/// Has the XSAVE or XRSTOR at `at` reach no further than the guest knows, however it is come to if the host has `keys`.
fn narrow(page: &[u8], at: usize, keys: bool) -> Patch {
    let restores = page[at + 2] >> 3 & 7 == 5;
    let mask = |from: &usize| {
        let load = &page[*from..at];
        load[0] == 0xb8 && load[2..5] == [0; 3] && load[5..7] == MASK
    };
    let nearest = (at.saturating_sub(MASK_REACH)..at.saturating_sub(6)).rev().find(mask);
    match nearest.filter(|_| !(keys && restores)) {
        Some(load) => Patch { at: load + 1, len: 1, bytes: u64::from(page[load + 1] & KNOWN) },
        None => Patch { at, len: 1, bytes: HLT },
    }
}

/// Where the CPUID instructions of a page are, as far as can be told.
fn cpuids(page: Page<'_>, enough: usize) -> impl Iterator<Item = usize> + '_ {
    occurrences(page, CPUID).filter(move |at| page.has_instruction(*at, enough))
}

/// Where the instructions are, behind their prefixes, that answer from what is the host's.
fn host_answers(page: Page<'_>) -> impl Iterator<Item = usize> + '_ {
    let rdpid = move |at: &usize| {
        let register = page.bytes.get(at + 2).is_some_and(|m| *m >= 0xf8);
        register && at.checked_sub(1).is_some_and(|before| page.bytes[before] == REPEAT)
    };
    let descriptors = occurrences(page, LAR).chain(occurrences(page, LSL));
    let all = descriptors.chain(occurrences(page, RDPID).filter(rdpid));
    // At the start of a page they are more likely the end of a displacement.
    all.filter(move |at| *at >= LONGEST && is_opcode(page, *at, ENOUGH))
}

/// Where the XSAVE and XRSTOR instructions of a page are, behind their prefixes.
fn xsaves(page: Page<'_>, enough: usize) -> impl Iterator<Item = usize> + '_ {
    let memory = move |at: &usize| {
        page.bytes.get(at + 2).is_some_and(|m| matches!(m >> 3 & 7, 4 | 5) && m >> 6 != 3)
    };
    occurrences(page, XSAVE).filter(memory).filter(move |at| is_opcode(page, *at, enough))
}

/// Where the RDPKRU and WRPKRU instructions of a page are.
fn keys(page: Page<'_>) -> impl Iterator<Item = usize> + '_ {
    let whole = move |at: &usize| page.bytes.get(at + 2).is_some_and(|end| KEYS_ENDS.contains(end));
    occurrences(page, KEYS).filter(whole).filter(move |at| page.has_instruction(*at, ENOUGH))
}

fn occurrences(page: Page<'_>, bytes: [u8; 2]) -> impl Iterator<Item = usize> + '_ {
    let pairs = page.bytes.windows(2).enumerate();
    pairs.filter(move |(_, pair)| *pair == bytes).map(|(at, _)| at)
}

/// An instruction starts at `at` or at one of the prefixes before it.
fn is_opcode(page: Page<'_>, at: usize, enough: usize) -> bool {
    let prefix = |at: &usize| match page.bytes[*at] {
        0x66 | 0xf2 | 0xf3 => true,
        byte => page.bits == 64 && byte & 0xf0 == 0x40,
    };
    let prefixes = (0..at).rev().take(MAX_PREFIXES).take_while(prefix);
    iter::once(at).chain(prefixes).any(|start| page.has_instruction(start, enough))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wide(bytes: &[u8]) -> Page<'_> {
        Page { bytes, bits: 64 }
    }

    /// `mov rax, [rdi+8]; add rax, rbx` over and over.
    fn page() -> Vec<u8> {
        [0x48, 0x8b, 0x47, 0x08, 0x48, 0x01, 0xd8].iter().copied().cycle().take(4096).collect()
    }

    #[test]
    fn an_instruction_is_found() {
        let mut page = page();
        assert_eq!(cpuids(wide(&page), ENOUGH).count(), 0);
        page[700..707].copy_from_slice(&[0x0f, 0xa2, 0x90, 0x90, 0x90, 0x90, 0x90]);
        assert_eq!(cpuids(wide(&page), ENOUGH).collect::<Vec<_>>(), [700]);
    }

    #[test]
    fn what_answers_for_the_host_is_found() {
        let mut page = page();
        page[700..707].copy_from_slice(&[0x0f, 0x02, 0xc1, 0x90, 0x90, 0x90, 0x90]); // lar eax, cx
        page[1400..1407].copy_from_slice(&[0x48, 0x0f, 0x03, 0xc1, 0x90, 0x90, 0x90]); // lsl rax, cx
        page[2100..2107].copy_from_slice(&[0xf3, 0x0f, 0xc7, 0xf8, 0x90, 0x90, 0x90]); // rdpid rax
        page[2800..2807].copy_from_slice(&[0x0f, 0xc7, 0xf8, 0x90, 0x90, 0x90, 0x90]); // rdseed eax
        page[3500..3507].copy_from_slice(&[0x48, 0x05, 0x00, 0x0f, 0x02, 0x00, 0x90]); // add rax, imm32
        assert_eq!(host_answers(wide(&page)).collect::<Vec<_>>(), [700, 1401, 2101]);
    }

    /// Any two bytes may be those of a displacement right behind an opcode of one byte.
    #[test]
    fn a_displacement_is_not_one() {
        let mut page = page();
        page[700..707].copy_from_slice(&[0xe8, 0x0f, 0x03, 0x00, 0x00, 0x90, 0x90]); // call +30fh
        page[1400..1407].copy_from_slice(&[0xe9, 0x0f, 0x02, 0x00, 0x00, 0x90, 0x90]); // jmp +20fh
        assert_eq!(host_answers(wide(&page)).count(), 0);
    }

    /// As in Mono's mscorlib.dll.so: a jump through memory, its number, the next jump.
    #[test]
    fn numbers_between_jumps_are_none() {
        let numbers = [
            0x0002_0f3d_u32,
            0x0002_0f40,
            0x0003_0f12,
            0xc103_0f48,
            0x0001_a20f,
            0x0000_a20f,
            0x24ae_0f48,
        ];
        for number in numbers {
            let entry = |n: u32| {
                let jump = [0xff, 0x25, n as u8, 0xdf, 0x0b, 0];
                [&jump[..], &number.wrapping_add(n & 1).to_le_bytes()].concat()
            };
            let page: Vec<u8> = (0..410).flat_map(entry).take(4096).collect();
            let found = cpuids(wide(&page), ENOUGH)
                .chain(host_answers(wide(&page)))
                .chain(xsaves(wide(&page), ENOUGH));
            assert_eq!(found.count(), 0, "{number:x}");
        }
    }

    #[test]
    fn key_instructions_are_found() {
        let mut page = page();
        page[700..707].copy_from_slice(&[0x0f, 0x01, 0xef, 0x90, 0x90, 0x90, 0x90]); // wrpkru
        page[1400..1407].copy_from_slice(&[0x0f, 0x01, 0xee, 0x90, 0x90, 0x90, 0x90]); // rdpkru
        page[2100..2107].copy_from_slice(&[0x0f, 0x01, 0xd0, 0x90, 0x90, 0x90, 0x90]); // xgetbv
        page[2800..2807].copy_from_slice(&[0x48, 0x05, 0x0f, 0x01, 0xef, 0x00, 0x90]); // add rax, imm32
        assert_eq!(keys(wide(&page)).collect::<Vec<_>>(), [700, 1400]);
    }

    #[test]
    fn an_immediate_is_not_one() {
        let mut page = page();
        page[700..707].copy_from_slice(&[0x48, 0x05, 0x00, 0x0f, 0xa2, 0x00, 0x90]); // add rax, imm32
        assert_eq!(cpuids(wide(&page), ENOUGH).count(), 0);
    }

    /// Where ld.so saves the registers: zeros before it make decodings agree late.
    #[test]
    fn zeros_do_not_hide_an_instruction() {
        let mut page = page();
        let clear = [0x48, 0x89, 0x94, 0x24, 0x78, 0x02, 0x00, 0x00]; // mov [rsp+278h], rdx
        for n in 0..7 {
            page[637 + n * 8..645 + n * 8].copy_from_slice(&clear);
        }
        page[693..700].copy_from_slice(&[0x0f, 0xae, 0x64, 0x24, 0x40, 0x90, 0x90]);
        assert_eq!(xsaves(wide(&page), ENOUGH).collect::<Vec<_>>(), [693]);
    }

    #[test]
    fn a_constant_mask_is_cut() {
        let mut page = page();
        let load = [0xb8, 0xee, 0, 0, 0, 0x31, 0xd2]; // mov eax, 0eeh; xor edx, edx
        page[679..686].copy_from_slice(&load);
        page[693..700].copy_from_slice(&[0x0f, 0xae, 0x64, 0x24, 0x40, 0x90, 0x90]);
        assert_eq!(narrow(&page, 693, true), Patch { at: 680, len: 1, bytes: 6 });
        page[679] = 0x90;
        assert_eq!(narrow(&page, 693, false), Patch { at: 693, len: 1, bytes: HLT });
    }

    #[test]
    fn keys_are_not_restored_with_any_mask() {
        let mut page = page();
        page[679..686].copy_from_slice(&[0xb8, 6, 0, 0, 0, 0x31, 0xd2]); // mov eax, 6; xor edx, edx
        page[693..700].copy_from_slice(&[0x0f, 0xae, 0x6c, 0x24, 0x40, 0x90, 0x90]); // xrstor [rsp+40h]
        assert_eq!(narrow(&page, 693, true), Patch { at: 693, len: 1, bytes: HLT });
        assert_eq!(narrow(&page, 693, false), Patch { at: 680, len: 1, bytes: 6 });
    }

    #[test]
    fn lfence_is_left_alone() {
        let mut page = page();
        page[700..707].copy_from_slice(&[0x0f, 0xae, 0x64, 0x24, 0x40, 0x90, 0x90]); // xsave [rsp+40h]
        page[1400..1407].copy_from_slice(&[0x48, 0x0f, 0xae, 0x27, 0x90, 0x90, 0x90]); // xsave64 [rdi]
        page[2100..2107].copy_from_slice(&[0x0f, 0xae, 0xe8, 0x90, 0x90, 0x90, 0x90]); // lfence
        page[2800..2807].copy_from_slice(&[0x0f, 0xae, 0x6c, 0x24, 0x40, 0x90, 0x90]); // xrstor [rsp+40h]
        assert_eq!(xsaves(wide(&page), ENOUGH).collect::<Vec<_>>(), [700, 1401, 2800]);
    }

    #[test]
    fn near_the_start_there_is_less_to_go_by() {
        for at in [0, 3, 14] {
            let mut page = page();
            page[..21].fill(0x90);
            page[at..at + 2].copy_from_slice(&CPUID);
            assert_eq!(cpuids(wide(&page), ENOUGH).collect::<Vec<_>>(), [at]);
            page[at..at + 3].copy_from_slice(&[0x0f, 0x03, 0x00]);
            assert_eq!(host_answers(wide(&page)).count(), 0);
        }
    }

    /// Small numbers, as compilers at run time keep them beside their code; and the tables of ciphers.
    #[test]
    fn data_are_left_alone() {
        let mut random = 1u64;
        let mut byte = |below: u64| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            ((random >> 33) % below) as u8
        };
        let (mut looked_at, mut found) = (0, 0);
        for below in [32, 256] {
            for _ in 0..500 {
                let page: Vec<u8> = (0..4096).map(|_| byte(below)).collect();
                looked_at += [CPUID, LAR, LSL]
                    .map(|b| occurrences(wide(&page), b).count())
                    .iter()
                    .sum::<usize>();
                found += cpuids(wide(&page), ENOUGH).count() + host_answers(wide(&page)).count();
            }
        }
        assert!(looked_at > 3000 && found < 4, "{found} of {looked_at}");
    }

    /// Where HotSpot asks: pushes, the question, stores.
    #[test]
    fn code_that_asks_is_found() {
        let code = [
            0x55, 0x53, 0x51, 0x52, 0x48, 0x89, 0xf5, // push rbp, rbx, rcx, rdx; mov rbp, rsi
            0xb8, 7, 0, 0, 0, 0x31, 0xc9, 0x0f, 0xa2, // mov eax, 7; xor ecx, ecx; cpuid
            0x48, 0x8d, 0x75, 0x20, 0x89, 0x06, 0x89, 0x5e,
            4, // lea rsi, [rbp+20h]; mov [rsi], eax; ...
            0x5a, 0x59, 0x5b, 0x5d, 0xc3, // pop rdx, rcx, rbx, rbp; ret
        ];
        let mut page = vec![0; 4096];
        page[1024..1024 + code.len()].copy_from_slice(&code);
        assert_eq!(cpuids(wide(&page), ENOUGH).collect::<Vec<_>>(), [1038]);
    }

    /// What 64-bit code calls a prefix is an instruction there, and its operands have no REX.
    #[test]
    fn code_of_32_bits_is_read_as_such() {
        let mut page = vec![0x90; 4096];
        let frame = [0x55, 0x89, 0xe5, 0x83, 0xec, 0x10, 0x8b, 0x45, 0xf8, 0x40, 0x89, 0x45, 0xfc]; // ... inc eax ...
        (600..1800).step_by(13).for_each(|at| page[at..at + 13].copy_from_slice(&frame));
        page[1120..1123].copy_from_slice(&[0x0f, 0x03, 0xc1]); // lsl eax, cx
        let found = |bits| host_answers(Page { bytes: &page, bits }).collect::<Vec<_>>();
        assert_eq!(found(32), [1120]);
    }
}
