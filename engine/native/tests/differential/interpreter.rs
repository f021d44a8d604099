//! The reference CPU with this vector unit, in a machine that maps the arena where the oracle has
//! it: 64-bit user mode with everything enabled.

use native::HostVectorUnit;
use ram::Ram;
use x86::{
    Segment, Vcpu,
    control::{cr0, cr4, efer},
    fpu::xstate,
    seg,
    segment::attr,
};
use x86_interp::{BareMachine, Cpu, CpuidResult};

use crate::oracle::{
    ARENA_ADDRESS, ARENA_SIZE, INSTRUCTION_ADDRESS, MEMORY, MEMORY_ADDRESS, Outcome, State,
};

/// GPA of the arena.
const ARENA_GPA: u64 = 0x8_0000;
/// GPA of the topmost page table; the others follow.
const TABLES: u64 = 0x1000;
/// Present, writable, user, accessed, dirty.
const ENTRY: u64 = 0x67;

type Machine = BareMachine<Ram, HostVectorUnit>;

/// The interpreter under test.
pub struct InterpreterSide {
    machine: Machine,
    cpu: Cpu<Machine>,
}

impl InterpreterSide {
    pub fn new() -> Self {
        let (ram, unit) = (Ram::new(1 << 20).unwrap(), HostVectorUnit::new().unwrap());
        let mut machine = BareMachine::new(ram, unit);
        machine.cpuid = CpuidResult { eax: 7, ..CpuidResult::default() };
        let table = |level: u64| TABLES + level * 4096;
        let entry = |at: u64, value: u64| {
            machine.ram.write_gpa(at, &value.to_le_bytes()).unwrap();
        };
        entry(table(0), table(1) | ENTRY);
        entry(table(1) + 8 * (ARENA_ADDRESS >> 30), table(2) | ENTRY);
        entry(table(2), table(3) | ENTRY);
        for page in 0..ARENA_SIZE / 4096 {
            entry(table(3) + 8 * page, (ARENA_GPA + page * 4096) | ENTRY);
        }
        Self { machine, cpu: Cpu::new(user_mode()) }
    }

    /// Changes registers other than those a [`State`] has.
    pub fn change(&mut self, change: impl Fn(&mut Vcpu)) {
        change(&mut self.cpu.vcpu);
        self.cpu.state_changed();
    }

    /// Executes one instruction.
    pub fn run(&mut self, bytes: &[u8], state: &State) -> Outcome {
        let gpa = |address: u64| address - ARENA_ADDRESS + ARENA_GPA;
        let ram = &self.machine.ram;
        ram.write_gpa(gpa(INSTRUCTION_ADDRESS), &[0x90; 15]).unwrap();
        ram.write_gpa(gpa(INSTRUCTION_ADDRESS), bytes).unwrap();
        ram.write_gpa(gpa(MEMORY_ADDRESS), &state.memory).unwrap();
        let v = &mut self.cpu.vcpu;
        v.fpu = state.fpu;
        v.gpr = state.gpr;
        v.rflags = state.rflags;
        v.rip = INSTRUCTION_ADDRESS;
        let fault = self.cpu.step(&mut self.machine).err();
        let mut memory = [0; MEMORY];
        self.machine.ram.read_gpa(gpa(MEMORY_ADDRESS), &mut memory).unwrap();
        let v = &self.cpu.vcpu;
        if fault.is_none() {
            assert_eq!(v.rip, INSTRUCTION_ADDRESS + bytes.len() as u64);
        }
        Outcome {
            fpu: v.fpu,
            gpr: v.gpr,
            memory,
            rflags: v.rflags,
            fault: fault.map_or(0, |fault| fault.vector),
            fault_address: fault.map_or(0, |fault| fault.address),
        }
    }
}

fn user_mode() -> Vcpu {
    let user = 3 << attr::DPL_SHIFT;
    let data = Segment {
        selector: 0x2b,
        attr: attr::P | attr::S | attr::RW | attr::ACCESSED | user | attr::G | attr::DB,
        limit: u32::MAX,
        base: 0,
    };
    let mut vcpu = Vcpu {
        cr0: cr0::PE | cr0::PG | cr0::NE | cr0::MP | cr0::ET | cr0::WP,
        cr3: TABLES,
        cr4: cr4::PAE | cr4::OSFXSR | cr4::OSXMMEXCPT | cr4::OSXSAVE,
        efer: efer::LME | efer::LMA | efer::NXE,
        xcr0: xstate::SUPPORTED,
        seg: [data; 6],
        ..Vcpu::default()
    };
    vcpu.seg[seg::CS] = Segment {
        selector: 0x33,
        attr: attr::P | attr::S | attr::RW | attr::CODE | attr::ACCESSED | user | attr::L | attr::G,
        ..data
    };
    vcpu
}
