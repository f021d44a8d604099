//! Code and registers that are anything, in all modes, executed by the reference CPU.

use native::HostVectorUnit;
use ram::Ram;
use x86::{
    Fault, Vcpu,
    control::{cr0, cr4, efer},
    cpuid::{CpuidResult, Model, Settings},
    fpu::xstate,
    seg,
    segment::attr,
};
use x86_interp::{Cpu, GuestRam, System, VectorUnit};

use super::anything;
use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "interpreter", seeds, run };

/// Bytes of an input before the code: mode, flags, 16 registers.
const HEAD: usize = 2 + 16 * 8;
const MEMORY: u64 = 4 << 20;
const CODE: u64 = 0x10_0000;
const BUDGET: u64 = 2000;

struct Machine {
    ram: Ram,
    unit: HostVectorUnit,
    model: Model,
    cr8: u8,
    time: u64,
    /// How often something outside is to be looked at.
    pending: u32,
}

impl System for Machine {
    type Ram = Ram;
    fn ram(&self) -> &Ram {
        &self.ram
    }
    fn pending(&self) -> u32 {
        self.pending
    }
    fn mmio_read(&mut self, gpa: u64, data: &mut [u8]) {
        data.fill(gpa as u8);
    }
    fn mmio_write(&mut self, _: u64, _: &[u8]) {}
    fn port_read(&mut self, port: u16, _: u8) -> u32 {
        port.into()
    }
    fn port_write(&mut self, _: u16, _: u8, _: u32) {}
    fn msr_read(&mut self, index: u32) -> Result<u64, Fault> {
        if index.is_multiple_of(2) { Ok(index.into()) } else { Err(Fault::gp(0)) }
    }
    fn msr_write(&mut self, index: u32, _: u64) -> Result<(), Fault> {
        if index.is_multiple_of(2) { Ok(()) } else { Err(Fault::gp(0)) }
    }
    fn cpuid(&self, leaf: u32, subleaf: u32) -> CpuidResult {
        self.model.query(leaf, subleaf, 0)
    }
    fn tsc(&mut self) -> u64 {
        self.time += 1;
        self.time
    }
    fn random(&mut self) -> Option<u64> {
        Some(4)
    }
    fn cr8(&mut self) -> u8 {
        self.cr8
    }
    fn set_cr8(&mut self, value: u8) {
        self.cr8 = value;
    }
    fn vector_unit(&mut self) -> &mut dyn VectorUnit {
        &mut self.unit
    }
}

fn everything(_: u32, _: u32) -> CpuidResult {
    CpuidResult { eax: u32::MAX, ebx: u32::MAX, ecx: u32::MAX, edx: u32::MAX }
}

/// Anything, and stretches of common instructions.
fn seeds() -> Vec<Vec<u8>> {
    let stretches: [&[u8]; 6] = [
        &[0x48, 0x89, 0x07, 0x48, 0x83, 0xc7, 0x08, 0xff, 0xc9, 0x75, 0xf5, 0xf4],
        &[0x0f, 0x22, 0xd8, 0x0f, 0x20, 0xc0, 0x0f, 0x22, 0xc0, 0x0f, 0x30, 0x0f, 0x32],
        &[0xf3, 0xa4, 0xf3, 0x48, 0xab, 0xf2, 0xae, 0xa6, 0x6c, 0x6e],
        &[0xcf, 0xcb, 0xca, 0, 1, 0xcd, 0x80, 0x0f, 0x05, 0x0f, 0x07, 0x48, 0xcf],
        &[
            0xc5, 0xfc, 0x58, 0xc1, 0x66, 0x0f, 0x6f, 0x07, 0xdb, 0x2f, 0x0f, 0xae, 0x07, 0x0f,
            0xae, 0x27,
        ],
        &[0x8e, 0xd8, 0x0f, 0x01, 0x17, 0x0f, 0x00, 0xd8, 0xea, 0, 0, 0, 0, 8, 0],
    ];
    let whole = |(mode, code): (usize, &&[u8])| {
        let mut bytes = vec![mode as u8, 2];
        bytes.extend(anything(mode as u64, HEAD - 2));
        bytes.extend(*code);
        bytes
    };
    stretches.iter().enumerate().map(whole).collect()
}

/// A CPU in the mode that a byte says, with the first 4 GiB at their own addresses.
fn vcpu(ram: &Ram, mode: u8) -> Vcpu {
    let table = |at: u64, index: u64, entry: u64| ram.store64(at + index * 8, entry);
    // The upper half is the lower one again.
    [0, 256, 511].iter().for_each(|index| table(0x1000, *index, 0x2000 | 7));
    for gib in 0..4 {
        table(0x2000, gib, (gib << 30) | 0x87);
    }
    let mut v = Vcpu { rip: CODE, cr3: 0x1000, ..Vcpu::default() };
    v.xcr0 = xstate::SUPPORTED;
    v.cr0 |= cr0::PE | cr0::NE | cr0::WP | cr0::MP | cr0::ET;
    v.cr4 |= cr4::PAE | cr4::OSFXSR | cr4::OSXMMEXCPT | cr4::OSXSAVE | cr4::FSGSBASE;
    match mode % 4 {
        // 64-bit code, in the lower or the upper half.
        0 | 1 => {
            v.cr0 |= cr0::PG;
            v.efer = efer::LME | efer::LMA | efer::SCE | efer::NXE;
            v.seg[seg::CS].attr |= attr::L;
            v.rip |= if mode % 4 == 1 { 0xffff_8000_0000_0000 } else { 0 };
        }
        // 32-bit code, without paging or with.
        2 => {}
        _ => {
            v.cr0 |= cr0::PG;
            v.efer = efer::LME | efer::LMA | efer::NXE;
        }
    }
    // Sometimes a program.
    if mode & 0x10 != 0 {
        for segment in [seg::CS, seg::SS] {
            v.seg[segment].attr |= 3 << attr::DPL_SHIFT;
        }
    }
    v
}

fn run(bytes: &[u8]) {
    let Some((head, code)) = bytes.split_at_checked(HEAD) else { return };
    let ram = Ram::new(MEMORY).expect("memory");
    let mut v = vcpu(&ram, head[0]);
    v.rflags = 2 | u64::from(head[1]) << 4 & 0xcd5 | u64::from(head[0] >> 5 & 1) << 8;
    for (register, value) in v.gpr.iter_mut().zip(head[2..].as_chunks::<8>().0) {
        *register = u64::from_le_bytes(*value);
        // Most addresses lead to memory.
        if value[7] % 4 != 0 {
            *register %= MEMORY;
        }
    }
    let at = if head[1] & 0x80 == 0 { CODE } else { CODE + 0x1000 - (code.len() as u64).min(64) };
    v.rip = v.rip - CODE + at;
    ram.write_gpa(at, &code[..code.len().min(0x8000)]).expect("in RAM");
    let unit = HostVectorUnit::new().expect("executable memory");
    let model =
        Model::new(everything, Settings { tsc_hz: 1_000_000_000, cpus: 1, kvm_features: 0 });
    let mut machine = Machine { ram, unit, model, cr8: 0, time: 0, pending: 0 };
    let mut cpu = Cpu::new(v);
    cpu.run(&mut machine, BUDGET);
    // Something comes from outside, whatever state that meets.
    cpu.interrupt(&mut machine, head[1]);
    cpu.run(&mut machine, BUDGET / 10);
    cpu.nmi(&mut machine);
    cpu.run(&mut machine, BUDGET / 10);
}
