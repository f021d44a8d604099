//! Which GPAs are RAM.

/// The end of low RAM at most: below 4 GiB, the rest belongs to PCI and the interrupt controllers.
pub const LOW_MAX: u64 = 0xc000_0000;
/// Where RAM goes on above the hole, a GPA.
pub const HIGH_BASE: u64 = 1 << 32;

/// Two ranges of GPAs, back to back in the memfd.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    low: u64,
    high: u64,
}

impl Layout {
    pub(crate) fn new(len: u64) -> Self {
        let low = len.min(LOW_MAX);
        Self { low, high: len - low }
    }

    pub(crate) fn len(self) -> u64 {
        self.low + self.high
    }

    pub(crate) fn low_len(self) -> u64 {
        self.low
    }

    /// The offset of `len` contiguous bytes at `gpa`.
    #[inline]
    pub(crate) fn offset(self, gpa: u64, len: u64) -> Option<u64> {
        if len <= self.low && gpa <= self.low - len {
            return Some(gpa);
        }
        let above = gpa.checked_sub(HIGH_BASE)?;
        (len <= self.high && above <= self.high - len).then(|| self.low + above)
    }

    /// Base GPA, offset and length in bytes of each range.
    pub(crate) fn ranges(self) -> impl Iterator<Item = (u64, u64, u64)> {
        [(0, 0, self.low), (HIGH_BASE, self.low, self.high)].into_iter().filter(|r| r.2 != 0)
    }
}
