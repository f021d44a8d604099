//! What becomes of an instruction of a 32-bit guest's, which is executed as 64-bit code.

use super::{Level, Rule, is_string, of_any_width, straight};
use iced_x86::{Code, FlowControl, Instruction, Mnemonic, OpKind, Register};

/// Chooses the rule for an instruction of 32-bit code.
pub fn narrow(insn: &Instruction, level: Level) -> Rule {
    match common(insn, level) {
        rule if level == Level::Kernel || is_users(rule) => rule,
        _ => Rule::CallOut,
    }
}

/// User code may do it.
fn is_users(rule: Rule) -> bool {
    use Rule::*;
    !matches!(
        rule,
        SetInterrupts(_)
            | SetAlignment(_)
            | PopFlags
            | ReadControl
            | InvalidatePage
            | Iret
            | LoadSegment
            | ExitSystem
    )
}

fn common(insn: &Instruction, level: Level) -> Rule {
    of_any_width(insn, level).unwrap_or_else(|| of_code(insn, level))
}

fn of_code(insn: &Instruction, level: Level) -> Rule {
    use Rule::*;
    match insn.code() {
        Code::Lea_r16_m | Code::Lea_r32_m => Copy,
        Code::Push_r32 | Code::Pushd_imm8 | Code::Pushd_imm32 => Push,
        Code::Push_rm32 if is_reached(insn, level) => Push,
        Code::Pushd_ES | Code::Pushd_CS | Code::Pushd_SS => Push,
        Code::Pushd_DS | Code::Pushd_FS | Code::Pushd_GS => Push,
        Code::Pop_r32 => Pop,
        Code::Pop_rm32 if is_flat(insn) => Pop,
        Code::Leaved => Leave,
        Code::Pushfd => PushFlags,
        Code::Popfd => PopFlags,
        Code::Call_rel32_32 => Call,
        Code::Call_rm32 if is_reached(insn, level) => CallIndirect,
        Code::Jmp_rel8_32 | Code::Jmp_rel32_32 => Jump,
        Code::Jmp_rm32 if is_reached(insn, level) => JumpIndirect,
        Code::Retnd | Code::Retnd_imm16 => Return,
        Code::Iretd => Iret,
        Code::Sysenter if level == Level::User => EnterSystem,
        Code::Int_imm8 if level == Level::User => SoftwareInterrupt,
        Code::Sysexitd => ExitSystem,
        Code::Popd_DS | Code::Popd_ES | Code::Popd_FS | Code::Popd_GS => LoadSegment,
        Code::Mov_Sreg_rm16 | Code::Mov_Sreg_r32m16 if loads_data_segment(insn) => LoadSegment,
        Code::Invlpg_m if is_flat(insn) => InvalidatePage,
        _ if insn.is_jcc_short_or_near() && insn.op0_kind() == OpKind::NearBranch32 => Conditional,
        _ => match insn.flow_control() {
            FlowControl::Next if is_string(insn) => string(insn),
            FlowControl::Next => straight(insn, is_reached(insn, level)),
            _ => CallOut,
        },
    }
}

/// From a register, or from memory in a flat segment, into DS, ES, FS or GS.
fn loads_data_segment(insn: &Instruction) -> bool {
    use Register::{CS, DS, ES, FS, GS};
    let based = [CS, FS, GS].contains(&insn.memory_segment()) && insn.op1_kind() == OpKind::Memory;
    matches!(insn.op0_register(), DS | ES | FS | GS) && !based
}

/// By 32-bit pointers, and from no segment of its own.
fn string(insn: &Instruction) -> Rule {
    let wide = (0..insn.op_count()).all(|i| {
        matches!(insn.op_kind(i), OpKind::MemorySegESI | OpKind::MemoryESEDI | OpKind::Register)
    });
    let flat = !matches!(insn.memory_segment(), Register::CS | Register::FS | Register::GS);
    if wide && flat && copied_string(insn) { Rule::String } else { Rule::CallOut }
}

fn copied_string(insn: &Instruction) -> bool {
    use Mnemonic::*;
    matches!(insn.mnemonic(), Movsb | Movsw | Movsd | Stosb | Stosw | Stosd | Lodsb | Lodsw | Lodsd)
        || matches!(insn.mnemonic(), Cmpsb | Cmpsw | Cmpsd | Scasb | Scasw | Scasd)
}

/// The operand is in memory, in a flat segment that can be written.
fn is_flat(insn: &Instruction) -> bool {
    let based = [Register::CS, Register::FS, Register::GS].contains(&insn.memory_segment());
    insn.op0_kind() == OpKind::Memory && !based
}

/// No operand is in memory, or it is in a flat segment or in the one of the CPU's or the thread's own.
fn is_reached(insn: &Instruction, level: Level) -> bool {
    let segment = insn.memory_segment();
    // What CS leads to cannot be written. A no-operation accesses nothing.
    let flat = match segment {
        Register::CS => insn.mnemonic() == Mnemonic::Nop,
        _ => !matches!(segment, Register::FS | Register::GS),
    };
    let in_memory = (0..insn.op_count()).any(|i| insn.op_kind(i) == OpKind::Memory);
    !in_memory || flat || segment == own_segment(level)
}

/// The segment of the CPU's own memory, or of a thread's.
pub(crate) fn own_segment(level: Level) -> Register {
    match level {
        Level::Kernel => Register::FS,
        Level::User => Register::GS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    fn rule_of(bytes: &[u8], level: Level) -> Rule {
        narrow(&Decoder::new(32, bytes, DecoderOptions::NONE).decode(), level)
    }

    #[test]
    fn the_kernels_code_has_its_own_rules() {
        for (bytes, wanted) in [
            (&[0x40][..], Rule::Copy),                    // inc eax
            (&[0x8b, 0x1d, 0, 0, 0, 0xc1], Rule::Memory), // mov ebx, [0xc1000000]
            (&[0xa1, 0, 0, 0, 0xc1], Rule::Memory),       // mov eax, [0xc1000000]
            (&[0x64, 0xa1, 0, 0, 0, 0xc1], Rule::PerCpu), // mov eax, fs:[0xc1000000]
            (&[0x8d, 0x74, 0x26, 0], Rule::Copy),         // lea esi, [esi]
            (&[0x50], Rule::Push),                        // push eax
            (&[0xff, 0x30], Rule::Push),                  // push dword [eax]
            (&[0x58], Rule::Pop),                         // pop eax
            (&[0x1e], Rule::Push),                        // push ds
            (&[0x8f, 0x00], Rule::Pop),                   // pop dword [eax]
            (&[0xe8, 0, 0, 0, 0], Rule::Call),
            (&[0xff, 0xd0], Rule::CallIndirect), // call eax
            (&[0xc3], Rule::Return),
            (&[0x75, 0], Rule::Conditional),
            (&[0xf3, 0xa5], Rule::String), // rep movsd
            (&[0x9c], Rule::PushFlags),
            (&[0x9d], Rule::PopFlags),
            (&[0xfa], Rule::SetInterrupts(false)),
            (&[0x0f, 0x01, 0xcb], Rule::SetAlignment(true)), // stac
            (&[0x0f, 0x20, 0xd0], Rule::ReadControl),        // mov eax, cr2
            (&[0x8c, 0xd8], Rule::ReadSelector),             // mov eax, ds
            (&[0x8e, 0xd8], Rule::LoadSegment),              // mov ds, eax
            (&[0x66, 0x8e, 0x60, 1], Rule::LoadSegment),     // mov fs, [eax + 1]
            (&[0x1f], Rule::LoadSegment),                    // pop ds
            (&[0x0f, 0x35], Rule::ExitSystem),               // sysexit
            (&[0x0f, 0xa9], Rule::LoadSegment),              // pop gs
            (&[0xcf], Rule::Iret),                           // iretd
            (&[0x0f, 0x01, 0x38], Rule::InvalidatePage),     // invlpg [eax]
        ] {
            assert_eq!(rule_of(bytes, Level::Kernel), wanted, "{bytes:x?}");
        }
    }

    #[test]
    fn what_64_bit_code_does_otherwise_is_interpreted() {
        for bytes in [
            &[0x60][..],               // pushad
            &[0x27],                   // daa
            &[0x63, 0xc8],             // arpl ax, cx
            &[0xc5, 0x00],             // lds eax, [eax]
            &[0x62, 0x00],             // bound eax, [eax]
            &[0xe3, 0],                // jecxz
            &[0xe2, 0],                // loop
            &[0x8e, 0xd0],             // mov ss, eax
            &[0x64, 0x8e, 0x18],       // mov ds, fs:[eax]
            &[0x17],                   // pop ss
            &[0x65, 0xa1, 0, 0, 0, 0], // mov eax, gs:[0], which is the thread's
            &[0x66, 0x50],             // push ax
            &[0x67, 0xa5],             // movsd by 16-bit pointers
            &[0x66, 0xc3],             // ret to 16 bits
            &[0xff, 0x18],             // call far [eax]
            &[0x66, 0xcf],             // iret
            &[0xcd, 0x80],             // int 0x80
            &[0x0f, 0x34],             // sysenter
            &[0x0f, 0x22, 0xd8],       // mov cr3, eax
            &[0x64, 0x0f, 0x01, 0x38], // invlpg fs:[eax]
            &[0xf4],                   // hlt
        ] {
            assert_eq!(rule_of(bytes, Level::Kernel), Rule::CallOut, "{bytes:x?}");
        }
    }

    #[test]
    fn programs_may_do_less_and_have_another_segment_of_their_own() {
        assert_eq!(rule_of(&[0x65, 0xa1, 0, 0, 0, 0], Level::User), Rule::PerCpu);
        assert_eq!(rule_of(&[0x64, 0xa1, 0, 0, 0, 0], Level::User), Rule::CallOut);
        assert_eq!(rule_of(&[0xcd, 0x80], Level::User), Rule::SoftwareInterrupt);
        assert_eq!(rule_of(&[0x0f, 0x34], Level::User), Rule::EnterSystem);
        assert_eq!(rule_of(&[0x0f, 0x35], Level::User), Rule::CallOut);
        assert_eq!(rule_of(&[0x9c], Level::User), Rule::PushFlags);
        assert_eq!(rule_of(&[0xf3, 0x90], Level::User), Rule::Copy);
        for bytes in [&[0xfa][..], &[0x9d], &[0x0f, 0x01, 0xcb], &[0x0f, 0x20, 0xd0], &[0x1f]] {
            assert_eq!(rule_of(bytes, Level::User), Rule::CallOut, "{bytes:x?}");
        }
    }
}
