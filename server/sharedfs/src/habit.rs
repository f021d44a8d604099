//! Whether the guest wants more of a folder's entries than their names.
//!
//! A listing that it has in its cache costs the guest one request, and then one more for each entry that it wants the attributes of. A listing
//! from us has the attributes of all, some two dozen in a request. Which is cheaper shows in what the guest does right after a listing of its own.

use std::time::{Duration, Instant};

/// So many lookups, so soon after a folder was opened, say that the guest goes through it for more than names.
const LOOKUPS: u32 = 8;
const SOON: Duration = Duration::from_millis(20);
/// So many listings come from us then. The next comes from the guest's cache again, and shows whether the guest still does so.
const LISTINGS: u32 = 16;

/// What the guest has done with one folder.
#[derive(Default)]
pub(crate) struct Habit {
    /// When it was opened for a listing from the cache.
    opened: Option<Instant>,
    /// Lookups soon after that.
    lookups: u32,
    /// Listings that are to come from us.
    left: u32,
}

impl Habit {
    /// A folder is opened: whether it may be listed from the guest's cache.
    pub(crate) fn opens(&mut self, now: Instant) -> bool {
        let is_ours = self.left > 0;
        self.left = self.left.saturating_sub(1);
        (self.opened, self.lookups) = ((!is_ours).then_some(now), 0);
        !is_ours
    }

    /// A name that is there was looked up in it.
    pub(crate) fn looks_up(&mut self, now: Instant) {
        let Some(opened) = self.opened else { return };
        if now.duration_since(opened) > SOON {
            self.opened = None;
            return;
        }
        self.lookups += 1;
        if self.lookups >= LOOKUPS {
            (self.opened, self.left) = (None, LISTINGS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A listing, and lookups so long after it; whether the cache was allowed.
    fn lists(habit: &mut Habit, now: &mut Instant, lookups: u32, after: Duration) -> bool {
        *now += Duration::from_secs(1);
        let cached = habit.opens(*now);
        (0..lookups).for_each(|_| habit.looks_up(*now + after));
        cached
    }

    #[test]
    fn who_looks_everything_up_gets_it_with_the_listing() {
        let (mut habit, mut now) = (Habit::default(), Instant::now());
        assert!(lists(&mut habit, &mut now, LOOKUPS, SOON));
        for _ in 0..LISTINGS {
            assert!(!lists(&mut habit, &mut now, 0, SOON), "nothing is left to look up");
        }
        assert!(lists(&mut habit, &mut now, LOOKUPS, SOON), "it is tried again");
        assert!(!lists(&mut habit, &mut now, 0, SOON));
    }

    #[test]
    fn names_from_the_cache_are_enough_for_who_looks_up_little_or_later() {
        let (mut habit, mut now) = (Habit::default(), Instant::now());
        for (lookups, after) in [(LOOKUPS - 1, SOON), (100, SOON * 2), (1, SOON), (0, SOON)] {
            assert!(lists(&mut habit, &mut now, lookups, after), "{lookups}");
        }
        assert!(lists(&mut habit, &mut now, 0, SOON));
    }
}
