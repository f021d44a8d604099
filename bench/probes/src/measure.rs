//! Time per operation, as a median of batches.
//!
//! The machine is shared and virtual, so a mean says nothing: one steal of the CPU ruins it. We take
//! many short batches, and report the median and the tenth percentile (what a quiet machine gives).

use std::arch::x86_64::_rdtsc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Nanoseconds per operation over the batches taken.
#[derive(Clone, Copy, Debug)]
pub struct Price {
    /// The median batch.
    pub median: f64,
    /// The tenth percentile: the price when nobody disturbs.
    pub quiet: f64,
}

/// Reads the time-stamp counter.
#[must_use]
pub fn tsc() -> u64 {
    // SAFETY: RDTSC is always allowed in a Linux process unless PR_SET_TSC forbade it; we never do.
    unsafe { _rdtsc() }
}

/// TSC ticks per nanosecond, measured once against the monotonic clock.
pub fn ticks_per_ns() -> f64 {
    static RATE: OnceLock<f64> = OnceLock::new();
    *RATE.get_or_init(|| {
        let (t0, c0) = (Instant::now(), tsc());
        while t0.elapsed() < Duration::from_millis(20) {}
        (tsc() - c0) as f64 / t0.elapsed().as_nanos() as f64
    })
}

/// Runs `batch` (which performs `ops` operations) `batches` times after one warm-up run.
pub fn price(batches: usize, ops: u64, mut batch: impl FnMut()) -> Price {
    batch();
    price_ticks(batches, ops, || {
        let start = tsc();
        batch();
        tsc() - start
    })
}

/// As [`price`], for a batch that measures its own interesting part in TSC ticks.
pub fn price_ticks(batches: usize, ops: u64, mut batch: impl FnMut() -> u64) -> Price {
    let scale = ticks_per_ns() * ops as f64;
    let mut samples: Vec<f64> = (0..batches.max(1)).map(|_| batch() as f64 / scale).collect();
    samples.sort_by(f64::total_cmp);
    Price { median: samples[samples.len() / 2], quiet: samples[samples.len() / 10] }
}
