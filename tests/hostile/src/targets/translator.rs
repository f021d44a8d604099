//! Code at any address, translated, placed, linked and dropped. It is not executed.

use jit::{
    Layout, Level, Version,
    cache::{Cache, CodeMemory, How},
};
use wedge_abi::{FIRST_VERSION, MAX_TEXTS, TEXT_REACH, place};

use super::anything;
use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "translator", seeds, run };

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
/// Of a program that must not reach what is not its own.
const CHECKED: Layout = Layout {
    level: Level::User,
    bias: 0,
    landings: None,
    copies: Some(LAYOUT.regions + 0x20_0000),
    checks: true,
    lookups: Some(LAYOUT.cache + 0x1000_0000),
    ..LAYOUT
};
/// The same, for places.
const PLACED: Layout = Layout {
    verified: Some(LAYOUT.cache + 0x1800_0000),
    origins: Some(LAYOUT.cache + 0x1900_0000),
    ..CHECKED
};
const ADDRESSES: [u64; 5] =
    [0xffff_ffff_8100_0000, 0xffff_ffff_ffff_f000, u64::MAX, 0, 0xffff_8000_0000_0000];
const PLACES: [u64; 5] = [
    place(0, 0),
    place(1, 0x7000),
    place(MAX_TEXTS - 1, -TEXT_REACH),
    place(2, TEXT_REACH - 0x2_0000),
    place(3, -1),
];
const PAGE: u64 = 4096;

/// What lies in the cache.
struct Code(Vec<u8>);

impl CodeMemory for Code {
    fn write_code(&mut self, offset: u64, bytes: &[u8]) {
        self.0[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
    }
    fn is_closed(&self, _: u64, _: &[u8]) -> bool {
        true
    }
    fn write_table(&mut self, _: u64, _: u64) {}
    fn table_word(&self, _: u64) -> u64 {
        0
    }
}

/// Anything, and what a kernel has most of.
fn seeds() -> Vec<Vec<u8>> {
    let code: [&[u8]; 4] = [
        &[0x55, 0x48, 0x89, 0xe5, 0xe8, 0, 0, 0, 0, 0x5d, 0xc3],
        &[0x65, 0x48, 0x8b, 4, 0x25, 0, 0, 0, 0, 0x0f, 0x01, 0xcb, 0x88, 0x07, 0x0f, 0x01, 0xca],
        &[0xf3, 0x48, 0xab, 0x74, 2, 0xeb, 0xfe, 0xff, 0xe0, 0xff, 0x14, 0xc5, 0, 0, 0, 0x81],
        &[0xfa, 0x9c, 0x58, 0xfb, 0xf4, 0x0f, 0x22, 0xd8, 0x0f, 0x01, 0x38, 0x48, 0xcf],
    ];
    let whole = |code: &&[u8]| [&[0, 0, 0], *code].concat();
    code.iter().map(whole).chain((0..2).map(|seed| anything(seed, 256))).collect()
}

/// Each block: where (one byte for the address, two for what is added), then its code to the end of 64 bytes.
fn run(bytes: &[u8]) {
    let user = Layout { level: Level::User, landings: None, ..LAYOUT };
    for layout in [LAYOUT, user, CHECKED, PLACED] {
        let addresses = if layout.origins.is_some() { PLACES } else { ADDRESSES };
        let mut code = Code(vec![0xcc; layout.cache_len as usize]);
        let mut cache = Cache::new(layout, &mut code);
        for (number, chunk) in bytes.chunks(67).enumerate() {
            let Some(([which, low, high], rest)) = chunk.split_first_chunk() else { break };
            let added = u64::from(u16::from_le_bytes([*low, *high]));
            let guest = addresses[usize::from(*which) % addresses.len()].wrapping_add(added);
            let here = rest.len().min((PAGE - guest % PAGE) as usize);
            let page = number as u64 % 3 * PAGE;
            // A program that has set it itself is not translated.
            let ac = which & 0x80 != 0 && layout.level == Level::Kernel;
            let index = FIRST_VERSION as u32 + u32::from(*which % 3);
            let second = (rest.len() > here).then_some(index + 3);
            let version = Version { index, second, generation: 1 };
            let version = layout.verified.map(|_| version);
            let how = How { ac, version, ..How::default() };
            let made = cache.add(&mut code, guest, rest, here, how, [page, page + PAGE]);
            if let Ok(host) = made {
                check(&cache, &layout, guest, host);
            }
            if which & 0x40 != 0 {
                cache.drop_page(&mut code, page);
            }
        }
        cache.clear(&mut code);
    }
}

/// The block lies in the cache, and each of its addresses is one of the guest's in it.
fn check(cache: &Cache, layout: &Layout, guest: u64, host: u64) {
    let source = cache.source(host).expect("it is there");
    let end = host + u64::from(source.host_len);
    assert!(host >= layout.cache && end <= layout.cache + layout.cache_len);
    assert!(u64::from(source.guest_len) <= 64);
    for pc in host..end {
        let Some(position) = cache.position(pc) else { continue };
        assert!(position.guest.wrapping_sub(guest) <= u64::from(source.guest_len), "{position:?}");
    }
}
