//! A decoded instruction: its handler and its operands in the form the handler wants.

use crate::{cpu::Cpu, memory::Target, system::System};
use iced_x86::{Instruction, OpKind, Register};
use x86::{Fault, seg};

/// Executes one instruction. RIP already points behind it; on error the caller sets it back.
pub(crate) type Handler<S> = fn(&mut Cpu<S>, &mut S, &Op<S>) -> Result<(), Fault>;

/// A general register operand. `shift` is 8 for AH, CH, DH and BH, else 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RegRef {
    pub index: u8,
    pub shift: u8,
}

/// A memory operand: `segment + ((base & base_mask) + (index & index_mask << scale) + (rip &
/// rip_mask) + displacement) & mask`. The masks are 0 or -1, which keeps the sum branch-free.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub base: u8,
    pub base_mask: i8,
    pub index: u8,
    pub index_mask: i8,
    pub scale: u8,
    pub rip_mask: i8,
    /// Index into `Vcpu::seg`.
    pub seg: u8,
    /// The segment's base and limit take part (legacy modes, FS, GS).
    pub segmented: bool,
    pub displacement: u64,
    pub mask: u64,
}

/// A decoded instruction.
pub(crate) struct Op<S: System> {
    pub run: Handler<S>,
    pub imm: u64,
    pub address: Address,
    /// Length in bytes.
    pub len: u8,
    /// First operand, if a general register.
    pub dst: RegRef,
    /// Second operand (or the register of a memory-first form), if a general register.
    pub src: RegRef,
    /// Decoded in 64-bit code.
    pub long: bool,
    /// For handlers of rare instructions. Its `ip` is meaningless: blocks are position-independent.
    pub insn: Instruction,
    /// The encoding, zero-padded.
    pub bytes: [u8; 15],
    /// The vector unit's handle for this encoding.
    pub unit: u64,
}

impl<S: System> Op<S> {
    /// The same instruction with its memory operand moved by `distance` bytes.
    pub fn displaced(&self, distance: u64) -> Self {
        let displacement = self.address.displacement.wrapping_add(distance);
        Self { address: Address { displacement, ..self.address }, ..*self }
    }
}

impl RegRef {
    pub fn of(register: Register) -> Self {
        match register {
            Register::AH | Register::CH | Register::DH | Register::BH => {
                Self { index: register.number() as u8 - 4, shift: 8 }
            }
            // SPL to R15L do not number like the registers they are part of.
            r if r.is_gpr() => Self { index: r.full_register().number() as u8, shift: 0 },
            _ => Self::default(),
        }
    }
}

impl Address {
    pub fn of(insn: &Instruction, bits: u32) -> Self {
        let (base, index) = (insn.memory_base(), insn.memory_index());
        let relative = matches!(base, Register::RIP | Register::EIP);
        let mut displacement = insn.memory_displacement64();
        if relative {
            displacement = displacement.wrapping_sub(insn.next_ip());
        }
        let present = |r: Register| if r.is_gpr() { -1 } else { 0 };
        let number = |r: Register| if r.is_gpr() { r.number() as u8 } else { 0 };
        let segment = segment_index(insn.memory_segment());
        let segment = if bits == 64 { long_segment(segment, base) } else { segment };
        Self {
            base: number(base),
            base_mask: present(base),
            index: number(index),
            index_mask: present(index),
            scale: insn.memory_index_scale().trailing_zeros() as u8,
            rip_mask: if relative { -1 } else { 0 },
            seg: segment as u8,
            segmented: bits != 64 || segment >= seg::FS,
            displacement,
            mask: address_mask(address_size(insn, bits)),
        }
    }
}

/// In 64-bit code overrides other than FS and GS do nothing (SDM vol. 1, 3.3.7.1).
fn long_segment(segment: usize, base: Register) -> usize {
    match base.full_register() {
        _ if segment >= seg::FS => segment,
        Register::RSP | Register::RBP => seg::SS,
        _ => seg::DS,
    }
}

/// Address size in bits.
pub(crate) fn address_size(insn: &Instruction, bits: u32) -> u32 {
    for i in 0..insn.op_count() {
        match insn.op_kind(i) {
            OpKind::MemorySegSI | OpKind::MemorySegDI | OpKind::MemoryESDI => return 16,
            OpKind::MemorySegESI | OpKind::MemorySegEDI | OpKind::MemoryESEDI => return 32,
            OpKind::MemorySegRSI | OpKind::MemorySegRDI | OpKind::MemoryESRDI => return 64,
            OpKind::Memory => {
                let (base, index) = (insn.memory_base(), insn.memory_index());
                let register = if base == Register::None { index } else { base };
                return match register {
                    Register::RIP => 64,
                    Register::EIP => 32,
                    r if r.is_gpr() => r.size() as u32 * 8,
                    _ => match insn.memory_displ_size() {
                        2 => 16,
                        4 if bits != 64 => 32,
                        // 64-bit code: disp32 is sign-extended already; with 67 it is cut below.
                        _ => absolute_size(insn, bits),
                    },
                };
            }
            _ => {}
        }
    }
    bits
}

/// A memory operand without registers: the sign-extended value tells the size in 64-bit code.
fn absolute_size(insn: &Instruction, bits: u32) -> u32 {
    if bits == 64 && insn.memory_displ_size() == 4 && insn.memory_displacement64() >> 32 == 0 {
        32
    } else {
        bits
    }
}

pub(crate) fn address_mask(bits: u32) -> u64 {
    match bits {
        16 => 0xffff,
        32 => 0xffff_ffff,
        _ => u64::MAX,
    }
}

/// Index into `Vcpu::seg`; DS where the instruction names none.
pub(crate) fn segment_index(register: Register) -> usize {
    match register {
        Register::ES => seg::ES,
        Register::CS => seg::CS,
        Register::SS => seg::SS,
        Register::FS => seg::FS,
        Register::GS => seg::GS,
        _ => seg::DS,
    }
}

/// An operand that can be read.
pub(crate) trait Source {
    fn get<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        op: &Op<S>,
    ) -> Result<u64, Fault>;
}

/// An operand that can be read and then written; `open` does everything that can fault.
pub(crate) trait Destination: Source {
    type Handle: Copy;
    fn open<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        op: &Op<S>,
    ) -> Result<Self::Handle, Fault>;
    fn load<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        handle: Self::Handle,
    ) -> Result<u64, Fault>;
    fn store<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        handle: Self::Handle,
        value: u64,
    ) -> Result<(), Fault>;
    /// Write without having read.
    fn put<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        op: &Op<S>,
        value: u64,
    ) -> Result<(), Fault>;
}

/// `Op::dst`.
pub(crate) struct Dst;
/// `Op::src`.
pub(crate) struct Src;
/// `Op::address`.
pub(crate) struct Mem;
/// `Op::imm`.
pub(crate) struct Imm;

impl Source for Imm {
    #[inline(always)]
    fn get<S: System, const SIZE: usize>(
        _: &mut Cpu<S>,
        _: &mut S,
        op: &Op<S>,
    ) -> Result<u64, Fault> {
        Ok(op.imm & mask::<SIZE>())
    }
}

impl Source for Src {
    #[inline(always)]
    fn get<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        _: &mut S,
        op: &Op<S>,
    ) -> Result<u64, Fault> {
        Ok(cpu.reg::<SIZE>(op.src))
    }
}

impl Source for Dst {
    #[inline(always)]
    fn get<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        _: &mut S,
        op: &Op<S>,
    ) -> Result<u64, Fault> {
        Ok(cpu.reg::<SIZE>(op.dst))
    }
}

impl Source for Mem {
    #[inline(always)]
    fn get<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        op: &Op<S>,
    ) -> Result<u64, Fault> {
        let linear = cpu.linear(op, SIZE as u64, false)?;
        cpu.load::<SIZE>(sys, linear).map_err(|fault| cpu.blame_stack(op, fault))
    }
}

impl Destination for Dst {
    type Handle = RegRef;
    #[inline(always)]
    fn open<S: System, const SIZE: usize>(
        _: &mut Cpu<S>,
        _: &mut S,
        op: &Op<S>,
    ) -> Result<RegRef, Fault> {
        Ok(op.dst)
    }
    #[inline(always)]
    fn load<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        _: &mut S,
        handle: RegRef,
    ) -> Result<u64, Fault> {
        Ok(cpu.reg::<SIZE>(handle))
    }
    #[inline(always)]
    fn store<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        _: &mut S,
        handle: RegRef,
        value: u64,
    ) -> Result<(), Fault> {
        cpu.set_reg::<SIZE>(handle, value);
        Ok(())
    }
    #[inline(always)]
    fn put<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        _: &mut S,
        op: &Op<S>,
        value: u64,
    ) -> Result<(), Fault> {
        cpu.set_reg::<SIZE>(op.dst, value);
        Ok(())
    }
}

impl Destination for Mem {
    type Handle = Target;
    #[inline(always)]
    fn open<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        op: &Op<S>,
    ) -> Result<Target, Fault> {
        let linear = cpu.linear(op, SIZE as u64, true)?;
        cpu.target(sys, linear, SIZE as u64).map_err(|fault| cpu.blame_stack(op, fault))
    }
    #[inline(always)]
    fn load<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        handle: Target,
    ) -> Result<u64, Fault> {
        cpu.target_load::<SIZE>(sys, handle)
    }
    #[inline(always)]
    fn store<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        handle: Target,
        value: u64,
    ) -> Result<(), Fault> {
        cpu.target_store::<SIZE>(sys, handle, value)
    }
    #[inline(always)]
    fn put<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        op: &Op<S>,
        value: u64,
    ) -> Result<(), Fault> {
        let linear = cpu.linear(op, SIZE as u64, true)?;
        cpu.store::<SIZE>(sys, linear, value).map_err(|fault| cpu.blame_stack(op, fault))
    }
}

/// All ones in `SIZE` bytes.
#[inline(always)]
pub(crate) const fn mask<const SIZE: usize>() -> u64 {
    u64::MAX >> (64 - SIZE * 8)
}

/// Sign-extends `SIZE` bytes.
#[inline(always)]
pub(crate) const fn sign_extend<const SIZE: usize>(value: u64) -> u64 {
    let unused = 64 - SIZE * 8;
    ((value << unused) as i64 >> unused) as u64
}

/// Instantiates `$f::<$($t,)* SIZE>` for a run-time size of 1, 2, 4 or 8 bytes.
macro_rules! by_size {
    ($size:expr, $f:ident, $($t:ty),*) => {
        match $size {
            1 => $f::<$($t,)* 1>,
            2 => $f::<$($t,)* 2>,
            4 => $f::<$($t,)* 4>,
            _ => $f::<$($t,)* 8>,
        }
    };
}
pub(crate) use by_size;
