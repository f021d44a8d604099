//! The registers of a [`State`] one by one, so that files, comparisons and the shrinker can
//! treat them alike.

use std::fmt;
use std::str::FromStr;

use crate::state::State;

/// Names of the general registers, in encoding order.
const GPR_NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];

/// Names of the segment registers, in encoding order.
const SEGMENT_NAMES: [&str; 6] = ["es", "cs", "ss", "ds", "fs", "gs"];

/// One register, of 128 bits at the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// A general register, in encoding order.
    Gpr(u8),
    /// RIP.
    Rip,
    /// RFLAGS.
    Rflags,
    /// Base of FS.
    FsBase,
    /// Base of GS.
    GsBase,
    /// The selector in a segment register, in encoding order.
    Selector(u8),
    /// x87 control word.
    Fcw,
    /// x87 status word.
    Fsw,
    /// x87 abridged tag word.
    Ftw,
    /// x87 last opcode.
    Fop,
    /// x87 last instruction pointer.
    Fip,
    /// x87 last operand pointer.
    Fdp,
    /// MXCSR.
    Mxcsr,
    /// An x87 register, 80 bits, counted from the top of stack.
    St(u8),
    /// An XMM register.
    Xmm(u8),
    /// The upper half of a YMM register.
    YmmHigh(u8),
}

impl Field {
    /// Every register.
    pub fn all() -> impl Iterator<Item = Self> {
        let gprs = (0..16).map(Self::Gpr);
        let words = [Self::Rip, Self::Rflags, Self::FsBase, Self::GsBase];
        let x87 = [Self::Fcw, Self::Fsw, Self::Ftw, Self::Fop, Self::Fip, Self::Fdp];
        gprs.chain(words)
            .chain((0..6).map(Self::Selector))
            .chain(x87)
            .chain((0..8).map(Self::St))
            .chain([Self::Mxcsr])
            .chain((0..16).map(Self::Xmm))
            .chain((0..16).map(Self::YmmHigh))
    }

    /// Its value in `state`.
    pub fn get(self, state: &State) -> u128 {
        let fpu = &state.fpu;
        match self {
            Self::Gpr(i) => state.gpr[usize::from(i)].into(),
            Self::Rip => state.rip.into(),
            Self::Rflags => state.rflags.into(),
            Self::FsBase => state.fs_base.into(),
            Self::GsBase => state.gs_base.into(),
            Self::Selector(i) => state.selectors[usize::from(i)].into(),
            Self::Fcw => fpu.fcw.into(),
            Self::Fsw => fpu.fsw.into(),
            Self::Ftw => fpu.ftw.into(),
            Self::Fop => fpu.fop.into(),
            Self::Fip => fpu.fip.into(),
            Self::Fdp => fpu.fdp.into(),
            Self::Mxcsr => fpu.mxcsr.into(),
            Self::St(i) => u128::from_le_bytes(fpu.st[usize::from(i)]) & ST_MASK,
            Self::Xmm(i) => u128::from_le_bytes(fpu.xmm[usize::from(i)]),
            Self::YmmHigh(i) => u128::from_le_bytes(fpu.ymm_high[usize::from(i)]),
        }
    }

    /// Sets it in `state`; bits beyond its width are dropped.
    pub fn set(self, state: &mut State, value: u128) {
        let fpu = &mut state.fpu;
        match self {
            Self::Gpr(i) => state.gpr[usize::from(i)] = value as u64,
            Self::Rip => state.rip = value as u64,
            Self::Rflags => state.rflags = value as u64,
            Self::FsBase => state.fs_base = value as u64,
            Self::GsBase => state.gs_base = value as u64,
            Self::Selector(i) => state.selectors[usize::from(i)] = value as u16,
            Self::Fcw => fpu.fcw = value as u16,
            Self::Fsw => fpu.fsw = value as u16,
            Self::Ftw => fpu.ftw = value as u8,
            Self::Fop => fpu.fop = value as u16,
            Self::Fip => fpu.fip = value as u64,
            Self::Fdp => fpu.fdp = value as u64,
            Self::Mxcsr => fpu.mxcsr = value as u32,
            Self::St(i) => fpu.st[usize::from(i)] = (value & ST_MASK).to_le_bytes(),
            Self::Xmm(i) => fpu.xmm[usize::from(i)] = value.to_le_bytes(),
            Self::YmmHigh(i) => fpu.ymm_high[usize::from(i)] = value.to_le_bytes(),
        }
    }
}

const ST_MASK: u128 = (1 << 80) - 1;

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpr(i) => f.write_str(GPR_NAMES[usize::from(*i)]),
            Self::Rip => f.write_str("rip"),
            Self::Rflags => f.write_str("rflags"),
            Self::FsBase => f.write_str("fs_base"),
            Self::GsBase => f.write_str("gs_base"),
            Self::Selector(i) => f.write_str(SEGMENT_NAMES[usize::from(*i)]),
            Self::Fcw => f.write_str("fcw"),
            Self::Fsw => f.write_str("fsw"),
            Self::Ftw => f.write_str("ftw"),
            Self::Fop => f.write_str("fop"),
            Self::Fip => f.write_str("fip"),
            Self::Fdp => f.write_str("fdp"),
            Self::Mxcsr => f.write_str("mxcsr"),
            Self::St(i) => write!(f, "st{i}"),
            Self::Xmm(i) => write!(f, "xmm{i}"),
            Self::YmmHigh(i) => write!(f, "ymm{i}_high"),
        }
    }
}

/// No register has the name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no register is called {0:?}")]
pub struct NoSuchField(String);

impl FromStr for Field {
    type Err = NoSuchField;
    fn from_str(name: &str) -> Result<Self, NoSuchField> {
        Self::all().find(|field| field.to_string() == name).ok_or_else(|| NoSuchField(name.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_round_trip() {
        for (i, field) in Field::all().enumerate() {
            assert_eq!(field.to_string().parse(), Ok(field));
            let mut state = State::default();
            field.set(&mut state, i as u128 + 1);
            assert_eq!(field.get(&state), i as u128 + 1, "{field}");
        }
        assert!("xmm16".parse::<Field>().is_err());
    }
}
