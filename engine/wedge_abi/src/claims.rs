//! Claims: regions that are the kernel's or the wedge's, in which no program may have pages.

use crate::{
    regions::REGION_BITS,
    sites::{hides_sites, near_sites},
    window::ENTRY_BITS,
};

/// Regions in the reach of one entry of the uppermost page table that the kernel or the wedge has something
/// in: where a program has pages there, too, its code cannot run beside that.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Index into the uppermost page table.
    pub entry: u16,
    /// Index of the first region into the table below it.
    pub first: u16,
    /// Index of the last region.
    pub last: u16,
}

impl Claim {
    /// Something of a range of HVAs is claimed.
    pub const fn reaches(&self, start: u64, len: u64) -> bool {
        let base = (self.entry as u64) << ENTRY_BITS;
        let first = base + ((self.first as u64) << REGION_BITS);
        let end = base + ((self.last as u64 + 1) << REGION_BITS);
        start < end && start.saturating_add(len) > first
    }

    /// A range of HVAs has something in the reach of the same entry: the kernel may come to have memory
    /// there.
    pub const fn is_near(&self, start: u64, len: u64) -> bool {
        Self { first: 0, last: 511, ..*self }.reaches(start, len)
    }
}

/// Linux's numbers of calls for memory, and of those that end a program.
pub mod calls {
    #![allow(missing_docs)]
    pub const MMAP: u64 = 9;
    pub const MPROTECT: u64 = 10;
    pub const MUNMAP: u64 = 11;
    pub const MREMAP: u64 = 25;
    pub const SHMAT: u64 = 30;
    pub const EXECVE: u64 = 59;
    pub const EXIT_GROUP: u64 = 231;
    pub const EXECVEAT: u64 = 322;
    /// No call.
    pub const NONE: u64 = !0;

    /// A call with this number and first argument asks for memory near the table of patched calls.
    #[inline(always)]
    pub const fn asks_near_sites(call: u64, address: u64) -> bool {
        call == MMAP && address != 0 && super::near_sites(address)
    }
}

/// The GPA in CR3.
const ROOT: u64 = ((1 << 46) - 1) & !0xfff;
/// Claims that a wedge looks at; if there are more, it leaves every return to user code to the monitor.
pub const MAX_CLAIMS: usize = 32;
/// Claims that it looks at without a loop.
pub const QUICK_CLAIMS: usize = 8;

/// What wedges know of claimed memory, and tell of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Claims {
    /// Where user code must have no pages.
    pub list: [Claim; MAX_CLAIMS],
    /// How many claims there are, perhaps more than [`Claims::list`] holds.
    pub count: u64,
    /// Offsets of their entries in the uppermost page table, some of them several times; all of them if there
    /// are no more than so many.
    pub entries: [u16; QUICK_CLAIMS],
    /// The number of the last system call, [`calls::NONE`] once somebody has returned to user code.
    pub call: u64,
    /// CR3 of the program that made it.
    pub caller: u64,
    /// The monitor remembers what programs have been given.
    pub remembers: u64,
    /// The uppermost page table of a program that has ended; zero for none.
    pub ended: u64,
    /// First address and bytes of claimed memory that a program has been given; no bytes for none.
    pub given: [u64; 2],
    /// The same of such memory that it has given back.
    pub taken: [u64; 2],
}

impl Claims {
    /// Some return to user code comes next: of the program with these page tables, with these values of RAX,
    /// RDX, RSI and RDI. If the last system call has given a program memory near what is claimed, or taken
    /// some, or ended it, this is noted for the monitor: true.
    #[cold]
    #[inline(never)]
    pub fn note_outcome(&mut self, cr3: u64, [result, rdx, rsi, rdi]: [u64; 4]) -> bool {
        let call = core::mem::replace(&mut self.call, calls::NONE);
        if (self.caller ^ cr3) & ROOT != 0 {
            let ends = matches!(call, calls::EXECVE | calls::EXECVEAT | calls::EXIT_GROUP);
            if ends && self.remembers != 0 {
                self.ended = self.caller & ROOT;
            }
            return ends && self.remembers != 0;
        }
        let (start, len) = match call {
            // What may not be accessed either is the program's, where the table of patched calls would be
            // seen.
            calls::MMAP if rdx != 0 || hides_sites(result, rsi) => (result, rsi),
            calls::MPROTECT if rdx != 0 && result == 0 => (rdi, rsi),
            calls::MUNMAP if result == 0 && self.remembers != 0 => (rdi, rsi),
            calls::MREMAP => (result, rdx),
            calls::SHMAT => (result, 4096),
            _ => return false,
        };
        let count = self.count as usize;
        let near = self.list.iter().take(count).any(|claim| claim.is_near(start, len));
        if start >> 47 != 0 || !near && !near_sites(start) {
            return false;
        }
        *(if call == calls::MUNMAP { &mut self.taken } else { &mut self.given }) = [start, len];
        true
    }
}
