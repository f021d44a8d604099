//! Segments of 32-bit guests: what the guest's descriptor tables say of them, as far as translated code can have it.
//!
//! Translated code takes DS, ES and SS for flat. It knows the base of one more segment, by which a CPU or a thread finds what it has of its
//! own. The wedge loads only segments that fit; all other loads are the monitor's. What the wedge has loaded the monitor hears from the vCPU
//! page: selectors and bases. The rest of a descriptor it reads in the guest's tables (`fast/src/state.rs`).

use crate::{
    Context,
    assist::{descriptor_word, go_on_behind},
    blocks::find,
};
use wedge_abi::{NOWHERE, SegmentLoad, VcpuPage, walks};
use x86::{
    flags::AC,
    reg::RSP,
    seg::{DS, ES, FS, GS},
};

/// Privilege levels.
pub const KERNEL: u64 = 0;
pub const PROGRAM: u64 = 3;
/// In a selector: the privilege level that is asked for.
const RPL: u64 = 3;
/// Of a descriptor: the limit, present, of code or data, and the bits of the type: code, expands down, may be written, accessed (SDM 3.4.5).
const LIMIT: u64 = 0x000f_0000_0000_ffff;
const PAGES: u64 = 1 << 55;
const BIG: u64 = 1 << 54;
const PRESENT: u64 = 1 << 47;
const PLAIN: u64 = 1 << 44;
const CODE: u64 = 1 << 43;
const DOWN: u64 = 1 << 42;
const WRITES: u64 = 1 << 41;
const ACCESSED: u64 = 1 << 40;
/// All 4 GiB, to be read and written, as data; or read, as code.
const WHOLE: u64 = LIMIT | PAGES | PRESENT | PLAIN | WRITES | ACCESSED;
const OF_TYPE: u64 = WHOLE | CODE | DOWN;

/// A descriptor of a guest's GDT.
#[derive(Clone, Copy)]
pub struct Descriptor(u64);

impl Descriptor {
    /// The descriptor of a selector, if [`descriptor_word`] has one.
    pub fn of(vcpu: &mut VcpuPage, selector: u64) -> Option<Self> {
        descriptor_word(vcpu, selector).map(Self)
    }

    fn level(self) -> u64 {
        self.0 >> 45 & 3
    }

    pub fn base(self) -> u64 {
        self.0 >> 16 & 0xff_ffff | self.0 >> 32 & 0xff00_0000
    }

    /// Data, all 4 GiB from the base on, to be read and written by code of this level with this selector.
    pub fn is_whole_data(self, selector: u64, level: u64) -> bool {
        self.0 & OF_TYPE == WHOLE && self.level() >= level.max(selector & RPL)
    }

    /// The same, from address zero on.
    pub fn is_flat_data(self, selector: u64, level: u64) -> bool {
        self.is_whole_data(selector, level) && self.base() == 0
    }

    /// Stack of exactly this level.
    pub fn is_flat_stack(self, selector: u64, level: u64) -> bool {
        self.is_flat_data(selector, level)
            && self.0 & BIG != 0
            && [self.level(), selector & RPL] == [level; 2]
    }

    /// 32-bit code of exactly this level, flat and not conforming.
    pub fn is_flat_code(self, selector: u64, level: u64) -> bool {
        self.0 & OF_TYPE == WHOLE | CODE
            && self.0 & BIG != 0
            && self.base() == 0
            && [self.level(), selector & RPL] == [level; 2]
    }
}

/// The selector is of no segment.
pub fn is_null(selector: u64) -> bool {
    selector & 0xfffc == 0
}

/// Loads a data segment register as the exit says. False leaves that to the monitor, with nothing changed.
pub fn load(cx: &mut Context<'_>) -> bool {
    let vcpu = &mut *cx.vcpu;
    let (selector, SegmentLoad { register, pops }) = SegmentLoad::decode(vcpu.exit.operand);
    let next = find(vcpu.exit.next, vcpu.regs.ac & AC != 0);
    let may = vcpu.run.walks == walks::PAE && vcpu.regs.cpl == 0 && next != 0;
    if !may || set(vcpu, register as usize, selector).is_none() {
        return false;
    }
    if pops {
        vcpu.regs.gpr[RSP] = (vcpu.regs.gpr[RSP] + 4) & u64::from(u32::MAX);
    }
    vcpu.counters.segments += 1;
    go_on_behind(vcpu, next)
}

/// Sets a data segment register for kernel code. `None` if translated code cannot have the segment.
fn set(vcpu: &mut VcpuPage, register: usize, selector: u64) -> Option<()> {
    let descriptor = match is_null(selector) {
        true => None,
        false => Some(Descriptor::of(vcpu, selector)?),
    };
    let is_flat = descriptor.is_some_and(|found| found.is_flat_data(selector, KERNEL));
    let is_whole = descriptor.is_none_or(|found| found.is_whole_data(selector, KERNEL));
    let base = descriptor.map_or(0, Descriptor::base);
    match register {
        DS if is_flat => vcpu.regs.ds = selector,
        ES if is_flat => vcpu.regs.es = selector,
        FS if is_whole => {
            (vcpu.regs.fs, vcpu.regs.fs_base) = (selector, base);
            vcpu.block.percpu = if descriptor.is_some() { base } else { NOWHERE };
        }
        GS if is_whole => (vcpu.regs.gs, vcpu.regs.gs_base) = (selector, base),
        _ => return None,
    }
    Some(())
}

/// What [`wedge_abi::BlockState::percpu`] is for a program that goes on with the data segments that are loaded now. `None` if the monitor is
/// needed: a return to the program would clear one of them, or translated code cannot have them.
pub fn own_of_program(vcpu: &mut VcpuPage) -> Option<u64> {
    for selector in [vcpu.regs.ds, vcpu.regs.es] {
        Descriptor::of(vcpu, selector).filter(|found| found.is_flat_data(selector, PROGRAM))?;
    }
    if !is_null(vcpu.regs.fs) {
        let selector = vcpu.regs.fs;
        Descriptor::of(vcpu, selector).filter(|found| found.is_whole_data(selector, PROGRAM))?;
    }
    own(vcpu, [vcpu.regs.gs, vcpu.regs.gs_base], PROGRAM)
}

/// The same for kernel code that a program has been left for, until the kernel loads FS.
pub fn own_of_kernel(vcpu: &mut VcpuPage) -> Option<u64> {
    own(vcpu, [vcpu.regs.fs, vcpu.regs.fs_base], KERNEL)
}

/// The same for code of a level, by the selector and the base of the segment for what is its own.
fn own(vcpu: &mut VcpuPage, [selector, base]: [u64; 2], level: u64) -> Option<u64> {
    if is_null(selector) {
        return Some(NOWHERE);
    }
    let found = Descriptor::of(vcpu, selector)?;
    (found.is_whole_data(selector, level) && found.base() == base).then_some(base)
}
