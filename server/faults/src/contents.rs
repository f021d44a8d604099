//! What a fault leaves on a disk, or in what is read from it, and what would be there without it.

use serde::{Deserialize, Serialize};

/// Bytes that are shown at the most.
const SHOWN: usize = 32;

/// Bytes that are not what they should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// The first of them, on the disk.
    pub at: u64,
    /// From it to the last of them, in bytes; some between may be right.
    pub len: u64,
    /// What was there before, as hexadecimal digits of 32 bytes at the most.
    pub before: String,
    /// What is there now, or was read.
    pub after: String,
    /// What should be there.
    pub meant: String,
}

impl Contents {
    /// Compares what is on the disk from the byte `at` on with what is `meant` to be there; `None` if they are the same.
    pub fn new(at: u64, before: &[u8], after: &[u8], meant: &[u8]) -> Option<Self> {
        let differs = |pair: (&u8, &u8)| pair.0 != pair.1;
        let first = after.iter().zip(meant).position(differs)?;
        let last = after.iter().zip(meant).rposition(differs)?;
        let shown = |bytes: &[u8]| -> String {
            let bytes = bytes.get(first..=last).unwrap_or_default();
            bytes.iter().take(SHOWN).map(|byte| format!("{byte:02x}")).collect()
        };
        let (at, len) = (at + first as u64, (last - first + 1) as u64);
        Some(Self { at, len, before: shown(before), after: shown(after), meant: shown(meant) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_that_differ_are_shown() {
        let (mut before, mut meant) = ([0; 512], [0; 512]);
        (before[7], meant[8], meant[300]) = (1, 0xab, 2);
        assert_eq!(Contents::new(512, &meant, &meant, &meant), None);
        let lost = Contents::new(512, &before, &before, &meant).expect("they differ");
        assert_eq!((lost.at, lost.len), (519, 294));
        assert_eq!((&lost.before, lost.before.len()), (&lost.after, 64));
        assert!(lost.before.starts_with("0100") && lost.meant.starts_with("00ab"), "{lost:?}");
    }
}
