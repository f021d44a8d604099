//! Bytes to look for in a page of code: an escape byte with one of few behind it, sixteen places at a time.
//!
//! Every page that programs execute is looked through before it is mapped, most of them once for each
//! process, and a page of code has an escape byte on every second line: what is rare are the pairs, so those
//! are what is asked for. The vectors are the guest's; four of them are borrowed, and are as before where
//! this ends. (VEX forms would be shorter, and would have to give back the upper halves too.)

use core::arch::naked_asm;

/// First byte of all that is looked for.
pub const ESCAPE: u8 = 0x0f;
const PAGE: u64 = 4096;
/// Bytes of a vector.
const PLACES: u64 = 16;
/// So many vectors begin at multiples of their size and have a byte of the page behind them; one more, which
/// ends one byte before the page's end, overlaps the last of them.
const BLOCKS: u64 = PAGE / PLACES - 1;

/// What may stand behind the escape byte, for the comparison below: 01 to 03, A2, AE, C7.
#[repr(align(16))]
struct Pairs(#[expect(dead_code, reason = "read by the search")] [[u8; PLACES as usize]; 6]);

static PAIRS: Pairs =
    Pairs([[ESCAPE; 16], [0xff; 16], [2; 16], [0xa2; 16], [0xae; 16], [0xc7; 16]]);

/// Whether one of the pairs in the page (4 KiB, readable there, aligned) is of this kind, by its offset; or
/// what may begin one in the page's last two bytes, where the rest of an instruction may be in the next page.
pub fn has(page: u64, kind: fn(u64, u64) -> bool) -> bool {
    let in_block = |at: u64, block: u64, mask: u32| {
        (0..PLACES).any(|n| mask >> n & 1 == 1 && kind(page, at + block * PLACES + n))
    };
    let mut at = 0;
    while at < BLOCKS * PLACES {
        let (blocks, mask) = first(page + at, BLOCKS - at / PLACES);
        if mask == 0 {
            break;
        }
        if in_block(at, blocks, mask) {
            return true;
        }
        at += (blocks + 1) * PLACES;
    }
    let last = PAGE - PLACES - 1;
    let (_, mask) = first(page + last, 1);
    let ends = |at: u64| byte(page + at) == ESCAPE && kind(page, at);
    in_block(last, 0, mask) || ends(PAGE - 2) || ends(PAGE - 1)
}

fn byte(at: u64) -> u8 {
    // SAFETY: callers stay inside a page that is readable.
    unsafe { core::ptr::read_volatile(at as *const u8) }
}

/// The first of so many blocks (at least one) from an address with pairs in it, and where they begin there as
/// bits; no bits if none has. Reads one byte behind each block it looks at.
fn first(from: u64, blocks: u64) -> (u64, u32) {
    let found = pairs(from, blocks);
    (blocks - (found >> 32), found as u32)
}

/// The same: bits, and above them how many blocks were left.
#[unsafe(naked)]
pub extern "C" fn pairs(from: u64, blocks: u64) -> u64 {
    naked_asm!(
        "sub rsp, 64",
        "movdqu [rsp], xmm0",
        "movdqu [rsp + 16], xmm1",
        "movdqu [rsp + 32], xmm2",
        "movdqu [rsp + 48], xmm3",
        "lea rdx, [rip + {pairs}]",
        "2:",
        "movdqu xmm0, [rdi]",
        "movdqu xmm1, [rdi + 1]",
        "pcmpeqb xmm0, [rdx]",
        // 1 to 3 are what is at most 2, once 1 is taken away.
        "movdqa xmm2, xmm1",
        "paddb xmm2, [rdx + 16]",
        "movdqa xmm3, xmm2",
        "pminub xmm3, [rdx + 32]",
        "pcmpeqb xmm3, xmm2",
        "movdqa xmm2, xmm1",
        "pcmpeqb xmm2, [rdx + 48]",
        "por xmm3, xmm2",
        "movdqa xmm2, xmm1",
        "pcmpeqb xmm2, [rdx + 64]",
        "por xmm3, xmm2",
        "pcmpeqb xmm1, [rdx + 80]",
        "por xmm3, xmm1",
        "pand xmm3, xmm0",
        "pmovmskb eax, xmm3",
        "test eax, eax",
        "jnz 3f",
        "add rdi, 16",
        "dec rsi",
        "jnz 2b",
        "3:",
        "shl rsi, 32",
        "or rax, rsi",
        "movdqu xmm0, [rsp]",
        "movdqu xmm1, [rsp + 16]",
        "movdqu xmm2, [rsp + 32]",
        "movdqu xmm3, [rsp + 48]",
        "add rsp, 64",
        "ret",
        pairs = sym PAIRS)
}
