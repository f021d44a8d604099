//! What vCPUs tell each other about code pages is heard before it matters, and nobody waits for one that waits for him.

use std::sync::Arc;

use models::News;
use shuttle::{
    check_pct, check_random,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
};

const PAGE: u64 = 7;

/// A vCPU: between two looks at its news it is in the middle of an instruction.
struct Vcpu {
    number: usize,
    news: Arc<News>,
    /// It writes the page without telling anybody.
    writes: Arc<[AtomicBool]>,
    /// It runs guest code.
    inside: Arc<[AtomicBool]>,
}

impl Vcpu {
    /// What it has missed comes first: whether the page is new.
    fn enter(&self) -> bool {
        self.news.set_inside(self.number, true);
        let stale = self.hear();
        self.inside[self.number].store(true, SeqCst);
        stale
    }

    fn leave(&self) {
        self.inside[self.number].store(false, SeqCst);
        self.news.set_inside(self.number, false);
    }

    fn hear(&self) -> bool {
        if !self.news.has_news(self.number) {
            return false;
        }
        // It executes nothing before it has acted on what it hears.
        let inside = self.inside[self.number].swap(false, SeqCst);
        let news = self.news.take(self.number);
        if news.closed.contains(&PAGE) {
            self.writes[self.number].store(false, SeqCst);
        }
        self.inside[self.number].store(inside, SeqCst);
        news.stale.contains(&PAGE)
    }

    /// Makes code of the page: no other vCPU that runs writes it unnoticed then.
    fn make_code(&self) {
        self.writes[self.number].store(false, SeqCst);
        self.inside[self.number].store(false, SeqCst);
        self.news.close(PAGE, self.number);
        for other in (0..self.writes.len()).filter(|other| *other != self.number) {
            let writes = self.inside[other].load(SeqCst) && self.writes[other].load(SeqCst);
            assert!(!writes, "vCPU {other} writes unnoticed");
        }
        // What it has been told while it waited.
        self.hear();
        self.inside[self.number].store(true, SeqCst);
    }
}

fn vcpus(count: usize) -> Vec<Vcpu> {
    let news = Arc::new(News::of(count));
    let writes: Arc<[_]> = (0..count).map(|_| AtomicBool::new(true)).collect();
    let inside: Arc<[_]> = (0..count).map(|_| AtomicBool::new(false)).collect();
    let vcpu = |number| Vcpu {
        number,
        news: Arc::clone(&news),
        writes: Arc::clone(&writes),
        inside: Arc::clone(&inside),
    };
    (0..count).map(vcpu).collect()
}

fn run(vcpus: Vec<Vcpu>, body: impl Fn(&Vcpu) + Copy + Send + 'static) {
    let threads: Vec<_> =
        vcpus.into_iter().map(|vcpu| thread::spawn(move || body(&vcpu))).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// All make code of the page at once, which has each wait for the others.
fn all_close(count: usize) {
    run(vcpus(count), |vcpu| {
        vcpu.enter();
        vcpu.hear();
        vcpu.make_code();
        vcpu.hear();
        vcpu.leave();
    });
}

#[test]
fn who_makes_code_has_nobody_write_it_and_nobody_waits_for_ever() {
    check_random(|| all_close(2), 5000);
    check_random(|| all_close(3), 5000);
    check_pct(|| all_close(2), 5000, 3);
}

/// One writes code and tells of it by a store; who sees the store has dropped the old code.
fn written(count: usize) {
    let told = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = vcpus(count)
        .into_iter()
        .map(|vcpu| {
            let told = Arc::clone(&told);
            thread::spawn(move || {
                let mut dropped = vcpu.enter();
                if vcpu.number == 0 {
                    vcpu.news.written(PAGE, 0);
                    vcpu.hear();
                    told.store(1, SeqCst);
                }
                for _ in 0..3 {
                    dropped |= vcpu.hear();
                    // An instruction that loads the flag; behind it the next look.
                    let seen = told.load(SeqCst) == 1;
                    dropped |= vcpu.hear();
                    assert!(vcpu.number == 0 || !seen || dropped, "runs what it was told is old");
                }
                vcpu.leave();
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_store_that_tells_of_new_code_is_seen_after_it() {
    check_random(|| written(2), 5000);
    check_random(|| written(3), 5000);
    check_pct(|| written(3), 5000, 3);
}
