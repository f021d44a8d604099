//! Nanoseconds per instruction through the vector unit: `cargo run --release -p native --example
//! speed`.

use std::time::Instant;

use iced_x86::{Decoder, DecoderOptions, Formatter, IntelFormatter};
use native::HostVectorUnit;
use x86::fpu::FpuState;
use x86_interp::{VectorOperands, VectorUnit};

host::choose!(host_linux::Linux);

/// The fastest batch counts: other programs disturb the rest.
const BATCHES: usize = 50;
const ROUNDS: u32 = 10_000;

const ENCODINGS: [&[u8]; 18] = [
    &[0x66, 0x0f, 0x6f, 0xc1],             // movdqa xmm0,xmm1
    &[0x66, 0x0f, 0xfe, 0x00],             // paddd xmm0,[rax]
    &[0x66, 0x44, 0x0f, 0xd7, 0xf1],       // pmovmskb r14d,xmm1
    &[0x66, 0x0f, 0x3a, 0x63, 0xc1, 0x08], // pcmpistri xmm0,xmm1,8
    &[0x66, 0x0f, 0x38, 0xdc, 0xc1],       // aesenc xmm0,xmm1
    &[0xc5, 0xf5, 0xfe, 0xc2],             // vpaddd ymm0,ymm1,ymm2
    &[0xc5, 0xf1, 0xfe, 0xc2],             // vpaddd xmm0,xmm1,xmm2
    &[0xf2, 0x0f, 0x58, 0xc1],             // addsd xmm0,xmm1
    &[0x66, 0x0f, 0x2f, 0xc1],             // comisd xmm0,xmm1
    &[0xf2, 0x48, 0x0f, 0x2a, 0xc0],       // cvtsi2sd xmm0,rax
    &[0xc4, 0xe2, 0xf5, 0xb8, 0xc2],       // vfmadd231pd ymm0,ymm1,ymm2
    &[0xc4, 0xe2, 0xf2, 0xf5, 0xc2],       // pext rax,rcx,rdx
    &[0xc4, 0xe2, 0xfb, 0xf6, 0xc2],       // mulx rax,rax,rdx
    &[0xc4, 0xe2, 0xf8, 0xf3, 0xc8],       // blsr rax,rax
    &[0xd8, 0xc1],                         // fadd st,st(1)
    &[0xd9, 0x28],                         // fldcw [rax]
    &[0xd9, 0xc1],                         // fld st(1)
    &[0x0f, 0xfe, 0xc1],                   // paddd mm0,mm1
];

fn main() {
    let mut unit = HostVectorUnit::new().expect("executable memory");
    let mut fpu = FpuState { fcw: 0x37f, ftw: 0xff, ..FpuState::default() };
    let mut operands = VectorOperands::default();
    // A control word that masks everything, for FLDCW.
    operands.memory[..2].copy_from_slice(&[0x7f, 0x03]);
    for bytes in ENCODINGS {
        let insn = Decoder::with_ip(64, bytes, 0, DecoderOptions::NONE).decode();
        let mut text = String::new();
        IntelFormatter::new().format(&insn, &mut text);
        let Ok(code) = unit.prepare(&insn, bytes) else {
            println!("{text:40} not executed");
            continue;
        };
        let best = (0..BATCHES)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..ROUNDS {
                    unit.run(code, &insn, &mut fpu, &mut operands).expect("no exception");
                }
                start.elapsed()
            })
            .min()
            .unwrap_or_default();
        println!("{text:40} {:7.1} ns", best.as_secs_f64() * 1e9 / f64::from(ROUNDS));
    }
}
