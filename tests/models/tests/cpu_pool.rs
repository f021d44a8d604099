//! Permits: nobody who waits is forgotten, nobody shares a permit.

use std::sync::Arc;

use models::{CpuPool, VcpuRequests};
use shuttle::{
    check_pct, check_random,
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

/// vCPUs that sit down and stand up again, some of them waited for by others. No time passes: who waits is called by who stands up.
fn permits(permits: usize, vcpus: usize) {
    let requests: Vec<_> = (0..vcpus).map(|_| Arc::new(VcpuRequests::default())).collect();
    let cpu_pool = CpuPool::new(permits, &requests);
    let taken: Arc<[AtomicU32]> = (0..permits).map(|_| AtomicU32::new(0)).collect();
    let run = |vcpu: usize| {
        let (permit, taken) = (cpu_pool.permit(vcpu), Arc::clone(&taken));
        thread::spawn(move || {
            for round in 0..2 {
                let own = permit.try_acquire().unwrap_or_else(|| permit.acquire(round == 0));
                assert_eq!(taken[own].fetch_add(1, Ordering::SeqCst), 0, "two on permit {own}");
                permit.prefer((vcpu == 0).then_some(vcpus - 1));
                taken[own].fetch_sub(1, Ordering::SeqCst);
                permit.release();
            }
        })
    };
    let all: Vec<_> = (0..vcpus).map(run).collect();
    all.into_iter().for_each(|vcpu| vcpu.join().unwrap());
    let first = cpu_pool.permit(0);
    assert!(!first.is_wanted(), "somebody still waits");
    assert!(
        (0..permits).all(|vcpu| cpu_pool.permit(vcpu).try_acquire().is_some()),
        "a permit is lost"
    );
}

#[test]
fn everybody_sits_and_nobody_on_another() {
    check_random(|| permits(1, 3), 3000);
    check_random(|| permits(2, 4), 3000);
    check_pct(|| permits(2, 3), 3000, 3);
}
