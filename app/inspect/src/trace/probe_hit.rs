//! A vCPU reaches a point: its registers and memory then, and the text that events have of them.

use contract::Engine;
use x86::{
    reg::{R8, RCX, RDI, RDX, RSI},
    tap::{Moment, TapRecord},
};

use super::{
    calls::{self, Reader},
    fields,
};
use crate::linux::{Form, Parameter, word};

/// Where functions have their arguments.
pub const REGISTERS: [usize; 6] = [RDI, RSI, RDX, RCX, R8, R8 + 1];
/// Where `struct pt_regs` has RIP.
pub const RIP: u64 = 128;

/// A vCPU that has reached a point, now or when a tap made its record.
#[derive(Clone, Copy)]
pub struct ProbeHit<'a> {
    pub moment: Moment,
    /// Nanoseconds since the trace began.
    pub ns: u64,
    /// Guest memory, as far as it was recorded.
    pub read: Reader<'a>,
    /// The tap's record; empty if the vCPU is at the point now.
    pub record: &'a [u8],
}

impl ProbeHit<'_> {
    pub fn register(&self, number: usize) -> u64 {
        self.moment.gpr[number]
    }

    pub fn word(&self, gva: u64) -> Option<u64> {
        word(gva, self.read)
    }
}

/// The registers of a vCPU between two instructions.
pub fn moment(engine: &mut dyn Engine) -> Moment {
    let tsc = engine.time_stamp();
    let v = engine.vcpu();
    let gs_base = v.seg[x86::seg::GS].base;
    Moment { rip: v.rip, tsc, cr2: v.cr2, cr3: v.cr3, gs_base, gpr: v.gpr }
}

/// The first arguments of a function, at its entry.
pub fn arguments(hit: &ProbeHit<'_>) -> [u64; 6] {
    REGISTERS.map(|register| hit.register(register))
}

/// The arguments of a function, printed by their types; without types the first three.
pub fn shown(hit: &ProbeHit<'_>, parameters: &[Parameter]) -> String {
    if parameters.is_empty() {
        return [RDI, RSI, RDX].map(|register| format!("{:#x}", hit.register(register))).join(", ");
    }
    let shown = |(parameter, register): (&Parameter, usize)| {
        let value = hit.register(register);
        let text = match parameter.form {
            Form::Signed(_) | Form::Unsigned(_) => {
                fields::number(parameter.form, value).to_string()
            }
            Form::Text => calls::text(value, hit.read).unwrap_or_else(|| format!("{value:#x}")),
            Form::Address => format!("{value:#x}"),
        };
        format!("{}={text}", parameter.name)
    };
    parameters.iter().zip(REGISTERS).map(shown).collect::<Vec<_>>().join(", ")
}

/// Where an exception happened, and its error code.
pub fn exception(hit: &ProbeHit<'_>) -> String {
    let rip = hit.word(hit.register(RDI).wrapping_add(RIP)).unwrap_or_default();
    let (cr2, code) = (hit.moment.cr2, hit.register(RSI) as u32);
    format!("rip {rip:#x}, cr2 {cr2:#x}, code {code:#x}")
}

/// Reads memory as recorded at the end of a call; what was not recorded then, as recorded at its beginning.
pub fn read_both(
    hit: &ProbeHit<'_>,
    before: Option<&TapRecord<'_>>,
    gva: u64,
    to: &mut [u8],
) -> usize {
    match ((hit.read)(gva, to), before) {
        (0, Some(before)) => before.read(gva, to),
        (count, _) => count,
    }
}

/// An exit status as `wait` encodes it.
pub fn status(code: u64) -> String {
    match code & 0x7f {
        0 => format!("status {}", code >> 8 & 0xff),
        signal => format!("signal {signal}"),
    }
}
