//! What CPUID has answered user code: wedges that are told answer the next time.

use wedge::Pages;
use wedge_abi::Cpuid;
use x86::{Vcpu, reg};

/// The answers that the wedges of a vCPU have been told.
#[derive(Default)]
pub struct CpuidAnswers {
    /// Answers told, those counted whose places others have.
    count: usize,
    /// CR4 and XCR0 at that time.
    under: (u64, u64),
}

impl CpuidAnswers {
    /// Forgets the answers if the registers that answers depend on have changed.
    pub fn check(&mut self, vcpu: &Vcpu, pages: &mut Pages) {
        let under = (vcpu.cr4, vcpu.xcr0);
        if under != self.under {
            (self.count, self.under) = (0, under);
            pages.told().cpuid.count = 0;
        }
    }

    /// Tells what CPUID has answered when `asked`, in the oldest answer's place if need be.
    pub fn tell(&mut self, asked: [u32; 2], vcpu: &Vcpu, pages: &mut Pages) {
        let registers = [reg::RAX, reg::RBX, reg::RCX, reg::RDX];
        let registers = registers.map(|register| vcpu.gpr[register] as u32);
        let cpuid = &mut pages.told().cpuid;
        let at = self.count % cpuid.answers.len();
        self.count += 1;
        cpuid.answers[at] = Cpuid { asked, registers };
        cpuid.count = self.count.min(cpuid.answers.len()) as u64;
    }
}
