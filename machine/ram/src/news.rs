//! What vCPUs tell each other about pages that hold code.
//!
//! A vCPU may write some pages unnoticed (its TLB says so), and runs code that was made from other pages. Marks of pages
//! say which pages are which. A vCPU that changes a mark posts the change to all other vCPUs, kicks them, and waits until
//! they have taken the news. It waits only for vCPUs that run guest code; the others take their news before they do. A
//! vCPU that waits counts as one that runs no guest code, so no two vCPUs wait for each other.

use std::mem::take;

use bus::Kicker;
use contract::CodeNews;

use crate::sync::{
    Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
    atomic::{AtomicBool, Ordering},
};

/// What one vCPU has to hear.
#[derive(Default)]
pub(crate) struct Inbox {
    unread: AtomicBool,
    state: Mutex<NewsState>,
    changed: Condvar,
    kicker: OnceLock<Arc<dyn Kicker>>,
}

#[derive(Default)]
struct NewsState {
    news: CodeNews,
    /// The vCPU runs guest code.
    inside: bool,
    /// News posted so far.
    posted: u64,
    /// Of those, how many have been taken.
    taken: u64,
    /// News that this vCPU has posted to others, as far as it does not know that they have taken it.
    owed: Vec<Receipt>,
}

/// Something posted to a vCPU that ran guest code then.
struct Receipt {
    vcpu: usize,
    number: u64,
}

/// A page's news.
#[derive(Clone, Copy)]
pub(crate) enum Change {
    /// It has been written, by the write of a number.
    Stale(u64),
    /// Code is being made from it.
    Closed,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, NewsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.unread.load(Ordering::Relaxed)
    }

    /// Posts: if the vCPU runs guest code the number of the news, and whether there are older ones.
    fn put(&self, page: u64, change: Change) -> (Option<u64>, bool) {
        let mut state = self.state();
        match change {
            Change::Stale(number) => {
                state.news.stale.push(page);
                state.news.writes.push(number);
            }
            Change::Closed => state.news.closed.push(page),
        }
        state.posted += 1;
        let known = self.unread.swap(true, Ordering::SeqCst);
        (state.inside.then_some(state.posted), known)
    }

    /// Posts; if the vCPU runs guest code, it is made to look up, and the number of the news is returned.
    fn post(&self, page: u64, change: Change) -> Option<u64> {
        let (number, known) = self.put(page, change);
        // Who has not taken older news either is on the way to them.
        if let Some(kicker) = self.kicker.get().filter(|_| number.is_some() && !known) {
            kicker.kick();
        }
        number
    }

    /// Waits until news have been taken, or the vCPU runs no guest code.
    fn wait(&self, number: u64) {
        let unread = |state: &mut NewsState| state.inside && state.taken < number;
        let _unused = self.changed.wait_while(self.state(), unread);
    }

    fn set_inside(&self, inside: bool) -> bool {
        let before = std::mem::replace(&mut self.state().inside, inside);
        if !inside {
            self.changed.notify_all();
        }
        before
    }
}

/// The inboxes of all vCPUs.
pub(crate) struct Inboxes {
    first: Arc<Inbox>,
    /// All of them, if there are several.
    all: OnceLock<Box<[Arc<Inbox>]>>,
}

impl Inboxes {
    /// That of one vCPU.
    pub(crate) fn one() -> Self {
        Self { first: Arc::default(), all: OnceLock::new() }
    }

    /// There is a vCPU for each kicker. To be called once, before any of them runs.
    pub(crate) fn divide(&self, kickers: Vec<Arc<dyn Kicker>>) {
        if kickers.len() < 2 {
            return;
        }
        let further = (1..kickers.len()).map(|_| Arc::default());
        let all: Box<[Arc<Inbox>]> = [Arc::clone(&self.first)].into_iter().chain(further).collect();
        for (inbox, kicker) in all.iter().zip(kickers) {
            // Nobody else has set one.
            let _ = inbox.kicker.set(kicker);
        }
        // As above.
        let _ = self.all.set(all);
    }

    fn all(&self) -> &[Arc<Inbox>] {
        self.all.get().map_or(std::slice::from_ref(&self.first), |all| all)
    }

    pub(crate) fn of(&self, vcpu: usize) -> Arc<Inbox> {
        Arc::clone(self.all().get(vcpu).unwrap_or(&self.first))
    }

    /// There are several vCPUs.
    #[inline]
    pub(crate) fn several(&self) -> bool {
        self.all.get().is_some()
    }

    /// Tells all vCPUs but `except` of a page.
    fn post(&self, page: u64, change: Change, except: Option<usize>) -> Vec<Receipt> {
        let others = self.all().iter().enumerate().filter(|(vcpu, _)| Some(*vcpu) != except);
        let receipt = |(vcpu, inbox): (usize, &Arc<Inbox>)| {
            inbox.post(page, change).map(|number| Receipt { vcpu, number })
        };
        others.filter_map(receipt).collect()
    }

    /// Tells all vCPUs that a page has been written. The one that has written it, if one has, waits for the
    /// others when it takes its own news, before its next instruction.
    pub(crate) fn written(&self, page: u64, number: u64, by: Option<usize>) {
        let receipts = self.post(page, Change::Stale(number), by);
        if let Some(own) = by.and_then(|by| self.all().get(by)) {
            own.put(page, Change::Stale(number));
            own.state().owed.extend(receipts);
        }
    }

    /// No vCPU but `by` can write a page unnoticed any more when this returns.
    pub(crate) fn close(&self, page: u64, by: Option<usize>) {
        let receipts = self.post(page, Change::Closed, by);
        self.wait(by, receipts);
    }

    fn wait(&self, who: Option<usize>, receipts: Vec<Receipt>) {
        if receipts.is_empty() {
            return;
        }
        self.wait_for(who, || {
            for Receipt { vcpu, number } in receipts {
                self.all().get(vcpu).into_iter().for_each(|inbox| inbox.wait(number));
            }
        });
    }

    /// Takes a vCPU's news, after what it has posted has been taken.
    pub(crate) fn take(&self, vcpu: usize) -> CodeNews {
        let Some(own) = self.all().get(vcpu) else { return CodeNews::default() };
        loop {
            let mut state = own.state();
            let owed = take(&mut state.owed);
            if owed.is_empty() {
                own.unread.store(false, Ordering::SeqCst);
                state.taken = state.posted;
                own.changed.notify_all();
                return take(&mut state.news);
            }
            drop(state);
            self.wait(Some(vcpu), owed);
        }
    }

    /// Has a vCPU count as one that runs no guest code while something waits for others.
    pub(crate) fn wait_for<T>(&self, vcpu: Option<usize>, wait: impl FnOnce() -> T) -> T {
        let own = vcpu.filter(|_| self.several()).and_then(|vcpu| self.all().get(vcpu));
        let inside = own.is_some_and(|own| own.set_inside(false));
        let done = wait();
        if inside && let Some(own) = own {
            own.set_inside(true);
        }
        done
    }

    /// A vCPU runs guest code from now on, or does not any more.
    pub(crate) fn set_inside(&self, vcpu: usize, inside: bool) {
        if self.several()
            && let Some(own) = self.all().get(vcpu)
        {
            own.set_inside(inside);
        }
    }
}
