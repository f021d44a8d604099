//! Nanoseconds per vector instruction in the interpreter: `cargo run --release -p native --example
//! loops`.

use std::time::Instant;

use iced_x86::{Formatter, IcedError, IntelFormatter, code_asm::*};
use native::HostVectorUnit;
use ram::Ram;
use x86::{
    Segment, Vcpu,
    control::{cr0, cr4, efer},
    fpu::xstate,
    seg,
    segment::attr,
};
use x86_interp::{BareMachine, Cpu, GuestRam};

host::choose!(host_linux::Linux);

type Machine = BareMachine<Ram, HostVectorUnit>;

/// The program, and the data it works on; page tables are below.
const CODE: u64 = 0x8_0000;
const DATA: u64 = 0x9_0000;
const TABLES: u64 = 0x1000;
/// Copies of an instruction in the loop.
const COPIES: u64 = 50;

/// One 2 MB page, 64-bit supervisor mode.
fn machine() -> (Machine, Cpu<Machine>) {
    let ram = Ram::new(2 << 20).expect("memory");
    for (level, entry) in [(0, TABLES + 0x1003), (1, TABLES + 0x2003), (2, 0x83)] {
        ram.store64(TABLES + level * 4096, entry);
    }
    let data = Segment {
        attr: attr::P | attr::S | attr::RW | attr::ACCESSED,
        limit: u32::MAX,
        ..Segment::default()
    };
    let mut vcpu = Vcpu {
        cr0: cr0::PE | cr0::PG | cr0::NE | cr0::MP | cr0::ET,
        cr3: TABLES,
        cr4: cr4::PAE | cr4::OSFXSR | cr4::OSXMMEXCPT | cr4::OSXSAVE,
        efer: efer::LME | efer::LMA,
        xcr0: xstate::SUPPORTED,
        seg: [data; 6],
        rip: CODE,
        ..Vcpu::default()
    };
    vcpu.seg[seg::CS].attr |= attr::CODE | attr::L;
    vcpu.gpr[0] = DATA;
    let unit = HostVectorUnit::new().expect("executable memory");
    (BareMachine::new(ram, unit), Cpu::new(vcpu))
}

type Emit = fn(&mut CodeAssembler) -> Result<(), IcedError>;

const LOOPS: [Emit; 14] = [
    |a| a.nop(),
    |a| a.movdqu(xmm0, xmmword_ptr(rax)),
    |a| a.movups(xmmword_ptr(rax), xmm0),
    |a| a.movaps(xmm0, xmm1),
    |a| a.pcmpeqb(xmm0, xmmword_ptr(rax)),
    |a| a.pminub(xmm0, xmm1),
    |a| a.pmovmskb(edx, xmm0),
    |a| a.vmovdqu(ymm0, ymmword_ptr(rax)),
    |a| a.vpcmpeqb(ymm0, ymm1, ymm2),
    |a| a.bzhi(rdx, rcx, rbx),
    |a| a.paddw(xmm0, xmm1),
    |a| a.pshufb(xmm0, xmmword_ptr(rax)),
    |a| a.addsd(xmm0, xmm1),
    |a| a.cvtsi2sd(xmm0, rcx),
];

fn main() -> Result<(), IcedError> {
    let mut formatter = IntelFormatter::new();
    for emit in LOOPS {
        let mut asm = CodeAssembler::new(64)?;
        let mut top = asm.create_label();
        asm.set_label(&mut top)?;
        for _ in 0..COPIES {
            emit(&mut asm)?;
        }
        asm.jmp(top)?;
        let mut text = String::new();
        formatter.format(&asm.instructions()[0], &mut text);
        let (mut machine, mut cpu) = machine();
        let code = asm.assemble(CODE)?;
        machine.ram.write_gpa(CODE, &code).expect("inside of memory");
        let best = (0..30).map(|_| {
            let start = Instant::now();
            let before = cpu.counters.instructions;
            cpu.run(&mut machine, 50_000);
            start.elapsed().as_secs_f64() * 1e9 / (cpu.counters.instructions - before) as f64
        });
        println!("{text:40} {:6.1} ns", best.fold(f64::INFINITY, f64::min));
    }
    Ok(())
}
