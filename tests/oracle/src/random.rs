//! The source of all randomness: xoshiro256++, written out here because a seed has to mean the
//! same cases for as long as case files and bug reports name seeds.

/// A seeded generator.
#[derive(Clone, Debug)]
pub struct Random([u64; 4]);

impl Random {
    /// The generator of `seed`.
    pub fn new(seed: u64) -> Self {
        let mut state = seed;
        let mut split_mix = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let a = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let b = (a ^ a >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            b ^ b >> 31
        };
        Self([split_mix(), split_mix(), split_mix(), split_mix()])
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// 8 random bits.
    pub fn byte(&mut self) -> u8 {
        (self.bits() >> 56) as u8
    }

    /// A number below `end`, which is not zero.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// True `percent` times out of a hundred.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of `choices`, which is not empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_repeat_and_differ() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            [random.bits(), random.bits(), random.bits()]
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn below_covers_its_range() {
        let mut random = Random::new(3);
        let mut seen = [false; 7];
        (0..500).for_each(|_| seen[random.below(7) as usize] = true);
        assert_eq!(seen, [true; 7]);
    }
}
