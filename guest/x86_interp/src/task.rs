//! The task state segment of legacy modes: inner stacks and the hardware task switch (SDM
//! chapter 7).
//!
//! A switch has a point of no return: until the old task's registers are saved a fault leaves the
//! old task as it was; from then on faults belong to the new task, whose registers are loaded
//! already and whose EIP they report (`Cpu::task_switched` keeps the instruction loop from putting
//! RIP back).

use crate::{
    cpu::Cpu,
    debug::{dr6, dr7},
    descriptor::{Descriptor, is_null, selector_fault},
    segmentation::{virtual_8086_segment, within_limit},
    system::System,
    tlb::View,
};
use x86::{
    Fault, Segment,
    control::cr0,
    flags, reg, seg,
    segment::{attr, kind},
    vector,
};

/// What asks for a task switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskSwitch {
    /// Far JMP.
    Jump,
    /// Far CALL.
    Call,
    /// An interrupt or exception through a task gate.
    Gate,
    /// IRET with NT set.
    Return,
}

impl TaskSwitch {
    /// The new task remembers the old one.
    fn nests(self) -> bool {
        matches!(self, Self::Call | Self::Gate)
    }
    fn blame(self) -> u8 {
        if self == Self::Return { vector::TS } else { vector::GP }
    }
}

/// Where the fields of a TSS are (SDM figures 7-2 and 7-10).
#[derive(Clone, Copy)]
struct Layout {
    word: u64,
    size: u64,
    stacks: u64,
    eip: u64,
    segments: u64,
    segment_count: usize,
    ldt: u64,
}

const WIDE: Layout = Layout {
    word: 4,
    size: 104,
    stacks: 4,
    eip: 0x20,
    segments: 0x48,
    segment_count: 6,
    ldt: 0x60,
};
const NARROW: Layout =
    Layout { word: 2, size: 44, stacks: 2, eip: 14, segments: 34, segment_count: 4, ldt: 42 };

const TSS_CR3: u64 = 0x1c;
const TSS_TRAP: u64 = 0x64;

fn layout(tss: &Segment) -> Layout {
    if tss.kind() & 8 != 0 { WIDE } else { NARROW }
}

/// The dynamic part of a TSS.
struct Image {
    eip: u64,
    eflags: u64,
    gpr: [u64; 8],
    selectors: [u16; 6],
    ldt: u16,
    cr3: u64,
    trap: bool,
}

impl<S: System> Cpu<S> {
    /// SS and ESP of an inner privilege level, from the current TSS.
    pub(crate) fn legacy_tss_stack(
        &mut self,
        sys: &mut S,
        level: u8,
    ) -> Result<(Segment, u64), Fault> {
        let tr = self.vcpu.tr;
        let form = layout(&tr);
        let offset = form.stacks + u64::from(level) * 2 * form.word;
        if offset + 2 * form.word - 1 > u64::from(tr.limit) {
            return Err(selector_fault(vector::TS, tr.selector));
        }
        let sp = self.tss_load(sys, &tr, offset)?;
        let selector = self.tss_load(sys, &tr, offset + form.word)? as u16;
        let ss = self.stack_segment(sys, selector, level, false, vector::TS)?;
        Ok((ss, sp))
    }

    /// Pushes words of `size` bytes on a stack that is not the current one yet: SS, ESP, and the
    /// selector to blame for lack of room. Returns the new ESP.
    pub(crate) fn push_legacy(
        &mut self,
        sys: &mut S,
        (ss, sp, blame): (Segment, u64, u16),
        level: u8,
        size: u64,
        words: &[u64],
    ) -> Result<u64, Fault> {
        let mask = if ss.attr & attr::DB != 0 { 0xffff_ffff } else { 0xffff };
        let view = View::at_level(level);
        let slot = |n: usize| sp.wrapping_sub(size * (n as u64 + 1)) & mask;
        let linear = |n: usize| ss.base.wrapping_add(slot(n)) & 0xffff_ffff;
        for n in 0..words.len() {
            if !within_limit(&ss, slot(n), size) {
                return Err(selector_fault(vector::SS, blame));
            }
            self.probe(sys, view, linear(n), size)?;
        }
        for (n, word) in words.iter().enumerate() {
            self.write_view(sys, view, linear(n), &word.to_le_bytes()[..size as usize])?;
        }
        let top = sp.wrapping_sub(size * words.len() as u64) & mask;
        Ok(if mask == 0xffff { sp & !mask | top } else { top })
    }

    /// Pushes an exception's error code on the stack of the task just switched to.
    pub(crate) fn push_task_code(&mut self, sys: &mut S, code: u32) -> Result<(), Fault> {
        match self.vcpu.tr.kind() & 8 {
            0 => self.push::<2>(sys, code.into()),
            _ => self.push::<4>(sys, code.into()),
        }
    }

    /// Switches to the task of a TSS selector. RIP must be the one the old task resumes at;
    /// `rflags` is what it resumes with.
    pub(crate) fn switch_task(
        &mut self,
        sys: &mut S,
        selector: u16,
        how: TaskSwitch,
        rflags: u64,
    ) -> Result<(), Fault> {
        let new = self.new_task(sys, selector, how)?;
        let old = self.vcpu.tr;
        let form = layout(&new.segment);
        // Everything that is going to be touched is probed while the old task still stands.
        let old_fields = layout(&old);
        self.probe_tss(sys, &old, old_fields)?;
        self.probe_tss(sys, &new.segment, form)?;
        let mut image = self.read_image(sys, &new.segment)?;
        let kept = if how == TaskSwitch::Return { rflags & !flags::NT } else { rflags };
        self.save_image(sys, &old, kept)?;
        if !how.nests() {
            self.set_busy(sys, old.selector, false)?;
        }
        if how.nests() {
            self.tss_store(sys, &new.segment, 0, 2, old.selector.into())?;
            image.eflags |= flags::NT;
        }
        if how != TaskSwitch::Return {
            let byte = new.raw >> 40 | 2;
            self.store_system::<1>(sys, new.address.wrapping_add(5), byte)?;
        }
        self.vcpu.tr = Segment { attr: new.segment.attr | 2, ..new.segment };
        self.enter_task(sys, &image)
    }

    /// The TSS descriptor of the task to switch to.
    fn new_task(
        &mut self,
        sys: &mut S,
        selector: u16,
        how: TaskSwitch,
    ) -> Result<Descriptor, Fault> {
        let wrong = selector_fault(how.blame(), selector);
        if is_null(selector) || selector & 4 != 0 {
            return Err(wrong);
        }
        let found = self.descriptor(sys, selector, how.blame())?;
        let busy = how == TaskSwitch::Return;
        let expected =
            if busy { [kind::TSS16_BUSY, kind::TSS_BUSY] } else { [kind::TSS16, kind::TSS] };
        if !found.segment.is_system() || !expected.contains(&found.segment.kind()) {
            return Err(wrong);
        }
        if !found.segment.present() {
            return Err(selector_fault(vector::NP, selector));
        }
        if u64::from(found.segment.limit) + 1 < layout(&found.segment).size {
            return Err(selector_fault(vector::TS, selector));
        }
        Ok(found)
    }

    fn probe_tss(&mut self, sys: &mut S, tss: &Segment, form: Layout) -> Result<(), Fault> {
        let linear = tss.base & 0xffff_ffff;
        self.probe(sys, View::Supervisor, linear, form.size)
    }

    fn tss_load(&mut self, sys: &mut S, tss: &Segment, offset: u64) -> Result<u64, Fault> {
        let linear = self.wrap_linear(tss.base.wrapping_add(offset));
        match layout(tss).word {
            2 => self.load_system::<2>(sys, linear),
            _ => self.load_system::<4>(sys, linear),
        }
    }

    fn tss_store(
        &mut self,
        sys: &mut S,
        tss: &Segment,
        offset: u64,
        size: u64,
        value: u64,
    ) -> Result<(), Fault> {
        let linear = self.wrap_linear(tss.base.wrapping_add(offset));
        match size {
            2 => self.store_system::<2>(sys, linear, value),
            _ => self.store_system::<4>(sys, linear, value),
        }
    }

    fn read_image(&mut self, sys: &mut S, tss: &Segment) -> Result<Image, Fault> {
        let form = layout(tss);
        let mut image = Image {
            eip: self.tss_load(sys, tss, form.eip)?,
            eflags: self.tss_load(sys, tss, form.eip + form.word)?,
            gpr: [0; 8],
            selectors: [0; 6],
            ldt: self.tss_load(sys, tss, form.ldt)? as u16,
            cr3: self.vcpu.cr3,
            trap: false,
        };
        for (n, value) in image.gpr.iter_mut().enumerate() {
            *value = self.tss_load(sys, tss, form.eip + form.word * (2 + n as u64))?;
        }
        for (n, value) in image.selectors.iter_mut().take(form.segment_count).enumerate() {
            *value = self.tss_load(sys, tss, form.segments + form.word * n as u64)? as u16;
        }
        if form.word == 4 {
            image.cr3 = self.tss_load(sys, tss, TSS_CR3)?;
            image.trap = self.tss_load(sys, tss, TSS_TRAP)? & 1 != 0;
        } else {
            image.gpr.iter_mut().for_each(|value| *value |= 0xffff_0000);
        }
        Ok(image)
    }

    fn save_image(&mut self, sys: &mut S, tss: &Segment, rflags: u64) -> Result<(), Fault> {
        let form = layout(tss);
        let v = &self.vcpu;
        let mut words = [v.rip, rflags, 0, 0, 0, 0, 0, 0, 0, 0];
        words[2..].copy_from_slice(&v.gpr[..8]);
        let selectors = v.seg.map(|s| s.selector);
        for (n, word) in words.into_iter().enumerate() {
            self.tss_store(sys, tss, form.eip + form.word * n as u64, form.word, word)?;
        }
        for (n, selector) in selectors.into_iter().take(form.segment_count).enumerate() {
            let offset = form.segments + form.word * n as u64;
            self.tss_store(sys, tss, offset, 2, selector.into())?;
        }
        Ok(())
    }

    fn set_busy(&mut self, sys: &mut S, selector: u16, busy: bool) -> Result<(), Fault> {
        let found = self.descriptor(sys, selector, vector::TS)?;
        let byte = found.raw >> 40 & !2 | u64::from(busy) << 1;
        self.store_system::<1>(sys, found.address.wrapping_add(5), byte)
    }

    /// The new task's registers, then its segments, whose faults are its own.
    fn enter_task(&mut self, sys: &mut S, image: &Image) -> Result<(), Fault> {
        self.task_switched = true;
        let v = &mut self.vcpu;
        v.cr0 |= cr0::TS;
        v.dr[7] &= !dr7::LOCAL;
        if v.cr0 & cr0::PG != 0 {
            v.cr3 = image.cr3;
        }
        v.rip = image.eip;
        v.rflags = image.eflags & flags::ALL | flags::FIXED;
        v.gpr[..8].copy_from_slice(&image.gpr);
        self.flush_tlb();
        self.update_watch();
        self.leave_block = true;
        let loaded = self.load_task_segments(sys, image);
        self.update_view();
        loaded?;
        self.check_target(self.vcpu.rip)?;
        if image.trap {
            self.traps |= dr6::BT;
        }
        Ok(())
    }

    fn load_task_segments(&mut self, sys: &mut S, image: &Image) -> Result<(), Fault> {
        let [es, cs, ss, ds, fs, gs] = image.selectors;
        if self.vcpu.rflags & flags::VM != 0 {
            self.vcpu.seg = image.selectors.map(virtual_8086_segment);
            return self.load_task_ldt(sys, image.ldt);
        }
        let cpl = cs as u8 & 3;
        for (register, selector) in image.selectors.into_iter().enumerate() {
            self.vcpu.seg[register] = Segment::null(selector, cpl);
        }
        self.load_task_ldt(sys, image.ldt)?;
        self.vcpu.seg[seg::CS] = self.task_code_segment(sys, cs)?;
        self.vcpu.seg[seg::SS] = self.stack_segment(sys, ss, cpl, false, vector::TS)?;
        for (register, selector) in [(seg::ES, es), (seg::DS, ds), (seg::FS, fs), (seg::GS, gs)] {
            self.load_segment(sys, register, selector).map_err(as_invalid_tss)?;
        }
        Ok(())
    }

    fn load_task_ldt(&mut self, sys: &mut S, selector: u16) -> Result<(), Fault> {
        self.vcpu.ldtr = Segment::null(selector, 0);
        if is_null(selector) {
            return Ok(());
        }
        let wrong = selector_fault(vector::TS, selector);
        if selector & 4 != 0 {
            return Err(wrong);
        }
        let found = self.descriptor(sys, selector, vector::TS)?.segment;
        if !found.is_system() || found.kind() != kind::LDT || !found.present() {
            return Err(wrong);
        }
        self.vcpu.ldtr = found;
        Ok(())
    }

    fn task_code_segment(&mut self, sys: &mut S, selector: u16) -> Result<Segment, Fault> {
        if is_null(selector) {
            return Err(Fault::with_code(vector::TS, 0));
        }
        let found = self.descriptor(sys, selector, vector::TS)?;
        let s = found.segment;
        let level = if s.is_conforming() { s.dpl() <= s.rpl() } else { s.dpl() == s.rpl() };
        if !s.is_code() || !level {
            return Err(selector_fault(vector::TS, selector));
        }
        if !s.present() {
            return Err(selector_fault(vector::NP, selector));
        }
        self.mark_accessed(sys, &found)?;
        Ok(Segment { attr: s.attr | attr::ACCESSED, ..s })
    }
}

/// A bad data selector in a TSS is #TS.
fn as_invalid_tss(fault: Fault) -> Fault {
    if fault.vector == vector::GP { Fault { vector: vector::TS, ..fault } } else { fault }
}

// The general registers of a TSS are in encoding order.
const _: () = assert!(reg::RDI == 7);
