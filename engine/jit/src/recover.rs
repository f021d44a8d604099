//! From a host PC in translated code back to exact guest state.
//!
//! A block carries one [`Mark`] per run of host bytes. It names the guest instruction the bytes
//! belong to and what to undo so that the registers are those at its start. A mark without
//! fixes is an exact instruction boundary *at its first byte*; anywhere else an asynchronous
//! event is rolled forward by single-stepping the host until it stands on such a byte, while a
//! synchronous fault is undone with the fixes.

/// An amount that was added to a pointer register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bias {
    /// The layout's bias.
    Fixed,
    /// What this register (by encoding) holds.
    Register(u8),
}

/// What to undo to get the state at the start of the guest instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fixes {
    /// Bias to take off RSI.
    pub rsi: Option<Bias>,
    /// Bias to take off RDI.
    pub rdi: Option<Bias>,
    /// Registers (by encoding) whose guest value is in the spill slot of the same position.
    pub spilled: [Option<u8>; 4],
}

impl Fixes {
    /// Nothing to undo.
    pub fn none(&self) -> bool {
        *self == Self::default()
    }

    /// Applies the fixes. `spill` are the vCPU page's spill slots.
    pub fn apply(&self, gpr: &mut [u64; 16], spill: &[u64; 4], bias: u64) {
        let amount = |gpr: &[u64; 16], b: Bias| match b {
            Bias::Fixed => bias,
            Bias::Register(r) => gpr[usize::from(r) & 15],
        };
        if let Some(b) = self.rsi {
            gpr[6] = gpr[6].wrapping_sub(amount(gpr, b));
        }
        if let Some(b) = self.rdi {
            gpr[7] = gpr[7].wrapping_sub(amount(gpr, b));
        }
        for (slot, register) in self.spilled.iter().enumerate() {
            if let Some(r) = register {
                gpr[usize::from(*r) & 15] = spill[slot];
            }
        }
    }
}

/// Host bytes from `host` up to the next mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Offset of the first byte in the block's code.
    pub host: u32,
    /// Offset of the guest instruction from the block's guest address.
    pub guest: u32,
    /// The first byte is the boundary before the guest instruction.
    pub boundary: bool,
    /// What to undo.
    pub fixes: Fixes,
    /// The guest instruction has had no effect anywhere in these bytes, and the fixes restore the state before it. Code that is
    /// stopped in these bytes must begin the instruction again, because its look-up may be stale by then.
    pub undoes: bool,
}
