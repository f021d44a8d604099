//! The bits of a word, for whoever keeps a bit for each entry of a table.

/// The numbers of the bits of a word that are one, ascending.
pub fn ones(mut word: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let lowest = (word != 0).then(|| word.trailing_zeros() as usize)?;
        word &= word - 1;
        Some(lowest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_one_is_found_once() {
        assert!(ones(0).eq([]));
        assert!(ones(1 << 63 | 1 << 40 | 1).eq([0, 40, 63]));
        assert!(ones(u64::MAX).eq(0..64));
    }
}
