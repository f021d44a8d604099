//! Steers what loads or looks at segments: selectors that mean something on Linux, far pointers
//! into the code window, IRET frames.

use iced_x86::{Code, Instruction, InstructionInfoFactory, Mnemonic, OpKind};
use x86::{flags, reg};

use super::encode::Draft;
use super::steer::place;
use super::{Sequence, start, target};
use crate::random::Random;

/// Null, user code (32 and 64 bits) and data, kernel code and data, empty, TSS, LDT, beyond the
/// limit. Not the one that holds the CPU number (0x7b).
const SELECTORS: [u16; 18] = [
    0, 1, 2, 3, 0x2b, 0x2b, 0x2b, 0x28, 0x23, 0x33, 0x30, 0x08, 0x10, 0x1b, 0x63, 0x43, 0x07, 0x83,
];
/// For CS.
const CODE_SELECTORS: [u16; 8] = [0x33, 0x33, 0x33, 0x33, 0x23, 0x30, 0x2b, 0];
/// For SS of an IRET frame.
const STACK_SELECTORS: [u16; 6] = [0x2b, 0x2b, 0x2b, 0x2b, 0x28, 0];

/// What the instruction takes its selector from.
enum Source {
    /// A register or 16 bits of memory: the operand's number.
    Operand(u32),
    /// A far pointer with an offset of so many bytes.
    Pointer(usize),
    /// A selector on the stack.
    Stack,
    /// An offset of so many bytes and CS, on the stack.
    FarReturn(usize),
    /// An interrupt's frame of words of so many bytes.
    InterruptReturn(usize),
}

fn source(insn: &Instruction) -> Option<Source> {
    use Code as C;
    Some(match insn.code() {
        C::Mov_Sreg_rm16 | C::Mov_Sreg_r32m16 | C::Mov_Sreg_r64m16 => Source::Operand(1),
        C::Call_m1616 | C::Jmp_m1616 => Source::Pointer(2),
        C::Call_m1632 | C::Jmp_m1632 => Source::Pointer(4),
        C::Call_m1664 | C::Jmp_m1664 => Source::Pointer(8),
        C::Retfw | C::Retfw_imm16 => Source::FarReturn(2),
        C::Retfd | C::Retfd_imm16 => Source::FarReturn(4),
        C::Retfq | C::Retfq_imm16 => Source::FarReturn(8),
        _ if insn.mnemonic() == Mnemonic::Pop && insn.op0_register().is_segment_register() => {
            Source::Stack
        }
        C::Iretw => Source::InterruptReturn(2),
        C::Iretd => Source::InterruptReturn(4),
        C::Iretq => Source::InterruptReturn(8),
        _ => match insn.mnemonic() {
            Mnemonic::Lar | Mnemonic::Lsl => Source::Operand(1),
            Mnemonic::Verr | Mnemonic::Verw => Source::Operand(0),
            Mnemonic::Lss | Mnemonic::Lfs | Mnemonic::Lgs | Mnemonic::Lds | Mnemonic::Les => {
                Source::Pointer(insn.op0_register().size())
            }
            _ => return None,
        },
    })
}

/// Settles the operands of an instruction with a selector; `None` if it has none. False as for
/// [`super::steer::steer`].
pub fn steer(sequence: &mut Sequence, random: &mut Random, draft: &mut Draft) -> Option<bool> {
    Some(match source(&draft.insn)? {
        Source::Operand(operand) => operand_selector(sequence, random, draft, operand),
        Source::Pointer(size) => {
            let loads = draft.insn.op_count() == 2;
            let selector = if loads { random.pick(&SELECTORS) } else { code_selector(random) };
            let offset = if loads { random.bits() } else { target::jump(random) };
            memory(sequence, random, draft, &far_pointer(offset, selector, size))
        }
        Source::Stack => stack(sequence, &[random.pick(&SELECTORS).into()], 8),
        Source::FarReturn(size) => {
            let frame = [target::jump(random), code_selector(random).into()];
            stack(sequence, &frame, size)
        }
        Source::InterruptReturn(size) => {
            let ss = random.pick(&STACK_SELECTORS);
            let (cs, rsp) = (code_selector(random), target::stack(random));
            // With AC the CPU checks the alignment of what is still to be popped; KVM takes the #AC
            // for a split lock and tries again without end.
            let rflags = start::rflags(random) & !flags::AC;
            stack(sequence, &[target::jump(random), cs.into(), rflags, rsp, ss.into()], size)
        }
    })
}

fn code_selector(random: &mut Random) -> u16 {
    if random.chance(10) { random.pick(&SELECTORS) } else { random.pick(&CODE_SELECTORS) }
}

fn far_pointer(offset: u64, selector: u16, size: usize) -> Vec<u8> {
    let mut bytes = offset.to_le_bytes()[..size].to_vec();
    bytes.extend(selector.to_le_bytes());
    bytes
}

fn operand_selector(
    sequence: &mut Sequence,
    random: &mut Random,
    draft: &mut Draft,
    operand: u32,
) -> bool {
    let selector = random.pick(&SELECTORS);
    if draft.insn.op_kind(operand) == OpKind::Register {
        let number = draft.insn.op_register(operand).full_register().number();
        let junk = sequence.reachable(random.bits() & !0xffff);
        return sequence.choose(number, junk | u64::from(selector));
    }
    memory(sequence, random, draft, &selector.to_le_bytes())
}

/// Puts `bytes` at the memory operand.
fn memory(sequence: &mut Sequence, random: &mut Random, draft: &mut Draft, bytes: &[u8]) -> bool {
    let mut info = InstructionInfoFactory::new();
    let operands = info.info(&draft.insn).used_memory().to_vec();
    let placed = operands
        .first()
        .and_then(|memory| place(sequence, random, draft, memory, bytes.len() as u64));
    if let Some(address) = placed {
        sequence.patch(address, bytes);
    }
    placed.is_some()
}

/// Puts words of `size` bytes on the stack.
fn stack(sequence: &mut Sequence, words: &[u64], size: usize) -> bool {
    let rsp = sequence.state.gpr[reg::RSP];
    let bytes: Vec<u8> =
        words.iter().flat_map(|word| word.to_le_bytes()[..size].to_vec()).collect();
    sequence.patch(rsp, &bytes);
    sequence.clean(reg::RSP)
}
