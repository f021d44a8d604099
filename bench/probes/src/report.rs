//! What a probe says: priced rows, facts, and verdicts. Plain text, one line each.

use crate::measure::Price;
use std::fmt::Display;

/// A measured row: label, median and quiet price.
pub fn row(label: impl Display, price: Price) {
    println!("  {label:<66} {:>9.1} {:>9.1}", price.median, price.quiet);
}

/// An observation that is not a time.
pub fn fact(label: impl Display, value: impl Display) {
    println!("  {label:<66} {value}");
}

/// A law the design needs; a broken one makes the whole run fail.
pub fn law(label: impl Display, holds: bool) {
    println!("  {label:<66} {}", if holds { "holds" } else { "BROKEN" });
    if !holds {
        fail();
    }
}

/// Remembers that the run failed.
pub fn fail() {
    FAILED.store(true, std::sync::atomic::Ordering::Relaxed);
}

static FAILED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Whether any law printed by this process was broken.
pub fn failed() -> bool {
    FAILED.load(std::sync::atomic::Ordering::Relaxed)
}
