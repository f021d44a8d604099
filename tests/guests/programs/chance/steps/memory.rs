//! Mappings, and the kernel's copies to and from them.

use crate::{
    random::Random,
    sys::*,
    trace::{digest, note},
    world::{FILE_PAGES, PAGE, PLACE_PAGES, World},
};

/// Not what may only be executed: where the host's CPU has protection keys its Linux closes that to loads, and the
/// guest's has none.
const PROTECTIONS: [u64; 10] = [0, 1, 3, 3, 3, 3, 5, 7, 7, 5];

fn protection(random: &mut Random) -> u64 {
    random.pick(&PROTECTIONS)
}

/// Maps, unmaps, protects, moves, advises.
pub fn map(random: &mut Random, world: &World) {
    let (page, count) = (world.page(random), 1 + random.below(6));
    match random.below(12) {
        0..=3 => anonymous(random, page, count),
        4..=5 => file(random, world, page, count),
        6 => note!("unmap {page:x} {count} = {}\n", sys!(MUNMAP, page, count * PAGE)),
        7..=8 => {
            let bits = protection(random);
            note!(
                "protect {page:x} {count} {bits} = {}\n",
                sys!(MPROTECT, page, count * PAGE, bits)
            );
        }
        9 => remap(random, world, page, count),
        _ => advise(random, page, count),
    }
}

fn anonymous(random: &mut Random, page: u64, count: u64) {
    let bits = protection(random);
    let kind = random.pick(&[MAP_PRIVATE, MAP_PRIVATE, MAP_SHARED]);
    let fixed = random.pick(&[MAP_FIXED, MAP_FIXED, MAP_FIXED_NOREPLACE]);
    let more = random.pick(&[0, MAP_NORESERVE]);
    let result =
        sys!(MMAP, page, count * PAGE, bits, kind | fixed | more | MAP_ANONYMOUS, usize::MAX, 0);
    note!("map {page:x} {count} {bits} {kind} {fixed:x} = {result:x}\n");
    if bits & 2 != 0 && result as u64 == page && random.chance(70) {
        write_words(random, page, count);
    }
}

/// Writes a word or two to each page.
fn write_words(random: &mut Random, page: u64, count: u64) {
    for at in 0..count {
        let to = (page + at * PAGE + random.below(500) * 8) as *mut u64;
        // SAFETY: the page has just been mapped to be written.
        unsafe { to.write_volatile(random.bits()) };
    }
}

fn file(random: &mut Random, world: &World, page: u64, count: u64) {
    let bits = protection(random);
    let kind = random.pick(&[MAP_PRIVATE, MAP_SHARED]);
    // Sometimes beyond the end, where pages are that give SIGBUS.
    let from = random.below(FILE_PAGES + 2) * PAGE;
    let result = sys!(MMAP, page, count * PAGE, bits, kind | MAP_FIXED, world.file, from);
    note!("file {page:x} {count} {bits} {kind} {from:x} = {result:x}\n");
}

fn remap(random: &mut Random, world: &World, page: u64, count: u64) {
    let (target, size) = (world.page(random), 1 + random.below(6));
    // Kernels differ in what they move that is not one mapping.
    let private = MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS;
    if sys!(MMAP, page, count * PAGE, 3, private, usize::MAX, 0) >= 0 {
        write_words(random, page, count);
    }
    // MAYMOVE and FIXED, or in place; sometimes with DONTUNMAP.
    let flags = random.pick(&[3_u64, 3, 0, 7]);
    let size = if flags == 7 { count } else { size };
    let result = sys!(MREMAP, page, count * PAGE, size * PAGE, flags, target);
    note!("remap {page:x} {count} {size} {flags} {target:x} = {result:x}\n");
}

/// Advice whose effect is certain.
fn advise(random: &mut Random, page: u64, count: u64) {
    // NORMAL, WILLNEED, DONTNEED, REMOVE, DONTFORK, DOFORK, HUGEPAGE, NOHUGEPAGE, WIPEONFORK, KEEPONFORK.
    let advice = random.pick(&[0, 4, 4, 4, 9, 10, 11, 14, 15, 18, 19]);
    note!("advise {page:x} {count} {advice} = {}\n", sys!(MADVISE, page, count * PAGE, advice));
}

/// A reservation of up to terabytes around a place, touched here and there.
pub fn reserve(random: &mut Random, world: &World) {
    let place = random.pick(&world.places);
    let len = 1_u64 << (24 + random.below(17));
    let start = place / len * len;
    let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    let result = sys!(MMAP, start, len, 3, flags, usize::MAX, 0);
    note!("reserve {start:x} {len:x} = {result:x}\n");
    if result < 0 {
        return;
    }
    let (count, mut sum) = (1 + random.below(64), 0_u64);
    let stride = len / count / 8 * 8;
    for at in 0..count {
        let word = (start + at * stride) as *mut u64;
        // SAFETY: the memory has just been reserved.
        unsafe { word.write_volatile(at * 3 + 1) };
    }
    for at in 0..count {
        let word = (start + at * stride) as *const u64;
        // SAFETY: as above.
        sum = sum.wrapping_mul(31).wrapping_add(unsafe { word.read_volatile() });
    }
    note!("sum {sum:x} ");
    if random.chance(70) {
        note!("unmap = {}", sys!(MUNMAP, start, len));
    }
    note!("\n");
}

/// The kernel reads and writes memory for a program.
pub fn copy(random: &mut Random, world: &World) {
    let (at, len) =
        (world.address(random), 1 + random.below(random.clone().pick(&[16, 200, 9000])));
    let mut buffer = [0_u8; 16384];
    let local = &raw mut buffer;
    let name: &str;
    let result = match random.below(11) {
        0 => {
            name = "write pipe";
            sys!(WRITE, world.pipe[1], at, len)
        }
        1 => {
            name = "read pipe";
            fill(random, world, len);
            sys!(READ, world.pipe[0], at, len)
        }
        2 => {
            name = "pread";
            sys!(PREAD, world.file, at, len, random.below(FILE_PAGES * PAGE))
        }
        3 => {
            name = "pwrite";
            sys!(PWRITE, world.file, at, len, random.below(FILE_PAGES / 2 * PAGE))
        }
        4 => {
            name = "read memory";
            sys!(PREAD, world.memory, local, len, at)
        }
        5 => {
            name = "write memory";
            buffer[..len as usize].iter_mut().for_each(|byte| *byte = random.bits() as u8);
            sys!(PWRITE, world.memory, local, len, at)
        }
        6 => {
            name = "readv";
            fill(random, world, len);
            let other = world.address(random);
            let vector = [at, len / 2, other, len];
            sys!(READV, world.pipe[0], vector.as_ptr(), 2)
        }
        7 => {
            name = "process_vm_readv";
            let (mine, theirs) = ([local as u64, len], [at, len]);
            sys!(PROCESS_VM_READV, sys!(GETPID), mine.as_ptr(), 1, theirs.as_ptr(), 1, 0)
        }
        8 => {
            name = "process_vm_writev";
            buffer[..len as usize].iter_mut().for_each(|byte| *byte = random.bits() as u8);
            let (mine, theirs) = ([local as u64, len], [at, len]);
            sys!(PROCESS_VM_WRITEV, sys!(GETPID), mine.as_ptr(), 1, theirs.as_ptr(), 1, 0)
        }
        9 => {
            name = "from place to place";
            let (from, to) = ([at, len], [world.address(random), len]);
            sys!(PROCESS_VM_READV, sys!(GETPID), to.as_ptr(), 1, from.as_ptr(), 1, 0)
        }
        _ => {
            name = "pointers";
            pointers(random, at)
        }
    };
    note!("{name} {at:x} {len} = {result} {:x}", digest(&buffer));
    let drained = sys!(READ, world.pipe[0], local, buffer.len());
    let drained = if drained > 0 { drained as usize } else { 0 };
    note!(" pipe {drained} {:x}\n", digest(&buffer[..drained]));
}

/// Puts bytes into the pipe.
fn fill(random: &mut Random, world: &World, len: u64) {
    let mut bytes = [0_u8; 9000];
    bytes.iter_mut().for_each(|byte| *byte = random.bits() as u8);
    sys!(WRITE, world.pipe[1], bytes.as_ptr(), len.min(9000));
}

/// System calls that take or give a few bytes.
fn pointers(random: &mut Random, at: u64) -> isize {
    let set = 0x1000_u64;
    match random.below(9) {
        0 => sys!(RT_SIGPENDING, at, 8),
        1 => {
            sys!(RT_SIGPROCMASK, 0, &raw const set, at, 8)
                | sys!(RT_SIGPROCMASK, 1, &raw const set, 0, 8)
        }
        2 => sys!(SIGALTSTACK, 0, at),
        3 => sys!(GETITIMER, 0, at),
        4 => sys!(FUTEX, at, 1, 1, 0, 0, 0),
        5 => sys!(FUTEX, at, 128 | 5, 1, 1, at.wrapping_add(8), 0x0100_1000),
        6 => sys!(POLL, at, 1, 0),
        7 => sys!(RT_SIGACTION, 40, 0, at, 8),
        _ => {
            let no_time = [0_u64; 2];
            sys!(RT_SIGTIMEDWAIT, &raw const set, at, no_time.as_ptr(), 8)
        }
    }
}

/// All memory at the places, by loads.
pub fn peek(_: &mut Random, world: &World) {
    for (number, &place) in world.places.iter().enumerate() {
        note!("place {number}:");
        for page in 0..PLACE_PAGES {
            match super::code::read_page(place + page * PAGE) {
                Ok(sum) => note!(" {:x}", sum as u32),
                Err((signal, code)) => note!(" {signal}/{code}"),
            }
        }
        note!("\n");
    }
}

/// Prints all memory at the places as the kernel reads it.
pub fn dump(_: &mut Random, world: &World) {
    let mut bytes = [0_u8; PAGE as usize];
    for (number, &place) in world.places.iter().enumerate() {
        note!("dump {number}:");
        for page in 0..PLACE_PAGES {
            let result = sys!(PREAD, world.memory, bytes.as_mut_ptr(), PAGE, place + page * PAGE);
            if result == PAGE as isize {
                note!(" {:x}", digest(&bytes) as u32);
            } else {
                note!(" {result}");
            }
        }
        note!("\n");
    }
}
