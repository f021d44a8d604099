use iced_x86::{Decoder, DecoderOptions, Instruction};
use x86::{Fault, fpu::FpuState, vector};
use x86_interp::{VectorOperands, VectorUnit};

use crate::HostVectorUnit;

fn decode(bytes: &[u8]) -> Instruction {
    Decoder::with_ip(64, bytes, 0, DecoderOptions::NONE).decode()
}

/// Prepares and runs one instruction.
fn run(
    unit: &mut HostVectorUnit,
    bytes: &[u8],
    fpu: &mut FpuState,
    operands: &mut VectorOperands,
) -> Result<(), Fault> {
    let insn = decode(bytes);
    let code = unit.prepare(&insn, bytes)?;
    unit.run(code, &insn, fpu, operands)
}

/// PADDW xmm`to`, xmm`from`: as many instructions as wanted.
fn paddw(to: u8, from: u8) -> [u8; 5] {
    let rex = 0x40 | (to >> 3) << 2 | from >> 3;
    [0x66, rex, 0x0f, 0xfd, 0xc0 | (to & 7) << 3 | from & 7]
}

#[test]
fn addressing_forms_share_a_routine() {
    let mut unit = HostVectorUnit::new().unwrap();
    let forms: [&[u8]; 5] = [
        &[0x0f, 0x58, 0x00],                               // addps xmm0,[rax]
        &[0x64, 0x0f, 0x58, 0x00],                         // addps xmm0,fs:[rax]
        &[0x67, 0x0f, 0x58, 0x40, 0x10],                   // addps xmm0,[eax+16]
        &[0x0f, 0x58, 0x05, 0x00, 0x01, 0x00, 0x00],       // addps xmm0,[rip+256]
        &[0x42, 0x0f, 0x58, 0x84, 0xfc, 0xff, 0xff, 0, 0], // addps xmm0,[rsp+r15*8+65535]
    ];
    for form in forms {
        let mut fpu = FpuState::default();
        let mut operands = VectorOperands::default();
        operands.memory[..4].copy_from_slice(&1.5_f32.to_le_bytes());
        run(&mut unit, form, &mut fpu, &mut operands).unwrap();
        assert_eq!(fpu.xmm[0][..4], 1.5_f32.to_le_bytes(), "{form:02x?}");
    }
    assert_eq!(unit.routines(), 1);
}

#[test]
fn legacy_encoding_keeps_and_vex_zeroes_the_upper_half() {
    let mut unit = HostVectorUnit::new().unwrap();
    let mut fpu = FpuState { ymm_high: [[7; 16]; 16], ..FpuState::default() };
    let mut operands = VectorOperands::default();
    run(&mut unit, &paddw(3, 4), &mut fpu, &mut operands).unwrap();
    assert_eq!(fpu.ymm_high[3], [7; 16]);
    let vpaddw = [0xc5, 0xd9, 0xfd, 0xdd]; // vpaddw xmm3,xmm4,xmm5
    run(&mut unit, &vpaddw, &mut fpu, &mut operands).unwrap();
    assert_eq!(fpu.ymm_high[3], [0; 16]);
    assert_eq!(fpu.ymm_high[4], [7; 16]);
}

#[test]
fn stale_handles_still_run_their_instruction() {
    let mut unit = HostVectorUnit::with_capacity(4096).unwrap();
    let first = decode(&paddw(0, 1));
    let code = unit.prepare(&first, &paddw(0, 1)).unwrap();
    for to in 0..16 {
        for from in 0..16 {
            let bytes = paddw(to, from);
            unit.prepare(&decode(&bytes), &bytes).unwrap();
        }
    }
    assert!(unit.routines() < 256, "the memory has overflowed");
    let mut fpu = FpuState::default();
    fpu.xmm[1] = [1; 16];
    unit.run(code, &first, &mut fpu, &mut VectorOperands::default()).unwrap();
    assert_eq!(fpu.xmm[0], [1; 16]);
}

#[test]
fn handles_of_another_unit_do_no_harm() {
    let mut one = HostVectorUnit::new().unwrap();
    let mut other = HostVectorUnit::new().unwrap();
    for from in 0..16 {
        let bytes = paddw(0, from);
        one.prepare(&decode(&bytes), &bytes).unwrap();
    }
    let insn = decode(&paddw(0, 15));
    let code = one.prepare(&insn, &paddw(0, 15)).unwrap();
    let mut fpu = FpuState::default();
    fpu.xmm[15] = [1; 16];
    other.run(code, &insn, &mut fpu, &mut VectorOperands::default()).unwrap();
    assert_eq!(fpu.xmm[0], [1; 16]);
}

#[test]
fn refuses_what_is_not_its_own() {
    let mut unit = HostVectorUnit::new().unwrap();
    let foreign: [&[u8]; 16] = [
        &[0x0f, 0x05],                         // syscall
        &[0x48, 0x89, 0xc8],                   // mov rax,rcx
        &[0x48, 0x0f, 0x44, 0xc1],             // cmove rax,rcx
        &[0xeb, 0x00],                         // jmp
        &[0x48, 0xcf],                         // iretq
        &[0x41, 0x58],                         // pop r8
        &[0x0f, 0xae, 0x00],                   // fxsave
        &[0x0f, 0xae, 0x10],                   // ldmxcsr
        &[0xdd, 0x30],                         // fnsave
        &[0x9b],                               // wait
        &[0x66, 0x0f, 0xf7, 0xc1],             // maskmovdqu
        &[0xc4, 0xe2, 0x71, 0x90, 0x04, 0x10], // vpgatherdd
        &[0xc5, 0xf8, 0x77],                   // vzeroupper
        &[0x62, 0xf1, 0x74, 0x48, 0x58, 0xc2], // EVEX vaddps
        &[0x0f, 0x0f, 0xc1, 0x9e],             // 3DNow
        &[0x0f, 0x01, 0xd0],                   // xgetbv
    ];
    for bytes in foreign {
        assert_eq!(unit.prepare(&decode(bytes), bytes), Err(Fault::ud()), "{bytes:02x?}");
    }
}

#[test]
fn pending_x87_exception_is_mf() {
    let mut unit = HostVectorUnit::new().unwrap();
    let mut fpu = FpuState { fcw: 0x37b, fsw: 0x8084, ..FpuState::default() };
    let mut operands = VectorOperands::default();
    let before = fpu;
    let fld1 = run(&mut unit, &[0xd9, 0xe8], &mut fpu, &mut operands);
    assert_eq!(fld1, Err(Fault::new(vector::MF)));
    assert_eq!(fpu, before);
    // FNCLEX does not wait.
    run(&mut unit, &[0xdb, 0xe2], &mut fpu, &mut operands).unwrap();
    assert_eq!(fpu.fsw & 0x80ff, 0);
}

#[test]
fn inconsistent_summary_bit_cannot_trap_the_host() {
    let mut unit = HostVectorUnit::new().unwrap();
    // A zero-divide is pending although ES says otherwise, as a crafted snapshot might have it.
    let mut fpu = FpuState { fcw: 0x37b, fsw: 0x0004, mxcsr: u32::MAX, ..FpuState::default() };
    let mut operands = VectorOperands::default();
    let fld1 = run(&mut unit, &[0xd9, 0xe8], &mut fpu, &mut operands);
    assert_eq!(fld1, Err(Fault::new(vector::MF)));
    fpu.fcw = 0x37f;
    run(&mut unit, &[0xd9, 0xe8], &mut fpu, &mut operands).unwrap();
    assert_eq!(fpu.ftw, 0x80);
}

#[test]
fn a_unit_moves_to_the_thread_of_its_cpu() {
    let mut unit = HostVectorUnit::new().unwrap();
    let fpu = std::thread::spawn(move || {
        let mut fpu = FpuState::default();
        fpu.xmm[1] = [1; 16];
        run(&mut unit, &paddw(0, 1), &mut fpu, &mut VectorOperands::default()).unwrap();
        fpu
    });
    assert_eq!(fpu.join().unwrap().xmm[0], [1; 16]);
}
