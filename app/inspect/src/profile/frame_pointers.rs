//! Callers in programs, by the frame pointers that a compiler leaves with `-fno-omit-frame-pointer` (System V ABI
//! for x86-64, 3.2.2).

use super::orc::OrcFrame;

/// How far a program's stack reaches from a frame to its caller's, at the most (bytes).
const FRAME: u64 = 1 << 20;

/// Walks a program's stack from one return address to the next.
pub struct Returns<W> {
    word: W,
    /// Where the innermost function's return address is while it has no frame (GVA).
    pending: Option<u64>,
    /// The lowest address that the next frame can have (GVA).
    low: u64,
    bp: u64,
}

impl<W: Fn(u64) -> Option<u64>> Returns<W> {
    /// `word` reads a little-endian word at a GVA; `is_code` knows addresses that a call can return to.
    pub fn new(first: OrcFrame, word: W, is_code: impl Fn(u64) -> bool) -> Self {
        let above = first.exact.then(|| word(first.ip)).flatten().and_then(return_above);
        let pending = above.map(|above| first.sp.wrapping_add(above));
        let pending = pending.filter(|at| word(*at).is_some_and(is_code));
        Self { word, pending, low: first.sp, bp: first.bp }
    }
}

impl<W: Fn(u64) -> Option<u64>> Iterator for Returns<W> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        if let Some(at) = self.pending.take() {
            self.low = at.wrapping_add(8);
            return (self.word)(at);
        }
        if self.bp < self.low || self.bp - self.low > FRAME || !self.bp.is_multiple_of(8) {
            return None;
        }
        let (next, back) = ((self.word)(self.bp)?, (self.word)(self.bp + 8)?);
        (self.low, self.bp) = (self.bp + 16, next);
        Some(back)
    }
}

/// How far above RSP the return address is where RBP is still, or again, the caller's (bytes).
fn return_above(code: u64) -> Option<u64> {
    match code.to_le_bytes() {
        // ENDBR64; PUSH RBP; RET.
        [0xf3, 0x0f, 0x1e, 0xfa, ..] | [0x55 | 0xc3, ..] => Some(0),
        // MOV RBP, RSP, in both encodings.
        [0x48, 0x89, 0xe5, ..] | [0x48, 0x8b, 0xec, ..] => Some(8),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const STACK: u64 = 0x7000;
    const CODE: u64 = 0x1000;

    /// The callers of a function whose next instruction is `code`. `above` are the words from RSP on; its own caller
    /// has its frame, with a return to `CODE + 2`, 64 bytes above RSP.
    fn callers(code: &[u8], above: &[u64], bp: u64) -> Vec<u64> {
        let mut bytes = [0x90; 8];
        bytes[..code.len()].copy_from_slice(code);
        let mut words = HashMap::from([(CODE, u64::from_le_bytes(bytes))]);
        words.extend((0..).map(|n| STACK + 8 * n).zip(above.iter().copied()));
        words.extend([(STACK + 64, 0), (STACK + 72, CODE + 2)]);
        let first = OrcFrame { ip: CODE, sp: STACK, bp, exact: true };
        let word = |gva: u64| words.get(&gva).copied();
        Returns::new(first, word, |address| address >> 12 == CODE >> 12).collect()
    }

    #[test]
    fn a_function_without_its_frame_has_all_its_callers() {
        let both = [CODE + 1, CODE + 2];
        for code in [&[0xf3, 0x0f, 0x1e, 0xfa, 0x55][..], &[0x55], &[0xc3]] {
            assert_eq!(callers(code, &[CODE + 1], STACK + 64), both, "{code:x?}");
        }
        for code in [[0x48, 0x89, 0xe5], [0x48, 0x8b, 0xec]] {
            assert_eq!(callers(&code, &[STACK + 64, CODE + 1], STACK + 64), both, "{code:x?}");
        }
    }

    #[test]
    fn a_function_with_its_frame_has_all_its_callers() {
        assert_eq!(callers(&[0x90], &[STACK + 64, CODE + 1], STACK), [CODE + 1, CODE + 2]);
        assert_eq!(callers(&[0xc9], &[STACK + 64, CODE + 1], STACK), [CODE + 1, CODE + 2]);
    }

    #[test]
    fn rbp_that_is_pushed_as_any_register_hides_no_frame() {
        assert_eq!(callers(&[0x55], &[12345], STACK + 64), [CODE + 2]);
    }
}
