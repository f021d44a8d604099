//! What memory holds where a case says nothing: one of a few fixed images, so that case files
//! stay small and every load still finds something that matters to arithmetic.

use std::sync::OnceLock;

use crate::layout::IMAGE_LEN;
use crate::random::Random;
use crate::values;

/// How many backgrounds there are.
pub const COUNT: u8 = 8;

/// Background `number` (modulo [`COUNT`]). Number 0 is all zeros.
pub fn image(number: u8) -> Box<[u8; IMAGE_LEN]> {
    static IMAGES: OnceLock<Vec<Box<[u8; IMAGE_LEN]>>> = OnceLock::new();
    let images = IMAGES.get_or_init(|| (0..COUNT).map(make).collect());
    images[usize::from(number % COUNT)].clone()
}

fn make(number: u8) -> Box<[u8; IMAGE_LEN]> {
    let mut image = Box::new([0; IMAGE_LEN]);
    if number != 0 {
        let mut random = Random::new(u64::from(number));
        for chunk in image.chunks_exact_mut(16) {
            chunk.copy_from_slice(&values::lanes(&mut random));
        }
    }
    image
}
