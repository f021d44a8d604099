//! Whether somebody has changed how the guest's kernel answers system calls, as root kits do.
//!
//! It is looked at from below, so nothing in the guest can hide it: every entry of the table of system calls is to be one of the
//! kernel's own functions, and these functions are to begin with the code they began with at the first look, and not with a jump.
//! With the kernel's file ([`Integrity::of_file`]) all of the kernel's text and the table are to be what the file says, but where the
//! kernel changes itself ([`crate::kernel_text`]). Where things are is what the guest's own symbols say.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Problem, Request, Rights, Service, kernel_text::KernelText};

const TABLE: &str = "sys_call_table";
const FUNCTIONS: &str = "__x64_sys_";
/// Entries of the table at the most, and bytes of a function that are compared.
const ENTRIES: usize = 512;
const BYTES: usize = 16;
/// Bytes that are read at once.
const PART: usize = 64 << 10;
/// Where the kernel's text is linked to begin.
const FIRST: u64 = 0xffff_ffff_8100_0000;
/// What of the kernel's symbols a comparison with its file needs.
const NAMES: [&str; 8] = [
    "_etext",
    TABLE,
    "__start_mcount_loc",
    "__stop_mcount_loc",
    "__start___jump_table",
    "__stop___jump_table",
    "__start_static_call_sites",
    "__stop_static_call_sites",
];
/// How a function of the kernel may begin: ENDBR64, and a NOP or a call of ftrace's.
const ENDBR: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
/// Jumps, near and short.
const JUMPS: [u8; 2] = [0xe9, 0xeb];

/// What was found at the first look.
pub struct Integrity {
    service: Service,
    table: u64,
    /// Functions by name.
    functions: BTreeMap<String, u64>,
    /// How each began.
    code: BTreeMap<String, Vec<u8>>,
    entries: Vec<u64>,
    /// What the kernel's file has, and how far from there the kernel is.
    file: Option<(KernelText, u64)>,
}

impl Integrity {
    /// Takes the first look at a machine.
    ///
    /// # Errors
    /// As [`Service::connect`]; or the kernel has no such table.
    pub fn new(machine: &str) -> Result<Self, Problem> {
        let request = Request { memory: Rights::Read, ..Request::default() };
        let mut service = Service::connect(machine, &request)?;
        let (table, functions) = (service.symbol(TABLE)?, service.symbols(FUNCTIONS)?);
        let (code, entries) = (BTreeMap::new(), Vec::new());
        let mut first = Self { service, table, functions, code, entries, file: None };
        first.entries = first.entries()?;
        first.code = first.code()?;
        Ok(first)
    }

    /// Compares with the kernel's file, an unpacked `vmlinux`, instead of with the first look.
    ///
    /// # Errors
    /// As [`Integrity::new`]; or the file is none of a kernel's.
    pub fn of_file(machine: &str, vmlinux: &[u8]) -> Result<Self, Problem> {
        let mut first = Self::new(machine)?;
        let slide = first.service.symbol("_text")?.wrapping_sub(FIRST);
        let names = NAMES.iter().map(|name| ((*name).to_owned(), first.service.symbol(name)));
        // A kernel without one of these tables does not change itself by it.
        let places: BTreeMap<_, _> =
            names.filter_map(|(name, at)| Some((name, at.ok()?))).collect();
        let symbol = |name: &str| places.get(name).map(|at| at.wrapping_sub(slide));
        let trampolines = first.trampolines()?;
        let trampolines: Vec<_> = trampolines.iter().map(|at| at.wrapping_sub(slide)).collect();
        let text = KernelText::parse(vmlinux, &symbol, &trampolines)?;
        first.entries = text.calls().iter().map(|at| at.wrapping_add(slide)).collect();
        first.code = BTreeMap::new();
        first.file = Some((text, slide));
        Ok(first)
    }

    /// Trampolines of static calls. Their names are asked for letter by letter: there are more than are told at once.
    fn trampolines(&mut self) -> Result<Vec<u64>, Problem> {
        const PREFIX: &str = "__SCT__";
        let letters = ('a'..='z').chain('A'..='Z').chain('0'..='9').chain(['_']);
        let mut all = Vec::new();
        for first in letters {
            let found = self.service.symbols(&format!("{PREFIX}{first}"))?;
            all.extend(found.into_values());
        }
        Ok(all)
    }

    /// The kernel's text as it is in memory.
    fn text(&mut self, mut at: u64, end: u64) -> Result<Vec<u8>, Problem> {
        let mut text = Vec::new();
        while at < end {
            let part = self.service.read(None, at, PART.min((end - at) as usize))?;
            if part.is_empty() {
                break;
            }
            at += part.len() as u64;
            text.extend(part);
        }
        Ok(text)
    }

    /// What is not as the file has it.
    fn differences(&mut self) -> Result<Vec<String>, Problem> {
        let Some((file, slide)) = self.file.take() else { return Ok(Vec::new()) };
        let range = file.range();
        let text = self.text(range.start.wrapping_add(slide), range.end.wrapping_add(slide));
        let told = text.map(|text| file.differences(&text, slide));
        self.file = Some((file, slide));
        told
    }

    /// How many entries and functions are watched.
    pub fn watched(&self) -> (usize, usize) {
        let functions = if self.file.is_some() { &self.functions.len() } else { &self.code.len() };
        (self.entries.len(), *functions)
    }

    /// What is not as it should be: a sentence each.
    ///
    /// # Errors
    /// The connection fails.
    pub fn problems(&mut self) -> Result<Vec<String>, Problem> {
        let own: BTreeMap<u64, &str> =
            self.functions.iter().map(|(name, at)| (*at, name.as_str())).collect();
        let was: Vec<_> =
            self.entries.iter().map(|at| own.get(at).map(|name| (*name).to_owned())).collect();
        let own: BTreeSet<u64> = own.into_keys().collect();
        let mut problems = Vec::new();
        let entries = self.entries()?;
        for (number, (entry, first)) in entries.iter().zip(&self.entries).enumerate() {
            let name = was[number].clone().unwrap_or_else(|| "?".to_owned());
            if !own.contains(entry) {
                problems.push(format!(
                    "system call {number} ({name}) leads to {entry:#x}, no function of the kernel's"
                ));
            } else if entry != first {
                problems.push(format!(
                    "system call {number} ({name}) leads to another call's function"
                ));
            }
        }
        problems.extend(self.differences()?);
        let code = if self.file.is_some() { BTreeMap::new() } else { self.code()? };
        for (name, code) in code {
            if begins_with_jump(&code) {
                problems.push(format!("{name} begins with a jump"));
            } else if self.code.get(&name) != Some(&code) {
                problems.push(format!("{name} begins with other code than before"));
            }
        }
        Ok(problems)
    }

    /// The table, up to its end: what comes behind it is no address of the kernel's.
    fn entries(&mut self) -> Result<Vec<u64>, Problem> {
        const KERNEL: u64 = 0xffff_8000_0000_0000;
        let bytes = self.service.read(None, self.table, ENTRIES * 8)?;
        let words = bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
        let known = self.entries.len();
        if known != 0 {
            return Ok(words.take(known).collect());
        }
        let own: BTreeSet<u64> = self.functions.values().copied().collect();
        // The last that is one of the kernel's own functions ends it: an entry changed before the first look is found.
        let words: Vec<u64> = words.take_while(|word| *word >= KERNEL).collect();
        let len = words.iter().rposition(|word| own.contains(word)).map_or(0, |last| last + 1);
        Ok(words[..len].to_vec())
    }

    fn code(&mut self) -> Result<BTreeMap<String, Vec<u8>>, Problem> {
        let mut code = BTreeMap::new();
        for (name, at) in &self.functions {
            if !name.contains('.') {
                code.insert(name.clone(), self.service.read(None, *at, BYTES)?);
            }
        }
        Ok(code)
    }
}

fn begins_with_jump(code: &[u8]) -> bool {
    let code = code.strip_prefix(&ENDBR).unwrap_or(code);
    code.first().is_some_and(|first| JUMPS.contains(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_that_begin_with_a_jump_are_hooked() {
        assert!(begins_with_jump(b"\xe9\0\0\0\0") && begins_with_jump(b"\xf3\x0f\x1e\xfa\xe9"));
        assert!(!begins_with_jump(b"\xf3\x0f\x1e\xfa\x0f\x1f\x44") && !begins_with_jump(b"\xe8"));
    }
}
