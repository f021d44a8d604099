//! The search of pages of code, against one that looks at every byte.

use crate::search::{ESCAPE, PageBytes, has, pairs};
use core::arch::asm;

const SECOND: [u8; 6] = [0x01, 0x02, 0x03, 0xa2, 0xae, 0xc7];

#[repr(align(4096))]
struct Page([u8; 4096]);

fn any(_: PageBytes, _: u64) -> bool {
    true
}

fn slowly(page: &Page) -> bool {
    (0..4096).any(|at| page.0[at] == ESCAPE && (at >= 4094 || SECOND.contains(&page.0[at + 1])))
}

fn address(page: &Page) -> u64 {
    page.0.as_ptr() as u64
}

#[allow(unsafe_code, reason = "the page is known by its address")]
fn code(page: &Page) -> PageBytes {
    // SAFETY: the page of the test, which outlives the search.
    unsafe { PageBytes::at(address(page)) }
}

/// A page of any bytes but escapes.
fn plain(seed: u64) -> Page {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let byte = (state >> 56) as u8;
        if byte == ESCAPE { 0x90 } else { byte }
    };
    Page(core::array::from_fn(next))
}

#[test]
fn every_pair_is_found_at_every_place() {
    for at in 0..4096 {
        let mut page = plain(at as u64);
        assert!(!has(code(&page), any));
        page.0[at] = ESCAPE;
        for second in 0..=255 {
            if let Some(byte) = page.0.get_mut(at + 1) {
                *byte = second;
            }
            assert_eq!(has(code(&page), any), slowly(&page), "{at:#x} {second:#x}");
        }
    }
}

#[test]
fn pages_full_of_escapes_are_searched_to_their_end() {
    fn at_the_end(page: PageBytes, at: u64) -> bool {
        at < 4095 && page.byte(at + 1) == 0xa2
    }
    for at in (0..4095).rev() {
        let mut page = Page([ESCAPE; 4096]);
        for (n, byte) in page.0.iter_mut().enumerate() {
            *byte = if n % 2 == 0 { ESCAPE } else { 0xc7 };
        }
        assert!(!has(code(&page), at_the_end));
        (page.0[at], page.0[at + 1]) = (ESCAPE, 0xa2);
        assert!(has(code(&page), at_the_end), "{at:#x}");
    }
}

#[test]
#[allow(unsafe_code, reason = "looks at registers around a call")]
fn vectors_are_as_before() {
    let mut page = plain(7);
    (page.0[2000], page.0[2001]) = (ESCAPE, 0x01);
    let before: [u64; 8] =
        core::array::from_fn(|n| 0x0123_4567_89ab_cdef_u64.rotate_left(n as u32));
    let mut after = [0_u64; 8];
    let found: u64;
    // SAFETY: calls a function of the C ABI, and says so; the pointers are in registers that it keeps.
    unsafe {
        asm!(
            "movdqu xmm0, [r12]", "movdqu xmm1, [r12 + 16]",
            "movdqu xmm2, [r12 + 32]", "movdqu xmm3, [r12 + 48]",
            "call {pairs}",
            "movdqu [r13], xmm0", "movdqu [r13 + 16], xmm1",
            "movdqu [r13 + 32], xmm2", "movdqu [r13 + 48], xmm3",
            in("r12") before.as_ptr(),
            in("r13") after.as_mut_ptr(),
            pairs = sym pairs,
            inout("rdi") address(&page) => _,
            inout("rsi") 200_u64 => _,
            out("rax") found,
            clobber_abi("C"),
        );
    }
    assert_eq!((found, after), ((200 - 125) << 32 | 1, before));
}
