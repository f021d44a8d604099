//! Temporary address spaces, which kernels enter for a moment. Linux patches its text through one, its temporary mm,
//! and calls the firmware in another.
//!
//! Such a space has pages of the kernel's in the user's half, which no wedge maps; every access to one is
//! interpreted, and each costs a turn or two. So what the kernel does there is interpreted from the load
//! of CR3, or the first such access, on. Debian's 6.1 patches 8,600 lock prefixes when it finds one CPU; 6.12 fills and writes
//! the text of BPF programs there, two pages a visit.
//!
//! Interpreting is always right; only how long is a matter of taste.

use crate::Fast;
use x86::{Activity, Vcpu, flags, paging::ADDRESS};

/// Instructions interpreted in one visit at the most: two pages are filled in some 1,300.
const VISIT: usize = 4000;

/// The temporary space, if one was seen.
#[derive(Default)]
pub struct TemporaryMm(Option<u64>);

impl TemporaryMm {
    /// Kernel code has accessed something in the user's half of this space, and not as the user's.
    pub fn note(&mut self, vcpu: &Vcpu) {
        self.0 = Some(vcpu.cr3 & ADDRESS);
    }

    fn is(&self, vcpu: &Vcpu) -> bool {
        self.0 == Some(vcpu.cr3 & ADDRESS)
    }
}

impl Fast {
    /// Interprets on while the guest is in a temporary space and can take no interrupts.
    pub(crate) fn pass_through(&mut self) {
        for _ in 0..VISIT {
            let v = &self.cpu.vcpu;
            let goes_on = v.activity == Activity::Running && v.rflags & flags::IF == 0;
            if !goes_on || !self.temporary_mm.is(v) || v.cpl() == 3 {
                return;
            }
            if self.cpu.is_at_breakpoint(&mut self.board) {
                return;
            }
            self.interpret();
        }
        self.temporary_mm = TemporaryMm::default();
    }
}
