//! IN, OUT, HLT, and the right to touch a port (SDM vol. 1, chapter 19).

use crate::{
    cpu::Cpu,
    exec::Choice,
    op::{Op, RegRef},
    system::System,
};
use iced_x86::{Instruction, Mnemonic, OpKind};
use x86::{Activity, Fault, control::cr0, flags, reg};

const RAX: RegRef = RegRef { index: reg::RAX as u8, shift: 0 };
/// Offset of the I/O map base in a 32-bit or 64-bit TSS.
const TSS_IO_MAP: u64 = 0x66;

impl<S: System> Cpu<S> {
    /// The current program may access `size` ports from `port`, by IOPL or the TSS bitmap.
    ///
    /// # Errors
    /// #GP(0), or #PF on the bitmap.
    pub(crate) fn check_port(&mut self, sys: &mut S, port: u16, size: u64) -> Result<(), Fault> {
        let v = &self.vcpu;
        let trusted = v.cpl() <= self.iopl() && v.rflags & flags::VM == 0;
        if (v.cr0 & cr0::PE != 0 && !trusted) && !self.bitmap_permits(sys, port, size)? {
            return Err(Fault::gp(0));
        }
        self.watch_port(port, size);
        Ok(())
    }

    fn bitmap_permits(&mut self, sys: &mut S, port: u16, size: u64) -> Result<bool, Fault> {
        let tr = self.vcpu.tr;
        let limit = u64::from(tr.limit);
        let wide = tr.present() && tr.kind() & 8 != 0;
        if !wide || limit < TSS_IO_MAP + 1 {
            return Ok(false);
        }
        let at = |offset: u64| tr.base.wrapping_add(offset);
        let map = self.load_system::<2>(sys, self.wrap_linear(at(TSS_IO_MAP)))?;
        // Two bytes are read whatever the port, so the bitmap needs a byte of ones at its end.
        let byte = map + u64::from(port) / 8;
        if byte + 1 > limit {
            return Ok(false);
        }
        let bits = self.load_system::<2>(sys, self.wrap_linear(at(byte)))?;
        Ok(bits >> (port & 7) & ((1 << size) - 1) == 0)
    }
}

fn port<S: System>(cpu: &Cpu<S>, op: &Op<S>, operand: u32) -> u16 {
    match op.insn.op_kind(operand) {
        OpKind::Register => cpu.vcpu.gpr[reg::RDX] as u16,
        _ => op.imm as u16 & 0xff,
    }
}

fn input<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let port = port(cpu, op, 1);
    cpu.check_port(sys, port, SIZE as u64)?;
    let value = sys.port_read(port, SIZE as u8);
    cpu.set_reg::<SIZE>(RAX, value.into());
    Ok(())
}

fn output<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let port = port(cpu, op, 0);
    cpu.check_port(sys, port, SIZE as u64)?;
    let value = cpu.reg::<SIZE>(RAX);
    sys.port_write(port, SIZE as u8, value as u32);
    Ok(())
}

fn hlt<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()?;
    cpu.vcpu.activity = Activity::Halted;
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    let size = |operand| insn.op_register(operand).size();
    // The device may change what is mapped or what interrupts: look again after each access.
    Some(match insn.mnemonic() {
        Mnemonic::In if size(0) == 1 => (input::<S, 1>, true),
        Mnemonic::In if size(0) == 2 => (input::<S, 2>, true),
        Mnemonic::In => (input::<S, 4>, true),
        Mnemonic::Out if size(1) == 1 => (output::<S, 1>, true),
        Mnemonic::Out if size(1) == 2 => (output::<S, 2>, true),
        Mnemonic::Out => (output::<S, 4>, true),
        Mnemonic::Hlt => (hlt, true),
        _ => return None,
    })
}
