//! Accesses by linear address: the fast path through the TLB and everything behind it.
//!
//! A store that crosses a page translates both pages before it writes either, so a fault leaves
//! memory untouched. Accesses to addresses that are not RAM become MMIO, split at the page.

use crate::{
    cpu::Cpu,
    system::System,
    tlb::{Right, View},
};
use contract::GuestRam;
use x86::{
    Fault,
    control::cr4,
    paging::{self, Access, Roots, WalkMemory},
    vector,
};

/// Where the bytes of an access that lies within one page are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// RAM at this offset. For stores: writable, and not code.
    Ram(u64),
    /// RAM that holds decoded code, at this offset: stores must be reported.
    Code(u64),
    /// ROM at this offset: stores are lost.
    Rom(u64),
    /// Not RAM: this GPA.
    Mmio(u64),
}

impl Place {
    /// The offset of RAM that is no ROM.
    fn writable(self) -> Option<u64> {
        match self {
            Self::Ram(offset) | Self::Code(offset) => Some(offset),
            Self::Rom(_) | Self::Mmio(_) => None,
        }
    }
}

/// A memory destination that is first read and then written, translated for writing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// Ordinary RAM at this offset.
    Ram(u64),
    /// RAM that holds decoded code, at this offset: stores must be reported.
    Code(u64),
    /// Anything else, by linear address.
    Slow(u64),
}

/// The page walker's view of physical memory.
struct Walker<'a, R>(&'a R);

impl<R: GuestRam> WalkMemory for Walker<'_, R> {
    fn read_u64(&mut self, gpa: u64) -> u64 {
        self.offset(gpa).map_or(u64::MAX, |offset| self.0.load64(offset))
    }
    fn read_u32(&mut self, gpa: u64) -> u32 {
        self.offset(gpa).map_or(u32::MAX, |offset| self.0.load32(offset))
    }
    fn cas_u64(&mut self, gpa: u64, old: u64, new: u64) -> bool {
        self.cas(gpa, 8, old, new)
    }
    fn cas_u32(&mut self, gpa: u64, old: u32, new: u32) -> bool {
        self.cas(gpa, 4, old.into(), new.into())
    }
}

impl<R: GuestRam> Walker<'_, R> {
    fn offset(&self, gpa: u64) -> Option<u64> {
        self.0.page(gpa).map(|page| page.offset + (gpa & 0xfff))
    }
    /// A page table in ROM keeps its bits: the swap is lost but the walk goes on.
    fn cas(&self, gpa: u64, size: usize, old: u64, new: u64) -> bool {
        match self.0.page(gpa) {
            Some(page) if page.writable => {
                self.0.cas(page.offset + (gpa & 0xfff), size, old, new) == old
            }
            _ => true,
        }
    }
}

impl<S: System> Cpu<S> {
    /// Loads `SIZE` (1, 2, 4, 8) bytes.
    #[inline(always)]
    pub(crate) fn load<const SIZE: usize>(
        &mut self,
        sys: &mut S,
        linear: u64,
    ) -> Result<u64, Fault> {
        match self.tlb.lookup(self.view, Right::Read, linear, SIZE as u64) {
            Some(offset) => Ok(ram_load::<S, SIZE>(sys, offset)),
            None => self.load_slow(sys, self.view, linear, SIZE),
        }
    }

    /// Stores the low `SIZE` (1, 2, 4, 8) bytes of `value`.
    #[inline(always)]
    pub(crate) fn store<const SIZE: usize>(
        &mut self,
        sys: &mut S,
        linear: u64,
        value: u64,
    ) -> Result<(), Fault> {
        match self.tlb.lookup(self.view, Right::Write, linear, SIZE as u64) {
            Some(offset) => {
                ram_store::<S, SIZE>(sys, offset, value);
                Ok(())
            }
            None => self.store_slow(sys, self.view, linear, SIZE, value),
        }
    }

    /// Translates `size` bytes for a read followed by a write.
    #[inline(always)]
    pub(crate) fn target(&mut self, sys: &mut S, linear: u64, size: u64) -> Result<Target, Fault> {
        match self.tlb.lookup(self.view, Right::Write, linear, size) {
            Some(offset) => Ok(Target::Ram(offset)),
            None => self.target_slow(sys, linear, size),
        }
    }

    #[cold]
    fn target_slow(&mut self, sys: &mut S, linear: u64, size: u64) -> Result<Target, Fault> {
        self.check_access(sys, self.view, linear, size as usize, Right::Write)?;
        if (linear & 0xfff) + size > 4096 {
            return Ok(Target::Slow(linear));
        }
        let first = self.translate(sys, self.view, linear, Right::Write)?;
        self.watch(linear, size, true);
        match first {
            Place::Ram(offset) => Ok(Target::Ram(offset)),
            Place::Code(offset) => Ok(Target::Code(offset)),
            _ => Ok(Target::Slow(linear)),
        }
    }

    /// Compare-and-swap of bytes of two pages: the value found; `None` if they are not all RAM that can be written. All of
    /// them have been translated for writing.
    pub(crate) fn cas_split(
        &mut self,
        sys: &mut S,
        linear: u64,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<Option<u64>, Fault> {
        let here = 4096 - (linear & 0xfff);
        if here >= size as u64 {
            return Ok(None);
        }
        let first = self.translate(sys, self.view, linear, Right::Write)?;
        let second = self.translate(sys, self.view, linear.wrapping_add(here), Right::Write)?;
        let (Some(at), Some(then)) = (first.writable(), second.writable()) else { return Ok(None) };
        let found = sys.ram().cas_split(at, then, size, old, new);
        for (place, len) in [(first, here), (second, size as u64 - here)] {
            if let Place::Code(offset) = place {
                self.code_written(sys, offset, len);
            }
        }
        self.watch(linear, size as u64, true);
        Ok(Some(found))
    }

    /// Loads from a translated target.
    #[inline(always)]
    pub(crate) fn target_load<const SIZE: usize>(
        &mut self,
        sys: &mut S,
        target: Target,
    ) -> Result<u64, Fault> {
        match target {
            Target::Ram(offset) | Target::Code(offset) => Ok(ram_load::<S, SIZE>(sys, offset)),
            Target::Slow(linear) => self.load_slow(sys, self.view, linear, SIZE),
        }
    }

    /// Stores to a translated target.
    #[inline(always)]
    pub(crate) fn target_store<const SIZE: usize>(
        &mut self,
        sys: &mut S,
        target: Target,
        value: u64,
    ) -> Result<(), Fault> {
        match target {
            Target::Ram(offset) => {
                ram_store::<S, SIZE>(sys, offset, value);
                Ok(())
            }
            Target::Code(offset) => {
                ram_store::<S, SIZE>(sys, offset, value);
                self.code_written(sys, offset, SIZE as u64);
                Ok(())
            }
            Target::Slow(linear) => self.store_slow(sys, self.view, linear, SIZE, value),
        }
    }

    /// Loads `SIZE` bytes as an implicit supervisor access (descriptor tables, TSS).
    pub(crate) fn load_system<const SIZE: usize>(
        &mut self,
        sys: &mut S,
        linear: u64,
    ) -> Result<u64, Fault> {
        match self.tlb.lookup(View::Supervisor, Right::Read, linear, SIZE as u64) {
            Some(offset) => Ok(ram_load::<S, SIZE>(sys, offset)),
            None => self.load_slow(sys, View::Supervisor, linear, SIZE),
        }
    }

    /// Stores `SIZE` bytes as an implicit supervisor access.
    pub(crate) fn store_system<const SIZE: usize>(
        &mut self,
        sys: &mut S,
        linear: u64,
        value: u64,
    ) -> Result<(), Fault> {
        self.store_slow(sys, View::Supervisor, linear, SIZE, value)
    }

    /// Reads any number of bytes with the current rights.
    pub(crate) fn read_bytes(
        &mut self,
        sys: &mut S,
        linear: u64,
        data: &mut [u8],
    ) -> Result<(), Fault> {
        self.read_view(sys, self.view, linear, data)
    }

    /// Writes any number of bytes with the current rights; a fault leaves all of them unwritten.
    pub(crate) fn write_bytes(
        &mut self,
        sys: &mut S,
        linear: u64,
        data: &[u8],
    ) -> Result<(), Fault> {
        self.write_view(sys, self.view, linear, data)
    }

    /// Checks that `len` bytes could be written now, without writing.
    pub(crate) fn probe_write(&mut self, sys: &mut S, linear: u64, len: u64) -> Result<(), Fault> {
        self.probe(sys, self.view, linear, len)
    }

    /// Checks that `len` bytes could be written with the rights of `view`.
    pub(crate) fn probe(
        &mut self,
        sys: &mut S,
        view: View,
        linear: u64,
        len: u64,
    ) -> Result<(), Fault> {
        self.check_rights(sys, view, linear, len as usize, Right::Write)
    }

    #[cold]
    #[inline(never)]
    fn load_slow(
        &mut self,
        sys: &mut S,
        view: View,
        linear: u64,
        size: usize,
    ) -> Result<u64, Fault> {
        let mut data = [0; 8];
        self.read_view(sys, view, linear, &mut data[..size])?;
        Ok(u64::from_le_bytes(data))
    }

    #[cold]
    #[inline(never)]
    fn store_slow(
        &mut self,
        sys: &mut S,
        view: View,
        linear: u64,
        size: usize,
        value: u64,
    ) -> Result<(), Fault> {
        self.write_view(sys, view, linear, &value.to_le_bytes()[..size])
    }

    /// Everything that can be wrong with an access, in the order in which CPUs find it: not an
    /// address, not aligned, not an address at its end, pages from the first on.
    fn check_access(
        &mut self,
        sys: &mut S,
        view: View,
        linear: u64,
        size: usize,
        right: Right,
    ) -> Result<(), Fault> {
        self.check_canonical(linear, 1)?;
        if view == View::UserAligned && linear & (alignment(size) - 1) != 0 {
            return Err(Fault::with_code(vector::AC, 0));
        }
        self.check_rights(sys, view, linear, size, right)
    }

    fn check_canonical(&self, linear: u64, size: usize) -> Result<(), Fault> {
        let last = linear.wrapping_add(size as u64).wrapping_sub(1);
        let good = paging::canonical(linear) && paging::canonical(last);
        if good || !self.vcpu.long_mode() { Ok(()) } else { Err(Fault::gp(0)) }
    }

    fn check_rights(
        &mut self,
        sys: &mut S,
        view: View,
        linear: u64,
        size: usize,
        right: Right,
    ) -> Result<(), Fault> {
        self.check_canonical(linear, size)?;
        for (piece, _) in pieces(linear, size) {
            self.translate(sys, view, piece, right)?;
        }
        Ok(())
    }

    pub(crate) fn read_view(
        &mut self,
        sys: &mut S,
        view: View,
        linear: u64,
        data: &mut [u8],
    ) -> Result<(), Fault> {
        let mut done = 0;
        // Everything is checked first: an MMIO read has effects and must not be repeated.
        self.check_access(sys, view, linear, data.len(), Right::Read)?;
        for (piece, len) in pieces(linear, data.len()) {
            let part = &mut data[done..done + len];
            match self.translate(sys, view, piece, Right::Read)? {
                Place::Ram(o) | Place::Code(o) | Place::Rom(o) => sys.ram().read(o, part),
                Place::Mmio(gpa) => mmio_read(sys, gpa, part),
            }
            done += len;
        }
        self.watch(linear, data.len() as u64, false);
        Ok(())
    }

    /// Writes any number of bytes with the rights of `view`; a fault leaves all unwritten.
    pub(crate) fn write_view(
        &mut self,
        sys: &mut S,
        view: View,
        linear: u64,
        data: &[u8],
    ) -> Result<(), Fault> {
        self.check_access(sys, view, linear, data.len(), Right::Write)?;
        let mut done = 0;
        for (piece, len) in pieces(linear, data.len()) {
            let part = &data[done..done + len];
            match self.translate(sys, view, piece, Right::Write)? {
                Place::Ram(offset) => sys.ram().write(offset, part),
                Place::Code(offset) => {
                    sys.ram().write(offset, part);
                    self.code_written(sys, offset, len as u64);
                }
                Place::Rom(_) => {}
                Place::Mmio(gpa) => {
                    mmio_write(sys, gpa, part);
                    // A device may have raised an interrupt for this very CPU.
                    self.leave_block = true;
                }
            }
            done += len;
        }
        self.watch(linear, data.len() as u64, true);
        Ok(())
    }

    /// Bytes of a code page have been written.
    pub(crate) fn code_written(&mut self, sys: &S, offset: u64, len: u64) {
        sys.ram().note_write(offset, len);
        self.wrote_code = true;
    }

    /// Translates one linear address, through the TLB, the page tables and the memory map.
    pub(crate) fn translate(
        &mut self,
        sys: &mut S,
        view: View,
        linear: u64,
        right: Right,
    ) -> Result<Place, Fault> {
        if let Some(offset) = self.tlb.lookup(view, right, linear, 1) {
            return Ok(Place::Ram(offset));
        }
        if self.vcpu.long_mode() && !paging::canonical(linear) {
            return Err(Fault::gp(0));
        }
        self.counters.tlb_misses += 1;
        let access = Access {
            write: right == Right::Write,
            fetch: right == Right::Execute,
            user: matches!(view, View::User | View::UserAligned),
            smap_override: view == View::SupervisorAc,
        };
        let roots = Roots::from(&self.vcpu);
        let found = paging::walk(&mut Walker(sys.ram()), roots, linear, access)?;
        let Some(page) = sys.ram().page(found.gpa) else {
            return Ok(Place::Mmio(found.gpa));
        };
        let offset = page.offset + (found.gpa & 0xfff);
        if right == Right::Write && !page.writable {
            return Ok(Place::Rom(offset));
        }
        if right == Right::Write && sys.ram().is_code(page.offset) {
            return Ok(Place::Code(offset));
        }
        let watched = right != Right::Execute && self.page_is_watched(linear);
        if view != View::UserAligned && !watched {
            self.tlb.fill(view, right, linear & !0xfff, page.offset, found.page_bits);
        }
        Ok(Place::Ram(offset))
    }

    /// Supervisor accesses fault on user pages: SMAP is on.
    pub(crate) fn smap(&self) -> bool {
        self.vcpu.cr4 & cr4::SMAP != 0
    }
}

#[inline(always)]
pub(crate) fn ram_load<S: System, const SIZE: usize>(sys: &S, offset: u64) -> u64 {
    match SIZE {
        1 => sys.ram().load8(offset).into(),
        2 => sys.ram().load16(offset).into(),
        4 => sys.ram().load32(offset).into(),
        _ => sys.ram().load64(offset),
    }
}

#[inline(always)]
pub(crate) fn ram_store<S: System, const SIZE: usize>(sys: &S, offset: u64, value: u64) {
    match SIZE {
        1 => sys.ram().store8(offset, value as u8),
        2 => sys.ram().store16(offset, value as u16),
        4 => sys.ram().store32(offset, value as u32),
        _ => sys.ram().store64(offset, value),
    }
}

/// What the address of a `size` byte operand must be a multiple of under alignment checks (SDM
/// table 6-7). Vectors have checks of their own.
const fn alignment(size: usize) -> u64 {
    match size {
        2 | 14 | 94 => 2,
        4 | 28 | 108 => 4,
        8 | 10 => 8,
        _ => 1,
    }
}

/// Splits an access at page borders: (linear address, bytes).
fn pieces(linear: u64, len: usize) -> impl Iterator<Item = (u64, usize)> {
    let mut at = linear;
    let mut left = len;
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let piece = left.min(4096 - (at & 0xfff) as usize);
        let start = at;
        at = at.wrapping_add(piece as u64);
        left -= piece;
        Some((start, piece))
    })
}

/// Buses take at most 8 bytes, in powers of two.
fn mmio_read<S: System>(sys: &mut S, gpa: u64, data: &mut [u8]) {
    let mut at = gpa;
    let mut rest = data;
    while !rest.is_empty() {
        let size = bus_size(rest.len());
        let (part, tail) = rest.split_at_mut(size);
        sys.mmio_read(at, part);
        at = at.wrapping_add(size as u64);
        rest = tail;
    }
}

fn mmio_write<S: System>(sys: &mut S, gpa: u64, data: &[u8]) {
    let mut at = gpa;
    let mut rest = data;
    while !rest.is_empty() {
        let size = bus_size(rest.len());
        let (part, tail) = rest.split_at(size);
        sys.mmio_write(at, part);
        at = at.wrapping_add(size as u64);
        rest = tail;
    }
}

fn bus_size(len: usize) -> usize {
    match len {
        8.. => 8,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}
