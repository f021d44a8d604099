//! 32-bit user code, and thread-local segments.

use crate::{code, state};
use ram::Ram;
use wedge_abi::{AREAS, FIRST_AREA, area};
use x86::{
    Vcpu,
    paging::{Access, Roots},
};
use x86_interp::GuestRam;

/// The 32-bit user code of a vCPU.
pub struct NarrowCode {
    /// 32-bit code runs directly, too.
    runs: bool,
    /// 32-bit code has run, or code with thread-local segments.
    seen: bool,
}

impl NarrowCode {
    /// 32-bit code runs directly, too, or does not.
    pub fn new(runs: bool) -> Self {
        Self { runs, seen: false }
    }

    /// 32-bit code runs directly, too.
    pub fn runs(&self) -> bool {
        self.runs
    }

    /// The guest's thread-local segments, as far as the host can have them and user code has to do with them.
    pub fn areas(&mut self, vcpu: &Vcpu, ram: &Ram) -> [u64; AREAS] {
        self.seen |= self.runs && state::has_areas(vcpu);
        if !self.seen {
            return [0; AREAS];
        }
        std::array::from_fn(|at| {
            let entry = (u64::from(FIRST_AREA) + at as u64) * 8;
            let inside = entry + 7 <= vcpu.gdtr.limit.into();
            let gva = vcpu.gdtr.base.wrapping_add(entry);
            let found = kernel_word(vcpu, ram, gva).filter(|_| inside);
            found.filter(|descriptor| area(at, *descriptor).is_some()).unwrap_or(0)
        })
    }
}

/// Eight bytes of the kernel's memory, not across a page.
pub(crate) fn kernel_word(vcpu: &Vcpu, ram: &Ram, gva: u64) -> Option<u64> {
    let at = code::offset(ram, Roots::from(vcpu), gva, Access::default())?;
    (gva & 0xfff <= 0xff8).then(|| ram.load64(at))
}
