//! Where a kernel's unwinding tables are that has no symbols for them, as Linux 7.2 has none.
//!
//! The first table cannot be taken for anything else: hundreds of thousands of distances, each from its own place to an address of the
//! kernel's code, in the order of these addresses. The second follows it (`ORC_UNWIND_TABLE` in Linux's linker script).

use std::ops::Range;

/// Entries at the least: what is shorter is another list of addresses in order.
const LEAST: usize = 100_000;
const PAGE: u64 = 4096;
const WORD: u64 = 4;

/// Addresses in order, each said as the distance from its own place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SortedRun {
    /// GVA of its first word.
    pub start: u64,
    /// Words.
    pub count: usize,
    last: u64,
}

/// Finds the first table in a kernel's image, a range of GVAs. `read` reads a page of the image at a GVA, and says whether it could.
pub fn in_kernel(image: Range<u64>, read: impl FnMut(u64, &mut [u8]) -> bool) -> Option<SortedRun> {
    Some(longest(image, read)).filter(|run| run.count >= LEAST)
}

fn longest(image: Range<u64>, mut read: impl FnMut(u64, &mut [u8]) -> bool) -> SortedRun {
    let (mut run, mut longest) = (SortedRun::default(), SortedRun::default());
    let mut page = [0; PAGE as usize];
    for at in (image.start & !(PAGE - 1)..image.end).step_by(PAGE as usize) {
        if !read(at, &mut page) {
            run = SortedRun::default();
            continue;
        }
        for (n, word) in page.as_chunks().0.iter().enumerate() {
            let place = at + WORD * n as u64;
            let address = place.wrapping_add_signed(i32::from_le_bytes(*word).into());
            run = run.with(place, address, &image);
            if run.count > longest.count {
                longest = run;
            }
        }
    }
    longest
}

impl SortedRun {
    /// The run with another word, or the one that begins there.
    fn with(self, place: u64, address: u64, image: &Range<u64>) -> Self {
        match image.contains(&address) {
            false => Self::default(),
            true if self.count != 0 && address >= self.last => {
                Self { count: self.count + 1, last: address, ..self }
            }
            true => Self { start: place, count: 1, last: address },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: Range<u64> = 0xffff_ffff_8100_0000..0xffff_ffff_8100_8000;
    const TABLE: u64 = IMAGE.start + 0x2ffc;

    /// Reads pages of an image with two lists of addresses in order: `count` of them at [`TABLE`], and a shorter list before that. One
    /// page cannot be read.
    fn image(count: u64) -> impl FnMut(u64, &mut [u8]) -> bool {
        move |page, bytes| {
            for (n, word) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let place = page + 4 * n as u64;
                let target = match place {
                    _ if (TABLE..TABLE + 4 * count).contains(&place) => {
                        IMAGE.start + (place - TABLE)
                    }
                    _ if (IMAGE.start + 0x400..IMAGE.start + 0x440).contains(&place) => place,
                    _ => 0,
                };
                *word = (target.wrapping_sub(place) as u32).to_le_bytes();
            }
            page != IMAGE.start + 0x1000
        }
    }

    #[test]
    fn the_longest_list_of_addresses_in_order_is_found() {
        let found = longest(IMAGE, image(3000));
        assert_eq!((found.start, found.count), (TABLE, 3000));
    }

    #[test]
    fn a_list_that_is_too_short_is_no_table() {
        assert_eq!(in_kernel(IMAGE, image(3000)), None);
        assert_eq!(longest(IMAGE, |_, _| false).count, 0, "and no memory has none");
    }
}
