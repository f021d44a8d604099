//! How many mappings the host has to hold for one space.
//!
//! The host allows 65,530 to a process and fails badly near that, so a space stops long before. Counting what
//! is made is cheap and never too little, but says nothing of what has gone since; so when that count is at its end,
//! what is left is counted, and only a space that really holds too much starts over. The tables that say where
//! RAM pages are mapped hold on to what has gone in the same way, and are cleared of it at the same time.

use super::{Space, WRITE};
use crate::process::Process;
use wedge::Error;

/// So many of a hundred of them it may hold then; counting again soon is not worth it.
const MAY_BE_LEFT: usize = 75;

impl<W: Process> Space<W> {
    /// There is room for more mappings from here on.
    pub(super) fn make_room(&mut self) -> Result<(), Error> {
        if self.mappings <= W::MAX_MAPPINGS {
            return Ok(());
        }
        // A page of the user's is one mapping at the most, whatever has been cut out around it.
        self.mappings = self.pages.len() + self.others;
        if self.mappings > W::MAX_MAPPINGS * MAY_BE_LEFT / 100 {
            return self.clear_all();
        }
        self.compact();
        Ok(())
    }

    /// Forgets where RAM pages were mapped once.
    fn compact(&mut self) {
        let (pages, user) = (&self.pages, &self.user_regions);
        let mapped = |hva: u64, of: u64, rights: u64| {
            let shown =
                |(offset, protection): &(u64, u64)| *offset == of && protection & rights == rights;
            !user.has(hva) || pages.get(&hva).is_some_and(shown)
        };
        for (places, rights) in [(&mut self.writable, WRITE), (&mut self.copies, 0)] {
            places.retain(|offset, hva| mapped(hva, offset, rights));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wedge::{Order, Pages, Ram};

    const PAGE: u64 = 4096;
    const READ: u64 = 1;

    /// A process that only remembers what it was told.
    #[derive(Default)]
    struct Listener(Vec<Order>);

    impl Process for Listener {
        const MAX_MAPPINGS: usize = 100;

        fn start(_: Ram<'_>, _: &Pages, _: usize) -> Result<Self, Error> {
            Ok(Self::default())
        }
        fn order(&mut self, order: Order) -> Result<(), Error> {
            self.0.push(order);
            Ok(())
        }
        fn run(&mut self) -> Result<bool, Error> {
            Ok(true)
        }
        fn publish(&self, _: Option<u64>) {}
        fn take_made(&mut self) -> Vec<Order> {
            Vec::new()
        }
        fn allow(&mut self, _: usize, _: bool) {}
        fn displaced(&mut self, _: u64) {}
        fn patched_entry(&self) -> u64 {
            0
        }
        fn pid(&self) -> i32 {
            0
        }
        fn searches(&self) -> bool {
            false
        }
    }

    fn space() -> Space<Listener> {
        Space::new(Listener::default(), Default::default(), 1, Default::default(), Default::default())
    }

    fn shown(page: u64) -> Order {
        Order { address: page * PAGE, len: PAGE, offset: page * PAGE, protection: READ | WRITE }
    }

    /// Maps pages and has them taken away but for the last one.
    fn churn(space: &mut Space<Listener>) {
        for page in 1..=101 {
            space.absorb(&shown(page));
            if page != 101 {
                space.absorb(&Order { protection: 0, ..shown(page) });
                space.unmap_pages(&[page * PAGE]).expect("listens");
            }
        }
        space.wedge.0.clear();
    }

    #[test]
    fn what_is_gone_does_not_count() {
        let mut space = space();
        churn(&mut space);
        space.make_room().expect("listens");
        assert_eq!((space.mappings, space.wedge.0.len()), (1, 0));
    }

    #[test]
    fn what_is_left_is_still_known_to_be_writable() {
        let mut space = space();
        churn(&mut space);
        space.make_room().expect("listens");
        space.protect(50 * PAGE).expect("listens");
        assert_eq!(space.wedge.0, []);
        space.protect(101 * PAGE).expect("listens");
        assert_eq!(space.wedge.0.len(), 1);
    }

    #[test]
    fn a_space_that_is_full_starts_over() {
        let mut space = space();
        (1..=101).for_each(|page| space.absorb(&shown(page)));
        space.make_room().expect("listens");
        assert_eq!(space.mappings, 0);
        assert!(!space.wedge.0.is_empty());
    }

    /// A page that the wedge has closed is still one of the host's mappings.
    #[test]
    fn what_is_closed_counts() {
        let mut space = space();
        for page in 1..=101 {
            space.absorb(&shown(page));
            space.absorb(&Order { protection: 0, ..shown(page) });
        }
        space.make_room().expect("listens");
        assert_eq!(space.mappings, 0);
        assert!(!space.wedge.0.is_empty());
    }
}
