//! Taps: programs that are run where translated code comes by a point, and the records they make.

/// Words of a step of a program: those of `x86::tap`.
pub const STEP_WORDS: usize = 3;
/// Steps of all programs at the most.
pub const TAP_STEPS: usize = 1 << 15;
/// Bytes of records at the most.
pub const TAP_BYTES: usize = 1 << 20;
/// log2 of [`TAP_PLACES`].
const PLACE_BITS: u32 = 13;
/// Places of the table of points.
pub const TAP_PLACES: usize = 1 << PLACE_BITS;

/// What the monitor and the wedges of a vCPU tell each other of taps. The monitor takes the records whenever it has the turn.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Taps {
    /// Bytes of records.
    pub used: u64,
    /// Where the record of the point that was passed last begins; the end of all if it has none.
    pub last: u64,
    /// The points of this vCPU. Translated code is several vCPUs', and says only that somebody has a point there.
    pub points: TapTable,
    /// The programs, one behind the other.
    pub steps: [[u64; STEP_WORDS]; TAP_STEPS],
    /// The records (`x86::tap::records`).
    pub records: Records,
}

/// Bytes of records, aligned as their words.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Records(pub [u8; TAP_BYTES]);

/// Points by GVA, each with the first step of its program: in the place that its GVA says, or behind it. Zero is no point.
#[repr(C)]
#[derive(Debug)]
pub struct TapTable(pub [[u64; 2]; TAP_PLACES]);

impl TapTable {
    /// Where a point is looked for first.
    fn places(gva: u64) -> impl Iterator<Item = usize> {
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        let first = (gva.wrapping_mul(GOLDEN) >> (u64::BITS - PLACE_BITS)) as usize;
        (0..TAP_PLACES).map(move |n| first.wrapping_add(n) % TAP_PLACES)
    }

    /// The first step of a point's program, if there is one.
    pub fn find(&self, gva: u64) -> Option<u64> {
        let used = Self::places(gva).map_while(|n| self.0.get(n).filter(|[point, _]| *point != 0));
        used.into_iter().find(|[point, _]| *point == gva).map(|[_, step]| *step)
    }

    /// Puts a point in the place where it will be found; `None` if there is none.
    pub fn place(table: &mut [[u64; 2]], gva: u64, step: u64) -> Option<()> {
        let free = |n: &usize| table.get(*n).is_some_and(|[point, _]| *point == 0);
        let at = Self::places(gva).find(free).filter(|_| gva != 0)?;
        *table.get_mut(at)? = [gva, step];
        Some(())
    }
}

/// In [`crate::ExitState::info`] of an exit at a tap: the monitor is to look by itself.
pub const TAP_ODD: u64 = u32::MAX as u64;

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    #[test]
    fn points_are_found_wherever_there_was_room_for_them() {
        let mut table = TapTable([[0; 2]; TAP_PLACES]);
        let points = || (1..=TAP_PLACES as u64).map(|n| 0xffff_ffff_8100_0000 + n * 16);
        for gva in points() {
            assert_eq!(table.find(gva), None, "{gva:x} is not there yet");
            assert_eq!(TapTable::place(&mut table.0, gva, gva >> 4), Some(()));
        }
        assert!(points().all(|gva| table.find(gva) == Some(gva >> 4)));
        assert_eq!(
            (table.find(8), TapTable::place(&mut table.0, 8, 1)),
            (None, None),
            "it is full"
        );
        assert_eq!(TapTable::place(&mut [[0; 2]; TAP_PLACES], 0, 1), None, "zero is no point");
    }
}
