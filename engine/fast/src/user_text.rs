//! User code as bytes, as far as traps have to be told apart by them.

use crate::code;
use ram::Ram;
use x86::{
    Vcpu,
    paging::{Access, Roots},
};
use x86_interp::GuestRam;

/// Bytes of the longest instruction.
pub const LONGEST: u64 = 15;
/// INT3.
pub const INT3: u8 = 0xcc;
/// INTO.
pub const INTO: u8 = 0xce;
const CPUID: [u8; 2] = [0x0f, 0xa2];
const INT1: u8 = 0xf1;

/// The user code of an address space.
pub struct UserText<'a> {
    ram: &'a Ram,
    roots: Roots,
}

impl<'a> UserText<'a> {
    /// The user code that a vCPU sees.
    pub fn of(vcpu: &Vcpu, ram: &'a Ram) -> Self {
        Self { ram, roots: Roots::from(vcpu) }
    }

    /// The instruction at a GVA is CPUID.
    pub fn is_cpuid(&self, gva: u64) -> bool {
        [gva, gva.wrapping_add(1)].map(|at| self.byte(at)) == CPUID.map(Some)
    }

    /// GVA of the interrupt that has trapped and ends at `rip`: the byte `opcode`, or INT and a number, which is never
    /// the opcode of an interrupt that traps. Prefixes before it mean nothing.
    pub fn interrupt_before(&self, rip: u64, opcode: u8) -> u64 {
        let short = self.byte(rip.wrapping_sub(1)) == Some(opcode);
        rip.wrapping_sub(if short { 1 } else { 2 })
    }

    /// The instruction at a GVA is INT1.
    fn is_int1(&self, gva: u64) -> bool {
        let mut bytes = (0..LONGEST).map_while(|n| self.byte(gva.wrapping_add(n)));
        let prefix = |byte: &u8| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf2 | 0xf3);
        bytes.find(|byte| !prefix(byte)) == Some(INT1)
    }

    /// The byte at a GVA, if user code may be executed there.
    fn byte(&self, gva: u64) -> Option<u8> {
        let access = Access { write: false, fetch: true, user: true, smap_override: false };
        let at = code::offset(self.ram, self.roots, gva, access)?;
        let mut byte = [0];
        self.ram.read(at, &mut byte);
        Some(byte[0])
    }
}

/// Where RIP points when INT1 traps. CPUs leave RIP behind INT1 (SDM, INT n), and some hosts that are virtual machines
/// themselves at it.
#[derive(Default)]
pub struct Int1Traps {
    /// On this host RIP stays at INT1.
    stays: bool,
}

impl Int1Traps {
    /// GVA of the INT1 that has trapped with this RIP. Where the bytes allow both, what this host did before decides.
    pub fn start(&mut self, text: &UserText<'_>, rip: u64) -> u64 {
        let behind = text.byte(rip.wrapping_sub(1)) == Some(INT1);
        if behind != text.is_int1(rip) {
            self.stays = !behind;
        }
        if self.stays { rip } else { rip.wrapping_sub(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machine::{kernel_state, map};
    use x86::paging::US;

    /// GVA of the code, and its place in RAM.
    const CODE: (u64, u64) = (0x5555_0000_0000, 0x4_0000);
    const NOP: u8 = 0x90;

    /// RAM with this user code.
    fn ram(code: &[u8]) -> Ram {
        let ram = Ram::new(2 << 20).expect("memory");
        map(&ram, &[(CODE, US)]);
        ram.write(CODE.1, code);
        ram
    }

    #[test]
    fn the_last_clear_case_says_where_int1_leaves_rip() {
        let (ram, vcpu) = (ram(&[NOP, INT1, INT1, NOP]), kernel_state(CODE.0, 0));
        let (text, mut traps) = (UserText::of(&vcpu, &ram), Int1Traps::default());
        let mut start = |rip| traps.start(&text, CODE.0 + rip) - CODE.0;
        assert_eq!(start(2), 1, "unclear: as on a CPU");
        assert_eq!((start(1), start(2)), (1, 2), "it stays");
        assert_eq!((start(3), start(2)), (2, 1), "it does not stay");
    }

    #[test]
    fn interrupts_have_two_encodings() {
        let (ram, vcpu) = (ram(&[INT3, 0xcd, 3, 0x0f, 0xa2]), kernel_state(CODE.0, 0));
        let text = UserText::of(&vcpu, &ram);
        let starts = [1, 3].map(|rip| text.interrupt_before(CODE.0 + rip, INT3) - CODE.0);
        assert_eq!(starts, [0, 1]);
        assert!(text.is_cpuid(CODE.0 + 3) && !text.is_cpuid(CODE.0 + 2));
    }
}
