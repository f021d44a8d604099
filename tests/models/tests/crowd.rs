//! Seats: nobody who waits is forgotten, nobody shares a seat.

use std::sync::Arc;

use models::{Crowd, VcpuRequests};
use shuttle::{
    check_pct, check_random,
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

/// vCPUs that sit down and stand up again, some of them waited for by others. No time passes: who waits is called by who stands up.
fn seats(seats: usize, vcpus: usize) {
    let requests: Vec<_> = (0..vcpus).map(|_| Arc::new(VcpuRequests::default())).collect();
    let crowd = Crowd::new(seats, &requests);
    let taken: Arc<[AtomicU32]> = (0..seats).map(|_| AtomicU32::new(0)).collect();
    let run = |vcpu: usize| {
        let (seat, taken) = (crowd.seat(vcpu), Arc::clone(&taken));
        thread::spawn(move || {
            for round in 0..2 {
                let own = seat.try_sit().unwrap_or_else(|| seat.sit(round == 0));
                assert_eq!(taken[own].fetch_add(1, Ordering::SeqCst), 0, "two on seat {own}");
                seat.favour((vcpu == 0).then_some(vcpus - 1));
                taken[own].fetch_sub(1, Ordering::SeqCst);
                seat.stand_up();
            }
        })
    };
    let all: Vec<_> = (0..vcpus).map(run).collect();
    all.into_iter().for_each(|vcpu| vcpu.join().unwrap());
    let first = crowd.seat(0);
    assert!(!first.is_wanted(), "somebody still waits");
    assert!((0..seats).all(|vcpu| crowd.seat(vcpu).try_sit().is_some()), "a seat is lost");
}

#[test]
fn everybody_sits_and_nobody_on_another() {
    check_random(|| seats(1, 3), 3000);
    check_random(|| seats(2, 4), 3000);
    check_pct(|| seats(2, 3), 3000, 3);
}
