//! Registers a case starts with.

use x86::fpu::FpuState;
use x86::{flags, reg};

use super::target;
use crate::layout::{DATA, HIGH, PAGE};
use crate::random::Random;
use crate::state::{LINUX_SELECTORS_32, State};
use crate::values;

/// A random state to run code of `bits` 64 or 32 at `rip`.
pub fn state(random: &mut Random, bits: u32, rip: u64) -> State {
    let mut state = State {
        rip,
        rflags: rflags(random),
        fs_base: segment_base(random),
        gs_base: segment_base(random),
        fpu: fpu(random),
        ..State::default()
    };
    for register in &mut state.gpr {
        *register = values::integer(random);
    }
    state.gpr[reg::RSP] = target::stack(random);
    if bits == 32 {
        state.selectors = LINUX_SELECTORS_32;
        let words = state.gpr.iter_mut().chain([&mut state.fs_base, &mut state.gs_base]);
        words.for_each(|word| *word &= 0xffff_ffff);
    }
    state
}

/// Status flags at random, DF and the harmless system flags sometimes, AC rarely.
pub fn rflags(random: &mut Random) -> u64 {
    let mut value = flags::FIXED | flags::IF | random.bits() & flags::STATUS;
    for (flag, percent) in
        [(flags::DF, 15), (flags::ID, 10), (flags::NT, 3), (flags::AC, 3), (flags::TF, 2)]
    {
        if random.chance(percent) {
            value |= flag;
        }
    }
    value
}

/// Any canonical address, mostly so that windows can be reached from it.
fn segment_base(random: &mut Random) -> u64 {
    match random.below(8) {
        0 => 0,
        1..=4 => random.below(DATA.base),
        5 => HIGH.base.wrapping_sub(random.below(PAGE)),
        6 => DATA.base + random.below(0x4000),
        _ => ((random.bits() << 16) as i64 >> 16) as u64,
    }
}

/// x87, SSE and AVX registers without a pending exception.
pub fn fpu(random: &mut Random) -> FpuState {
    let mut fpu = FpuState { fcw: values::fcw(random), ..FpuState::default() };
    fpu.fsw = random.bits() as u16 & 0x7f00;
    if random.chance(30) {
        // Sticky flags, but of masked exceptions only.
        fpu.fsw |= random.bits() as u16 & fpu.fcw & 0x3f;
    }
    let some = random.byte();
    fpu.ftw = random.pick(&[0, 0xff, 0xff, 0xff, some]);
    fpu.mxcsr = values::mxcsr(random);
    fpu.st.iter_mut().for_each(|st| *st = values::extended(random));
    fpu.xmm.iter_mut().for_each(|xmm| *xmm = values::lanes(random));
    fpu.ymm_high.iter_mut().for_each(|ymm| *ymm = values::lanes(random));
    fpu
}
