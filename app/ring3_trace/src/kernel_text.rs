//! The kernel's code as its file has it, and where a kernel changes its own code as it runs.
//!
//! Linux patches itself: alternatives for the CPU it finds, returns and indirect calls, locks of machines with one CPU, static keys and
//! static calls, ftrace's sites, constants that are known after the start. Its file lists all these places. Everywhere else memory is
//! to be what the file is; at these places code may differ, and yet must not lead out of the kernel's own text.

use std::ops::Range;

use object::{Object, ObjectSection, read::elf::ElfFile64};

/// Lists of places, as offsets from where each entry lies, and the bytes of code there.
const LISTS: [(&str, usize); 5] = [
    (".retpoline_sites", 6),
    (".return_sites", 5),
    (".call_sites", 5),
    (".ibt_endbr_seal", 4),
    (".smp_locks", 1),
];
/// How sections of constants that are known after the start are called, and bytes of the constants.
const CONSTANTS: [(&str, usize); 2] = [("runtime_ptr_", 8), ("runtime_shift_", 1)];
/// Bytes of an entry of `.altinstructions`: first Linux 6.2 and later, then earlier ones.
const ALTERNATIVES: [usize; 2] = [14, 12];
/// Bytes of what calls, jumps and NOPs of static keys, static calls and ftrace replace.
const CALL: usize = 5;
/// Bytes of a static call's trampoline that are code.
const TRAMPOLINE: usize = 8;
/// Differences that are told at the most.
const MOST_TOLD: usize = 16;
/// System calls at the most.
const MOST_CALLS: usize = 512;
/// Differing bytes that are so near to each other are one difference.
const NEAR: usize = 16;

/// The kernel's text in its file.
pub struct KernelText {
    /// Its first byte (link address).
    begin: u64,
    bytes: Vec<u8>,
    /// Places at which the kernel changes itself: offsets in order, and how many bytes.
    sites: Vec<(usize, usize)>,
    /// Its table of system calls (link addresses).
    calls: Vec<u64>,
}

/// The file is no kernel whose text can be compared.
#[derive(Debug, thiserror::Error)]
#[error("this kernel's file cannot be compared with memory: {0}")]
pub struct UnknownFile(String);

impl KernelText {
    /// Reads an ELF kernel (`vmlinux`). `symbol` is where the running kernel has a symbol, and `trampolines` are those of static calls
    /// (link addresses).
    ///
    /// # Errors
    /// [`UnknownFile`] says what it lacks.
    pub fn parse(
        file: &[u8],
        symbol: &dyn Fn(&str) -> Option<u64>,
        trampolines: &[u64],
    ) -> Result<Self, UnknownFile> {
        let elf = ElfFile64::<object::LittleEndian>::parse(file);
        let elf = Sections(elf.map_err(|error| UnknownFile(error.to_string()))?);
        let (begin, text) =
            elf.section(".text").ok_or_else(|| UnknownFile("it has no .text".to_owned()))?;
        // Behind the end are zeroes up to the next page.
        let end = symbol("_etext").and_then(|end| usize::try_from(end.checked_sub(begin)?).ok());
        let bytes = text.get(..end.unwrap_or(text.len())).unwrap_or(text).to_vec();
        let mut text = Self { begin, bytes, sites: Vec::new(), calls: Vec::new() };
        text.add_lists(&elf);
        text.add_alternatives(&elf)?;
        text.add_tables(&elf, symbol);
        trampolines.iter().for_each(|at| text.add(*at, TRAMPOLINE));
        text.sites.sort_unstable();
        let own = text.range();
        let table = symbol("sys_call_table").map_or(&[][..], |at| elf.behind(at));
        let words = table.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        text.calls = words.take_while(|word| own.contains(word)).take(MOST_CALLS).collect();
        Ok(text)
    }

    /// The table of system calls (link addresses).
    pub fn calls(&self) -> &[u64] {
        &self.calls
    }

    /// Where it is (link addresses).
    pub fn range(&self) -> Range<u64> {
        self.begin..self.begin + self.bytes.len() as u64
    }

    /// How many places the kernel changes itself at.
    pub fn sites(&self) -> usize {
        self.sites.len()
    }

    fn add(&mut self, address: u64, len: usize) {
        let at = address.checked_sub(self.begin).and_then(|at| usize::try_from(at).ok());
        if let Some(at) = at.filter(|at| *at < self.bytes.len() && len != 0) {
            self.sites.push((at, len.min(self.bytes.len() - at)));
        }
    }

    fn add_lists(&mut self, elf: &Sections<'_>) {
        for (name, len) in LISTS {
            self.add_list(elf.section(name), len);
        }
        let names: Vec<_> =
            elf.0.sections().filter_map(|section| Some(section.name().ok()?.to_owned())).collect();
        for name in names {
            let constant = CONSTANTS.iter().find(|(prefix, _)| name.starts_with(prefix));
            constant.into_iter().for_each(|(_, len)| self.add_list(elf.section(&name), *len));
        }
    }

    fn add_list(&mut self, section: Option<(u64, &[u8])>, len: usize) {
        let Some((first, entries)) = section else { return };
        for (n, entry) in (0..).zip(entries.as_chunks::<4>().0) {
            self.add(relative(first + 4 * n, *entry), len);
        }
    }

    /// The place is an offset from its entry's beginning, and its length the last but one byte.
    fn add_alternatives(&mut self, elf: &Sections<'_>) -> Result<(), UnknownFile> {
        let Some((first, entries)) = elf.section(".altinstructions") else { return Ok(()) };
        let is_of = |len: &usize| {
            let mut all = entries.chunks_exact(*len);
            // The longest instruction that is replaced has some hundred bytes at the most, and what replaces it no more.
            let sound = all.all(|entry| entry[*len - 1] <= entry[*len - 2]);
            sound && entries.len().is_multiple_of(*len)
        };
        let len = ALTERNATIVES.into_iter().find(is_of);
        let len = len.ok_or_else(|| UnknownFile("its alternatives are unknown".to_owned()))?;
        for (n, entry) in entries.chunks_exact(len).enumerate() {
            let Some(offset) = entry.first_chunk() else { continue };
            self.add(relative(first + (n * len) as u64, *offset), entry[len - 2].into());
        }
        Ok(())
    }

    /// Tables that are parts of other sections: ftrace's sites, static keys, static calls; and patches of paravirtualization before 6.8.
    fn add_tables(&mut self, elf: &Sections<'_>, symbol: &dyn Fn(&str) -> Option<u64>) {
        let table = |first: &str, end: &str| {
            let (first, end) = (symbol(first)?, symbol(end)?);
            Some((first, elf.at(first, end.checked_sub(first)?)?))
        };
        if let Some((_, sites)) = table("__start_mcount_loc", "__stop_mcount_loc") {
            let all = sites.as_chunks::<8>().0.iter();
            all.for_each(|site| self.add(u64::from_le_bytes(*site), CALL));
        }
        for (first, end, len) in [
            ("__start___jump_table", "__stop___jump_table", 16),
            ("__start_static_call_sites", "__stop_static_call_sites", 8),
        ] {
            let Some((first, entries)) = table(first, end) else { continue };
            for (n, entry) in entries.chunks_exact(len).enumerate() {
                let Some(offset) = entry.first_chunk() else { continue };
                self.add(relative(first + (n * len) as u64, *offset), CALL);
            }
        }
        for entry in elf.section(".parainstructions").map_or(&[][..], |all| all.1).chunks_exact(16)
        {
            let Some(address) = entry.first_chunk() else { continue };
            self.add(u64::from_le_bytes(*address), entry[9].into());
        }
    }

    /// What is in memory and is not in the file, a sentence each. `memory` is the text, `slide` bytes further than linked.
    pub fn differences(&self, memory: &[u8], slide: u64) -> Vec<String> {
        let mut told = self.foreign_code(memory, slide);
        let mut is_site = vec![false; self.bytes.len()];
        for (at, len) in &self.sites {
            is_site[*at..at + len].fill(true);
        }
        let (mut at, mut last) = (0, None::<usize>);
        while at < self.bytes.len() && told.len() < MOST_TOLD {
            if memory.get(at) == Some(&self.bytes[at]) || is_site[at] {
                at += 1;
            } else if let Some(behind) = self.relocated(memory, slide, at) {
                at = behind;
            } else {
                if last.is_none_or(|last| at - last > NEAR) {
                    told.push(format!("code at {:#x} is not the file's", self.address(at, slide)));
                }
                last = Some(at);
                at += 1;
            }
        }
        told
    }

    /// Bytes that differ because the kernel is not where it was linked; returns what is behind them. The kernel moves by whole pages.
    fn relocated(&self, memory: &[u8], slide: u64, at: usize) -> Option<usize> {
        let word = |bytes: &[u8], from: usize| {
            Some(u32::from_le_bytes(*bytes.get(from..)?.first_chunk()?))
        };
        let slide = Some(slide as u32).filter(|slide| *slide != 0)?;
        (at.saturating_sub(3)..=at).rev().find_map(|from| {
            let (linked, now) = (word(&self.bytes, from)?, word(memory, from)?);
            // Distances to per-CPU variables, which do not move, grow smaller.
            let moved = [linked.wrapping_add(slide), linked.wrapping_sub(slide)];
            moved.contains(&now).then_some(from + 4)
        })
    }

    /// What the kernel has put at its places leads to its own text.
    fn foreign_code(&self, memory: &[u8], slide: u64) -> Vec<String> {
        let own = self.range();
        let mut told = Vec::new();
        for (at, len) in &self.sites {
            let Some(code) = memory.get(*at..at + len) else { continue };
            if self.bytes.get(*at..at + len) == Some(code) || told.len() >= MOST_TOLD {
                continue;
            }
            let target =
                leads_to(code).map(|offset| (self.begin + *at as u64).wrapping_add(offset));
            if let Some(target) = target.filter(|target| !own.contains(target)) {
                let (place, target) = (self.address(*at, slide), target.wrapping_add(slide));
                told.push(format!("code at {place:#x} leads to {target:#x}, out of the kernel"));
            }
        }
        told
    }

    fn address(&self, at: usize, slide: u64) -> u64 {
        (self.begin + at as u64).wrapping_add(slide)
    }
}

/// Where code leads that begins with a near call or jump, from its first byte.
fn leads_to(code: &[u8]) -> Option<u64> {
    // Prefixes make an instruction longer, and mean nothing.
    let prefixes = code.iter().take_while(|byte| [0x2e, 0x3e, 0x66].contains(*byte)).count();
    let rest = &code[prefixes..];
    let (skipped, offset) = match *rest.first()? {
        0xe8 | 0xe9 => (1, rest.get(1..5)?),
        0x0f if rest.get(1)? & 0xf0 == 0x80 => (2, rest.get(2..6)?),
        _ => return None,
    };
    let offset = i32::from_le_bytes(*offset.first_chunk()?);
    Some(((prefixes + skipped + 4) as u64).wrapping_add_signed(offset.into()))
}

/// An address that is said by its distance from a place.
fn relative(place: u64, offset: [u8; 4]) -> u64 {
    place.wrapping_add_signed(i32::from_le_bytes(offset).into())
}

/// Sections of the file.
struct Sections<'a>(ElfFile64<'a, object::LittleEndian>);

impl<'a> Sections<'a> {
    /// A section's link address and its bytes.
    fn section(&self, name: &str) -> Option<(u64, &'a [u8])> {
        let section = self.0.section_by_name(name)?;
        Some((section.address(), section.data().ok()?))
    }

    /// Bytes at a link address.
    fn at(&self, address: u64, len: u64) -> Option<&'a [u8]> {
        self.behind(address).get(..usize::try_from(len).ok()?)
    }

    /// All bytes of a section from a link address on; none if there is no such section.
    fn behind(&self, address: u64) -> &'a [u8] {
        let found = self.0.sections().find_map(|section| {
            let data = section.data().ok()?;
            let from = usize::try_from(address.checked_sub(section.address())?).ok()?;
            data.get(from..).filter(|rest| !rest.is_empty())
        });
        found.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forty bytes of code with a place of five at 8.
    fn text() -> KernelText {
        KernelText {
            begin: 0x8100_0000,
            bytes: (0..40).collect(),
            sites: vec![(8, 5)],
            calls: Vec::new(),
        }
    }

    #[test]
    fn code_is_the_files_but_where_the_kernel_changes_it() {
        let text = text();
        let mut memory = text.bytes.clone();
        assert!(text.differences(&memory, 0).is_empty());
        memory[8..13].copy_from_slice(b"\x0f\x1f\x44\0\0");
        assert!(text.differences(&memory, 0).is_empty(), "a NOP at a place for one");
        memory[20] ^= 1;
        memory[22] ^= 1;
        assert_eq!(text.differences(&memory, 0), ["code at 0x81000014 is not the file's"]);
        assert_eq!(text.differences(&memory[..39], 0).len(), 2, "some is missing");
    }

    #[test]
    fn no_place_leads_out_of_the_kernel() {
        let text = text();
        let mut memory = text.bytes.clone();
        memory[8..13].copy_from_slice(b"\xe8\x03\0\0\0");
        assert!(text.differences(&memory, 0).is_empty(), "a call of its own");
        memory[8..13].copy_from_slice(b"\xe9\0\0\0\x10");
        let told = text.differences(&memory, 0);
        assert_eq!(told, ["code at 0x81000008 leads to 0x9100000d, out of the kernel"]);
    }

    #[test]
    fn what_moved_with_the_kernel_is_the_same() {
        let text = text();
        let mut memory = text.bytes.clone();
        let slide = 0x0120_0000;
        let moved = |bytes: &[u8], by: u32| {
            u32::from_le_bytes(*bytes.first_chunk().expect("four")).wrapping_add(by).to_le_bytes()
        };
        memory[20..24].copy_from_slice(&moved(&text.bytes[20..], slide));
        memory[30..34].copy_from_slice(&moved(&text.bytes[30..], slide.wrapping_neg()));
        assert!(text.differences(&memory, slide.into()).is_empty());
        assert_eq!(text.differences(&memory, 0).len(), 1, "both, which are near each other");
    }

    #[test]
    fn a_file_that_is_no_kernel_is_refused() {
        assert!(KernelText::parse(b"\x7fELF", &|_| None, &[]).is_err());
        assert!(KernelText::parse(&[], &|_| None, &[]).is_err());
    }
}
