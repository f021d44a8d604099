//! How many mappings the host has to hold for one space.
//!
//! The host allows so many to a process (`vm.max_map_count`), and a space stops before. Counting what is made is cheap,
//! but says nothing of what has gone since, nor of pages that go on in RAM where others end, which the host makes one
//! mapping of. So when that count is at its end, what is left is counted, and only a space that really holds too much
//! gives some up: the user's pages behind those given up the last time, by address, a quarter of all there may be. To
//! start over instead costs a program whose pages are many and far apart all of them each time. The tables that say
//! where RAM pages are mapped hold on to what has gone in the same way, and are cleared of it at the same time.
//!
//! A mapping that is cut into three counts as two, so the host's count can be the larger one. If the host then refuses one,
//! the space starts over (`Fast::enter`): slow, and right.
//!
//! A space that gives some up again and again is under pressure (`pressure`): look-ups do what mappings cannot.
//!
//! What a wedge says it has mapped is a guest's word, and takes memory of ours: so many entries, for all spaces together, as
//! [`most_entries`] says.

use super::{LARGE, Space, runs};
use crate::process::Process;
use wedge::Error;

/// Entries there may be of a machine with so many pages of RAM: one for where each is mapped, one for that it may be written there,
/// and one to spare, some 40 bytes each, thus 3 % of RAM; and 10 MiB more.
pub(crate) fn most_entries(ram_pages: u64) -> usize {
    (1 << 18) + 3 * ram_pages as usize
}

/// So many of a hundred mappings a space may hold when they are counted; counting again sooner is not worth it.
const MAY_BE_LEFT: usize = 90;
/// So many of a hundred a space gives up that holds more.
const GIVEN_UP: usize = 25;

impl<W: Process> Space<W> {
    /// What is kept of this space, in entries of all tables.
    pub(crate) fn entries(&self) -> usize {
        self.mapper.mappings().entries()
    }

    /// There is room for more mappings from here on.
    pub(super) fn make_room(&mut self) -> Result<(), Error> {
        if self.mapper.mappings().made() <= W::max_mappings() {
            return Ok(());
        }
        if self.mapper.recount() > W::max_mappings() * MAY_BE_LEFT / 100 {
            self.give_up_some(W::max_mappings() * GIVEN_UP / 100)?;
            self.pressure.note();
        }
        self.mapper.compact();
        Ok(())
    }

    /// Drops so many of the user's pages, and what else is in the same 2 MiB, or all there is if they are fewer.
    fn give_up_some(&mut self, count: usize) -> Result<(), Error> {
        if self.mapper.mappings().user().len() < count {
            return self.clear_all();
        }
        let mut blocks = self.mapper.mappings().blocks_from(self.given_up, count);
        self.given_up = blocks.last().map_or(0, |last| last + LARGE);
        blocks.sort_unstable();
        blocks.dedup();
        for (start, end) in runs(&blocks, LARGE) {
            self.mapper.drop_range(start, end - start)?;
        }
        self.mapper.recount();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{super::KERNEL_PAGE, *};
    use crate::{Selection, listener::Listener};
    use wedge::{MapCommand, MapReport, Owner, Pages, Rights, WedgeRam};
    use wedge_abi::TextPage;

    const PAGE: u64 = 4096;

    fn space() -> Space<Listener> {
        Space::new(Listener::default(), Default::default(), 1, Default::default())
    }

    fn mapped(page: u64) -> MapReport {
        mapped_at(page * PAGE, page)
    }

    fn mapped_at(start: u64, page: u64) -> MapReport {
        let (rights, owner, piece) = (Rights::READ_WRITE, Owner::User, false);
        MapReport::Mapped { start, len: PAGE, offset: page * PAGE, rights, owner, piece }
    }

    fn dropped(page: u64) -> MapReport {
        MapReport::Dropped { start: page * PAGE, len: PAGE }
    }

    /// Maps pages and has them taken away but for the last one.
    fn churn(space: &mut Space<Listener>) {
        for page in 1..=101 {
            space.absorb(mapped(page));
            if page != 101 {
                space.absorb(dropped(page));
                space.mapper.unmap_pages(&[page * PAGE]).expect("listens");
            }
        }
        space.mapper.wedge_mut().told.clear();
    }

    #[test]
    fn what_is_gone_does_not_count() {
        let mut space = space();
        churn(&mut space);
        space.make_room().expect("listens");
        assert_eq!((space.mapper.mappings().made(), space.mapper.wedge().told.len()), (1, 0));
    }

    #[test]
    fn pages_that_go_on_in_ram_count_as_one_mapping() {
        let mut space = space();
        // Three by three, with one left out between them, and the last ones elsewhere in RAM.
        let pages = (0..=111u64).filter(|page| page % 4 != 3);
        pages.clone().for_each(|page| space.absorb(mapped(page + 4)));
        space.absorb(mapped_at(117 * PAGE, 7));
        (200..=217).for_each(|page| space.absorb(mapped_at(page * PAGE, 2 * page)));
        space.make_room().expect("listens");
        assert_eq!(
            (space.mapper.mappings().made(), space.mapper.wedge().told.len()),
            (28 + 1 + 18, 0)
        );
    }

    #[test]
    fn what_is_left_is_still_known_to_be_writable() {
        let mut space = space();
        churn(&mut space);
        space.make_room().expect("listens");
        space.protect(50 * PAGE).expect("listens");
        assert_eq!(space.mapper.wedge().told, []);
        space.protect(101 * PAGE).expect("listens");
        assert_eq!(space.mapper.wedge().told.len(), 1);
    }

    /// Pages 2 MiB apart.
    fn apart(page: u64) -> MapReport {
        mapped_at(page * LARGE, page)
    }

    #[test]
    fn a_space_that_is_full_gives_up_a_quarter_by_address() {
        let mut space = space();
        (1..=101).for_each(|page| space.absorb(apart(page)));
        space.make_room().expect("listens");
        let unmap =
            |start: u64, len: u64| MapCommand::Unmap { start: start * LARGE, len: len * LARGE };
        assert_eq!(
            (space.mapper.mappings().made(), std::mem::take(&mut space.mapper.wedge_mut().told)),
            (76, vec![unmap(1, 25)])
        );
        (1..=25).for_each(|page| space.absorb(apart(page)));
        space.given_up = 90 * LARGE; // around the end
        space.make_room().expect("listens");
        assert_eq!(
            (space.mapper.mappings().made(), std::mem::take(&mut space.mapper.wedge_mut().told)),
            (76, vec![unmap(1, 13), unmap(90, 12)])
        );
    }

    /// What is not the user's cannot be given up in parts.
    #[test]
    fn a_space_full_of_others_starts_over() {
        let mut space = space();
        (1..=20).for_each(|page| space.absorb(apart(page)));
        (0..90)
            .for_each(|page| space.mapper.map(page * PAGE, PAGE, 0, KERNEL_PAGE).expect("listens"));
        assert_eq!((space.mapper.mappings().made(), space.mapper.wedge().told.len()), (110, 90));
        space.mapper.wedge_mut().told.clear();
        space.make_room().expect("listens");
        assert_eq!((space.mapper.mappings().made(), space.mapper.mappings().user().len()), (0, 0));
        assert!(!space.mapper.wedge().told.is_empty());
    }

    /// A hostile wedge's word for mappings that cost the host nothing, each for another page.
    #[derive(Default)]
    struct Liar(u64);

    impl Process for Liar {
        fn max_mappings() -> usize {
            30_000
        }
        fn start(_: WedgeRam<'_>, _: &Pages, _: usize) -> Result<Self, Error> {
            Ok(Self::default())
        }
        fn order(&mut self, _: MapCommand) -> Result<(), Error> {
            Ok(())
        }
        fn run(&mut self) -> Result<bool, Error> {
            Ok(true)
        }
        fn take_failure(&mut self) -> bool {
            false
        }
        fn publish(&self, _: Option<u64>) {}
        fn take_made(&mut self) -> Vec<MapReport> {
            let claim = |number: u64| {
                let (start, len) = (number % (1 << 30) * 64 * PAGE, 64 * PAGE);
                let (offset, rights, owner) = (0, Rights::READ_WRITE, Owner::User);
                match number % 4 {
                    0 => MapReport::Mapped { start, len, offset, rights, owner, piece: false },
                    1 => MapReport::Refused { page: start },
                    2 => MapReport::Mapped { start, len, offset, rights, owner, piece: true },
                    _ => MapReport::Shown { page: start, offset, rights },
                }
            };
            let claims = self.0..self.0 + wedge_abi::MAX_MADE as u64;
            self.0 = claims.end;
            claims.map(claim).collect()
        }
        fn allow(&mut self, _: usize, _: bool) {}
        fn look_up(&mut self, _: bool) {}
        fn hide(&mut self, _: u64) {}
        fn show_all(&mut self) {}
        fn forget_lookups(&mut self, _: u64, _: u64) {}
        fn watch_forks(&mut self) {}
        fn take_fork(&mut self) -> bool {
            false
        }
        fn has_verified_code(&self) -> bool {
            false
        }
        fn verify_code(&mut self, _: TextPage, _: u64, _: u64) -> bool {
            true
        }
        fn resolve(&self, place: u64) -> u64 {
            place
        }
        fn clear_lookups(&mut self) {}
        fn protect_lookups(&mut self, _: u64) {}
        fn displaced(&mut self, _: u64) {}
        fn patched_entry(&self) -> u64 {
            0
        }
        fn keeps(&self) -> bool {
            true
        }
        fn processes(&self) -> Vec<i32> {
            Vec::new()
        }
        fn searches(&self) -> bool {
            false
        }
        fn hides_code(&self) -> bool {
            false
        }
    }

    #[test]
    fn what_a_hostile_wedge_says_takes_no_more_memory_than_it_may() {
        let ram = ram::Ram::new(1 << 20).expect("memory");
        let most = most_entries(ram.len() / PAGE);
        let pages = Pages::new().expect("the host has memory");
        let mut slots = crate::slots::Slots::<Liar>::new(ram, wedge_abi::Base::default(), true);
        slots.select(Selection::uncounted(1, Default::default()), &pages).expect("a slot");
        let mut largest = 0;
        for _ in 0..400 {
            slots.run(false, Default::default()).expect("it runs");
            slots.take_invalidated();
            largest = largest.max(slots.entries());
        }
        // It is looked at now and then only.
        let between = 2 * crate::slots::CLAIMS * 64;
        assert!((most / 2..most + between).contains(&largest), "{largest} of {most}");
    }

    /// A page that the wedge has closed is still one of the host's mappings.
    #[test]
    fn what_is_closed_counts() {
        let mut space = space();
        for page in 1..=101 {
            space.absorb(mapped(page));
            space.absorb(dropped(page));
        }
        space.make_room().expect("listens");
        assert!(space.mapper.mappings().made() < 100);
        assert!(!space.mapper.wedge().told.is_empty());
    }
}
