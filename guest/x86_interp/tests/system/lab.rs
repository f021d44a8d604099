//! A laboratory for system-level behaviour: a machine in long mode with a GDT, a TSS, an IDT
//! whose handlers all halt, kernel memory below 2 MB and user memory in 4 KB pages above.
//!
//! A test writes a few instructions, runs until a handler (or the code itself) halts, and looks at
//! where it landed and at the frame on the stack.

use crate::support::FakeSystem;
use iced_x86::{IcedError, code_asm::CodeAssembler};
use x86::{
    Activity, Segment, TableRegister, Vcpu,
    control::{cr0, cr4, efer},
    flags, reg, seg,
};
use x86_interp::{Cpu, Exit, GuestRam};

pub const PML4: u64 = 0x1000;
pub const PDPT: u64 = 0x2000;
pub const PD: u64 = 0x3000;
/// Page table of `USER..USER + 2 MB`.
pub const PT: u64 = 0x4000;
pub const GDT: u64 = 0x5000;
pub const IDT: u64 = 0x6000;
pub const TSS: u64 = 0x7000;
pub const RSP0: u64 = 0xa000;
pub const IST1: u64 = 0xb000;
pub const KERNEL_STACK: u64 = 0xc000;
pub const KERNEL: u64 = 0x1_0000;
/// A handler per vector, 16 bytes each: a HLT.
pub const HANDLERS: u64 = 0x1_8000;
pub const USER: u64 = 0x20_0000;
pub const USER_STACK: u64 = 0x21_0000;
/// A user page for tests to play with, and its neighbour.
pub const PAGE: u64 = 0x22_0000;
/// Supervisor page in the same page table.
pub const KERNEL_PAGE: u64 = 0x23_0000;
/// A kernel large page.
pub const LARGE: u64 = 0x60_0000;

pub const KERNEL_CS: u16 = 0x08;
pub const KERNEL_SS: u16 = 0x10;
pub const USER_CS32: u16 = 0x1b;
pub const USER_SS: u16 = 0x23;
pub const USER_CS: u16 = 0x2b;
pub const TSS_SELECTOR: u16 = 0x30;
pub const KERNEL_CS32: u16 = 0x40;
/// Free descriptors for tests, up to the limit of 0x100.
pub const SPARE: u16 = 0x80;

pub const CODE64: u64 = 0x00af_9b00_0000_ffff;
pub const CODE32: u64 = 0x00cf_9b00_0000_ffff;
pub const DATA: u64 = 0x00cf_9300_0000_ffff;
/// DPL 3 in a descriptor.
pub const DPL3: u64 = 3 << 45;
/// Type bits of a gate: long-mode or 32-bit interrupt gate, present.
pub const INTERRUPT_GATE: u64 = 0x8e00 << 32;
pub const TRAP_GATE: u64 = 0x8f00 << 32;

/// An exception frame of long mode.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    pub rip: u64,
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
}

pub struct Lab {
    pub sys: FakeSystem,
    pub cpu: Cpu<FakeSystem>,
}

impl Lab {
    /// At CPL 0 in 64-bit code, interrupts off.
    pub fn new() -> Self {
        let sys = FakeSystem::new(16 << 20);
        build_page_tables(&sys);
        build_descriptors(&sys);
        for vector in 0..256 {
            sys.ram.store8(HANDLERS + vector * 16, 0xf4);
        }
        let mut lab = Self { sys, cpu: Cpu::new(initial()) };
        for vector in 0..=255 {
            lab.gate(vector, INTERRUPT_GATE, 0);
        }
        lab
    }

    pub fn v(&mut self) -> &mut Vcpu {
        &mut self.cpu.vcpu
    }

    /// Makes the IDT entry of a vector; `ist` zero means none.
    pub fn gate(&mut self, vector: u8, kind: u64, ist: u64) {
        let target = HANDLERS + u64::from(vector) * 16;
        let raw = gate(KERNEL_CS, target, kind) | ist << 32;
        let at = IDT + u64::from(vector) * 16;
        self.sys.ram.store64(at, raw);
        self.sys.ram.store64(at + 8, target >> 32);
    }

    /// Writes a descriptor.
    pub fn descriptor(&mut self, selector: u16, raw: u64) {
        self.sys.ram.store64(GDT + u64::from(selector & !7), raw);
    }

    /// Sets the page-table entry of a page above `USER`.
    pub fn page(&mut self, linear: u64, entry: u64) {
        self.sys.ram.store64(PT + (linear - USER) / 4096 * 8, entry);
    }

    /// Assembles code, writes it at `at`.
    pub fn code(
        &mut self,
        bits: u32,
        at: u64,
        write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
    ) {
        let mut a = CodeAssembler::new(bits).expect("bits");
        write(&mut a).expect("operands");
        let bytes = a.assemble(at).expect("assembles");
        // Through the same door as a device: decoded code must not survive.
        self.sys.ram.write(at, &bytes);
        self.sys.ram.note_write(at, bytes.len() as u64);
    }

    /// 64-bit code at CPL 0, followed by HLT, where RIP points.
    pub fn kernel(&mut self, write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
        self.code(64, KERNEL, |a| {
            write(a)?;
            a.hlt()
        });
        self.v().rip = KERNEL;
        self.v().activity = Activity::Running;
    }

    /// 64-bit code at CPL 3, followed by UD2, where RIP points.
    pub fn user(&mut self, write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
        self.code(64, USER, |a| {
            write(a)?;
            a.ud2()
        });
        self.enter(64, USER);
    }

    /// Puts the CPU to CPL 3 in code of 64 or 32 bits.
    pub fn enter(&mut self, bits: u32, rip: u64) {
        let (cs, raw) = if bits == 64 { (USER_CS, CODE64) } else { (USER_CS32, CODE32) };
        let v = self.v();
        v.seg[seg::CS] = Segment::from_descriptor(cs, raw | DPL3);
        for register in [seg::SS, seg::DS, seg::ES] {
            v.seg[register] = Segment::from_descriptor(USER_SS, DATA | DPL3);
        }
        v.gpr[reg::RSP] = USER_STACK;
        v.rip = rip;
        v.activity = Activity::Running;
        self.cpu.state_changed();
    }

    /// Runs until HLT (or the end of a generous budget).
    pub fn run(&mut self) -> Exit {
        self.cpu.run(&mut self.sys, 10_000)
    }

    /// Runs until a handler halts and says of which vector.
    pub fn lands(&mut self) -> u8 {
        assert_eq!(self.run(), Exit::Halted, "at {:#x}", self.cpu.vcpu.rip);
        let rip = self.cpu.vcpu.rip - 1;
        assert_eq!(rip % 16, 0, "halted at {rip:#x}, not in a handler");
        let vector = rip.wrapping_sub(HANDLERS) / 16;
        u8::try_from(vector).unwrap_or_else(|_| panic!("halted at {rip:#x}, not in a handler"))
    }

    /// Runs to the HLT behind the kernel code, without any exception.
    pub fn finishes(&mut self) {
        assert_eq!(self.run(), Exit::Halted, "at {:#x}", self.cpu.vcpu.rip);
        let rip = self.cpu.vcpu.rip;
        assert!(
            !(HANDLERS..HANDLERS + 4096).contains(&rip),
            "exception {} {:x?}",
            (rip - HANDLERS) / 16,
            self.words(6)
        );
    }

    /// The lowest words on the stack.
    pub fn words(&self, count: u64) -> Vec<u64> {
        let rsp = self.cpu.vcpu.gpr[reg::RSP];
        (0..count).map(|n| self.sys.ram.load64(rsp + 8 * n)).collect()
    }

    /// The frame of an exception without error code.
    pub fn frame(&self) -> Frame {
        self.frame_at(0)
    }

    /// Error code and frame.
    pub fn coded_frame(&self) -> (u64, Frame) {
        (self.words(1)[0], self.frame_at(1))
    }

    fn frame_at(&self, skip: usize) -> Frame {
        let w = &self.words(6)[skip..];
        Frame { rip: w[0], cs: w[1], rflags: w[2], rsp: w[3], ss: w[4] }
    }

    /// Expects vector and error code.
    pub fn faults(&mut self, vector: u8, code: u64) {
        assert_eq!(self.lands(), vector, "{:x?}", self.words(6));
        assert_eq!(self.words(1)[0], code, "error code of vector {vector}");
    }

    pub fn gpr(&self, register: usize) -> u64 {
        self.cpu.vcpu.gpr[register]
    }
}

/// A gate descriptor's low word.
pub fn gate(selector: u16, target: u64, kind: u64) -> u64 {
    target & 0xffff | u64::from(selector) << 16 | kind | (target >> 16 & 0xffff) << 48
}

/// A system descriptor's low word, byte-granular.
pub fn system(kind: u64, base: u64, limit: u64) -> u64 {
    limit & 0xffff
        | (base & 0xff_ffff) << 16
        | (0x80 | kind) << 40
        | (limit >> 16 & 0xf) << 48
        | (base >> 24 & 0xff) << 56
}

fn build_page_tables(sys: &FakeSystem) {
    sys.ram.store64(PML4, PDPT | 7);
    sys.ram.store64(PDPT, PD | 7);
    sys.ram.store64(PD, 0x83);
    sys.ram.store64(PD + 8, PT | 7);
    for n in 2..8 {
        sys.ram.store64(PD + 8 * n, n << 21 | if n == LARGE >> 21 { 0x83 } else { 0x87 });
    }
    for n in 0..512 {
        sys.ram.store64(PT + 8 * n, (USER + n * 4096) | 7);
    }
    sys.ram.store64(PT + (KERNEL_PAGE - USER) / 4096 * 8, KERNEL_PAGE | 3);
}

fn build_descriptors(sys: &FakeSystem) {
    let table = [
        0,
        CODE64,
        DATA,
        CODE32 | DPL3,
        DATA | DPL3,
        CODE64 | DPL3,
        system(9, TSS, 0x1fff),
        0,
        CODE32,
    ];
    for (n, raw) in table.into_iter().enumerate() {
        sys.ram.store64(GDT + 8 * n as u64, raw);
    }
    sys.ram.store64(TSS + 4, RSP0);
    sys.ram.store64(TSS + 36, IST1);
    sys.ram.store16(TSS + 0x66, 0x68);
    sys.ram.write(TSS + 0x68, &[0xff; 0x2000]);
}

fn initial() -> Vcpu {
    let mut v = Vcpu { rip: KERNEL, cr3: PML4, ..Vcpu::default() };
    v.cr0 |= cr0::PE | cr0::PG | cr0::WP | cr0::NE;
    v.cr4 |= cr4::PAE | cr4::OSFXSR;
    v.efer = efer::LME | efer::LMA | efer::SCE | efer::NXE;
    v.rflags = flags::FIXED;
    v.seg[seg::CS] = Segment::from_descriptor(KERNEL_CS, CODE64);
    for register in [seg::SS, seg::DS, seg::ES] {
        v.seg[register] = Segment::from_descriptor(KERNEL_SS, DATA);
    }
    v.gdtr = TableRegister { base: GDT, limit: 0xff, ..TableRegister::default() };
    v.idtr = TableRegister { base: IDT, limit: 0xfff, ..TableRegister::default() };
    v.tr = Segment::from_descriptor(TSS_SELECTOR, system(11, TSS, 0x1fff));
    v.gpr[reg::RSP] = KERNEL_STACK;
    v
}
