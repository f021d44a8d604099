//! Time and randomness.

/// Time.
pub trait Clock: Send + Sync {
    /// Nanoseconds of a monotonic clock, from an arbitrary start. Guest time is derived from it.
    fn monotonic_ns(&self) -> u64;
    /// Nanoseconds since 1970-01-01T00:00:00Z, for the guest's real-time clock.
    fn wall_clock_ns(&self) -> u64;
    /// The time-stamp counter the guest sees, in ticks of [`Clock::tsc_hz`].
    fn tsc(&self) -> u64;
    /// Ticks of the time-stamp counter in a second.
    fn tsc_hz(&self) -> u64;
}

/// Randomness.
pub trait Entropy: Send + Sync {
    /// Fills `data` with bytes no one can predict; false if the host has none to give.
    fn fill(&self, data: &mut [u8]) -> bool;
}
