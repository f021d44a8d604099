use super::*;
use crate::Level;
use wedge_abi::{CROSSES, DEEP, DEEP_REACH, deep_slot};

const LAYOUT: Layout = Layout {
    level: Level::Kernel,
    several: false,
    bias: 0x7e00_0000_0000,
    regions: 0x7e00_7fff_0000,
    copies: None,
    cache: 0x2100_0000_0000,
    cache_len: 1 << 20,
    vcpu_page: 0x2100_0010_0000,
    table: 0x2100_0011_0000,
    landings: Some(0x7e00_7ff0_0000),
    checks: false,
    lookups: None,
    verified: None,
    origins: None,
};

/// The words of the tables.
#[derive(Default)]
struct Tables(FxHashMap<u64, u64>);

impl CodeMemory for Tables {
    fn write_code(&mut self, _: u64, _: &[u8]) {}
    fn is_closed(&self, _: u64, bytes: &[u8]) -> bool {
        wedge_abi::keys::find(bytes).is_none()
    }
    fn write_table(&mut self, offset: u64, value: u64) {
        self.0.insert(offset, value);
    }
    fn table_word(&self, offset: u64) -> u64 {
        self.0.get(&offset).copied().unwrap_or(0)
    }
}

/// Publishing a block again may give it an earlier slot of the searched table. After the block is dropped, no slot may lead to it.
#[test]
fn a_dropped_block_is_not_found() {
    let mut tables = Tables::default();
    let mut cache = Cache::new(LAYOUT, &mut tables);
    let first = 0xffff_ffff_8100_0000u64;
    let meets = |other: &u64| deep_slot(*other) == deep_slot(first);
    let second = (first + 16..).step_by(16).find(meets).expect("an address of the same slot");
    for (guest, page) in [(first, 0x1000), (second, 0x2000)] {
        cache.add(&mut tables, guest, &[0xf4], 1, (false, false), [page; 2]).expect("a block");
    }
    cache.drop_page(&mut tables, 0x1000);
    cache.publish(&mut tables, second, false);
    cache.drop_page(&mut tables, 0x2000);
    let slots = deep_slot(second)..deep_slot(second) + DEEP_REACH;
    let left = slots.filter(|at| tables.0.get(&((DEEP + at * 16) as u64)) == Some(&second));
    assert_eq!(left.count(), 0);
}
/// A block that opened keys as one of a page alone is made again as one of two, and may not reach into the second.
#[test]
fn a_block_whose_gate_asks_for_two_pages_is_of_both() {
    let mut tables = Tables::default();
    let mut cache = Cache::new(LAYOUT, &mut tables);
    let index = FIRST_VERSION as u32;
    let version = Some(Version { index, second: Some(index + 1), generation: 1 });
    let how = How { version, ..How::default() };
    let host = cache.add(&mut tables, 0x1000, &[0xf4], 1, how, [0x1000, 0x2000]).expect("a block");
    assert!(tables.0.values().any(|found| *found == host | CROSSES));
    cache.drop_page(&mut tables, 0x2000);
    assert!(cache.find(0x1000, Variant::of_page(index)).is_none());
}

/// User code can jump into the middle of the block.
#[test]
fn code_that_would_open_keys_is_not_made() {
    let mut tables = Tables::default();
    let mut cache = Cache::new(LAYOUT, &mut tables);
    let mut add = |code: &[u8]| {
        cache.add(&mut tables, 0xffff_ffff_8100_0000, code, code.len(), (false, false), [0x1000; 2])
    };
    let compare = [0x3d, 0x0f, 0x01, 0xef, 0xc3, 0xf4]; // cmp eax, imm32; hlt
    assert_eq!(add(&compare), Err(Refused::Untranslatable));
    add(&[0x3d, 0x0f, 0x01, 0xee, 0xc3, 0xf4]).expect("another number");
}

/// A jump whose displacement would open keys leads out of its block, and is taken back like others.
#[test]
fn a_jump_that_would_open_keys_is_not_linked() {
    const FROM: u64 = 0xffff_ffff_8100_0000;
    let mut memory = Once::default();
    let mut cache = Cache::new(LAYOUT, &mut memory);
    let jump = [0xe9, 0xfb, 0x0f, 0, 0]; // to FROM + 1000h
    let mut add = |memory: &mut Once, guest, code: &[u8], page| {
        cache.add(memory, guest, code, code.len(), (false, false), [page; 2]).expect("a block");
        cache.counters.linked
    };
    add(&mut memory, FROM, &jump, 0x1000);
    memory.0 = true;
    assert_eq!(add(&mut memory, FROM + 0x1000, &[0xf4], 0x2000), 0);
    cache.drop_page(&mut memory, 0x2000);
    cache
        .add(&mut memory, FROM + 0x1000, &[0xf4], 1, (false, false), [0x2000; 2])
        .expect("a block");
    assert_eq!(cache.counters.linked, 1);
}

/// Refuses a displacement, once if it is told to.
#[derive(Default)]
struct Once(bool, std::cell::Cell<bool>);

impl CodeMemory for Once {
    fn write_code(&mut self, _: u64, _: &[u8]) {}
    fn is_closed(&self, _: u64, bytes: &[u8]) -> bool {
        bytes.len() != 4 || !self.0 || self.1.replace(true)
    }
    fn write_table(&mut self, _: u64, _: u64) {}
    fn table_word(&self, _: u64) -> u64 {
        0
    }
}
