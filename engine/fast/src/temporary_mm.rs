//! Temporary address spaces, which kernels enter for a moment. Linux patches its text through one, its temporary mm,
//! and calls the firmware in another.
//!
//! Such a space has pages of the kernel's in the user's half, which no wedge maps; every access to one is
//! interpreted, and each costs a turn or two. So what the kernel does there is interpreted from the load
//! of CR3, or the first such access, on. Debian's 6.1 patches 8,600 lock prefixes when it finds one CPU; 6.12 fills and writes
//! the text of BPF programs there, two pages a visit.
//!
//! Interpreting is always right; only how long is a matter of taste.

use x86::{Activity, Vcpu, flags, paging::Roots};

/// Instructions interpreted in one visit at the most: two pages are filled in some 1,300.
pub const VISIT: usize = 4000;

/// The guest's kernel runs, and can take no interrupts.
pub fn is_undisturbed(vcpu: &Vcpu) -> bool {
    let runs = vcpu.activity == Activity::Running && vcpu.cpl() != 3;
    runs && vcpu.rflags & flags::IF == 0
}

/// The temporary space, if one was seen.
#[derive(Default)]
pub struct TemporaryMm(Option<u64>);

impl TemporaryMm {
    /// Kernel code has accessed something in the user's half of this space, and not as the user's.
    pub fn note(&mut self, vcpu: &Vcpu) {
        self.0 = Some(Roots::from(vcpu).top());
    }

    /// The guest is in the temporary space and can take no interrupts: what comes next is interpreted, too.
    pub fn goes_on(&self, vcpu: &Vcpu) -> bool {
        is_undisturbed(vcpu) && self.0 == Some(Roots::from(vcpu).top())
    }

    /// A visit has taken too long: the space is none that is entered for a moment.
    pub fn forget(&mut self) {
        self.0 = None;
    }
}
