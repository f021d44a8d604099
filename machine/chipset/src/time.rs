//! Counting at one frequency in the time of another.

/// Nanoseconds in a second.
pub(crate) const NS_PER_S: u64 = 1_000_000_000;

/// Ticks a clock owes at the most: enough for any calibration that counts them, and soon worked off.
pub(crate) const BACKLOG: u64 = 100;
/// Ticks closer together than this are not owed but merge: a guest that cannot follow them would do
/// nothing else for ever.
const LEAST_OWED_NS: u64 = 500_000;

/// Ticks, of a clock with a period of `period` nanoseconds, that went unnoticed when one was noticed
/// `late` nanoseconds after it was due; `None` if the clock is too fast for them to count.
pub(crate) fn missed(late: u64, period: u64) -> Option<u64> {
    (period >= LEAST_OWED_NS).then(|| late / period)
}

/// Ticks of a clock of `hz` in `ns` nanoseconds, rounded down.
pub(crate) fn ticks_in(ns: u64, hz: u64) -> u64 {
    (u128::from(ns) * u128::from(hz) / u128::from(NS_PER_S)) as u64
}

/// The least number of nanoseconds in which a clock of `hz` makes `ticks` ticks.
pub(crate) fn ns_for(ticks: u64, hz: u64) -> u64 {
    let ns = (u128::from(ticks) * u128::from(NS_PER_S)).div_ceil(u128::from(hz));
    u64::try_from(ns).unwrap_or(u64::MAX)
}
