//! The guest's page tables: a few processes and a kernel, as an operating system would have them, and
//! random changes to them.

use oracle::random::Random;
use ram::Ram;
use std::collections::HashMap;
use x86::paging::{A, D, G, NX, P, PS, RW, US};
use x86_interp::GuestRam;

/// Bytes of guest RAM.
pub const RAM_LEN: u64 = 16 << 20;
/// Address spaces.
pub const SPACES: u64 = 5;
/// Process-context identifiers, which they share.
pub const PCIDS: u64 = 3;
/// Small frames that are mapped.
pub const FRAMES: u64 = 24;
/// GPA of the first, inside the first large one.
pub const FIRST_FRAME: u64 = 0x80_0000;
/// GPA of one that is empty most of the time, and mapped in many places.
pub const EMPTY_FRAME: u64 = FIRST_FRAME + 3 * PAGE;
const LARGE_FRAMES: [u64; 2] = [0x80_0000, 0xa0_0000];
/// Not RAM: a device.
const DEVICE: u64 = 0xfee0_0000;
const TABLES: u64 = 0x10_0000;
const PAGE: u64 = 4096;
pub const LARGE: u64 = 1 << 21;
/// 2 MiB areas of user addresses in use: of a program, in regions of the kernel's, and, but in the first space,
/// beside the table of patched system calls.
const USER: [u64; 5] =
    [0x5555_5540_0000, 0x5555_5560_0000, 0x0680_0000_0000, 0x4700_0020_0000, 0x0500_0000];
/// 2 MiB areas of kernel addresses: of the direct map, and of memory mapped page by page.
pub const KERNEL: [u64; 3] = [0xffff_8880_0000_0000, 0xffff_8880_0020_0000, 0xffff_c900_0000_0000];
/// Pages in use of each area.
const USED: u64 = 20;

/// The GVAs in use of the lower half.
pub fn user_pages() -> impl Iterator<Item = u64> {
    USER.into_iter().flat_map(pages_of)
}

/// The GVAs in use of the upper half.
pub fn kernel_pages() -> impl Iterator<Item = u64> {
    KERNEL.into_iter().flat_map(pages_of)
}

fn pages_of(area: u64) -> impl Iterator<Item = u64> {
    (0..USED).map(move |n| area + n * PAGE)
}

/// A GVA in use.
pub fn some_page(random: &mut Random, kernel: bool) -> u64 {
    let area = if kernel { random.pick(&KERNEL) } else { random.pick(&USER) };
    area + random.below(USED) * PAGE + random.below(PAGE / 8) * 8
}

/// The page tables in RAM.
#[derive(Debug)]
pub struct Tables {
    ram_used: u64,
    roots: Vec<u64>,
    /// The entries there are, by level (1: of 4 KiB pages): GPA, and GVA of what it maps.
    entries: [Vec<(u64, u64)>; 4],
    /// What those above the last level were at first, by GPA.
    pointers: HashMap<u64, u64>,
}

impl Tables {
    /// Builds them; nothing is mapped yet.
    pub fn new(ram: &Ram) -> Self {
        let (roots, entries, pointers) = (Vec::new(), Default::default(), HashMap::new());
        let mut tables = Self { ram_used: TABLES, roots, entries, pointers };
        for _ in 0..SPACES {
            let root = tables.fresh();
            tables.roots.push(root);
        }
        for (space, root) in tables.roots.clone().into_iter().enumerate() {
            let areas = &USER[..if space == 0 { USER.len() - 1 } else { USER.len() }];
            areas.iter().for_each(|area| tables.build(ram, root, *area, P | RW | US));
        }
        let (first, others) = (tables.roots[0], tables.roots[1..].to_vec());
        KERNEL.iter().for_each(|area| tables.build(ram, first, *area, P | RW));
        for entry in 256..512 {
            let value = ram.load64(first + entry * 8);
            others.iter().for_each(|root| ram.store64(root + entry * 8, value));
        }
        tables
    }

    /// GPA of the top table of an address space.
    pub fn root(&self, space: u64) -> u64 {
        self.roots[space as usize]
    }

    fn fresh(&mut self) -> u64 {
        self.ram_used += PAGE;
        self.ram_used - PAGE
    }

    /// The tables down to the area at `gva`.
    fn build(&mut self, ram: &Ram, root: u64, gva: u64, rights: u64) {
        let mut table = root;
        for (level, shift) in [(3, 39), (2, 30), (1, 21)] {
            let at = table + (gva >> shift & 0x1ff) * 8;
            if ram.load64(at) == 0 {
                let next = self.fresh();
                ram.store64(at, next | rights);
                self.entries[level].push((at, gva));
                self.pointers.insert(at, next | rights);
            }
            table = ram.load64(at) & x86::paging::ADDRESS;
        }
        let leaf = |n| (table + n * 8, gva + n * PAGE);
        self.entries[0].extend((0..USED).map(leaf));
    }

    /// Replaces the small page at a GVA by another one that user code may write, as a kernel does that copies a page
    /// on write, or takes it away; nothing if no table of small pages is there.
    pub fn replace(&self, ram: &Ram, random: &mut Random, root: u64, gva: u64) {
        let mut table = root;
        for shift in [39, 30, 21] {
            let value = ram.load64(table + (gva >> shift & 0x1ff) * 8);
            if value & (P | PS) != P || ram.page(value & x86::paging::ADDRESS).is_none() {
                return;
            }
            table = value & x86::paging::ADDRESS;
        }
        let page = FIRST_FRAME + random.below(FRAMES) * PAGE;
        let new = if random.chance(30) { 0 } else { page | P | RW | US | A | D | NX };
        ram.store64(table + (gva >> 12 & 0x1ff) * 8, new);
    }

    /// GPA of the entry for a page in use of the first space.
    #[cfg(test)]
    pub fn entry_for(&self, gva: u64) -> u64 {
        let found = self.entries[0].iter().find(|(_, at)| *at == gva);
        found.expect("a page in use").0
    }

    /// Takes a page away, or a right, or gives it back.
    pub fn toggle(&self, ram: &Ram, random: &mut Random) {
        let (at, _) = self.entries[0][random.below(self.entries[0].len() as u64) as usize];
        let right = random.pick(&[P, P, P, RW, A, D]);
        ram.store64(at, ram.load64(at) ^ right);
    }

    /// Changes an entry at random, as a kernel may: any value, at any time.
    pub fn change(&self, ram: &Ram, random: &mut Random) {
        let level = random.pick(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 3]);
        let entries = &self.entries[level];
        let index = random.below(entries.len() as u64) as usize;
        let (at, gva) = entries[index];
        if level == 0 && gva >> 63 == 0 && random.chance(10) {
            return show_empty(ram, &entries[index..]);
        }
        let old = ram.load64(at);
        let value = match level {
            0 => leaf(random, gva, FIRST_FRAME, PAGE),
            1 if random.chance(40) => leaf(random, gva, large_frame(gva), LARGE) | PS,
            1 if random.chance(40) => self.pointers[&at],
            _ => old ^ flip(random, level),
        };
        let value = if random.chance(20) { old ^ flip(random, level) } else { value };
        ram.store64(at, if gva >> 63 == 0 { value & !G } else { value });
    }
}

/// The empty frame in several places at once, as where memory has been read and not been written yet.
fn show_empty(ram: &Ram, entries: &[(u64, u64)]) {
    let users = entries.iter().take_while(|(_, gva)| gva >> 63 == 0);
    users.take(10).for_each(|(at, _)| ram.store64(*at, EMPTY_FRAME | P | A | US | NX));
}

fn large_frame(gva: u64) -> u64 {
    LARGE_FRAMES[(gva / LARGE % 2) as usize]
}

/// A leaf entry for `gva`; often one that continues its neighbours.
fn leaf(random: &mut Random, gva: u64, first: u64, size: u64) -> u64 {
    let frame = match random.below(20) {
        0 => DEVICE & !(size - 1),
        // One that a large page shows at the same place.
        1..=4 if size == PAGE => large_frame(gva) + gva % LARGE,
        5..=9 if size == PAGE => first + random.below(FRAMES) * PAGE,
        _ if size == PAGE => first + gva / PAGE % FRAMES * PAGE,
        _ => first,
    };
    let half = if gva >> 63 == 0 { US } else { G };
    let usual = P | RW | A | D | half | NX;
    let odd = random.bits() & random.bits() & (P | RW | US | A | D | G | NX);
    frame | usual ^ odd
}

/// A change of one right; of the entries above the last level, one that leaves them usable as a rule.
fn flip(random: &mut Random, level: usize) -> u64 {
    match level {
        0 => random.pick(&[P, RW, RW, US, A, D, D, NX, G, G, 1 << 50]),
        _ => random.pick(&[P, RW, US, A, NX, G]),
    }
}
