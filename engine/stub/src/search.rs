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

/// A page of code (4 KiB) that can be read at an HVA.
#[derive(Clone, Copy)]
pub struct PageBytes(u64);

impl PageBytes {
    /// The page at an HVA, a multiple of 4 KiB.
    ///
    /// # Safety
    /// The page is readable as long as this is used.
    pub unsafe fn at(address: u64) -> Self {
        Self(address)
    }

    /// The byte at an offset in the page.
    pub fn byte(self, at: u64) -> u8 {
        // SAFETY: inside the page. Others may be writing it.
        unsafe { core::ptr::read_volatile((self.0 + (at & (PAGE - 1))) as *const u8) }
    }

    /// The bytes from an offset on, two of the page.
    pub fn two(self, at: u64) -> [u8; 2] {
        [self.byte(at), self.byte(at + 1)]
    }

    /// The page's words, four at a time.
    pub fn words(self) -> impl Iterator<Item = [u64; 4]> {
        // SAFETY: inside the page, and aligned. Others may be writing it.
        let words = move |at| unsafe { core::ptr::read_volatile((self.0 + at) as *const [u64; 4]) };
        (0..PAGE).step_by(32).map(words)
    }

    /// The first of so many blocks (at least one) from an offset with pairs in it, and where they begin there as
    /// bits; no bits if none has. The byte behind the last block is one of the page.
    fn first(self, at: u64, blocks: u64) -> (u64, u32) {
        // SAFETY: callers stay inside the page.
        let found = unsafe { pairs(self.0 + at, blocks) };
        (blocks - (found >> 32), found as u32)
    }
}

/// Whether one of the pairs in the page is of this kind, by its offset; or what may begin one in the page's last two
/// bytes, where the rest of an instruction may be in the next page.
pub fn has(page: PageBytes, kind: fn(PageBytes, u64) -> bool) -> bool {
    let in_block = |at: u64, block: u64, mask: u32| {
        (0..PLACES).any(|n| mask >> n & 1 == 1 && kind(page, at + block * PLACES + n))
    };
    let mut at = 0;
    while at < BLOCKS * PLACES {
        let (blocks, mask) = page.first(at, BLOCKS - at / PLACES);
        if mask == 0 {
            break;
        }
        if in_block(at, blocks, mask) {
            return true;
        }
        at += (blocks + 1) * PLACES;
    }
    let last = PAGE - PLACES - 1;
    let (_, mask) = page.first(last, 1);
    let ends = |at: u64| page.byte(at) == ESCAPE && kind(page, at);
    in_block(last, 0, mask) || ends(PAGE - 2) || ends(PAGE - 1)
}

/// The first of so many blocks (at least one) from an HVA with pairs in it: where they begin there as bits, and above those
/// how many blocks were left.
///
/// # Safety
/// The blocks and one byte behind them are readable.
#[unsafe(naked)]
pub unsafe extern "C" fn pairs(from: u64, blocks: u64) -> u64 {
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
