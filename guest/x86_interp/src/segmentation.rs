//! Segments in use and being loaded: limit and type checks, and what a selector may be loaded
//! into a data segment register (SDM 5.3 to 5.7).

use crate::{
    cpu::Cpu,
    descriptor::{is_null, selector_fault},
    system::System,
};
use x86::{Fault, Segment, control::cr0, flags, seg, segment::attr, vector};

/// The bytes at `offset` lie within the segment's limit.
pub(crate) fn within_limit(segment: &Segment, offset: u64, size: u64) -> bool {
    let last = offset + (size - 1);
    let expand_down = segment.attr & (attr::S | attr::CODE | attr::DC) == attr::S | attr::DC;
    if !expand_down {
        // A flat segment has no end: accesses wrap. One of 4 GiB with a base has, the host CPU says.
        let flat = segment.limit == u32::MAX && segment.base == 0;
        return flat || last <= u64::from(segment.limit);
    }
    let top = if segment.attr & attr::DB != 0 { 0xffff_ffff } else { 0xffff };
    offset > u64::from(segment.limit) && last <= top
}

impl<S: System> Cpu<S> {
    /// Segments are loaded as in the 8086: base from the selector, no descriptor.
    pub(crate) fn real_style(&self) -> bool {
        self.vcpu.cr0 & cr0::PE == 0 || self.vcpu.rflags & flags::VM != 0
    }

    /// Protected mode proper, where descriptors exist: else the instructions on them are #UD.
    pub(crate) fn require_protected(&self) -> Result<(), Fault> {
        if self.real_style() { Err(Fault::ud()) } else { Ok(()) }
    }

    /// #GP(0) unless at CPL 0.
    pub(crate) fn require_cpl0(&self) -> Result<(), Fault> {
        if self.vcpu.cpl() == 0 { Ok(()) } else { Err(Fault::gp(0)) }
    }

    /// Linear address of `size` bytes at `offset` of a segment, for code that is not 64-bit.
    ///
    /// # Errors
    /// #SS(0) for the stack segment, #GP(0) for the others: outside the limit, of the wrong
    /// type, or unusable.
    pub(crate) fn check_segment(
        &self,
        segment: usize,
        offset: u64,
        size: u64,
        write: bool,
    ) -> Result<u64, Fault> {
        let s = &self.vcpu.seg[segment];
        let typed = if write { s.is_writable() } else { s.is_readable() };
        let usable = typed && s.present() || self.real_style();
        if usable && within_limit(s, offset, size) {
            return Ok(s.base.wrapping_add(offset) & 0xffff_ffff);
        }
        let vector = if segment == seg::SS { vector::SS } else { vector::GP };
        Err(Fault::with_code(vector, 0))
    }

    /// MOV or POP to a segment register other than CS, and its like.
    pub(crate) fn load_segment(
        &mut self,
        sys: &mut S,
        register: usize,
        selector: u16,
    ) -> Result<(), Fault> {
        let loaded = if self.real_style() {
            self.real_segment(register, selector)
        } else if register == seg::SS {
            let (cpl, long) = (self.vcpu.cpl(), self.vcpu.is_64bit());
            self.stack_segment(sys, selector, cpl, long, vector::GP)?
        } else {
            self.data_segment(sys, selector)?
        };
        self.vcpu.seg[register] = loaded;
        Ok(())
    }

    /// Real mode keeps limit and rights as they are.
    pub(crate) fn real_segment(&self, register: usize, selector: u16) -> Segment {
        let base = u64::from(selector) << 4;
        if self.vcpu.rflags & flags::VM != 0 {
            return virtual_8086_segment(selector);
        }
        Segment { selector, base, ..self.vcpu.seg[register] }
    }

    /// What DS, ES, FS or GS holds after loading `selector`.
    fn data_segment(&mut self, sys: &mut S, selector: u16) -> Result<Segment, Fault> {
        if is_null(selector) {
            return Ok(Segment::null(selector, 0));
        }
        let found = self.descriptor(sys, selector, vector::GP)?;
        let s = found.segment;
        let level = self.vcpu.cpl().max(s.rpl());
        if !s.is_readable() || !s.is_conforming() && level > s.dpl() {
            return Err(selector_fault(vector::GP, selector));
        }
        if !s.present() {
            return Err(selector_fault(vector::NP, selector));
        }
        self.mark_accessed(sys, &found)?;
        Ok(Segment { attr: s.attr | attr::ACCESSED, ..s })
    }

    /// What SS holds after loading `selector` at privilege level `cpl`, with 64-bit code
    /// (`long`) or not; `vector` names the exception for an unsuitable one (#GP, or #TS if it
    /// came from a TSS).
    pub(crate) fn stack_segment(
        &mut self,
        sys: &mut S,
        selector: u16,
        cpl: u8,
        long: bool,
        vector: u8,
    ) -> Result<Segment, Fault> {
        if is_null(selector) {
            let usable = long && cpl < 3 && selector as u8 & 3 == cpl;
            let null = Segment::null(selector, cpl);
            return if usable { Ok(null) } else { Err(Fault::with_code(vector, 0)) };
        }
        let found = self.descriptor(sys, selector, vector)?;
        let s = found.segment;
        if s.rpl() != cpl || s.dpl() != cpl || !s.is_writable() {
            return Err(selector_fault(vector, selector));
        }
        if !s.present() {
            return Err(selector_fault(vector::SS, selector));
        }
        self.mark_accessed(sys, &found)?;
        Ok(Segment { attr: s.attr | attr::ACCESSED, ..s })
    }

    /// After a return to an outer level: data segments that level may not use become null. The
    /// base stays, and 64-bit code goes on using that of FS and GS, as on hardware.
    pub(crate) fn drop_inner_segments(&mut self) {
        let cpl = self.vcpu.cpl();
        for register in [seg::ES, seg::DS, seg::FS, seg::GS] {
            let s = self.vcpu.seg[register];
            if !s.is_conforming() && s.dpl() < cpl {
                self.vcpu.seg[register] = Segment { base: s.base, ..Segment::null(0, 0) };
            }
        }
    }
}

/// A segment of virtual-8086 mode.
pub(crate) fn virtual_8086_segment(selector: u16) -> Segment {
    let attr = attr::P | attr::S | 3 << attr::DPL_SHIFT | attr::RW | attr::ACCESSED;
    Segment { selector, attr, limit: 0xffff, base: u64::from(selector) << 4 }
}
