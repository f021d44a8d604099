//! What the steps of a program share.

use crate::{
    random::Random,
    sys::{self, FTRUNCATE, MEMFD_CREATE, MPROTECT, OPEN, PIPE2, sys},
};

pub const PAGE: u64 = 4096;
/// Pages that belong to a place.
pub const PLACE_PAGES: u64 = 16;
/// Pages of the file that programs map.
pub const FILE_PAGES: u64 = 32;
const CODE_LEN: usize = 4 * PAGE as usize;

#[repr(C, align(4096))]
struct Code([u8; CODE_LEN]);

static mut CODE: Code = Code([0; CODE_LEN]);

/// A program's surroundings.
pub struct World {
    /// Page addresses where it maps, reads, writes and executes.
    pub places: [u64; 4],
    /// Instruction sequences with registers and memory.
    pub cases: &'static [u8],
    /// A file of pages that are all different.
    pub file: usize,
    /// A pipe that does not block.
    pub pipe: [i32; 2],
    /// /proc/self/mem.
    pub memory: usize,
}

impl World {
    /// Makes it; called in the program's own process.
    pub fn new(places: [u64; 4], cases: &'static [u8]) -> Self {
        let file = sys!(MEMFD_CREATE, c"chance".as_ptr(), 0) as usize;
        sys!(FTRUNCATE, file, FILE_PAGES * PAGE);
        for word in 0..FILE_PAGES * 8 {
            let value = word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            sys!(sys::PWRITE, file, &raw const value, 8, word * 512);
        }
        let mut pipe = [0_i32; 2];
        const NONBLOCK: usize = 0o4000;
        sys!(PIPE2, pipe.as_mut_ptr(), NONBLOCK);
        let memory = sys!(OPEN, c"/proc/self/mem".as_ptr(), 2) as usize;
        sys!(MPROTECT, code(), CODE_LEN, 7);
        Self { places, cases, file, pipe, memory }
    }

    /// A random address in one of the mapped places. It need not be aligned.
    pub fn address(&self, random: &mut Random) -> u64 {
        let page = self.page(random);
        match random.below(8) {
            0 => page,
            1 => page + PAGE - 1 - random.below(32),
            2 => page + random.below(PAGE) / 64 * 64,
            3 => page.wrapping_sub(random.below(16)),
            _ => page + random.below(PAGE),
        }
    }

    /// One of the pages of one of the places.
    pub fn page(&self, random: &mut Random) -> u64 {
        let few = if random.chance(70) { 4 } else { PLACE_PAGES };
        random.pick(&self.places) + random.below(few) * PAGE
    }
}

/// Where code can always be written and run: in this program's image, below 4 GiB.
pub fn code() -> u64 {
    (&raw mut CODE) as u64
}

/// Fills it with UD2, which ends whatever runs into it.
pub fn clear_code() {
    for at in (0..CODE_LEN).step_by(2) {
        // SAFETY: inside the array, which nothing else refers to.
        unsafe { ((code() as usize + at) as *mut [u8; 2]).write([0x0f, 0x0b]) };
    }
}

/// Writes code there.
pub fn put_code(at: u64, bytes: &[u8]) {
    for (i, &byte) in bytes.iter().enumerate() {
        // SAFETY: callers stay inside the array.
        unsafe { ((at as usize + i) as *mut u8).write_volatile(byte) };
    }
}
