//! A kick is never lost, whenever it comes.

use std::sync::Arc;

use bus::Kicker;
use contract::pending;
use models::VcpuRequests;
use shuttle::{
    check_pct, check_random,
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

/// What the vCPU loop does: acknowledges kicks, looks at what is there, and sleeps if there is nothing.
fn sleeps_until(requests: &VcpuRequests, all_there: impl Fn() -> bool) {
    loop {
        requests.take_kick();
        requests.set_interrupts(pending::INTERRUPT);
        if all_there() {
            return;
        }
        requests.sleep();
    }
}

fn kicks_are_heard(kickers: u32) {
    let (requests, news) = (Arc::new(VcpuRequests::default()), Arc::new(AtomicU32::new(0)));
    let kick = |_| {
        let (requests, news) = (Arc::clone(&requests), Arc::clone(&news));
        thread::spawn(move || {
            news.fetch_add(1, Ordering::SeqCst);
            requests.kick();
        })
    };
    let kickers_run: Vec<_> = (0..kickers).map(kick).collect();
    sleeps_until(&requests, || news.load(Ordering::SeqCst) == kickers);
    kickers_run.into_iter().for_each(|kicker| kicker.join().unwrap());
}

#[test]
fn a_vcpu_that_sleeps_hears_each_kick() {
    check_random(|| kicks_are_heard(3), 5000);
    check_pct(|| kicks_are_heard(2), 5000, 3);
}

/// One that looks up because of its own thread, too.
#[test]
fn the_vcpus_own_kick_takes_no_other_away() {
    let model = || {
        let (requests, news) = (Arc::new(VcpuRequests::default()), Arc::new(AtomicU32::new(0)));
        let other = (Arc::clone(&requests), Arc::clone(&news));
        let other = thread::spawn(move || {
            other.1.store(1, Ordering::SeqCst);
            other.0.kick();
        });
        requests.kick_myself();
        sleeps_until(&requests, || news.load(Ordering::SeqCst) == 1);
        other.join().unwrap();
    };
    check_random(model, 5000);
}
