//! ORC: how Linux finds the caller of a function that keeps no frame pointer (Documentation/arch/x86/orc-unwinder.rst).
//!
//! The kernel has two tables. One lists addresses of its code, in order. The other says, for each address, how to compute the caller's
//! registers from those of the function that was called. Both tables are read once. Stacks are read as they are, with bounds.

use ram::Ram;
use x86::reg::{RBP, RDI, RDX, RSP};

use super::orc_search;
use crate::linux::LinuxKernel;

/// Entries at the most: a kernel has some 400 000.
const MOST: u64 = 4 << 20;
/// Bytes of an entry: two offsets and a word of fields.
const ENTRY: usize = 6;
/// `struct pt_regs`: where RBP, RIP, CS and RSP are in it.
const REGS_BP: u64 = 32;
const REGS_IP: u64 = 128;
const REGS_CS: u64 = 136;
const REGS_SP: u64 = 152;

/// Where the tables are (GVA), and how many entries each has.
struct OrcLayout {
    places: u64,
    entries: u64,
    count: usize,
}

/// Which numbers the registers have that offsets count from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BaseNumbers {
    /// Up to Linux 6.12 at least.
    First,
    /// In 7.2.
    Second,
}

/// The tables.
pub struct Orc {
    /// Where each entry begins to count (GVA), in order.
    places: Vec<u64>,
    entries: Vec<Entry>,
}

/// How a frame's caller is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    sp_offset: i64,
    bp_offset: i64,
    sp_base: u16,
    bp_base: u16,
    kind: EntryKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryKind {
    /// Nobody called, or nobody knows.
    End,
    /// A return address lies below the caller's stack.
    Call,
    /// All registers of what was interrupted lie there.
    Registers,
    /// Those that the CPU puts there.
    Interrupted,
}

/// Where a frame's code and stack are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OrcFrame {
    /// RIP (GVA).
    pub ip: u64,
    /// RSP (GVA).
    pub sp: u64,
    /// RBP.
    pub bp: u64,
    /// RIP is the next instruction, not what a call returns to.
    pub exact: bool,
}

/// A frame's caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Kernel code.
    Kernel(OrcFrame),
    /// A program, by a system call or an interrupt.
    Program(OrcFrame),
}

impl Orc {
    /// Reads them; none if this kernel has no such tables, or other ones.
    pub fn read(kernel: &LinuxKernel, ram: &Ram) -> Option<Self> {
        let OrcLayout { places, entries, count } = OrcLayout::of(kernel, ram)?;
        let mut raw = vec![0; count * 4];
        kernel.read(ram, places, &mut raw).then_some(())?;
        let at = |(n, word): (usize, &[u8; 4])| {
            let from = places.wrapping_add(4 * n as u64);
            from.wrapping_add(i64::from(i32::from_le_bytes(*word)) as u64)
        };
        let places = raw.as_chunks().0.iter().enumerate().map(at).collect();
        let mut raw = vec![0; count * ENTRY];
        kernel.read(ram, entries, &mut raw).then_some(())?;
        // Linux 6.4 numbers the kinds of entries anew, and has no mark of the last frame any more.
        let is_old = kernel.types.offset("orc_entry", "end").is_ok();
        let entries = raw.as_chunks().0;
        let numbers = BaseNumbers::of(entries)?;
        let entries = entries.iter().map(|bytes| Entry::of(bytes, is_old, numbers)).collect();
        Some(Self { places, entries })
    }

    fn entry(&self, ip: u64) -> Option<Entry> {
        let behind = self.places.partition_point(|place| *place <= ip);
        self.entries.get(behind.checked_sub(1)?).copied()
    }

    /// The caller of a frame. `registers` are the vCPU's, for the frame that it executes.
    pub fn caller(
        &self,
        frame: OrcFrame,
        registers: Option<&[u64; 16]>,
        word: &dyn Fn(u64) -> Option<u64>,
    ) -> Option<Caller> {
        let entry = self.entry(if frame.exact { frame.ip } else { frame.ip.wrapping_sub(1) })?;
        let top = entry.top(frame, registers, word)?;
        let at = |offset: u64| word(top.wrapping_add(offset));
        let bp = entry.caller_bp(frame, top, word);
        match entry.kind {
            EntryKind::End => None,
            EntryKind::Call => {
                let ip = at(8u64.wrapping_neg())?;
                Some(Caller::Kernel(OrcFrame { ip, sp: top, bp: bp?, exact: false }))
            }
            EntryKind::Registers => {
                let bp = if entry.bp_base == 0 { at(REGS_BP)? } else { bp? };
                let next = OrcFrame { ip: at(REGS_IP)?, sp: at(REGS_SP)?, bp, exact: true };
                Some(Caller::of(next, at(REGS_CS)?))
            }
            EntryKind::Interrupted => {
                let next = OrcFrame { ip: at(0)?, sp: at(24)?, bp: bp?, exact: true };
                Some(Caller::of(next, at(8)?))
            }
        }
    }
}

impl OrcLayout {
    /// By the kernel's symbols if it has them, else by what is in its memory.
    fn of(kernel: &LinuxKernel, ram: &Ram) -> Option<Self> {
        Self::named(kernel).or_else(|| {
            let symbol = |name| kernel.symbols.find(name);
            let image = symbol("_stext")?..symbol("_end")?;
            let found = orc_search::in_kernel(image, |page, bytes| kernel.read(ram, page, bytes))?;
            let entries = found.start + 4 * found.count as u64;
            Some(Self { places: found.start, entries, count: found.count })
        })
    }

    fn named(kernel: &LinuxKernel) -> Option<Self> {
        let symbol = |name| kernel.symbols.find(name);
        let (places, end) = (symbol("__start_orc_unwind_ip")?, symbol("__stop_orc_unwind_ip")?);
        let entries = symbol("__start_orc_unwind")?;
        let count = end.checked_sub(places).map(|bytes| bytes / 4).filter(|n| *n <= MOST)? as usize;
        Some(Self { places, entries, count })
    }
}

impl BaseNumbers {
    /// Most entries of any kernel count from RSP, so that is what the most frequent number means.
    fn of(entries: &[[u8; ENTRY]]) -> Option<Self> {
        let count = |number: u8| entries.iter().filter(|bytes| bytes[4] & 0xf == number).count();
        match [count(5), count(3)] {
            [first, second] if first > second => Some(Self::First),
            [_, second] if second > entries.len() / 2 => Some(Self::Second),
            _ => None,
        }
    }

    /// The number that the register has among the first ones.
    fn first(self, number: u16) -> u16 {
        match (self, number) {
            (Self::First, number) => number,
            (Self::Second, 3) => 5,
            (Self::Second, 5) => 3,
            (Self::Second, 8) => 1,
            (Self::Second, 10) => 8,
            (Self::Second, number) => number,
        }
    }
}

impl Caller {
    fn of(frame: OrcFrame, cs: u64) -> Self {
        if cs & 3 == 3 { Self::Program(frame) } else { Self::Kernel(frame) }
    }
}

impl Entry {
    fn of(bytes: &[u8; ENTRY], is_old: bool, numbers: BaseNumbers) -> Self {
        let half = |at: usize| i16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let fields = half(4) as u16;
        let kind = match (is_old, fields >> 8 & if is_old { 3 } else { 7 }) {
            (true, 0) | (false, 2) => EntryKind::Call,
            (true, 1) | (false, 3) => EntryKind::Registers,
            (true, 2) | (false, 4) => EntryKind::Interrupted,
            _ => EntryKind::End,
        };
        Self {
            sp_offset: half(0).into(),
            bp_offset: half(2).into(),
            sp_base: numbers.first(fields & 0xf),
            bp_base: numbers.first(fields >> 4 & 0xf),
            kind,
        }
    }

    /// What the offsets count from: RSP of the caller, or where registers lie (GVA).
    fn top(
        &self,
        frame: OrcFrame,
        registers: Option<&[u64; 16]>,
        word: &dyn Fn(u64) -> Option<u64>,
    ) -> Option<u64> {
        let moved = |base: u64| base.wrapping_add_signed(self.sp_offset);
        let register = |number: usize| registers.map(|all| moved(all[number]));
        match self.sp_base {
            2 => register(RDX),
            3 => register(RDI),
            4 => Some(moved(frame.bp)),
            5 => Some(moved(frame.sp)),
            6 => register(10),
            7 => register(13),
            8 => word(moved(frame.bp)),
            9 => word(frame.sp).map(moved),
            _ => None,
        }
    }

    /// RBP of the caller.
    fn caller_bp(
        &self,
        frame: OrcFrame,
        top: u64,
        word: &dyn Fn(u64) -> Option<u64>,
    ) -> Option<u64> {
        match self.bp_base {
            0 => Some(frame.bp),
            1 => word(top.wrapping_add_signed(self.bp_offset)),
            4 => word(frame.bp.wrapping_add_signed(self.bp_offset)),
            _ => None,
        }
    }
}

/// The frame that a vCPU executes.
pub fn innermost(rip: u64, registers: &[u64; 16]) -> OrcFrame {
    OrcFrame { ip: rip, sp: registers[RSP], bp: registers[RBP], exact: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FUNCTION: u64 = 0x1000;
    const HANDLER: u64 = 0x2000;
    const STACK: u64 = 0x9000;

    fn entry(sp_offset: i16, bp_offset: i16, fields: u16, is_old: bool) -> Entry {
        let bytes =
            [sp_offset.to_le_bytes(), bp_offset.to_le_bytes(), fields.to_le_bytes()].concat();
        Entry::of(bytes.first_chunk().expect("six bytes"), is_old, BaseNumbers::First)
    }

    #[test]
    fn registers_have_other_numbers_in_newer_tables() {
        // Two words above the caller's stack pointer, one of which is its RBP; and a function without a frame.
        let (first, second): ([[u8; ENTRY]; 2], [[u8; ENTRY]; 2]) = (
            [[16, 0, 0xf0, 0xff, 0x15, 2], [8, 0, 0, 0, 0x05, 2]],
            [[16, 0, 0xf0, 0xff, 0x83, 2], [8, 0, 0, 0, 0x03, 2]],
        );
        assert_eq!(BaseNumbers::of(&first), Some(BaseNumbers::First));
        assert_eq!(BaseNumbers::of(&second), Some(BaseNumbers::Second));
        assert_eq!(BaseNumbers::of(&[[0xff; ENTRY]; 2]), None);
        for (old, new) in first.iter().zip(&second) {
            let old = Entry::of(old, false, BaseNumbers::First);
            assert_eq!(Entry::of(new, false, BaseNumbers::Second), old);
        }
    }

    /// A function with one saved word above its stack, and an interrupt's handler.
    fn tables(is_old: bool) -> Orc {
        let (call, registers) = if is_old { (0, 1) } else { (2, 3) };
        let function = entry(16, -16, 5 | 1 << 4 | call << 8, is_old);
        let handler = entry(0, 0, 5 | registers << 8, is_old);
        Orc { places: vec![FUNCTION, HANDLER], entries: vec![function, handler] }
    }

    fn stack(at: u64) -> Option<u64> {
        Some(match at - STACK {
            0 => 0xb0,         // the caller's RBP
            8 => FUNCTION + 5, // where the function returns to
            REGS_BP => 0xb1,
            REGS_IP => 0x40_0000,
            REGS_CS => 0x33,
            REGS_SP => 0x7f00,
            _ => return None,
        })
    }

    #[test]
    fn callers_are_found_in_old_and_new_tables() {
        for is_old in [true, false] {
            let orc = tables(is_old);
            let inside = OrcFrame { ip: FUNCTION + 9, sp: STACK, bp: 1, exact: true };
            let caller = OrcFrame { ip: FUNCTION + 5, sp: STACK + 16, bp: 0xb0, exact: false };
            assert_eq!(orc.caller(inside, None, &stack), Some(Caller::Kernel(caller)));
            let inside = OrcFrame { ip: HANDLER, sp: STACK, bp: 1, exact: true };
            let program = OrcFrame { ip: 0x40_0000, sp: 0x7f00, bp: 0xb1, exact: true };
            assert_eq!(orc.caller(inside, None, &stack), Some(Caller::Program(program)));
        }
    }

    #[test]
    fn a_call_at_a_functions_end_is_that_functions() {
        let orc = tables(false);
        let returned = OrcFrame { ip: HANDLER, sp: STACK, bp: 1, exact: false };
        assert!(matches!(orc.caller(returned, None, &stack), Some(Caller::Kernel(_))));
    }

    #[test]
    fn what_is_not_known_has_no_caller() {
        let orc = tables(false);
        let frame = |ip, sp| OrcFrame { ip, sp, bp: 0, exact: true };
        assert_eq!(orc.caller(frame(FUNCTION - 1, STACK), None, &stack), None, "before all code");
        assert_eq!(
            orc.caller(frame(FUNCTION, STACK + 0x1000), None, &stack),
            None,
            "no memory there"
        );
        let orc = Orc { entries: vec![entry(0, 0, 5, false); 2], ..orc };
        assert_eq!(orc.caller(frame(FUNCTION, STACK), None, &stack), None, "undefined");
    }
}
