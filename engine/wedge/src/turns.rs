//! Whose turn it is, seen from the monitor; and kicks, which go to whoever has it.

use crate::memory::MemoryObject;
use host::{Child, End};
use std::{
    io,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic::Ordering},
    time::Duration,
};
use wedge_abi::{KICK, LEFT, MAX_WEDGES, MONITOR, SpaceVersion};

/// How long the monitor waits before it looks whether a process has ended.
const PATIENCE: Duration = Duration::from_secs(1);
/// Times a kick follows the turn from wedge to wedge: more often than a guest can have it passed on.
const FOLLOW: usize = 16;

/// The turns of a vCPU's monitor and wedges.
#[derive(Clone, Debug)]
pub struct Turns(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    page: MemoryObject<wedge_abi::TurnsPage>,
    /// Processes by number, until they are reaped.
    children: Children,
    /// Those of their user code, where that has one of its own.
    users: Children,
}

/// What has become of the PCID of a space, at the hands of wedges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// The space has this one.
    Got(u64),
    /// Another space has the one that it had.
    Left,
}

impl Turns {
    pub(crate) fn new() -> io::Result<Self> {
        let page = MemoryObject::new("ring3-turns", size_of::<wedge_abi::TurnsPage>())?;
        let [children, users] = [(); 2].map(|()| std::array::from_fn(|_| RwLock::new(None)));
        Ok(Self(Arc::new(Inner { page, children, users })))
    }

    pub(crate) fn object(&self) -> &dyn host::MemoryObject {
        self.0.page.object()
    }

    /// The wedge with a number is this child of ours, which has not been reaped.
    pub(crate) fn adopt(&self, number: usize, child: Box<dyn Child>) {
        if let Some(mut known) = write(&self.0.children, number) {
            *known = Some(child);
        }
    }

    /// So for the process of its user code.
    pub(crate) fn adopt_user(&self, number: usize, child: Box<dyn Child>) {
        if let Some(mut known) = write(&self.0.users, number) {
            *known = Some(child);
        }
    }

    /// Ends the wedge with a number.
    pub(crate) fn end(&self, number: usize) {
        self.publish(number, None); // another may come with this number
        self.publish_version(number, None);
        let _ = self.take_move(number);
        for known in [&self.0.children, &self.0.users] {
            let child = write(known, number).and_then(|mut known| known.take());
            if let Some(child) = child {
                child.end();
            }
        }
    }

    /// Kicks reach the wedge with this number from now on, and those that it passes its turn on to.
    pub(crate) fn aim(&self, number: usize) {
        self.page().current.store(number as u32, Ordering::SeqCst);
    }

    /// The wedge with a number can go on in the space of a PCID by itself, or cannot.
    pub(crate) fn publish(&self, number: usize, pcid: Option<u64>) {
        if let Some(space) = self.page().spaces.get(number) {
            space.store(pcid.map_or(0, |pcid| pcid as u32 + 1), Ordering::Relaxed);
        }
    }

    /// The wedge with a number can go on in the space of this version by itself, or cannot.
    pub(crate) fn publish_version(&self, number: usize, version: Option<SpaceVersion>) {
        if let Some(words) = self.page().versions.get(number) {
            let version = version.map_or([0; SpaceVersion::WORDS], SpaceVersion::words);
            words.iter().zip(version).for_each(|(word, to)| word.store(to, Ordering::Relaxed));
        }
    }

    /// Wedges find the versions of spaces here, relative to GS, and may pass the turn on by them. With zero they may not.
    pub fn pass_by_count(&self, counts: u64) {
        self.page().counts.store(counts, Ordering::Relaxed);
    }

    /// The version at which guest code has left the space of a wedge last, if that is known. Guest code can write it.
    pub(crate) fn left(&self, number: usize) -> Option<SpaceVersion> {
        let [root, owner, flushes] = &self.page().left.get(number)?;
        let [root, owner, flushes] =
            [root, owner, flushes].map(|word| word.load(Ordering::Relaxed));
        (owner != 0).then_some(SpaceVersion { root, owner, flushes })
    }

    /// Whether wedges have left spaces at new versions, or have moved PCIDs, since the last call.
    pub(crate) fn take_moved(&self) -> bool {
        self.page().moved.swap(0, Ordering::Relaxed) != 0
    }

    /// What wedges have done with the PCID of a wedge's space since the last call.
    pub(crate) fn take_move(&self, number: usize) -> Option<Move> {
        const PCIDS: u64 = 1 << 12;
        match self.page().moves.get(number)?.swap(0, Ordering::Relaxed) {
            0 => None,
            LEFT => Some(Move::Left),
            to => Some(u64::from(to) - 1).filter(|pcid| *pcid < PCIDS).map(Move::Got),
        }
    }

    /// Makes the wedge that has the turn come back, from any thread.
    pub fn kick(&self) {
        for _ in 0..FOLLOW {
            let current = self.page().current.load(Ordering::SeqCst);
            // The wedge first: it then knows of the kick when its user code comes back with one.
            for known in [&self.0.children, &self.0.users] {
                if let Some(child) =
                    read(known, current as usize).as_deref().and_then(Option::as_ref)
                {
                    child.signal(KICK);
                }
            }
            if self.page().current.load(Ordering::SeqCst) == current {
                return;
            }
        }
    }

    /// Gives the wedge with a number its turn.
    pub(crate) fn give(&self, number: usize) {
        if let Some(word) = self.page().words.get(number) {
            word.store(1, Ordering::SeqCst);
            host::current().wake(word);
        }
    }

    /// Waits for the monitor's turn, a second at the most; false if it has not come.
    pub(crate) fn wait(&self) -> bool {
        let own = &self.page().words[MONITOR];
        if own.load(Ordering::SeqCst) == 0 {
            host::current().wait(own, 0, PATIENCE);
        }
        own.swap(0, Ordering::SeqCst) != 0
    }

    /// One of the wedges has ended, in this way.
    pub(crate) fn lost_one(&self) -> Option<End> {
        let all = [&self.0.children, &self.0.users];
        let numbers = (0..=MAX_WEDGES).flat_map(|number| all.map(|known| (known, number)));
        numbers.into_iter().find_map(|(known, number)| {
            let mut known = write(known, number)?;
            let end = known.as_ref().and_then(|child| child.ended())?;
            *known = None;
            Some(end)
        })
    }

    fn page(&self) -> &wedge_abi::TurnsPage {
        self.0.page.all()
    }
}

type Children = [RwLock<Option<Box<dyn Child>>>; MAX_WEDGES + 1];

fn read(known: &Children, number: usize) -> Option<RwLockReadGuard<'_, Option<Box<dyn Child>>>> {
    Some(known.get(number)?.read().unwrap_or_else(PoisonError::into_inner))
}

fn write(known: &Children, number: usize) -> Option<RwLockWriteGuard<'_, Option<Box<dyn Child>>>> {
    Some(known.get(number)?.write().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// A child that has ended by itself.
    #[derive(Debug)]
    struct Ended(Arc<AtomicUsize>);

    impl Child for Ended {
        fn number(&self) -> i32 {
            1
        }
        fn signal(&self, _: i32) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        fn trace(&self) -> std::io::Result<()> {
            Ok(())
        }
        fn end(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        fn ended(&self) -> Option<End> {
            Some(End::Exited(7))
        }
    }

    #[test]
    fn moves_are_told_once_and_decoded() {
        let turns = Turns::new().expect("memory");
        assert!(!turns.take_moved() && turns.take_move(3).is_none());
        let page = turns.page();
        page.moved.store(1, Ordering::Relaxed);
        for (number, word) in [(3, 5), (4, LEFT), (5, 4097), (6, LEFT - 1)] {
            page.moves[number].store(word, Ordering::Relaxed);
        }
        assert!(turns.take_moved() && !turns.take_moved());
        let moves = [3, 3, 4, 5, 6, MAX_WEDGES + 1].map(|number| turns.take_move(number));
        assert_eq!(moves, [Some(Move::Got(4)), None, Some(Move::Left), None, None, None]);
    }

    /// Who ends or kicks a child that has ended ends nobody else, whatever has its number.
    #[test]
    fn what_has_ended_is_not_signalled() {
        let (turns, signals) = (Turns::new().expect("memory"), Arc::default());
        turns.adopt(1, Box::new(Ended(Arc::clone(&signals))));
        assert_eq!(turns.lost_one(), Some(End::Exited(7)));
        assert_eq!(turns.lost_one(), None, "it is lost once");
        turns.aim(1);
        turns.kick();
        turns.end(1);
        assert_eq!(signals.load(Ordering::SeqCst), 0);
    }
}
