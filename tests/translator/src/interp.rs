//! The interpreter's side: the same case in a machine that is nothing but memory.

use crate::case::{Case, DATA_LEN, Place, USER, USER_LEN};
use anyhow::Result;
use iced_x86::Instruction;
use jit::Level;
use oracle::{
    Vendor,
    undefined::{Ignored, Undefined},
};
use x86::{
    Fault, Vcpu,
    control::{cr0, cr4, efer},
    fpu::xstate,
    paging::{P, RW, US},
    reg, seg,
    segment::attr,
};
use x86_interp::{Cpu, GuestRam, System};

const ROOT: u64 = 0x1000;
const CR4: u64 =
    cr4::PAE | cr4::OSFXSR | cr4::OSXMMEXCPT | cr4::OSXSAVE | cr4::FSGSBASE | cr4::SMAP | cr4::SMEP;
const IMAGE: u64 = 0x4_0000;
/// Steps after which a case counts as lost.
const MAX_STEPS: usize = 10_000;

/// The interpreter in its machine.
pub struct Interpreter {
    cpu: Cpu<oracle::interp::Machine>,
    machine: oracle::interp::Machine,
    program: Vec<Instruction>,
    vendor: Vendor,
}

/// Where it stands.
pub struct Standing {
    /// The exception, if it ended in one.
    pub fault: Option<Fault>,
    /// What the architecture leaves open.
    pub ignored: Ignored,
}

impl Interpreter {
    /// Builds machine and page tables.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn new(level: Level) -> Result<Self> {
        Self::at(Place::of(level))
    }

    /// The same for code at a place.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn at(place: Place) -> Result<Self> {
        let level = place.level;
        let machine = oracle::interp::machine()?;
        let mut next = ROOT;
        let mut map = |gva: u64, gpa: u64, rights: u64| {
            let mut table = ROOT;
            for shift in if place.narrow { &[30, 21][..] } else { &[39, 30, 21] } {
                let slot = table + (gva >> shift & 0x1ff) * 8;
                if machine.ram().load64(slot) == 0 {
                    next += 0x1000;
                    // Entries of PAE's top level have no rights.
                    let rights = if place.narrow && *shift == 30 { 0 } else { RW | US };
                    machine.ram().store64(slot, next | P | rights);
                }
                table = machine.ram().load64(slot) & x86::paging::ADDRESS;
            }
            machine.ram().store64(table + (gva >> 12 & 0x1ff) * 8, gpa | P | rights);
        };
        let own = if level == Level::User { US } else { 0 };
        map(place.code, IMAGE, own);
        for page in (0..DATA_LEN).step_by(4096) {
            map(place.data + page, IMAGE + 4096 + page, RW | own);
        }
        map(USER, IMAGE + 4096 + DATA_LEN, RW | US);
        let (cpu, vendor) = (Cpu::new(Vcpu::default()), Vendor::of_host());
        Ok(Self { cpu, machine, program: Vec::new(), vendor })
    }

    /// Starts a case over.
    pub fn load(&mut self, case: &Case) {
        let mut code = [0xcc; 4096];
        code[..case.code.len()].copy_from_slice(&case.code);
        let ram = self.machine.ram();
        ram.write(IMAGE, &code);
        ram.note_write(IMAGE, 4096);
        ram.write(IMAGE + 4096, &case.memory);
        self.program = case.decoder().iter().collect();
        self.cpu.vcpu = state(case);
        self.cpu.state_changed();
    }

    /// Steps until RIP is `rip`, or an exception.
    pub fn run_to(&mut self, rip: u64) -> Standing {
        let mut undefined = Undefined::default();
        for _ in 0..MAX_STEPS {
            let before = self.cpu.vcpu.rip;
            if before == rip {
                return Standing { fault: None, ignored: undefined.ignored() };
            }
            let insn = self.instruction(before);
            if let Some(insn) = &insn {
                undefined.before(insn, &self.cpu.vcpu);
            }
            if let Err(fault) = self.cpu.step(&mut self.machine) {
                if let Some(insn) = &insn {
                    self.vendor.faulted(insn, fault, &mut undefined);
                }
                return Standing { fault: Some(fault), ignored: undefined.ignored() };
            }
            if let Some(insn) = insn.filter(|_| self.cpu.vcpu.rip != before) {
                undefined.after(&insn);
            }
        }
        Standing { fault: None, ignored: undefined.ignored() }
    }

    /// Steps until RIP is `rip`; if the instruction there is repeated, until `left` iterations are left
    /// of it. Flags are then as before the first.
    pub fn run_to_iteration(&mut self, rip: u64, left: u64) -> Standing {
        let standing = self.run_to(rip);
        let v = &mut self.cpu.vcpu;
        let rflags = v.rflags;
        let done = v.gpr[reg::RCX].wrapping_sub(left);
        let repeated = self
            .program
            .iter()
            .any(|insn| insn.ip() == rip && (insn.has_rep_prefix() || insn.has_repne_prefix()));
        if standing.fault.is_some() || done == 0 || !repeated {
            return standing;
        }
        v.gpr[reg::RCX] = done;
        let mut fault = None;
        while fault.is_none() && self.cpu.vcpu.rip == rip {
            fault = self.cpu.step(&mut self.machine).err();
        }
        let v = &mut self.cpu.vcpu;
        (v.rip, v.rflags) = (rip, rflags);
        v.gpr[reg::RCX] = v.gpr[reg::RCX].wrapping_add(left);
        self.cpu.state_changed();
        Standing { fault, ..standing }
    }

    fn instruction(&self, rip: u64) -> Option<Instruction> {
        self.program.iter().find(|insn| insn.ip() == rip).copied()
    }

    /// Goes on with the instruction at RIP, however often it repeats; if it faults, what the host
    /// CPU's maker leaves open then.
    pub fn faults_next(&mut self) -> Option<Ignored> {
        let insn = self.instruction(self.cpu.vcpu.rip)?;
        for _ in 0..MAX_STEPS {
            if let Err(fault) = self.cpu.step(&mut self.machine) {
                let mut undefined = Undefined::default();
                self.vendor.faulted(&insn, fault, &mut undefined);
                return Some(undefined.ignored());
            }
            if self.cpu.vcpu.rip != insn.ip() {
                return None;
            }
        }
        None
    }

    /// The state.
    pub fn vcpu(&self) -> &Vcpu {
        &self.cpu.vcpu
    }

    /// Kernel data, then user data.
    pub fn memory(&self) -> Vec<u8> {
        let mut memory = vec![0; (DATA_LEN + USER_LEN) as usize];
        self.machine.ram().read(IMAGE + 4096, &mut memory);
        memory
    }
}

fn state(case: &Case) -> Vcpu {
    let place = &case.place;
    let mut v = Vcpu {
        gpr: case.gpr,
        rip: place.code,
        rflags: case.rflags,
        cr0: cr0::PE | cr0::MP | cr0::ET | cr0::NE | cr0::WP | cr0::AM | cr0::PG,
        cr3: ROOT,
        cr4: CR4,
        efer: efer::SCE | efer::LME | efer::LMA | efer::NXE,
        ..Vcpu::default()
    };
    if place.narrow {
        v.efer = 0;
        flatten(&mut v);
    } else {
        v.seg[seg::CS].attr |= attr::L;
    }
    let user = place.level == Level::User;
    for segment in [seg::CS, seg::SS] {
        v.seg[segment].attr &= !(3 << attr::DPL_SHIFT);
        v.seg[segment].attr |= if user { 3 << attr::DPL_SHIFT } else { 0 };
    }
    for (segment, selector) in v.seg.iter_mut().zip(case.selectors) {
        segment.selector = selector;
    }
    (v.seg[seg::FS].base, v.seg[seg::GS].base) = case.bases();
    v.kernel_gs_base = case.kernel_gs_base;
    v.tsc_aux = case.tsc_aux;
    v.xcr0 = xstate::SUPPORTED;
    v.fpu.xmm = case.xmm;
    v
}

/// Flat segments, as 32-bit Linux has them.
fn flatten(v: &mut Vcpu) {
    let data = attr::P | attr::S | attr::G | attr::DB | attr::RW | attr::ACCESSED;
    for segment in &mut v.seg {
        (segment.attr, segment.limit, segment.base) = (data, u32::MAX, 0);
    }
    v.seg[seg::CS].attr |= attr::CODE;
}
