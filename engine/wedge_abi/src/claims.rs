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
    pub const CLONE: u64 = 56;
    pub const FORK: u64 = 57;
    pub const EXECVE: u64 = 59;
    pub const EXIT_GROUP: u64 = 231;
    pub const EXECVEAT: u64 = 322;
    /// No call.
    pub const NONE: u64 = !0;

    /// Of a clone's first argument: the child shares the memory.
    const CLONE_VM: u64 = 1 << 8;

    /// A call with this number and first argument copies the address space.
    #[inline(always)]
    pub const fn copies_space(call: u64, flags: u64) -> bool {
        call == FORK || call == CLONE && flags & CLONE_VM == 0
    }

    /// A call with this number may give a program memory or take some.
    #[inline(always)]
    pub const fn is_for_memory(call: u64) -> bool {
        matches!(call, MMAP | MPROTECT | MUNMAP | MREMAP | SHMAT)
    }

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

/// Calls for memory that are remembered while others run.
const MAX_WAITING: usize = 4;
/// Returns to user code after which those are forgotten: their threads have gone on elsewhere, or ended.
const PATIENCE: u64 = 10_000;

/// Where a thread goes on in user code. No two threads of a program have the same stack.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserPoint {
    /// CR3.
    pub cr3: u64,
    /// RIP; where a system call was made, behind it.
    pub rip: u64,
    /// RSP.
    pub rsp: u64,
}

impl UserPoint {
    fn is(&self, other: &Self) -> bool {
        self.is_of_program(other) && (self.rip, self.rsp) == (other.rip, other.rsp)
    }

    fn is_of_program(&self, other: &Self) -> bool {
        (self.cr3 ^ other.cr3) & ROOT == 0
    }
}

/// A system call that has been made.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenCall {
    /// The call's number; [`calls::NONE`] if there is no call.
    pub number: u64,
    /// Where in user code the call returns to.
    pub from: UserPoint,
}

/// What wedges know of claimed memory, and tell of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Claims {
    /// Where user code must have no pages.
    pub list: [Claim; MAX_CLAIMS],
    /// How many claims there are, perhaps more than [`Claims::list`] holds.
    pub count: u64,
    /// Offsets in the uppermost page table of the claims' entries; an entry may stand here several times. All claims
    /// are covered if there are no more than [`QUICK_CLAIMS`].
    pub entries: [u16; QUICK_CLAIMS],
    /// The last system call, none once somebody has returned to user code.
    pub call: OpenCall,
    /// Calls for memory from which others than their threads have returned: the kernel has made them wait.
    pub waiting: [OpenCall; MAX_WAITING],
    /// Index into [`Claims::waiting`] of the call that the next one replaces.
    pub oldest: u64,
    /// After so many more returns to user code all calls in [`Claims::waiting`] are forgotten; zero if there are none.
    pub patience: u64,
    /// The monitor remembers what programs have been given.
    pub remembers: u64,
    /// The uppermost page table of a program that has ended; zero for none.
    pub ended: u64,
    /// First address and bytes of claimed memory that a program has been given; no bytes for none.
    pub given: [u64; 2],
    /// First address and bytes of claimed memory that a program has given back; no bytes for none.
    pub taken: [u64; 2],
}

impl Claims {
    /// Some return to user code comes next: to here, with these values of RAX, RDX, RSI and RDI. If that is the
    /// return from a call that has given a program memory near what is claimed, or taken some, or if the last call
    /// has ended a program, this is noted for the monitor: true.
    #[cold]
    #[inline(never)]
    pub fn note_outcome(&mut self, to: UserPoint, [result, rdx, rsi, rdi]: [u64; 4]) -> bool {
        let last = OpenCall {
            number: core::mem::replace(&mut self.call.number, calls::NONE),
            ..self.call
        };
        let mut number = self.end_waiting(&to);
        if last.number != calls::NONE && last.from.is(&to) {
            number = last.number;
        } else {
            self.wait(last);
        }
        let ends = matches!(last.number, calls::EXECVE | calls::EXECVEAT | calls::EXIT_GROUP);
        let ended = ends && !last.from.is_of_program(&to) && self.remembers != 0;
        if ended {
            self.ended = last.from.cr3 & ROOT;
        }
        let (start, len) = match number {
            // What may not be accessed either is the program's, where the table of patched calls would be
            // seen.
            calls::MMAP if rdx != 0 || hides_sites(result, rsi) => (result, rsi),
            calls::MPROTECT if rdx != 0 && result == 0 => (rdi, rsi),
            calls::MUNMAP if result == 0 && self.remembers != 0 => (rdi, rsi),
            calls::MREMAP => (result, rdx),
            calls::SHMAT => (result, 4096),
            _ => return ended,
        };
        let count = self.count as usize;
        let near = self.list.iter().take(count).any(|claim| claim.is_near(start, len));
        if start >> 47 != 0 || !near && !near_sites(start) {
            return ended;
        }
        *(if number == calls::MUNMAP { &mut self.taken } else { &mut self.given }) = [start, len];
        true
    }

    /// The number of the call that has waited and returns to here.
    fn end_waiting(&mut self, to: &UserPoint) -> u64 {
        if self.patience == 0 {
            return calls::NONE;
        }
        self.patience -= 1;
        let mut number = calls::NONE;
        let mut others = false;
        for open in self.waiting.iter_mut().filter(|open| calls::is_for_memory(open.number)) {
            if open.from.is(to) {
                number = open.number;
            }
            if open.from.is(to) || self.patience == 0 {
                open.number = calls::NONE;
            }
            others |= open.number != calls::NONE;
        }
        self.patience = if others { self.patience } else { 0 };
        number
    }

    /// The last call is not what returns: if it is for memory, it waits.
    fn wait(&mut self, last: OpenCall) {
        if !calls::is_for_memory(last.number) {
            return;
        }
        if let Some(oldest) = self.waiting.get_mut(self.oldest as usize) {
            *oldest = last;
        }
        self.oldest = (self.oldest + 1) % MAX_WAITING as u64;
        self.patience = PATIENCE;
    }
}
