//! Looking before sleeping.
//!
//! A thread that sleeps is woken some 50 us later, and two vCPUs whose processes wait for each other pay that both ways. So a vCPU that
//! halts looks for a moment whether it is kicked. As long as it looks in vain, it looks less and less often. (Linux does so for its guests:
//! virt/kvm/halt-polling.rst.)

/// How long a vCPU looks, in nanoseconds: what it takes to be woken.
const WINDOW: u64 = 50_000;
/// At most so many halts pass between two looks.
const SELDOM: u32 = 63;

/// When a vCPU looks.
#[derive(Debug, Default)]
pub(crate) struct HaltPoll {
    /// So many halts pass after a look in vain.
    pause: u32,
    /// So many halts are still to pass before the next look.
    left: u32,
}

impl HaltPoll {
    /// The vCPU has halted. Looks for as long as is worthwhile; `now` is the time in nanoseconds.
    pub fn look(&mut self, now: impl Fn() -> u64, is_kicked: impl Fn() -> bool) {
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        let started = now();
        while !is_kicked() {
            if now().saturating_sub(started) >= WINDOW {
                self.pause = (2 * self.pause + 1).min(SELDOM);
                self.left = self.pause;
                return;
            }
            std::hint::spin_loop();
        }
        self.pause = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Halts so many times, each until it is kicked after a time. Returns at which halts it looks.
    fn looks(poll: &mut HaltPoll, halts: usize, kicked_after: u64) -> Vec<usize> {
        let look = |_: &usize| {
            let time = Cell::new(0);
            let now = || time.replace(time.get() + 1000);
            poll.look(now, || time.get() > kicked_after);
            time.get() > 0
        };
        (0..halts).filter(look).collect()
    }

    #[test]
    fn who_looks_in_vain_looks_less_often() {
        let mut poll = HaltPoll::default();
        assert_eq!(looks(&mut poll, 40, u64::MAX), [0, 2, 6, 14, 30]);
        assert_eq!(looks(&mut poll, 1000, u64::MAX).len(), 16);
    }

    #[test]
    fn who_is_kicked_soon_looks_each_time() {
        let mut poll = HaltPoll::default();
        looks(&mut poll, 15, u64::MAX);
        assert_eq!(looks(&mut poll, 20, WINDOW / 2), [15, 16, 17, 18, 19]);
        assert_eq!(looks(&mut poll, 8, 2 * WINDOW), [0, 2, 6]);
    }
}
