//! Who gets which bytes of guest RAM.
//!
//! Images claim the addresses they are linked for; everything else is then put into what is left.
//! A claim outside usable RAM or over an earlier one is refused, and nothing is written but through
//! here, so two parts of a loaded machine never share a byte.

use crate::layout::{self, BIOS_DATA_END, EBDA};
use crate::{Error, Placed};
use ram::{HIGH_BASE, OutOfRam, Ram};
use std::ops::Range;

/// Page size of the guest, in bytes.
pub(crate) const PAGE: u64 = 4096;

/// Guest RAM being filled.
pub(crate) struct Loader<'m> {
    memory: &'m Ram,
    usable: Vec<Range<u64>>,
    placed: Vec<Placed>,
}

impl<'m> Loader<'m> {
    /// Nothing placed yet but what every PC has in its first page.
    pub(crate) fn new(memory: &'m Ram) -> Result<Self, Error> {
        let (have, need) = (memory.len(), layout::MIN_RAM);
        if have < need {
            return Err(Error::RamTooSmall { have, need });
        }
        let bios_data = Placed { what: "BIOS data area", range: 0..BIOS_DATA_END };
        Ok(Self { memory, usable: layout::usable(memory), placed: vec![bios_data] })
    }

    /// The RAM being filled.
    pub(crate) fn memory(&self) -> &'m Ram {
        self.memory
    }

    /// Everything placed, in order of placement.
    pub(crate) fn into_placed(self) -> Vec<Placed> {
        self.placed
    }

    /// Takes exactly `start..start + len`.
    pub(crate) fn claim(&mut self, what: &'static str, start: u64, len: u64) -> Result<(), Error> {
        let end = start.saturating_add(len);
        let refuse = |taken| Err(Error::NoRoomAt { what, start, end, taken });
        if !self.usable.iter().any(|ram| ram.start <= start && end <= ram.end) {
            return refuse("not all usable RAM");
        }
        if let Some(other) = self.placed.iter().find(|p| overlap(&p.range, &(start..end))) {
            return refuse(other.what);
        }
        self.placed.push(Placed { what, range: start..end });
        Ok(())
    }

    /// Places `data` at the lowest free multiple of `align` from `from` on, and returns the GPA.
    pub(crate) fn place_low(
        &mut self,
        what: &'static str,
        data: &[u8],
        align: u64,
        from: u64,
    ) -> Result<u64, Error> {
        let start = self.reserve_low(what, data.len() as u64, align, from)?;
        self.memory.write_gpa(start, data)?;
        Ok(start)
    }

    /// Like [`Loader::place_low`] but below 640 KiB, where any boot protocol can reach it. Falls
    /// back to extended memory when the image has taken all of that.
    pub(crate) fn place_info(&mut self, what: &'static str, data: &[u8]) -> Result<u64, Error> {
        self.place_low(what, data, PAGE, BIOS_DATA_END)
    }

    /// Takes `len` bytes at the lowest free multiple of `align` from `from` on and below 4 GiB.
    pub(crate) fn reserve_low(
        &mut self,
        what: &'static str,
        len: u64,
        align: u64,
        from: u64,
    ) -> Result<u64, Error> {
        let starts = self.usable.iter().map(|ram| ram.start);
        let ends = self.placed.iter().map(|p| p.range.end);
        let candidates = starts.chain(ends).chain([from]).filter_map(|at| {
            at.max(from).checked_next_multiple_of(align).filter(|at| self.free(*at, len, HIGH_BASE))
        });
        let start = candidates.min().ok_or(Error::DoesNotFit { what, len })?;
        self.claim(what, start, len)?;
        Ok(start)
    }

    /// Takes `len` bytes at the highest free multiple of `align` that ends at or below `limit`, in
    /// RAM below 4 GiB and above 1 MiB.
    pub(crate) fn reserve_high(
        &mut self,
        what: &'static str,
        len: u64,
        align: u64,
        limit: u64,
    ) -> Result<u64, Error> {
        let limit = limit.min(HIGH_BASE);
        let ends = self.usable.iter().map(|ram| ram.end);
        let starts = self.placed.iter().map(|p| p.range.start);
        let candidates = ends.chain(starts).filter_map(|end| {
            let at = end.min(limit).checked_sub(len)?;
            let at = at - at % align;
            (at >= layout::EXTENDED && self.free(at, len, limit)).then_some(at)
        });
        let start = candidates.max().ok_or(Error::DoesNotFit { what, len })?;
        self.claim(what, start, len)?;
        Ok(start)
    }

    /// Whether `len` bytes at `start` are usable, unclaimed and end at or below `limit`.
    fn free(&self, start: u64, len: u64, limit: u64) -> bool {
        let Some(end) = start.checked_add(len).filter(|end| *end <= limit) else { return false };
        self.usable.iter().any(|ram| ram.start <= start && end <= ram.end)
            && !self.placed.iter().any(|p| overlap(&p.range, &(start..end)))
    }
}

/// Writes the two words of the BIOS data area that kernels look for the end of conventional memory
/// in: the segment of the extended BIOS data area, and the KiB below it.
pub(crate) fn write_bios_data(memory: &Ram) -> Result<(), Error> {
    zero(memory, 0, BIOS_DATA_END)?;
    zero(memory, EBDA, layout::CONVENTIONAL_END - EBDA)?;
    memory.write_gpa(0x40e, &((EBDA >> 4) as u16).to_le_bytes())?;
    memory.write_gpa(0x413, &((EBDA >> 10) as u16).to_le_bytes())?;
    Ok(())
}

/// Writes `len` zero bytes at `gpa`. RAM need not be fresh: after a reset the kernel is loaded over
/// what ran before.
pub(crate) fn zero(memory: &Ram, gpa: u64, len: u64) -> Result<(), OutOfRam> {
    static CHUNK: [u8; 0x1_0000] = [0; 0x1_0000];
    let mut done = 0;
    while done < len {
        let step = (len - done).min(CHUNK.len() as u64);
        memory.write_untouched(gpa.saturating_add(done), &CHUNK[..step as usize])?;
        done += step;
    }
    Ok(())
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
