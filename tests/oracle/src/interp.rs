//! Runs cases on the reference interpreter, in a machine that is nothing but memory: 64-bit user
//! mode, page tables that map the windows with their permissions, descriptors as Linux has them,
//! an empty IDT (so every INT is #GP), no I/O permission map.

use iced_x86::{Code, Instruction};
use native::HostVectorUnit;
use ram::Ram;
use x86::control::{cr0, cr4, efer};
use x86::fpu::xstate;
use x86::paging::{NX, P, RW, US};
use x86::segment::{Segment, attr};
use x86::{Fault, TableRegister, Vcpu, flags, seg, vector};
use x86_interp::BareMachine;

use crate::layout::{IMAGE_LEN, PAGE, WINDOWS};
use crate::state::{Case, LINUX_SELECTORS, Outcome, State, Stop, changes};
use crate::undefined::{Ignored, Undefined};
use crate::vendor::Vendor;

/// Where the image lies in guest RAM (GPA).
const IMAGE_GPA: u64 = 0x4_0000;
/// The descriptor table (GPA), and where it is mapped for the supervisor.
const GDT_GPA: u64 = 0x3_f000;
const GDT: u64 = 0xffff_fe00_0000_1000;
/// What Linux has in it, as far as a program can tell: code and data of kernel and user, the TSS,
/// and the segment whose limit is the CPU's number.
const GDT_ENTRIES: [u64; 16] = {
    let mut entries = [0; 16];
    entries[1] = 0x00cf_9b00_0000_ffff;
    entries[2] = 0x00af_9b00_0000_ffff;
    entries[3] = 0x00cf_9300_0000_ffff;
    entries[4] = 0x00cf_fb00_0000_ffff;
    entries[5] = 0x00cf_f300_0000_ffff;
    entries[6] = 0x00af_fb00_0000_ffff;
    entries[8] = 0x0000_8b00_0000_0067;
    entries[15] = 0x0040_f500_0000_0000;
    entries
};
/// The page tables' root (GPA); further tables follow.
const ROOT_GPA: u64 = 0x1000;
/// Steps after which a case counts as endless. Repeated string instructions take one step for
/// many iterations.
const MAX_STEPS: usize = 100_000;

/// Why the interpreter's side cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum InterpError {
    /// No guest memory.
    #[error(transparent)]
    Ram(#[from] ram::RamError),
    /// No vector unit.
    #[error("the host's vector unit cannot be set up: {0}")]
    Unit(std::io::Error),
}

/// What the interpreter made of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interpreted {
    /// The outcome.
    pub outcome: Outcome,
    /// What of it the architecture leaves open.
    pub ignored: Ignored,
    /// The forms of the instructions that ran, the last one possibly to a fault.
    pub ran: Vec<Code>,
    /// How many of them ran to their end.
    pub completed: usize,
}

/// The interpreter in its machine.
pub struct Interpreter {
    cpu: x86_interp::Cpu<Machine>,
    machine: Machine,
    vendor: Vendor,
    after: Box<[u8; IMAGE_LEN]>,
}

impl Interpreter {
    /// Builds machine and page tables.
    ///
    /// # Errors
    /// The host has no memory for it.
    pub fn new() -> Result<Self, InterpError> {
        let machine = machine()?;
        map_windows(&machine.ram);
        let cpu = x86_interp::Cpu::new(user_vcpu());
        let vendor = Vendor::of_host();
        Ok(Self { cpu, machine, vendor, after: Box::new([0; IMAGE_LEN]) })
    }

    /// Runs a case on memory `image`, made from it.
    pub fn run_on(&mut self, case: &Case, image: &[u8; IMAGE_LEN]) -> Interpreted {
        self.write_image(image);
        load(&mut self.cpu.vcpu, &case.state);
        self.cpu.state_changed();
        let program = Program::new(case, self.vendor);
        let mut trace = Trace::default();
        let stop = self.steps(&program, &mut trace);
        self.read_image();
        let state = save(&self.cpu.vcpu);
        if !self.cpu.vcpu.is_64bit() {
            trace.undefined.left_64bit_mode();
        }
        if self.vendor == Vendor::Amd {
            trace.undefined.ignore_x87_pointers();
        }
        let outcome = Outcome { stop, state, changes: changes(image, &self.after) };
        let Trace { undefined, ran, completed } = trace;
        Interpreted { outcome, ignored: undefined.ignored(), ran, completed }
    }

    /// Runs a case.
    pub fn run(&mut self, case: &Case) -> Interpreted {
        self.run_on(case, &case.image())
    }

    fn steps(&mut self, program: &Program, trace: &mut Trace) -> Stop {
        for _ in 0..MAX_STEPS {
            let before = self.cpu.vcpu.rip;
            let insn = program.at(before);
            if let Some(insn) = insn {
                trace.before(insn, &self.cpu.vcpu);
                let ran = program.before(insn);
                self.vendor.before(insn, ran, &self.cpu.vcpu, &mut trace.undefined);
            }
            if program.foreign.contains(&before) {
                trace.undefined.open("AMD: decoded otherwise");
            }
            if let Err(fault) = self.cpu.step(&mut self.machine) {
                trace.fault(insn, &self.cpu.vcpu, fault);
                let Trace { undefined, .. } = trace;
                match insn {
                    Some(insn) if self.cpu.vcpu.rip != before => {
                        self.vendor.after(insn, &self.cpu.vcpu, undefined);
                    }
                    Some(insn) => self.vendor.faulted(insn, fault, undefined),
                    None => {}
                }
                return Stop::Fault(fault);
            }
            if let Some(insn) = insn.filter(|_| self.cpu.vcpu.rip != before) {
                trace.after(insn);
                self.vendor.after(insn, &self.cpu.vcpu, &mut trace.undefined);
            }
        }
        Stop::Timeout
    }

    fn write_image(&mut self, image: &[u8; IMAGE_LEN]) {
        let written = self.machine.ram.write_gpa(IMAGE_GPA, image);
        assert!(written.is_ok(), "the image lies in RAM");
    }
    fn read_image(&mut self) {
        let read = self.machine.ram.read_gpa(IMAGE_GPA, &mut self.after[..]);
        assert!(read.is_ok(), "the image lies in RAM");
    }
}

/// What is noted while a case runs.
#[derive(Default)]
struct Trace {
    undefined: Undefined,
    ran: Vec<Code>,
    completed: usize,
}

impl Trace {
    /// `insn` is about to run, or to go on with its iterations.
    fn before(&mut self, insn: &Instruction, vcpu: &Vcpu) {
        self.undefined.before(insn, vcpu);
        if self.ran.len() == self.completed {
            self.ran.push(insn.code());
        }
    }
    /// An instruction ended in an exception.
    fn fault(&mut self, insn: Option<&Instruction>, vcpu: &Vcpu, fault: Fault) {
        let is_trap = fault.vector == vector::DB;
        match insn {
            Some(insn) if is_trap && vcpu.rip != insn.ip() => self.after(insn),
            Some(insn) => self.undefined.faulted(insn, vcpu, fault),
            None => {}
        }
    }
    /// `insn` has run to its end.
    fn after(&mut self, insn: &Instruction) {
        self.undefined.after(insn);
        self.completed = self.ran.len();
    }
}

/// The instructions of a case, by address.
struct Program {
    instructions: Vec<Instruction>,
    /// Addresses of those the host CPU takes for others.
    foreign: Vec<u64>,
}

impl Program {
    fn new(case: &Case, vendor: Vendor) -> Self {
        Self { instructions: case.instructions(), foreign: vendor.foreign(case) }
    }

    /// Those that come before `insn`.
    fn before(&self, insn: &Instruction) -> &[Instruction] {
        let before = self.instructions.partition_point(|other| other.ip() < insn.ip());
        self.instructions.get(..before).unwrap_or_default()
    }

    fn at(&self, rip: u64) -> Option<&Instruction> {
        self.instructions.iter().find(|insn| insn.ip() == rip)
    }
}

/// Maps every window, with 4 KiB pages.
fn map_windows(ram: &Ram) {
    let mut tables = Tables { ram, next: ROOT_GPA + PAGE };
    for window in WINDOWS {
        for offset in (0..window.len).step_by(PAGE as usize) {
            let write = if window.writable { RW } else { 0 };
            let execute = if window.executable { 0 } else { NX };
            let gpa = IMAGE_GPA + window.offset + offset;
            tables.map(window.base + offset, gpa | P | US | write | execute);
        }
    }
    tables.map(GDT, GDT_GPA | P);
    for (slot, entry) in (GDT_GPA..).step_by(8).zip(GDT_ENTRIES) {
        tables.write(slot, entry);
    }
}

/// Page tables under construction.
struct Tables<'a> {
    ram: &'a Ram,
    next: u64,
}

impl Tables<'_> {
    fn map(&mut self, gva: u64, leaf: u64) {
        let mut table = ROOT_GPA;
        for shift in [39, 30, 21] {
            let slot = table + (gva >> shift & 0x1ff) * 8;
            let mut entry = self.read(slot);
            if entry == 0 {
                entry = self.next | P | RW | US;
                self.next += PAGE;
                self.write(slot, entry);
            }
            table = entry & x86::paging::ADDRESS;
        }
        self.write(table + (gva >> 12 & 0x1ff) * 8, leaf);
    }

    fn read(&self, gpa: u64) -> u64 {
        let mut bytes = [0; 8];
        assert!(self.ram.read_gpa(gpa, &mut bytes).is_ok(), "tables lie in RAM");
        u64::from_le_bytes(bytes)
    }
    fn write(&self, gpa: u64, value: u64) {
        assert!(gpa < IMAGE_GPA, "tables do not reach the image");
        assert!(self.ram.write_gpa(gpa, &value.to_le_bytes()).is_ok(), "tables lie in RAM");
    }
}

/// A CPU in 64-bit user mode, with the control bits a Linux kernel sets.
fn user_vcpu() -> Vcpu {
    let mut vcpu = Vcpu {
        cr0: cr0::PE | cr0::MP | cr0::ET | cr0::NE | cr0::WP | cr0::AM | cr0::PG,
        cr3: ROOT_GPA,
        cr4: cr4::PAE | cr4::PGE | cr4::OSFXSR | cr4::OSXMMEXCPT | cr4::FSGSBASE | cr4::OSXSAVE,
        efer: efer::SCE | efer::LME | efer::LMA | efer::NXE,
        xcr0: xstate::SUPPORTED,
        gdtr: TableRegister { base: GDT, limit: GDT_ENTRIES.len() as u16 * 8 - 1, pad: [0; 3] },
        idtr: TableRegister::default(),
        ldtr: Segment::default(),
        // Too short to hold the base of an I/O permission map.
        tr: Segment { attr: attr::P | 11, limit: 0x66, ..Segment::default() },
        ..Vcpu::default()
    };
    load_segments(&mut vcpu, LINUX_SELECTORS);
    vcpu
}

/// Loads selectors a Linux program can have.
fn load_segments(vcpu: &mut Vcpu, selectors: [u16; 6]) {
    for (segment, selector) in vcpu.seg.iter_mut().zip(selectors) {
        *segment = match GDT_ENTRIES.get(usize::from(selector >> 3)) {
            Some(&entry) if entry != 0 => Segment::from_descriptor(selector, entry),
            _ => Segment { selector, ..Segment::default() },
        };
    }
}

fn load(vcpu: &mut Vcpu, state: &State) {
    load_segments(vcpu, state.selectors);
    vcpu.gpr = state.gpr;
    vcpu.rip = state.rip;
    vcpu.rflags = state.rflags;
    vcpu.seg[seg::FS].base = state.fs_base;
    vcpu.seg[seg::GS].base = state.gs_base;
    vcpu.fpu = state.fpu;
    vcpu.interrupt_shadow = false;
}

fn save(vcpu: &Vcpu) -> State {
    State {
        gpr: vcpu.gpr,
        rip: vcpu.rip,
        rflags: vcpu.rflags & !flags::RF,
        fs_base: vcpu.seg[seg::FS].base,
        gs_base: vcpu.seg[seg::GS].base,
        selectors: vcpu.seg.map(|segment| segment.selector),
        fpu: vcpu.fpu,
    }
}

/// The interpreter's machine.
pub type Machine = BareMachine<Ram, HostVectorUnit>;

/// A machine with the least memory there can be.
///
/// # Errors
/// The host has no memory for it.
pub fn machine() -> Result<Machine, InterpError> {
    let unit = HostVectorUnit::new().map_err(InterpError::Unit)?;
    Ok(BareMachine::new(Ram::new(ram::MIN_LEN)?, unit))
}
