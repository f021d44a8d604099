extern crate std;

use super::*;
use std::{vec, vec::Vec};

/// Memory with the four page tables of one GVA at GPA 0, 0x1000, 0x2000 and 0x3000; the page is at 0x4000.
struct Tables(Vec<u64>);

const GVA: u64 = 0x1234_5678_9abc;
const ROOTS: Roots = Roots {
    cr0: cr0::PE | cr0::PG | cr0::WP,
    cr3: 0,
    cr4: cr4::PAE | cr4::PGE,
    efer: efer::LME | efer::LMA | efer::NXE,
};
const USED: u64 = P | A;

impl Tables {
    /// Tables whose entries for the GVA have these bits, top level first.
    fn new(bits: [u64; 4]) -> Self {
        let mut words = vec![0; 4 * 512];
        for ((level, shift), bits) in [39, 30, 21, 12].into_iter().enumerate().zip(bits) {
            let table = (level as u64 + 1) << 12;
            words[level * 512 + (GVA >> shift & 0x1ff) as usize] = table ^ bits;
        }
        Self(words)
    }
}

impl WalkMemory for Tables {
    fn read_u64(&mut self, gpa: u64) -> u64 {
        self.0.get(gpa as usize / 8).copied().unwrap_or(u64::MAX)
    }
    fn read_u32(&mut self, _: u64) -> u32 {
        unreachable!("entries have 64 bits")
    }
    fn cas_u64(&mut self, gpa: u64, _: u64, new: u64) -> bool {
        self.0[gpa as usize / 8] = new;
        true
    }
    fn cas_u32(&mut self, _: u64, _: u32, _: u32) -> bool {
        unreachable!("entries have 64 bits")
    }
}

fn look(tables: &mut Tables, wanted: u64) -> Option<Translation> {
    let page = Descent::top(ROOTS).look(tables, ROOTS, GVA, (12, wanted))?;
    Some(page.translation(ROOTS, GVA))
}

/// For random entries, `look` finds the same translation as a walk whose access is always permitted, and writes nothing.
#[test]
fn a_look_finds_what_a_walk_finds_and_leaves_no_trace() {
    let mut random = 1u64;
    let mut next = || {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        random >> 20
    };
    let (mut found, mut faults) = (0, 0);
    for _ in 0..100_000 {
        let mut bits = [USED | RW | US; 4];
        for entry in &mut bits {
            // One bit in three entries of four: most are of no consequence.
            *entry ^= if next() & 3 == 0 { 0 } else { 1 << (next() % 64) };
        }
        let mut tables = Tables::new(bits);
        let before = tables.0.clone();
        let looked = look(&mut tables, P);
        assert_eq!(tables.0, before, "{bits:x?}");
        let access = Access { smap_override: true, ..Access::default() };
        match walk(&mut tables, ROOTS, GVA, access) {
            Ok(walked) => {
                assert_eq!(looked, Some(walked), "{bits:x?}");
                found += 1;
            }
            Err(_) => {
                assert_eq!(looked, None, "{bits:x?}");
                faults += 1;
            }
        }
    }
    assert!(found > 10_000 && faults > 10_000, "{found} and {faults}");
}

#[test]
fn what_has_not_been_used_is_found_if_asked_for() {
    let mut tables = Tables::new([USED | US, USED | US, USED | US, P | US]);
    assert_eq!(look(&mut tables, USED), None);
    assert!(look(&mut tables, P).is_some_and(|page| page.user && !page.writable && !page.dirty));
}

#[test]
fn a_page_that_linux_has_protected_since_it_was_written_seems_so() {
    let seems = |bits: u64| {
        let page = look(&mut Tables::new([USED | US, USED | US, USED | US, USED | bits]), USED);
        page.map(|page| (page.dirty, page.seems_written))
    };
    let expected = [(0, (false, false)), (D, (true, true)), (SAVED_DIRTY, (false, true))];
    assert_eq!(expected.map(|(bits, _)| seems(bits)), expected.map(|(_, seen)| Some(seen)));
}

/// `look` rejects an entry with a reserved bit set, on which a CPU would fault.
#[test]
fn an_entry_with_a_reserved_bit_leads_nowhere() {
    let large = USED | RW | US | PS;
    // Bit 13 of a 2 MiB page's address, bit 21 of a 1 GiB page's, and the top level has no pages.
    for (level, reserved) in [(2, 1 << 13), (1, 1 << 21), (0, 0)] {
        let mut bits = [USED | RW | US; 4];
        bits[level] = large ^ ((level as u64 + 1) << 12); // at GPA 0
        assert_eq!(look(&mut Tables::new(bits), USED).is_some(), reserved != 0, "{level}");
        bits[level] ^= reserved;
        assert_eq!(look(&mut Tables::new(bits), USED), None, "{level}");
    }
}

#[test]
fn a_table_says_what_the_levels_above_it_allow() {
    let table = |bits| {
        let step = Descent::top(ROOTS).look(&mut Tables::new(bits), ROOTS, GVA, (21, USED));
        step.and_then(Descent::table)
    };
    let all = USED | RW | US;
    assert_eq!(table([all, all, all, 0]), Some(0x3000 | RW | US));
    assert_eq!(table([all, USED | US, all, 0]), Some(0x3000 | US));
    assert_eq!(table([all, all, USED | RW, 0]), Some(0x3000 | RW));
    assert_eq!(table([all | NX, all, all, 0]), Some(0x3000 | RW | US | NX));
    assert_eq!(table([all, all, all ^ PS ^ 0x3000, 0]), None, "a large page");
    assert_eq!(table([all, P | RW | US, all, 0]), None, "not used");
}

#[test]
fn top_tables_of_pae_have_32_bytes() {
    let of = |cr4, efer| Roots { cr3: 0x1_2345_6fff, cr4, efer, ..Roots::default() };
    let (pae, four) = (of(cr4::PAE, 0), of(cr4::PAE, efer::LMA));
    assert_eq!((pae.top(), pae.entries_of_programs()), (0x2345_6fe0, 3));
    assert_eq!((four.top(), four.entries_of_programs()), (0x1_2345_6000, 256));
    assert_eq!(of(0, 0).top(), 0x1_2345_6000);
}
