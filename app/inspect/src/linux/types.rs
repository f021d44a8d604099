//! BTF: how the kernel's structures are laid out (Documentation/bpf/btf.rst).
//!
//! Only what is asked for is decoded: where a member lies in a structure. The bytes are the guest's, so nothing in them is believed
//! to be inside of them.

use std::collections::HashMap;

use super::KernelError;
use crate::memory::KernelMemory;

/// Bytes at the most: Debian's kernels have some five million.
const MOST: u64 = 64 << 20;
/// Structures without a name in each other, and modifiers of a type, at the most.
const DEPTH: usize = 8;
const MAGIC: u32 = 0xeb9f;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const INT: u32 = 1;
const POINTER: u32 = 2;
const ENUM: u32 = 6;
const FUNCTION: u32 = 12;
const PROTOTYPE: u32 = 13;
/// TYPEDEF, VOLATILE, CONST and RESTRICT, and TYPE_TAG: another type with a word more.
const MODIFIERS: [u32; 5] = [8, 9, 10, 11, 18];
/// Bytes of a type's head, and of a member.
const HEAD: usize = 12;
const MEMBER: usize = 12;

/// The kernel's types.
pub struct Types {
    bytes: Vec<u8>,
    /// Where the strings begin.
    strings: usize,
    /// Where each type's head is; the first is number 1.
    types: Vec<usize>,
    /// Structures by name.
    structures: HashMap<Vec<u8>, usize>,
    /// Functions by name.
    functions: HashMap<Vec<u8>, usize>,
}

/// What an argument of a function is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// What the source calls it.
    pub name: String,
    /// How its register is to be read.
    pub form: Form,
}

/// How a register is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A number with a sign, of so many bytes.
    Signed(u32),
    /// A number without, of so many bytes.
    Unsigned(u32),
    /// The address of text.
    Text,
    /// An address.
    Address,
}

impl Types {
    /// Reads them.
    pub(super) fn read(
        memory: KernelMemory<'_>,
        start: u64,
        stop: u64,
    ) -> Result<Self, KernelError> {
        let wrong = |problem: &str| KernelError::Types(problem.to_owned());
        let len = stop.checked_sub(start).filter(|len| *len <= MOST);
        let mut bytes = vec![0; len.ok_or_else(|| wrong("its size"))? as usize];
        if memory.read(start, &mut bytes) != bytes.len() {
            return Err(wrong("it is not all in memory"));
        }
        Self::of_bytes(bytes).ok_or_else(|| wrong("its form"))
    }

    fn of_bytes(bytes: Vec<u8>) -> Option<Self> {
        if word(&bytes, 0)? & 0xffff != MAGIC {
            return None;
        }
        let [head, types, len, strings] = [4, 8, 12, 16].map(|at| word(&bytes, at));
        let (head, strings) = (head? as usize, strings? as usize);
        let first = head.checked_add(types? as usize)?;
        let end = first.checked_add(len? as usize)?;
        let strings = head.checked_add(strings)?;
        let (types, structures, functions) = Default::default();
        let mut found = Self { bytes, strings, types, structures, functions };
        let mut at = first;
        while at < end {
            let (kind, count) = found.kind(at)?;
            if kind == STRUCT {
                let name = found.name(word(&found.bytes, at)?).to_vec();
                found.structures.entry(name).or_insert(at);
            }
            if kind == FUNCTION {
                let name = found.name(word(&found.bytes, at)?).to_vec();
                found.functions.entry(name).or_insert(at);
            }
            found.types.push(at);
            at = at.checked_add(HEAD + behind(kind, count)?)?;
        }
        Some(found)
    }

    /// Kind of the type at `at`, and how many parts it has.
    fn kind(&self, at: usize) -> Option<(u32, usize)> {
        let info = word(&self.bytes, at + 4)?;
        Some((info >> 24 & 0x1f, (info & 0xffff) as usize))
    }

    fn name(&self, offset: u32) -> &[u8] {
        let text = self.strings.checked_add(offset as usize).and_then(|at| self.bytes.get(at..));
        text.and_then(|text| text.split(|byte| *byte == 0).next()).unwrap_or_default()
    }

    /// The arguments of a function, as far as each has a register to itself.
    pub fn parameters(&self, function: &str) -> Vec<Parameter> {
        let found = || {
            let at = *self.functions.get(function.as_bytes())?;
            let prototype = self.at(word(&self.bytes, at + 8)?)?;
            let (kind, count) = self.kind(prototype)?;
            (kind == PROTOTYPE).then_some((prototype + HEAD, count))
        };
        let Some((first, count)) = found() else { return Vec::new() };
        let parameter = |n: usize| {
            let [name, number] = [0, 4].map(|more| word(&self.bytes, first + 8 * n + more));
            let name = String::from_utf8_lossy(self.name(name?)).into_owned();
            Some(Parameter { name, form: self.form(number?)? })
        };
        (0..count).map_while(parameter).collect()
    }

    /// Where the head of the type with this number is.
    fn at(&self, number: u32) -> Option<usize> {
        self.types.get((number as usize).checked_sub(1)?).copied()
    }

    /// The type with this number, without names and modifiers.
    fn plain(&self, number: u32) -> Option<(u32, usize)> {
        let mut at = self.at(number)?;
        for _ in 0..DEPTH {
            let (kind, _) = self.kind(at)?;
            if !MODIFIERS.contains(&kind) {
                return Some((kind, at));
            }
            at = self.at(word(&self.bytes, at + 8)?)?;
        }
        None
    }

    /// `None` if it is not in one register.
    fn form(&self, number: u32) -> Option<Form> {
        const SIGNED: u32 = 1 << 24;
        let (kind, at) = self.plain(number)?;
        let size = word(&self.bytes, at + 8)?;
        match kind {
            INT if size > 8 => None,
            INT if word(&self.bytes, at + HEAD)? & SIGNED != 0 => Some(Form::Signed(size)),
            INT | ENUM => Some(Form::Unsigned(size)),
            POINTER => Some(if self.is_char(size) { Form::Text } else { Form::Address }),
            _ => None,
        }
    }

    fn is_char(&self, number: u32) -> bool {
        let found = self.plain(number).filter(|(kind, _)| *kind == INT);
        let name = found.and_then(|(_, at)| word(&self.bytes, at));
        name.is_some_and(|name| self.name(name) == b"char")
    }

    /// Where a member of a structure lies in it, in bytes.
    ///
    /// # Errors
    /// There is no such structure or member.
    pub fn offset(&self, structure: &str, member: &str) -> Result<u64, KernelError> {
        let at = self.structures.get(structure.as_bytes());
        let bits = at.and_then(|at| self.offset_in(*at, member.as_bytes(), 0));
        let missing = || KernelError::Types(format!("no {member} in {structure}"));
        bits.map(|bits| u64::from(bits) / 8).ok_or_else(missing)
    }

    /// In bits, from the beginning of the structure at `at`.
    fn offset_in(&self, at: usize, member: &[u8], depth: usize) -> Option<u32> {
        let (kind, count) = self.kind(at)?;
        if depth > DEPTH || !matches!(kind, STRUCT | UNION) {
            return None;
        }
        let with_sizes = word(&self.bytes, at + 4)? >> 31 == 1;
        (0..count).find_map(|n| {
            let from = at + HEAD + n * MEMBER;
            let [name, number, offset] = [0, 4, 8].map(|more| word(&self.bytes, from + more));
            let (name, number, offset) = (self.name(name?), number?, offset?);
            let offset = if with_sizes { offset & 0xff_ffff } else { offset };
            if name == member {
                return Some(offset);
            }
            let inner = self.types.get((number as usize).checked_sub(1)?)?;
            let inner = name.is_empty().then(|| self.offset_in(*inner, member, depth + 1));
            inner.flatten().and_then(|inner| offset.checked_add(inner))
        })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*bytes))
}

/// Bytes behind the head of a type of this kind with so many parts.
fn behind(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        1 | 14 | 17 => 4,                       // INT, VAR, DECL_TAG
        2 | 7..=12 | 16 | 18 => 0,              // PTR, FWD to FUNC, FLOAT, TYPE_TAG
        3 => 12,                                // ARRAY
        STRUCT | UNION | 15 | 19 => 12 * count, // and DATASEC, ENUM64
        6 | 13 => 8 * count,                    // ENUM, FUNC_PROTO
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRINGS: &[u8] = b"\0task\0pid\0comm\0";

    /// `struct task { int pid; union { char comm; }; }`
    fn sample() -> Vec<u8> {
        let types: [u32; 17] = [
            [0, 1 << 24, 4, 32].as_slice(),      // 1: an int
            &[0, UNION << 24 | 1, 8, 10, 1, 64], // 2: the union, comm at bit 64
            &[1, STRUCT << 24 | 2, 16, 6, 1, 32, 0][..7],
        ]
        .concat()
        .try_into()
        .expect("17 words");
        let last = [2, 128]; // the union, at bit 128
        let types = types.iter().chain(&last).flat_map(|word| word.to_le_bytes());
        let types: Vec<u8> = types.collect();
        let head =
            [MAGIC | 1 << 16, 24, 0, types.len() as u32, types.len() as u32, STRINGS.len() as u32];
        [&head.map(u32::to_le_bytes).concat()[..], &types, STRINGS].concat()
    }

    #[test]
    fn members_are_found_in_structures_without_names_too() {
        let types = Types::of_bytes(sample()).expect("it is right");
        assert_eq!(types.offset("task", "pid"), Ok(4));
        assert_eq!(types.offset("task", "comm"), Ok(24));
        assert!(types.offset("task", "tgid").is_err() && types.offset("mm", "pid").is_err());
    }

    /// `int f(char *name, task t, int n)`, of which only the first argument has a register for certain.
    #[test]
    fn arguments_of_functions_have_names_and_forms() {
        const NAMES: &[u8] = b"\0char\0f\0name\0t\0n\0task\0";
        let types: Vec<u32> = [
            [1, INT << 24, 1, 1 << 24 | 8].as_slice(),        // 1: char
            &[0, POINTER << 24, 1],                           // 2: char *
            &[0, INT << 24, 4, 1 << 24 | 32],                 // 3: int
            &[17, STRUCT << 24, 32],                          // 4: task
            &[0, PROTOTYPE << 24 | 3, 3, 8, 2, 15, 3, 13, 4], // 5
            &[6, FUNCTION << 24, 5],                          // 6: f
        ]
        .concat();
        let types: Vec<u8> = types.iter().flat_map(|word| word.to_le_bytes()).collect();
        let len = types.len() as u32;
        let head = [MAGIC | 1 << 16, 24, 0, len, len, NAMES.len() as u32];
        let bytes = [&head.map(u32::to_le_bytes).concat()[..], &types, NAMES].concat();
        let types = Types::of_bytes(bytes).expect("it is right");
        let name = |name: &str, form| Parameter { name: name.to_owned(), form };
        let found = types.parameters("f");
        assert_eq!(found, [name("name", Form::Text), name("n", Form::Signed(4))]);
        assert!(types.parameters("g").is_empty());
    }

    #[test]
    fn garbage_is_refused_or_has_nothing() {
        let right = sample();
        for at in 0..right.len() {
            for value in [0, 0x7f, 0xff] {
                let mut bytes = right.clone();
                bytes[at] = value;
                let types = Types::of_bytes(bytes);
                // Whatever it answers, it does.
                let _ = types.map(|types| (types.offset("task", "comm"), types.parameters("task")));
            }
            assert!(Types::of_bytes(right[..at.min(40)].to_vec()).is_none());
        }
    }
}
