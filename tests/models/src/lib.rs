//! What vCPUs do to each other, under a scheduler that chooses the order of their steps.
//!
//! The files are those of the crates `engine` and `ram`, compiled here with shuttle's locks, condition variables and atomics in place of
//! the standard library's (`crate::sync`): each use of one is a point at which another thread may go on. A model is a test in `tests/`.
//! A thread that waits for ever is a deadlock, and fails. Time does not pass: whoever relies on a timeout to go on waits for ever, too.

/// What the files take from here in place of `std::sync`.
#[allow(unused_imports)] // each file needs some of it
mod sync {
    pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
    pub use std::sync::{Arc, OnceLock, PoisonError};
}

/// Stands for the engine's work queue: no model has a debugger.
mod vcpu_work {
    /// Work that does nothing.
    pub type VcpuWork = ();

    /// A queue that takes no work.
    #[derive(Default)]
    pub(crate) struct WorkQueue;

    impl WorkQueue {
        pub(crate) fn add(&self, (): VcpuWork) -> bool {
            false
        }
    }
}

#[allow(dead_code)]
#[path = "../../../engine/engine/src/cpu_pool.rs"]
mod cpu_pool;
#[allow(dead_code)]
#[path = "../../../machine/ram/src/news.rs"]
mod news;
#[allow(dead_code)] // models use some of it
#[path = "../../../engine/engine/src/requests.rs"]
mod requests;

pub use cpu_pool::{CpuPermit, CpuPool};
pub use requests::VcpuRequests;

use contract::CodeNews;

/// What vCPUs tell each other about code pages: `ram`'s inboxes.
pub struct News(news::Inboxes);

/// Kicks nothing: the models' vCPUs poll.
struct NoKicker;

impl bus::Kicker for NoKicker {
    fn kick(&self) {}
}

impl News {
    /// Of so many vCPUs, each of which looks for news before each of its steps.
    #[must_use]
    pub fn of(vcpus: usize) -> Self {
        let news = news::Inboxes::one();
        let kicker = || sync::Arc::new(NoKicker) as sync::Arc<dyn bus::Kicker>;
        news.divide((0..vcpus).map(|_| kicker()).collect());
        Self(news)
    }

    /// A vCPU runs guest code from now on, or none any more.
    pub fn set_inside(&self, vcpu: usize, inside: bool) {
        self.0.set_inside(vcpu, inside);
    }

    /// Whether a vCPU has something to hear.
    #[must_use]
    pub fn has_news(&self, vcpu: usize) -> bool {
        self.0.of(vcpu).has_news()
    }

    /// It hears it.
    #[must_use]
    pub fn take(&self, vcpu: usize) -> CodeNews {
        self.0.take(vcpu)
    }

    /// It makes code from a page.
    pub fn close(&self, page: u64, by: usize) {
        self.0.close(page, Some(by));
    }

    /// It has written a page of which there is code.
    pub fn written(&self, page: u64, by: usize) {
        self.0.written(page, 0, Some(by));
    }
}
