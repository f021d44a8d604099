//! KVM's paravirtual clock as guests know it (Linux, `Documentation/virt/kvm/x86/`, cpuid.rst and msr.rst): how
//! CPUID offers it, which MSRs place it in memory, and what lies there.
//!
//! It tells a kernel the time of day to the nanosecond where the CMOS clock tells seconds. A hypercall tells the
//! host's time of day, to which a guest that wants to can set its own ([`encode_pairing`]). Beside what
//! [`crate::paravirt`] has nothing else of KVM's is offered: every feature bit that is not named here stays clear.

/// The leaf with the signature. Hypervisors may begin at any multiple of 0x100, and guests search them all; the
/// first place is ring3's own.
pub const LEAF: u32 = 0x4000_0100;
/// Whom guests look for.
pub const SIGNATURE: &[u8; 12] = b"KVMKVMKVM\0\0\0";

/// Feature bits, in EAX of the leaf after [`LEAF`].
pub mod feature {
    /// Port writes need no delay: no device here is slow.
    pub const NO_IO_DELAY: u64 = 1 << 1;
    /// The clock, by [`super::WALL_CLOCK`] and [`super::SYSTEM_TIME`].
    pub const CLOCK: u64 = 1 << 3;
    /// The clocks of all CPUs agree, so a guest need not compare them.
    pub const STABLE_CLOCK: u64 = 1 << 24;
}

/// What a machine with the clock offers.
pub const CLOCK_FEATURES: u64 = feature::NO_IO_DELAY | feature::CLOCK | feature::STABLE_CLOCK;

/// MSR `KVM_WALL_CLOCK_NEW`: where the time of day at the clock's zero is to be written, once.
pub const WALL_CLOCK: u32 = 0x4b56_4d00;
/// MSR `KVM_SYSTEM_TIME_NEW`: where the vCPU's clock is kept, and in bit 0 whether it is.
pub const SYSTEM_TIME: u32 = 0x4b56_4d01;
/// Bit 0 of [`SYSTEM_TIME`].
pub const ENABLED: u64 = 1;

/// Flag of a vCPU's clock: the clocks of all vCPUs agree (`PVCLOCK_TSC_STABLE_BIT`).
const STABLE: u8 = 1;
const NS_PER_S: u64 = 1_000_000_000;

/// A time that grows with the time-stamp counter: what a guest's clock is from some moment on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// The counter at that moment.
    pub tsc: u64,
    /// Nanoseconds then.
    pub ns: u64,
    /// Nanoseconds a tick, times 2^32, after the shift.
    multiplier: u32,
    /// Ticks are shifted left by so much first (right if negative).
    shift: i8,
}

impl Line {
    /// A line through a moment, for a counter of `hz` ticks a second, faster than that by so many parts of a
    /// thousand million.
    pub fn new(tsc: u64, ns: u64, hz: u64, faster: i64) -> Self {
        let hz = u128::from(hz.max(1));
        let rate = (1_000_000_000 + i128::from(faster)).max(1).unsigned_abs();
        // Nanoseconds a tick with 64 bits behind the point, of which the multiplier keeps the highest 32.
        let ratio = (u128::from(NS_PER_S) << 64) / hz * rate / 1_000_000_000;
        let bits = 128 - ratio.leading_zeros();
        let multiplier = if bits >= 32 { ratio >> (bits - 32) } else { ratio << (32 - bits) };
        Self { tsc, ns, multiplier: multiplier as u32, shift: (bits as i32 - 64) as i8 }
    }

    /// The time at a value of the counter, as guests work it out.
    pub fn at(&self, tsc: u64) -> u64 {
        let ticks = tsc.wrapping_sub(self.tsc);
        let ticks = if self.shift < 0 {
            ticks.checked_shr(u32::from(self.shift.unsigned_abs())).unwrap_or(0)
        } else {
            ticks.checked_shl(u32::from(self.shift.unsigned_abs())).unwrap_or(0)
        };
        let passed = (u128::from(ticks) * u128::from(self.multiplier)) >> 32;
        self.ns.wrapping_add(passed as u64)
    }

    /// What is in memory behind the version word, which is even while the rest may be read.
    pub fn encode(&self) -> [u8; 28] {
        let mut bytes = [0; 28];
        bytes[4..12].copy_from_slice(&self.tsc.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.ns.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.multiplier.to_le_bytes());
        bytes[24] = self.shift as u8;
        bytes[25] = STABLE;
        bytes
    }
}

/// The time of day at the clock's zero, in memory behind its version word.
pub fn encode_wall_clock(ns: u64) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&((ns / NS_PER_S) as u32).to_le_bytes());
    bytes[4..].copy_from_slice(&((ns % NS_PER_S) as u32).to_le_bytes());
    bytes
}

/// The clock that a pairing can be of: the host's time of day (`KVM_CLOCK_PAIRING_WALLCLOCK`).
pub const PAIRED_WALL_CLOCK: u64 = 0;

/// What the hypercall for a pairing writes: the time of day in nanoseconds since 1970 and the counter, at the same
/// moment. Flags and what is kept for later are zero.
pub fn encode_pairing(tsc: u64, wall: u64) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(&(wall / NS_PER_S).to_le_bytes());
    bytes[8..16].copy_from_slice(&(wall % NS_PER_S).to_le_bytes());
    bytes[16..24].copy_from_slice(&tsc.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_exact_for_any_counter() {
        for hz in
            [1, 24_000_000, 999_999_999, 1_000_000_000, 1_000_000_001, 2_595_124_000, 9_000_000_000]
        {
            for faster in [0, 500_000, -500_000] {
                let line = Line::new(1000, 77, hz, faster);
                for seconds in [0_u64, 1, 3600, 86_400] {
                    let exact = u128::from(seconds) * (1_000_000_000 + faster) as u128;
                    let off = u128::from(line.at(1000 + seconds * hz) - 77).abs_diff(exact);
                    assert!(off <= 1 + u128::from(seconds), "{hz} Hz, {seconds} s: {off} ns");
                }
            }
        }
    }

    /// Linux takes the counter's frequency from the line.
    #[test]
    fn the_frequency_can_be_read_back() {
        for hz in [500_000_000_u64, 1_000_000_000, 2_595_124_000, 4_200_000_000] {
            let line = Line::new(0, 0, hz, 0);
            let khz = (1_000_000_u64 << 32) / u64::from(line.multiplier);
            let khz = if line.shift < 0 { khz << -line.shift } else { khz >> line.shift };
            assert!(khz.abs_diff(hz / 1000) <= 8, "{khz} kHz for {hz} Hz");
        }
    }

    #[test]
    fn what_lies_in_memory() {
        let bytes = Line::new(0x1122, 0x3344, 2_000_000_000, 0).encode();
        assert_eq!(bytes[4..6], [0x22, 0x11]);
        assert_eq!(bytes[12..14], [0x44, 0x33]);
        // Half a nanosecond a tick.
        assert_eq!(bytes[20..26], [0, 0, 0, 0x80, 0, STABLE]);
        assert_eq!(encode_wall_clock(5_000_000_007), [5, 0, 0, 0, 7, 0, 0, 0]);
        let pairing = encode_pairing(0x5566, 5_000_000_007);
        assert_eq!(pairing[..18], [5, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0x66, 0x55]);
        assert_eq!(pairing[18..], [0; 46]);
    }
}
