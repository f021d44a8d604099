//! What is there when a vCPU comes by a point, and what is told of it.

use contract::Engine;
use x86::{
    reg::{R8, RCX, RDI, RDX, RSI},
    tap::{Moment, TapRecord},
};

use super::{
    calls::{self, Reader},
    facts,
};
use crate::linux::{Form, Parameter, word};

/// Where functions have their arguments.
pub const REGISTERS: [usize; 6] = [RDI, RSI, RDX, RCX, R8, R8 + 1];
/// Where `struct pt_regs` has RIP.
pub const RIP: u64 = 128;

/// What is there when a vCPU comes by a point.
#[derive(Clone, Copy)]
pub struct Scene<'a> {
    pub moment: Moment,
    /// Nanoseconds since the trace began.
    pub ns: u64,
    /// Guest memory, as far as it was recorded.
    pub read: Reader<'a>,
    /// The record, if it is one.
    pub record: &'a [u8],
}

impl Scene<'_> {
    pub fn register(&self, number: usize) -> u64 {
        self.moment.gpr[number]
    }

    pub fn word(&self, gva: u64) -> Option<u64> {
        word(gva, self.read)
    }
}

/// The registers of an engine that stands between two instructions.
pub fn moment(engine: &mut dyn Engine) -> Moment {
    let tsc = engine.time_stamp();
    let v = engine.vcpu();
    let gs_base = v.seg[x86::seg::GS].base;
    Moment { rip: v.rip, tsc, cr2: v.cr2, cr3: v.cr3, gs_base, gpr: v.gpr }
}

/// The first arguments of a function, at its entry.
pub fn arguments(scene: &Scene<'_>) -> [u64; 6] {
    REGISTERS.map(|register| scene.register(register))
}

/// The arguments of a function by their types; without those the first three.
pub fn shown(scene: &Scene<'_>, parameters: &[Parameter]) -> String {
    if parameters.is_empty() {
        return [RDI, RSI, RDX]
            .map(|register| format!("{:#x}", scene.register(register)))
            .join(", ");
    }
    let shown = |(parameter, register): (&Parameter, usize)| {
        let value = scene.register(register);
        let text = match parameter.form {
            Form::Signed(_) | Form::Unsigned(_) => facts::number(parameter.form, value).to_string(),
            Form::Text => calls::text(value, scene.read).unwrap_or_else(|| format!("{value:#x}")),
            Form::Address => format!("{value:#x}"),
        };
        format!("{}={text}", parameter.name)
    };
    parameters.iter().zip(REGISTERS).map(shown).collect::<Vec<_>>().join(", ")
}

/// Where an exception happened, and its error code.
pub fn exception(scene: &Scene<'_>) -> String {
    let rip = scene.word(scene.register(RDI).wrapping_add(RIP)).unwrap_or_default();
    let (cr2, code) = (scene.moment.cr2, scene.register(RSI) as u32);
    format!("rip {rip:#x}, cr2 {cr2:#x}, code {code:#x}")
}

/// Memory at the end of a call; what was not recorded then as it was at its beginning.
pub fn read_both(
    scene: &Scene<'_>,
    before: Option<&TapRecord<'_>>,
    gva: u64,
    to: &mut [u8],
) -> usize {
    match ((scene.read)(gva, to), before) {
        (0, Some(before)) => before.read(gva, to),
        (count, _) => count,
    }
}

/// A status as wait has it.
pub fn status(code: u64) -> String {
    match code & 0x7f {
        0 => format!("status {}", code >> 8 & 0xff),
        signal => format!("signal {signal}"),
    }
}
