//! Instructions of the kernel that access devices.
//!
//! No wedge maps a device's page, so translated code that accesses one faults: the host delivers a signal, and the turn goes to the monitor. An
//! instruction that does so again and again is left out of translations. The code before it then leaves as it does for any other instruction that
//! is interpreted, without a signal. An instruction that turns out to access memory as well is translated for good: interpreting it is dearer.

use crate::fault_counts::FaultCounts;

/// Faults before an instruction is left out.
const OFTEN: u32 = 16;
/// It accesses memory as well.
const MIXED: u32 = u32::MAX;

/// How often instructions have accessed a device.
#[derive(Default)]
pub struct Devices(FaultCounts);

impl Devices {
    /// The instruction at a GVA is left out of translations.
    pub fn leaves_out(&self, guest: u64) -> bool {
        self.0.get(guest).is_some_and(is_left_out)
    }

    /// Translated code has faulted at a device; true if the instruction is left out from now on.
    pub fn note_fault(&mut self, guest: u64) -> bool {
        self.0.note(guest, OFTEN)
    }

    /// An instruction that is left out has not accessed a device.
    pub fn note_memory(&mut self, guest: u64) {
        self.0.set(guest, MIXED);
    }

    /// How many of the bytes from a GVA on come before an instruction that is left out.
    pub fn before(&self, guest: u64, len: usize) -> usize {
        let mut within = self.0.within(guest, len);
        within.find(|(_, faults)| is_left_out(*faults)).map_or(len, |(far, _)| far as usize)
    }
}

/// An instruction with so many faults is left out.
fn is_left_out(faults: u32) -> bool {
    (OFTEN..MIXED).contains(&faults)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Fast,
        test_machine::{MODES, board, kernel_state, map},
    };
    use engine::{Engine, VcpuRequests};
    use iced_x86::{IcedError, code_asm::*};
    use ram::Ram;
    use std::sync::Arc;
    use wedge_abi::WedgeExit;
    use x86_interp::{Exit, GuestRam};

    const CODE: (u64, u64) = (0xffff_ffff_8100_0000, 0x4_0000);
    const DATA: (u64, u64) = (0xffff_ffff_8200_0000, 0x5_0000);
    /// There is no RAM.
    const DEVICE: (u64, u64) = (0xffff_ffff_8300_0000, 0xfe00_0000);
    const TIMES: u32 = 400;

    /// One instruction stores so often to the device, and then as often to memory; both is counted in memory.
    fn kernel() -> Result<Vec<u8>, IcedError> {
        let mut a = CodeAssembler::new(64)?;
        let (mut all, mut one, mut end) = (a.create_label(), a.create_label(), a.create_label());
        a.mov(rdi, DEVICE.0)?;
        a.mov(rbx, DATA.0 + 8)?;
        a.set_label(&mut all)?;
        a.mov(ecx, TIMES)?;
        a.set_label(&mut one)?;
        a.inc(dword_ptr(rbx))?;
        a.mov(dword_ptr(rdi), ecx)?;
        a.dec(ecx)?;
        a.jne(one)?;
        a.mov(rax, DATA.0)?;
        a.cmp(rdi, rax)?;
        a.je(end)?;
        a.mov(rdi, rax)?;
        a.jmp(all)?;
        a.set_label(&mut end)?;
        a.hlt()?;
        a.assemble(CODE.0)
    }

    #[test]
    fn what_accesses_devices_stops_faulting_and_what_accesses_memory_is_translated() {
        let ram = Ram::new(2 << 20).expect("memory");
        map(&ram, &[(CODE, 0), (DATA, 0), (DEVICE, 0)]);
        ram.write(CODE.1, &kernel().expect("encodable"));
        let requests = Arc::new(VcpuRequests::default());
        let board = board(ram, Arc::clone(&requests));
        let start = kernel_state(CODE.0, DATA.0 + 0x800);
        let mut fast = Fast::new(
            start,
            board,
            &requests,
            MODES,
            (&crate::Machine::new(1), &crate::Placement::default()),
        )
        .expect("an engine");
        assert_eq!(fast.run(u64::MAX), Exit::Halted);
        assert_eq!(fast.traffic().0, u64::from(TIMES), "each store reached the device");
        assert_eq!(fast.ram().load64(DATA.1 + 8), u64::from(2 * TIMES));
        assert_eq!(fast.ram().load64(DATA.1), 1, "the last store to memory");
        let faults = fast.statistics.exits[WedgeExit::KernelSignal.number()];
        assert!(faults < 2 * u64::from(OFTEN), "{faults} faults");
        let interpreted = fast.statistics.interpreted;
        assert!(interpreted < u64::from(TIMES) + 50, "{interpreted} interpreted");
    }

    #[test]
    fn a_block_ends_before_what_is_left_out() {
        let mut devices = Devices::default();
        for _ in 0..OFTEN - 1 {
            assert!(!devices.note_fault(0x1010));
        }
        assert_eq!(devices.before(0x1000, 100), 100);
        assert!(devices.note_fault(0x1010));
        assert!(!devices.note_fault(0x1010), "it is said once");
        let before = [(0x1000, 16), (0x1010, 0), (0x1011, 100), (0xf00, 100)];
        for (guest, expected) in before {
            assert_eq!(devices.before(guest, 100), expected, "{guest:#x}");
        }
        devices.note_memory(0x1010);
        assert!(!devices.leaves_out(0x1010) && !devices.note_fault(0x1010));
        assert_eq!(devices.before(0x1000, 100), 100);
    }
}
