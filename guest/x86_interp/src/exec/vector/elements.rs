//! Instructions that access memory element by element: masked moves and gathers.
//!
//! An element whose mask bit is clear is not accessed and cannot fault; there are no alignment
//! checks, except of MASKMOVQ and MASKMOVDQU as a whole. A gather that faults keeps the elements it
//! has loaded and clears their mask bits, so that it goes on where it stopped (SDM vol. 2,
//! VPGATHERDD); a masked store writes nothing if any of its elements faults.

use super::permit::{self, VectorClass};
use crate::{
    cpu::Cpu,
    debug::dr6,
    op::{Handler, Op},
    system::System,
    tlb::View,
};
use iced_x86::{Instruction, Mnemonic, OpKind, Register};
use x86::{Fault, flags, reg, vector};

/// A vector register as bytes.
type Bytes = [u8; 32];

impl<S: System> Cpu<S> {
    fn bytes(&self, register: Register) -> Bytes {
        let number = register.number() & 15;
        let fpu = &self.vcpu.fpu;
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&fpu.xmm[number]);
        bytes[16..].copy_from_slice(&fpu.ymm_high[number]);
        bytes
    }

    fn set_bytes(&mut self, register: Register, bytes: &Bytes) {
        let number = register.number() & 15;
        let (low, high) = bytes.split_at(16);
        self.vcpu.fpu.xmm[number].copy_from_slice(low);
        self.vcpu.fpu.ymm_high[number].copy_from_slice(high);
    }

    /// Linear address of an element `at` bytes into the memory operand: the operand as a whole has
    /// an address of the address size, its parts follow.
    pub(crate) fn part_address(
        &self,
        op: &Op<S>,
        at: usize,
        size: usize,
        write: bool,
    ) -> Result<u64, Fault> {
        let offset = self.effective(op).wrapping_add(at as u64);
        self.segmented(op.address.seg as usize, offset, size as u64, write)
    }

    /// Linear address of an element whose own address is `distance` bytes from that of the memory
    /// operand.
    fn element_address(
        &self,
        op: &Op<S>,
        distance: u64,
        size: usize,
        write: bool,
    ) -> Result<u64, Fault> {
        self.linear(&op.displaced(distance), size as u64, write)
    }

    fn load_element(
        &mut self,
        sys: &mut S,
        op: &Op<S>,
        linear: u64,
        element: &mut [u8],
    ) -> Result<(), Fault> {
        let view = self.view.unaligned();
        let result = self.read_view(sys, view, linear, element);
        result.map_err(|fault| self.blame_stack(op, fault))
    }
}

/// The mask bit of an element: its top bit.
fn is_set(mask: &Bytes, at: usize, size: usize) -> bool {
    mask[at + size - 1] & 0x80 != 0
}

/// VMASKMOVPS/PD and VPMASKMOVD/Q, load form.
fn masked_load<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    permit::avx(cpu)?;
    let mask = cpu.bytes(op.insn.op1_register());
    let (size, width) = (element_size(&op.insn), op.insn.op0_register().size());
    let mut value = [0; 32];
    for at in (0..width).step_by(size) {
        if is_set(&mask, at, size) {
            let linear = cpu.part_address(op, at, size, false)?;
            cpu.load_element(sys, op, linear, &mut value[at..at + size])?;
        }
    }
    cpu.set_bytes(op.insn.op0_register(), &value);
    Ok(())
}

/// VMASKMOVPS/PD and VPMASKMOVD/Q, store form.
fn masked_store<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    permit::avx(cpu)?;
    let mask = cpu.bytes(op.insn.op1_register());
    let value = cpu.bytes(op.insn.op2_register());
    let (size, width) = (element_size(&op.insn), op.insn.op2_register().size());
    let selected = || (0..width).step_by(size).filter(|at| is_set(&mask, *at, size));
    for at in selected() {
        let linear = cpu.part_address(op, at, size, true)?;
        cpu.probe_write(sys, linear, size as u64).map_err(|fault| cpu.blame_stack(op, fault))?;
    }
    for at in selected() {
        let linear = cpu.part_address(op, at, size, true)?;
        cpu.write_view(sys, cpu.view.unaligned(), linear, &value[at..at + size])?;
    }
    Ok(())
}

fn element_size(insn: &Instruction) -> usize {
    match insn.mnemonic() {
        Mnemonic::Vmaskmovps | Mnemonic::Vpmaskmovd => 4,
        _ => 8,
    }
}

/// MASKMOVQ, MASKMOVDQU: selected bytes go to DS:RDI (the segment can be overridden).
fn masked_bytes<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let (value_register, mask_register) = (op.insn.op1_register(), op.insn.op2_register());
    permit::check(cpu, VectorClass::of(&op.insn))?;
    let (value, mask) = match value_register.is_mm() {
        true => (mmx_bytes(cpu, value_register), mmx_bytes(cpu, mask_register)),
        false => (cpu.bytes(value_register), cpu.bytes(mask_register)),
    };
    let width = value_register.size();
    let start = cpu.vcpu.gpr[reg::RDI] & op.address.mask;
    let selected = || (0..width).filter(|at| is_set(&mask, *at, 1));
    let address = |cpu: &Cpu<S>, at: usize| {
        let offset = start.wrapping_add(at as u64) & op.address.mask;
        cpu.segmented(op.address.seg as usize, offset, 1, true)
    };
    // Segment and alignment are looked at even if nothing is selected.
    if address(cpu, 0)? & 7 != 0 && cpu.view == View::UserAligned {
        return Err(Fault::with_code(vector::AC, 0));
    }
    for at in selected() {
        let linear = address(cpu, at)?;
        cpu.probe_write(sys, linear, 1).map_err(|fault| cpu.blame_stack(op, fault))?;
    }
    for at in selected() {
        let linear = address(cpu, at)?;
        cpu.write_bytes(sys, linear, &value[at..=at])?;
    }
    if value_register.is_mm() {
        enter_mmx(cpu);
    }
    Ok(())
}

fn mmx_bytes<S: System>(cpu: &Cpu<S>, register: Register) -> Bytes {
    let fpu = &cpu.vcpu.fpu;
    // MMX registers are physical, the image is in stack order.
    let top = usize::from(fpu.fsw >> 11 & 7);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&fpu.st[(register.number() + 8 - top) & 7][..8]);
    bytes
}

/// What every MMX instruction does: all registers valid, top of stack zero.
fn enter_mmx<S: System>(cpu: &mut Cpu<S>) {
    let fpu = &mut cpu.vcpu.fpu;
    let top = usize::from(fpu.fsw >> 11 & 7);
    fpu.st.rotate_right(top);
    fpu.fsw &= !(7 << 11);
    fpu.ftw = 0xff;
}

/// The shape of a gather.
struct Gather {
    /// Bytes of an element.
    size: usize,
    /// Bytes of an index.
    index_size: usize,
    /// Number of elements.
    count: usize,
}

impl Gather {
    fn of(insn: &Instruction) -> Self {
        use Mnemonic as M;
        let (size, index_size) = match insn.mnemonic() {
            M::Vpgatherdd | M::Vgatherdps => (4, 4),
            M::Vpgatherqd | M::Vgatherqps => (4, 8),
            M::Vpgatherdq | M::Vgatherdpd => (8, 4),
            _ => (8, 8),
        };
        let count =
            (insn.op0_register().size() / size).min(insn.memory_index().size() / index_size);
        Self { size, index_size, count }
    }
}

/// VGATHER and VPGATHER (AVX2).
fn gather<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    permit::avx(cpu)?;
    let insn = &op.insn;
    let (to, mask_register, index_register) =
        (insn.op0_register(), insn.op2_register(), insn.memory_index());
    if !distinct(to, mask_register, index_register) {
        return Err(Fault::ud());
    }
    let shape = Gather::of(insn);
    let (mut value, mut mask) = (cpu.bytes(to), cpu.bytes(mask_register));
    let index = cpu.bytes(index_register);
    let mut gathered = false;
    for i in 0..shape.count {
        let at = i * shape.size;
        if is_set(&mask, at, shape.size) {
            let scaled = element_index(&index, i, shape.index_size) << op.address.scale;
            let element = &mut value[at..at + shape.size];
            let address = cpu.element_address(op, scaled, shape.size, false);
            let loaded = address.and_then(|linear| cpu.load_element(sys, op, linear, element));
            if let Err(fault) = loaded {
                suspend(cpu, op, gathered.then_some(value), &mask);
                return Err(if gathered { trap_first(cpu, fault) } else { fault });
            }
            gathered = true;
        }
        mask[at..at + shape.size].fill(0);
    }
    value[shape.size * shape.count..].fill(0);
    cpu.set_bytes(to, &value);
    cpu.set_bytes(mask_register, &[0; 32]);
    Ok(())
}

/// A trap of an element already gathered is delivered instead of the fault of a later one, with RF
/// set since the instruction is not over (SDM vol. 2, VPGATHERDD).
fn trap_first<S: System>(cpu: &mut Cpu<S>, fault: Fault) -> Fault {
    let stepping = if cpu.vcpu.rflags & flags::TF != 0 { dr6::BS } else { 0 };
    match cpu.traps | stepping {
        0 => fault,
        traps => {
            cpu.vcpu.rflags |= flags::RF;
            Fault::debug(traps)
        }
    }
}

/// Keeps what was gathered before a fault, if anything was; bytes of the destination it has not
/// come to stay as they were, except those above the vector length. As on hardware the mask elements
/// still set become all ones, over the whole vector length.
fn suspend<S: System>(cpu: &mut Cpu<S>, op: &Op<S>, value: Option<Bytes>, mask: &Bytes) {
    let insn = &op.insn;
    let size = Gather::of(insn).size;
    let length = insn.op0_register().size().max(insn.memory_index().size());
    let mut remaining = [0; 32];
    for at in (0..length).step_by(size).filter(|at| is_set(mask, *at, size)) {
        remaining[at..at + size].fill(0xff);
    }
    if let Some(mut value) = value {
        value[length..].fill(0);
        cpu.set_bytes(insn.op0_register(), &value);
    }
    cpu.set_bytes(insn.op2_register(), &remaining);
}

fn element_index(index: &Bytes, element: usize, size: usize) -> u64 {
    let at = element * size;
    match size {
        4 => {
            let low = core::array::from_fn(|i| index[at + i]);
            i32::from_le_bytes(low) as i64 as u64
        }
        _ => u64::from_le_bytes(core::array::from_fn(|i| index[at + i])),
    }
}

fn distinct(a: Register, b: Register, c: Register) -> bool {
    let (a, b, c) = (a.number(), b.number(), c.number());
    a != b && b != c && a != c
}

/// Chooses the handler.
pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    use Mnemonic as M;
    Some(match insn.mnemonic() {
        M::Vmaskmovps | M::Vmaskmovpd | M::Vpmaskmovd | M::Vpmaskmovq => {
            if insn.op0_kind() == OpKind::Memory { masked_store } else { masked_load }
        }
        M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu => masked_bytes,
        M::Vpgatherdd
        | M::Vpgatherdq
        | M::Vpgatherqd
        | M::Vpgatherqq
        | M::Vgatherdps
        | M::Vgatherdpd
        | M::Vgatherqps
        | M::Vgatherqpd => gather,
        _ => return None,
    })
}
