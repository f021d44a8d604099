//! Places: what translated code of programs has for addresses.
//!
//! A program, or a library, is loaded at another address each time, but its pages of code keep their distances. So pages that have been
//! seen near each other are one text. A place is a text and a distance from the text's origin. Each wedge knows the GVA of that origin in
//! its address space ([`crate::Lookups::verify`]).

/// Set in a place, and in no GVA: an address with this bit is not canonical unless it is the kernel's.
pub const PLACE: u64 = 1 << 62;
/// So many texts there can be.
pub const MAX_TEXTS: usize = 1 << 12;
/// Pages of a text lie this far from its origin at the most, in bytes. Direct jumps and operands from there reach three times as far at
/// the most, and such distances have room in a place.
pub const TEXT_REACH: i64 = 1 << 30;
/// Bits of a place for the distance.
const DISTANCE_BITS: u32 = 34;
/// What a place has for distance zero.
const ZERO: u64 = 1 << (DISTANCE_BITS - 1);
/// The bits in which places differ.
const PLACE_BITS: u64 = ((MAX_TEXTS as u64) << DISTANCE_BITS) - 1;
const _: () = assert!(PLACE_BITS <= crate::GVA_MASK);

/// Bytes of a block's head, before its gate: the block's place, and the check of where a computed jump leads.
pub const HEAD_LEN: u64 = 48;
/// Bytes before the gate at which computed jumps come: behind the place, which is a word.
pub const FRONT_LEN: u64 = HEAD_LEN - 8;
/// In [`crate::ExitState::info`] of a [`crate::BlockExit::Miss`]: RIP is where a computed jump of user code has led, and no place.
pub const COMPUTED: u64 = u64::MAX;

/// The place so many bytes from the origin of a text.
pub const fn place(text: usize, distance: i64) -> u64 {
    PLACE | (text as u64) << DISTANCE_BITS | ZERO.wrapping_add_signed(distance)
}

/// The word is a place and no address.
pub const fn is_place(word: u64) -> bool {
    word >> 62 == 1
}

/// The text of a place.
pub const fn text_of(place: u64) -> usize {
    (place >> DISTANCE_BITS) as usize % MAX_TEXTS
}

/// How far a place is from the origin of its text.
pub const fn distance(place: u64) -> i64 {
    (place & (2 * ZERO - 1)).wrapping_sub(ZERO) as i64
}

/// A page of translated user code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextPage {
    /// The place of the page's first byte. Where code is translated for one address, the page's GVA.
    pub place: u64,
    /// Its index among all pages that code has been made from.
    pub index: u32,
}

/// Bits of a word for the index of a page.
const INDEX_BITS: u32 = crate::MAX_VERSIONS.trailing_zeros();

impl TextPage {
    /// As a word. `self` has a place.
    pub const fn to_word(self) -> u64 {
        (self.place & PLACE_BITS) >> 12 << INDEX_BITS | self.index as u64
    }

    /// The page with a place that a word stands for.
    pub const fn from_word(word: u64) -> Self {
        let place = PLACE | word >> INDEX_BITS << 12;
        Self { place, index: word as u32 % crate::MAX_VERSIONS as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: [i64; 7] = [0, 1, -1, 0x1234_5678, -TEXT_REACH, TEXT_REACH, 3 * TEXT_REACH];

    #[test]
    fn places_say_what_they_are() {
        for (text, far) in [0, 1, MAX_TEXTS - 1].into_iter().flat_map(|t| FAR.map(|far| (t, far))) {
            let at = place(text, far);
            assert_eq!((is_place(at), text_of(at), distance(at)), (true, text, far));
            assert_eq!(at.wrapping_add(0x1000), place(text, far + 0x1000));
            assert_eq!(at & crate::GVA_MASK | PLACE, at);
        }
        for address in [0, 0x7fff_ffff_ffff, 0xffff_8000_0000_0000, u64::MAX] {
            assert!(!is_place(address), "{address:#x}");
        }
    }

    #[test]
    fn pages_fit_into_a_word() {
        for far in FAR.map(|far| far & !0xfff) {
            let page = TextPage { place: place(MAX_TEXTS - 1, far), index: 0xfffe };
            assert_eq!(TextPage::from_word(page.to_word()), page);
        }
    }
}
