//! A set of interrupt vectors: IRR, ISR and TMR are one each (SDM 10.8.4).

#[derive(Clone, Copy, Default)]
pub(crate) struct VectorSet([u64; 4]);

impl VectorSet {
    fn place(vector: u8) -> (usize, u64) {
        (usize::from(vector >> 6), 1 << (vector & 63))
    }

    pub(crate) fn insert(&mut self, vector: u8) {
        let (word, bit) = Self::place(vector);
        self.0[word] |= bit;
    }

    pub(crate) fn remove(&mut self, vector: u8) {
        let (word, bit) = Self::place(vector);
        self.0[word] &= !bit;
    }

    pub(crate) fn contains(&self, vector: u8) -> bool {
        let (word, bit) = Self::place(vector);
        self.0[word] & bit != 0
    }

    /// The highest vector, which is the one of highest priority.
    pub(crate) fn highest(&self) -> Option<u8> {
        let word = self.0.iter().rposition(|word| *word != 0)?;
        Some((word * 64) as u8 + 63 - self.0[word].leading_zeros() as u8)
    }

    /// There is one vector and no more.
    pub(crate) fn has_one(&self) -> bool {
        self.0.iter().map(|word| word.count_ones()).sum::<u32>() == 1
    }

    /// The `index`th 32-bit register of the set, 0 to 7.
    pub(crate) fn register(&self, index: u32) -> u32 {
        (self.0[(index as usize >> 1) & 3] >> ((index & 1) * 32)) as u32
    }
}
