//! Time: the host's clocks and time-stamp counter as the guest's.
//!
//! The guest sees the host's TSC unscaled and unshifted, so an engine
//! that runs RDTSC natively gives the same values as one that emulates it.
//!
//! The monotonic clock is CLOCK_MONOTONIC_RAW: nobody slews it, so the guest's other timers keep
//! step with the TSC, and a kernel that compares them (Linux's clocksource watchdog tolerates
//! about 100 ppm) trusts both.

use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::cpu::{self, CpuidResult};

/// How long to count ticks when no CPUID leaf tells the TSC's frequency.
const CALIBRATION: Duration = Duration::from_millis(20);

/// Readings taken for one exact pair of TSC and clock.
const ATTEMPTS: usize = 32;

/// Where the TSC's frequency was learnt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TscSource {
    /// CPUID leaf 0x15: crystal frequency times a ratio.
    CrystalRatio,
    /// CPUID leaf 0x40000010: the hypervisor under us says.
    HypervisorLeaf,
    /// Leaf 0x16: the processor's nominal frequency.
    NominalFrequency,
    /// Counted against CLOCK_MONOTONIC_RAW.
    Calibrated,
}

/// The host's clocks.
#[derive(Clone, Debug)]
pub struct LinuxClock {
    tsc_hz: u64,
    source: TscSource,
}

impl LinuxClock {
    /// The host's own clocks: the TSC is the CPU's, as guest code that runs directly reads it. Takes 20 ms where the frequency must be measured.
    pub fn new() -> Self {
        let (tsc_hz, source) =
            tsc_from_cpuid(cpu::cpuid).unwrap_or_else(|| (calibrate(), TscSource::Calibrated));
        Self { tsc_hz, source }
    }

    /// The time-stamp counter and nanoseconds since 1970 at the same moment.
    pub fn moment(&self) -> (u64, u64) {
        simultaneous(ClockId::Realtime)
    }

    /// Where the TSC's frequency was learnt.
    pub fn tsc_source(&self) -> TscSource {
        self.source
    }
}

impl Default for LinuxClock {
    fn default() -> Self {
        Self::new()
    }
}

/// Nanoseconds that the host has run.
pub(crate) fn uptime_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::MonotonicRaw))
}

impl host::Clock for LinuxClock {
    fn monotonic_ns(&self) -> u64 {
        uptime_ns()
    }
    fn wall_clock_ns(&self) -> u64 {
        nanoseconds(clock_gettime(ClockId::Realtime))
    }
    fn tsc(&self) -> u64 {
        cpu::rdtsc()
    }
    fn tsc_hz(&self) -> u64 {
        self.tsc_hz
    }
}

/// A time before the epoch counts as the epoch.
fn nanoseconds(time: Timespec) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

/// What a leaf that does not exist reads as.
const NONE: CpuidResult = CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };

/// The frequency as the CPU or the hypervisor under us reports it, most exact first. Leaf 0x16
/// is rounded to whole MHz (up to 0.05 % off), but only where leaf 0x15 exists without a crystal
/// frequency do we trust it: there it is what the kernel uses too.
fn tsc_from_cpuid(cpuid: impl Fn(u32, u32) -> CpuidResult) -> Option<(u64, TscSource)> {
    let max = cpuid(0, 0).eax;
    let ratio = if max >= 0x15 { cpuid(0x15, 0) } else { NONE };
    if ratio.eax != 0 && ratio.ebx != 0 && ratio.ecx != 0 {
        let hz = u64::from(ratio.ecx) * u64::from(ratio.ebx) / u64::from(ratio.eax);
        return Some((hz, TscSource::CrystalRatio));
    }
    let hypervisor = cpuid(1, 0).ecx >> 31 == 1;
    if hypervisor && cpuid(0x4000_0000, 0).eax >= 0x4000_0010 {
        let khz = cpuid(0x4000_0010, 0).eax;
        if khz != 0 {
            return Some((u64::from(khz) * 1000, TscSource::HypervisorLeaf));
        }
    }
    let nominal = if max >= 0x16 { cpuid(0x16, 0).eax & 0xffff } else { 0 };
    (ratio.ebx != 0 && nominal != 0)
        .then_some((u64::from(nominal) * 1_000_000, TscSource::NominalFrequency))
}

/// Counts ticks against CLOCK_MONOTONIC_RAW.
fn calibrate() -> u64 {
    let (tsc_start, ns_start) = simultaneous(ClockId::MonotonicRaw);
    std::thread::sleep(CALIBRATION);
    let (tsc_end, ns_end) = simultaneous(ClockId::MonotonicRaw);
    let ticks = u128::from(tsc_end.wrapping_sub(tsc_start));
    let elapsed = u128::from(ns_end.saturating_sub(ns_start)).max(1);
    u64::try_from(ticks * 1_000_000_000 / elapsed).unwrap_or(u64::MAX).max(1)
}

/// The TSC and the clock at the same moment: the pair, out of several, with the least time between
/// the readings, because on a busy host we may lose the CPU at any point.
fn simultaneous(clock: ClockId) -> (u64, u64) {
    let pair = || {
        let before = cpu::rdtsc();
        let ns = nanoseconds(clock_gettime(clock));
        let width = cpu::rdtsc().wrapping_sub(before);
        (width, before.wrapping_add(width / 2), ns)
    };
    let narrowest = (0..ATTEMPTS).map(|_| pair()).min().unwrap_or_default();
    (narrowest.1, narrowest.2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::Clock;

    fn host_with(leaves: &[(u32, CpuidResult)]) -> impl Fn(u32, u32) -> CpuidResult {
        move |leaf, _| leaves.iter().find(|(l, _)| *l == leaf).map_or(NONE, |(_, r)| *r)
    }
    const fn leaf(eax: u32, ebx: u32, ecx: u32) -> CpuidResult {
        CpuidResult { eax, ebx, ecx, edx: 0 }
    }

    #[test]
    fn crystal_ratio_is_preferred() {
        let leaves = [(0, leaf(0x16, 0, 0)), (0x15, leaf(2, 160, 25_000_000))];
        assert_eq!(
            tsc_from_cpuid(host_with(&leaves)),
            Some((2_000_000_000, TscSource::CrystalRatio))
        );
    }

    #[test]
    fn hypervisor_leaf_only_under_a_hypervisor() {
        const LEAVES: [(u32, CpuidResult); 3] = [
            (1, leaf(0, 0, 1 << 31)),
            (0x4000_0000, leaf(0x4000_0010, 0, 0)),
            (0x4000_0010, leaf(2_400_000, 0, 0)),
        ];
        let under = host_with(&LEAVES);
        assert_eq!(tsc_from_cpuid(under), Some((2_400_000_000, TscSource::HypervisorLeaf)));
        assert_eq!(tsc_from_cpuid(host_with(&LEAVES[1..])), None);
    }

    #[test]
    fn nothing_known_is_measured() {
        assert_eq!(tsc_from_cpuid(|_, _| NONE), None);
        let (one, other) = (calibrate(), calibrate());
        assert!((100_000_000..10_000_000_000).contains(&one), "{one} Hz");
        assert!(one.abs_diff(other) < one / 20_000, "{one} and {other} Hz: within 50 ppm");
    }

    #[test]
    fn clocks_advance_together() {
        let clock = LinuxClock::new();
        let (tsc, ns) = (clock.tsc(), clock.monotonic_ns());
        std::thread::sleep(Duration::from_millis(50));
        let (ticks, elapsed) = (clock.tsc() - tsc, clock.monotonic_ns() - ns);
        let by_tsc = u128::from(ticks) * 1_000_000_000 / u128::from(clock.tsc_hz());
        let error = by_tsc.abs_diff(u128::from(elapsed));
        assert!(error < u128::from(elapsed) / 1000, "{by_tsc} ns by TSC, {elapsed} ns by clock");
    }
}
