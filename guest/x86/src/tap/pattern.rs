//! Patterns of text, as filters have them: `*` is any text, `?` any letter.

use super::{Memory, STEP_WORDS, front};

/// Bytes of a pattern at the most.
pub const MOST_PATTERN: usize = 48;
/// Bytes of text that are compared at the most.
pub const MOST_COMPARED: usize = 256;

/// A pattern, in words of steps.
pub type PatternWords = [[u64; STEP_WORDS]; MOST_PATTERN / 8 / STEP_WORDS];

/// A pattern in words; `None` if it is too long, or has a letter that is more than a byte.
pub fn in_words(pattern: &str) -> Option<PatternWords> {
    let mut words = PatternWords::default();
    if !pattern.is_ascii() || pattern.len() > MOST_PATTERN || pattern.contains('\0') {
        return None;
    }
    for (word, bytes) in words.as_flattened_mut().iter_mut().zip(pattern.as_bytes().chunks(8)) {
        *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    }
    Some(words)
}

/// Whether the text at a GVA is like a pattern, which ends with its first zero. `Some(None)` if it may be: there is none, it
/// does not fit into `room`, or it has letters that are more than a byte. `None` if that cannot be told here.
pub fn compare(
    memory: &mut impl Memory,
    gva: u64,
    room: &mut [u8],
    pattern: &PatternWords,
) -> Option<Option<bool>> {
    let mut done = 0;
    while done < room.len() {
        let part = front(gva, done, room.get_mut(done..)?);
        if !memory.read(gva.wrapping_add(done as u64), part)? {
            return Some(None);
        }
        let zero = part.iter().position(|byte| *byte == 0);
        done += zero.unwrap_or(part.len());
        if zero.is_some() {
            let text = room.get(..done)?;
            // `<[u8]>::is_ascii` has vector instructions, which nothing in a wedge may have.
            let is_ascii = text.iter().all(u8::is_ascii);
            return Some(is_ascii.then(|| is_like(text, pattern)));
        }
    }
    Some(None)
}

/// Time is at most the product of both lengths.
fn is_like(text: &[u8], pattern: &PatternWords) -> bool {
    let letter = |of: usize| {
        let word = pattern.as_flattened().get(of / 8).copied().unwrap_or_default();
        (word >> (of % 8 * 8)) as u8
    };
    let (mut at, mut of, mut star) = (0, 0, None);
    while let Some(next) = text.get(at) {
        match (letter(of), star) {
            (b'*', _) => {
                star = Some((of, at));
                of += 1;
            }
            (known, _) if known == b'?' || known == *next => {
                at += 1;
                of += 1;
            }
            (_, Some((before, matched))) => {
                star = Some((before, matched + 1));
                (at, of) = (matched + 1, before + 1);
            }
            (_, None) => return false,
        }
    }
    while letter(of) == b'*' {
        of += 1;
    }
    letter(of) == 0
}
