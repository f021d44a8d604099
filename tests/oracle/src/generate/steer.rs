//! Chooses what an instruction works on: registers are set so that memory operands land where
//! `target` says, counts are small, divisions mostly possible, jumps land on HLTs.

use iced_x86::{
    FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
    UsedMemory,
};
use x86::reg;

use super::encode::Draft;
use super::{Sequence, selector, start, target};
use crate::random::Random;
use crate::state::Patch;
use crate::values;

/// Percent of instructions let through whose operand could not be placed.
const WILD: u64 = 8;

/// Settles the operands of `draft`. False if another draft is to be tried; then `sequence` has
/// been changed and must be restored.
pub fn steer(
    sequence: &mut Sequence,
    random: &mut Random,
    info: &mut InstructionInfoFactory,
    draft: &mut Draft,
) -> bool {
    if !registers(sequence, random, &draft.insn) {
        return false;
    }
    if let Some(good) = selector::steer(sequence, random, draft) {
        return good;
    }
    if !jump_register(sequence, random, &draft.insn) {
        return false;
    }
    let memories: Vec<UsedMemory> = info.info(&draft.insn).used_memory().to_vec();
    for memory in &memories {
        let size = operand_size(&draft.insn, memory);
        let Some(address) = place(sequence, random, draft, memory, size) else {
            let wild = if is_16bit(memory) { 100 } else { WILD };
            return !locked(&draft.insn) && random.chance(wild);
        };
        if locked(&draft.insn) && !address.is_multiple_of(size.max(1)) {
            return false;
        }
        contents(sequence, random, &draft.insn, memory, address, size);
    }
    accept_immediate(&draft.insn)
}

/// The access locks the bus if it is not aligned. Hypervisors and kernels punish that: it may be
/// slow, counted, or never end.
fn locked(insn: &Instruction) -> bool {
    insn.has_lock_prefix() || insn.mnemonic() == Mnemonic::Xchg
}

/// Interrupt gates user code may call: breakpoint, overflow, Linux system call.
fn accept_immediate(insn: &Instruction) -> bool {
    insn.mnemonic() != Mnemonic::Int || !matches!(insn.immediate8(), 3 | 4 | 0x80)
}

/// The instruction branches by a displacement in its encoding.
pub fn is_relative_branch(insn: &Instruction) -> bool {
    (0..insn.op_count()).any(|i| {
        matches!(
            insn.op_kind(i),
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
        )
    })
}

/// Marks what the instruction writes, so that later ones do not rely on it. Stack and string
/// pointers move by little, so they stay as good as they were.
pub fn note_writes(sequence: &mut Sequence, info: &mut InstructionInfoFactory, insn: &Instruction) {
    let used = info.info(insn);
    for register in used.used_registers() {
        let reads = matches!(register.access(), OpAccess::Read | OpAccess::CondRead);
        if reads || register.access() == OpAccess::NoMemAccess {
            continue;
        }
        let full = register.register().full_register();
        let moves = insn.is_stack_instruction() && full == Register::RSP
            || insn.is_string_instruction() && matches!(full, Register::RSI | Register::RDI);
        if full.is_gpr() && !moves {
            sequence.dirty |= 1 << full.number();
        } else if full.is_vector_register() {
            sequence.dirty_vectors |= 1 << (full.number() & 15);
        }
    }
}

impl Sequence {
    /// The register's initial value can still be chosen.
    fn free(&self, number: usize) -> bool {
        (self.pinned | self.dirty) >> number & 1 == 0
    }
    /// The register still has its initial value when the next instruction runs.
    pub(super) fn clean(&self, number: usize) -> bool {
        self.dirty >> number & 1 == 0
    }
    fn pin(&mut self, number: usize) {
        self.pinned |= 1 << number;
    }
    /// Sets and pins a register if it is free.
    pub(super) fn choose(&mut self, number: usize, value: u64) -> bool {
        let free = self.free(number);
        if free {
            self.state.gpr[number] = value;
            self.pin(number);
        }
        free
    }
    /// An address as far as the mode has it.
    pub(super) fn reachable(&self, address: u64) -> u64 {
        if self.state.bits() == 64 { address } else { address & 0xffff_ffff }
    }
    pub(super) fn patch(&mut self, address: u64, bytes: &[u8]) {
        self.patches.push(Patch { address, bytes: bytes.to_vec() });
    }
}

/// Registers that are not addresses: counts, bit offsets, dividends. False if one that matters is
/// taken.
fn registers(sequence: &mut Sequence, random: &mut Random, insn: &Instruction) -> bool {
    if insn.is_string_instruction() && (insn.has_rep_prefix() || insn.has_repne_prefix()) {
        let junk = random.bits() << 32;
        let narrow =
            insn.op_kinds().any(|kind| matches!(kind, OpKind::MemoryESEDI | OpKind::MemorySegESI));
        let most = if random.chance(90) { 24 } else { 3000 };
        let count = random.below(most);
        sequence.choose(reg::RCX, if narrow { junk | count } else { count });
    }
    match insn.mnemonic() {
        Mnemonic::Div | Mnemonic::Idiv if random.chance(60) => {
            let sign = random.chance(30);
            let number = |value| if sign { u64::wrapping_neg(value) } else { value };
            let high = number(random.below(4));
            sequence.choose(reg::RDX, high);
        }
        Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc
            if insn.op1_kind() == OpKind::Register && random.chance(90) =>
        {
            let offset = random.below(4000).wrapping_sub(2000);
            sequence.choose(insn.op1_register().full_register().number(), offset);
        }
        m if is_xstate(m) => {
            // Only components this CPU has and others that no CPU the test runs on has.
            return sequence.choose(reg::RAX, random.bits() & 0xfff8_0c1f)
                && sequence.choose(reg::RDX, 0);
        }
        _ => {}
    }
    true
}

fn is_xstate(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(mnemonic, M::Xsave | M::Xsave64 | M::Xrstor | M::Xrstor64)
}

/// For jumps and calls through a register. False if the register is taken.
fn jump_register(sequence: &mut Sequence, random: &mut Random, insn: &Instruction) -> bool {
    let indirect =
        matches!(insn.flow_control(), FlowControl::IndirectBranch | FlowControl::IndirectCall);
    if !indirect || insn.op0_kind() != OpKind::Register {
        return true;
    }
    let address = sequence.reachable(target::jump(random));
    sequence.choose(insn.op0_register().full_register().number(), address)
}

/// Such addresses reach no window, unless by segment base.
fn is_16bit(memory: &UsedMemory) -> bool {
    memory.base().is_gpr16() || memory.index().is_gpr16()
}

/// Bytes of a memory operand, as far as steering needs to know.
fn operand_size(insn: &Instruction, memory: &UsedMemory) -> u64 {
    use Mnemonic as M;
    match insn.mnemonic() {
        M::Fxsave | M::Fxsave64 | M::Fxrstor | M::Fxrstor64 => 512,
        m if is_xstate(m) => 512,
        _ => memory.memory_size().size() as u64,
    }
}

/// Makes a memory operand land where it should, and gives that address.
pub(super) fn place(
    sequence: &mut Sequence,
    random: &mut Random,
    draft: &mut Draft,
    memory: &UsedMemory,
    size: u64,
) -> Option<u64> {
    let target = sequence.reachable(target::data(random, size));
    if is_16bit(memory) {
        return None;
    }
    let Some(operand) = Operand::of(sequence, memory) else {
        return absolute(sequence, draft, memory, target).then_some(target);
    };
    if memory.index().is_vector_register() {
        indices(sequence, random, memory);
    }
    if let Some(number) = operand.unknown(sequence) {
        let narrow = operand.narrow && sequence.state.bits() == 64;
        let high = if narrow { random.bits() << 32 } else { 0 };
        let value = operand.solve(sequence, number, target)?;
        sequence.state.gpr[number] = value | high;
        operand.pin(sequence);
        return Some(target);
    }
    operand.pin(sequence);
    let settled = operand.clean(sequence).then(|| operand.address(sequence))?;
    if crate::layout::image_offset(settled).is_some() && random.chance(70) {
        return Some(settled);
    }
    // Another displacement, if it has room for one.
    let distance = target.wrapping_sub(settled).wrapping_add(memory.displacement()) as i64;
    let own = draft.insn.memory_base() == memory.base() && !operand.narrow;
    let moved = own && draft.set_displacement(distance);
    Some(if moved { target } else { settled })
}

/// An operand without registers: an absolute or RIP-relative displacement.
fn absolute(sequence: &Sequence, draft: &mut Draft, memory: &UsedMemory, target: u64) -> bool {
    let offset = target.wrapping_sub(segment_base(sequence, memory.segment()));
    let relative = draft.insn.is_ip_rel_memory_operand();
    let from = if relative { draft.insn.next_ip() } else { 0 };
    draft.set_displacement(offset.wrapping_sub(from) as i64)
}

fn segment_base(sequence: &Sequence, segment: Register) -> u64 {
    match segment {
        Register::FS => sequence.state.fs_base,
        Register::GS => sequence.state.gs_base,
        _ => 0,
    }
}

/// The registers that make up an address.
struct Operand {
    base: Option<usize>,
    index: Option<usize>,
    scale: u64,
    displacement: u64,
    segment_base: u64,
    /// The address size is 32 bits.
    narrow: bool,
}

impl Operand {
    /// `None` if the operand has no general registers.
    fn of(sequence: &Sequence, memory: &UsedMemory) -> Option<Self> {
        let number = |r: Register| r.is_gpr().then(|| r.full_register().number());
        let (base, index) = (number(memory.base()), number(memory.index()));
        let narrow = [memory.base(), memory.index()].iter().any(|r| r.is_gpr32());
        (base.is_some() || index.is_some()).then(|| Self {
            base,
            index,
            scale: memory.scale().into(),
            displacement: memory.displacement(),
            segment_base: segment_base(sequence, memory.segment()),
            narrow,
        })
    }

    fn pin(&self, sequence: &mut Sequence) {
        self.base.into_iter().chain(self.index).for_each(|number| sequence.pin(number));
    }

    fn clean(&self, sequence: &Sequence) -> bool {
        self.base.into_iter().chain(self.index).all(|number| sequence.clean(number))
    }

    /// The register to solve the address for: free, and used once, unscaled.
    fn unknown(&self, sequence: &Sequence) -> Option<usize> {
        if self.base == self.index {
            return None;
        }
        let others_clean = |number| {
            let other = if self.base == Some(number) { self.index } else { self.base };
            other.is_none_or(|other| sequence.clean(other))
        };
        let index = self.index.filter(|_| self.scale == 1);
        self.base.into_iter().chain(index).find(|&n| sequence.free(n) && others_clean(n))
    }

    /// The address with the registers as they are.
    fn address(&self, sequence: &Sequence) -> u64 {
        let value = |number: Option<usize>| number.map_or(0, |n| sequence.state.gpr[n]);
        let offset = value(self.base)
            .wrapping_add(value(self.index).wrapping_mul(self.scale))
            .wrapping_add(self.displacement);
        let offset = if self.narrow { offset & 0xffff_ffff } else { offset };
        sequence.reachable(offset.wrapping_add(self.segment_base))
    }

    /// The value of register `number` for which the address is `target`.
    fn solve(&self, sequence: &mut Sequence, number: usize, target: u64) -> Option<u64> {
        sequence.state.gpr[number] = 0;
        let rest = self.address(sequence).wrapping_sub(self.segment_base);
        let offset = target.wrapping_sub(self.segment_base);
        let value = offset.wrapping_sub(rest);
        match self.narrow {
            false => Some(value),
            true if offset >> 32 == 0 || sequence.state.bits() == 32 => Some(value & 0xffff_ffff),
            true => None,
        }
    }
}

/// Small lanes in the index register of a gather.
fn indices(sequence: &mut Sequence, random: &mut Random, memory: &UsedMemory) {
    let number = memory.index().number() & 15;
    if sequence.dirty_vectors >> number & 1 != 0 {
        return;
    }
    let lane = if memory.vsib_size() == 4 { 4 } else { 8 };
    let fpu = &mut sequence.state.fpu;
    for half in [&mut fpu.xmm[number], &mut fpu.ymm_high[number]] {
        for bytes in half.chunks_exact_mut(lane) {
            let index = random.below(200).wrapping_sub(20);
            bytes.copy_from_slice(&index.to_le_bytes()[..lane]);
        }
    }
}

/// Puts something at a memory operand that the instruction can use.
fn contents(
    sequence: &mut Sequence,
    random: &mut Random,
    insn: &Instruction,
    memory: &UsedMemory,
    address: u64,
    size: u64,
) {
    use Mnemonic as M;
    if !matches!(memory.access(), OpAccess::Read | OpAccess::ReadWrite | OpAccess::ReadCondWrite) {
        return;
    }
    let jumps = matches!(
        insn.flow_control(),
        FlowControl::IndirectBranch | FlowControl::IndirectCall | FlowControl::Return
    );
    match insn.mnemonic() {
        _ if jumps => sequence.patch(address, &target::jump(random).to_le_bytes()),
        M::Popf | M::Popfd | M::Popfq if random.chance(95) => {
            sequence.patch(address, &start::rflags(random).to_le_bytes());
        }
        M::Ldmxcsr | M::Vldmxcsr if random.chance(90) => {
            sequence.patch(address, &values::mxcsr(random).to_le_bytes());
        }
        M::Fldcw => sequence.patch(address, &values::fcw(random).to_le_bytes()),
        M::Fldenv | M::Frstor => environment(sequence, random, address, size),
        M::Fxrstor | M::Fxrstor64 | M::Xrstor | M::Xrstor64 => area(sequence, random, address),
        M::Cmpxchg | M::Cmpxchg8b | M::Cmpxchg16b if random.chance(50) => {
            let mut bytes = sequence.state.gpr[reg::RAX].to_le_bytes().to_vec();
            let high = sequence.state.gpr[reg::RDX].to_le_bytes();
            bytes.truncate(if size == 8 && insn.mnemonic() == M::Cmpxchg8b { 4 } else { 8 });
            bytes.extend(high);
            bytes.truncate(size as usize);
            sequence.patch(address, &bytes);
        }
        _ if random.chance(50) => {
            let bytes = [values::lanes(random), values::lanes(random)];
            let bytes = bytes.as_flattened();
            sequence.patch(address, &bytes[..bytes.len().min(size as usize)]);
        }
        _ => {}
    }
}

/// An x87 environment in its 32-bit format (28 bytes) or 16-bit format (14 bytes).
fn environment(sequence: &mut Sequence, random: &mut Random, address: u64, size: u64) {
    let word = if matches!(size, 14 | 94) { 2 } else { 4 };
    let fpu = start::fpu(random);
    let some = random.bits() as u16;
    let tags = random.pick(&[0xffff, 0, some]);
    for (i, value) in [fpu.fcw, fpu.fsw, tags].into_iter().enumerate() {
        sequence.patch(address.wrapping_add(i as u64 * word), &value.to_le_bytes());
    }
}

/// An FXSAVE area and XSAVE header (SDM vol. 1, 13.4), mostly valid.
fn area(sequence: &mut Sequence, random: &mut Random, address: u64) {
    let fpu = start::fpu(random);
    let mut legacy = [0u8; 512];
    legacy[0..2].copy_from_slice(&fpu.fcw.to_le_bytes());
    legacy[2..4].copy_from_slice(&fpu.fsw.to_le_bytes());
    legacy[4] = fpu.ftw;
    legacy[24..28].copy_from_slice(&fpu.mxcsr.to_le_bytes());
    legacy[32..160].copy_from_slice(fpu.st.as_flattened());
    legacy[160..416].copy_from_slice(fpu.xmm.as_flattened());
    if random.chance(4) {
        legacy[random.below(32) as usize] = random.byte();
    }
    sequence.patch(address, &legacy);
    let mut header = [0u8; 64];
    header[0] = random.byte() & 7;
    if random.chance(4) {
        // Not what a newer host knows: AVX-512, AMX (in the first bytes), the compacted form (bit 63
        // of XCOMP_BV).
        let at = random.pick(&[3, 4, 5, 6, 8, 9, 10, 14, 16, 20, 23, 24, 40, 63]);
        header[at] = 1 << random.below(8);
    }
    sequence.patch(address.wrapping_add(512), &header);
    sequence.patch(address.wrapping_add(576), fpu.ymm_high.as_flattened());
}
