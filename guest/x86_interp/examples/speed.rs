//! How many guest instructions a second the interpreter executes on a mixed integer loop.
#[path = "../tests/support/mod.rs"]
mod support;

use iced_x86::code_asm::*;
use std::time::Instant;
use support::{FakeSystem, long_mode};
use x86_interp::{Cpu, GuestRam};

fn main() -> Result<(), iced_x86::IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let (mut outer, mut inner, mut function) =
        (a.create_label(), a.create_label(), a.create_label());
    a.mov(rsp, 0x8000u64)?;
    a.set_label(&mut outer)?;
    a.mov(rsi, 0x20000u64)?;
    a.mov(ecx, 100)?;
    a.set_label(&mut inner)?;
    a.mov(rax, qword_ptr(rsi + rcx * 8))?;
    a.add(rax, rcx)?;
    a.xor(edx, eax)?;
    a.shl(rdx, 3)?;
    a.mov(qword_ptr(rsi + rcx * 8), rdx)?;
    a.test(al, 1)?;
    let mut skip = a.create_label();
    a.jne(skip)?;
    a.call(function)?;
    a.set_label(&mut skip)?;
    a.dec(ecx)?;
    a.jne(inner)?;
    a.jmp(outer)?;
    a.set_label(&mut function)?;
    a.push(rbx)?;
    a.lea(rbx, ptr(rax + rdx * 2 + 5))?;
    a.movzx(eax, bl)?;
    a.pop(rbx)?;
    a.ret()?;
    let code = a.assemble(0x10000)?;

    let mut sys = FakeSystem::new(1 << 20);
    sys.ram.write(0x10000, &code);
    let mut cpu = Cpu::new(long_mode(&sys, 0x10000));
    cpu.run(&mut sys, 1_000_000);
    let (start, before) = (Instant::now(), cpu.counters.instructions);
    cpu.run(&mut sys, 200_000_000);
    let done = cpu.counters.instructions - before;
    println!("{:.1} million instructions/s", done as f64 / start.elapsed().as_secs_f64() / 1e6);
    Ok(())
}
