//! When translated code writes the host's FS base for a SWAPGS of the guest. A write takes 10 ns.

mod support;

use iced_x86::{Code, Decoder, DecoderOptions};
use jit::{Request, stubs, translate};
use support::LAYOUT;

const SWAPGS: &[u8] = &[0x0f, 0x01, 0xf8];
const SYSRETQ: &[u8] = &[0x48, 0x0f, 0x07];
const IRETQ: &[u8] = &[0x48, 0xcf];
const NOP: &[u8] = &[0x0f, 0x1f, 0x40, 0x00];
const OVER_VERW: &[u8] = &[0xeb, 0x07];
const VERW: &[u8] = &[0x0f, 0x00, 0x2d, 0, 0, 0, 0];
const READ_OF_GS: &[u8] = &[0x65, 0x48, 0x8b, 0x04, 0x25, 0, 0, 0, 0];
const OUTSIDE: &[u8] = &[0xeb, 0x70];
const TO_ITSELF: &[u8] = &[0xeb, 0xfe];
const BACK: &[u8] = &[0xeb, 0xfb];

/// The number of writes to FS base in the block that is made from these pieces of guest code.
fn writes(code: &[&[u8]]) -> usize {
    let bytes = code.concat();
    let request = Request {
        guest: 0xffff_ffff_8100_0000,
        bytes: &bytes,
        here: bytes.len(),
        ac: false,
        tap: false,
        landing: false,
        narrow: false,
        sought: 0,
        on_trial: false,
        version: None,
        host: LAYOUT.cache + stubs::LEN,
        stubs: LAYOUT.cache + LAYOUT.cache_len,
        cache_offset: 0,
    };
    let block = translate(&LAYOUT, &request).expect("a block");
    let decoder = Decoder::new(64, &block.code, DecoderOptions::NONE);
    decoder.into_iter().filter(|insn| insn.code() == Code::Wrfsbase_r64).count()
}

#[test]
fn swapgs_before_a_return_leaves_the_base_as_it_is() {
    for way in [&[][..], &[NOP, NOP], &[OVER_VERW, VERW]] {
        for end in [SYSRETQ, IRETQ] {
            assert_eq!(writes(&[&[SWAPGS], way, &[end]].concat()), 0, "{way:x?}");
        }
    }
}

#[test]
fn swapgs_before_anything_else_sets_it() {
    for rest in [
        &[READ_OF_GS, SYSRETQ][..],
        &[NOP, READ_OF_GS, SYSRETQ],
        &[VERW, SYSRETQ],
        &[OVER_VERW, VERW, READ_OF_GS],
        // What follows is not known.
        &[],
        &[NOP],
        &[OUTSIDE],
        &[BACK],
        &[TO_ITSELF],
    ] {
        assert_eq!(writes(&[&[SWAPGS], rest].concat()), 1, "{rest:x?}");
    }
}
