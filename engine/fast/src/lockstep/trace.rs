//! What the interpreter makes of a block: the state before each of its instructions.

use super::scratch::{Accesses, Scratch};
use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic};
use jit::{
    Level,
    rules::{narrow, rule},
};
use x86::{Fault, Vcpu, flags};
use x86_interp::{Cpu, rflags};

/// Bursts of a repeated string instruction that are followed.
const MAX_BURSTS: usize = 64;

/// The state between two instructions.
#[derive(Clone)]
pub struct Moment {
    pub vcpu: Vcpu,
    /// Flags the architecture leaves open.
    pub undefined: u64,
    /// The next instruction repeats itself.
    pub repeats: bool,
    /// How many reads and writes came before it.
    pub progress: [usize; 2],
}

/// Why the interpreter went no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The block is over, or its next instruction is the interpreter's anyway.
    Complete,
    /// The instruction raises this.
    Fault(Fault),
    /// Beyond it nothing can be compared.
    Open(Uncompared),
}

/// Why something was not compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uncompared {
    /// An instruction answers differently each time.
    Varies = 0,
    /// A flag that is undefined is read.
    UndefinedFlag = 1,
    /// A device is asked, or code is written.
    Left = 2,
    /// A repeated instruction takes too long, or was left in the middle.
    Repeats = 3,
    /// Memory that was read has been changed since.
    Changed = 4,
}

/// Reasons, as the statistics name them.
pub const REASONS: [&str; 5] = [
    "not compared: time or chance",
    "not compared: undefined flag",
    "not compared: device or code",
    "not compared: repeats",
    "not compared: memory changed",
];

/// What the interpreter did.
pub struct Trace {
    /// Before each instruction, and where it ended.
    pub moments: Vec<Moment>,
    pub accesses: Accesses,
    pub end: End,
}

impl Trace {
    /// Runs the block with these bytes in the scratch machine, which is as new.
    pub fn record(
        cpu: &mut Cpu<Scratch>,
        machine: &mut Scratch,
        start: &Vcpu,
        (level, code): (Level, &[u8]),
    ) -> Self {
        cpu.vcpu = start.clone();
        cpu.state_changed();
        let mut moments = Vec::new();
        let end = follow(cpu, machine, (level, code), &mut moments);
        Self { moments, accesses: machine.take_accesses(), end }
    }
}

fn follow(
    cpu: &mut Cpu<Scratch>,
    machine: &mut Scratch,
    (level, code): (Level, &[u8]),
    moments: &mut Vec<Moment>,
) -> End {
    let mut undefined = 0;
    let bits = cpu.vcpu.code_bits();
    let mut decoder = Decoder::with_ip(bits, code, cpu.vcpu.rip, DecoderOptions::NONE);
    loop {
        let (vcpu, progress) = (cpu.vcpu.clone(), machine.progress());
        let next = (decoder.can_decode() && decoder.ip() == vcpu.rip).then(|| decoder.decode());
        let repeats = next.is_some_and(|insn| repeats(&insn));
        moments.push(Moment { vcpu, undefined, repeats, progress });
        let Some(insn) = next else { return End::Complete };
        let rule = if bits == 32 { narrow(&insn, level) } else { rule(&insn, level) };
        if rule.is_left_to_others() {
            return End::Complete;
        }
        if let Some(reason) = open(&insn, undefined) {
            return End::Open(reason);
        }
        match complete(cpu, machine, insn.ip()) {
            Err(fault) => return End::Fault(fault),
            Ok(Some(reason)) => return End::Open(reason),
            Ok(None) => undefined = undefined_after(&insn, undefined),
        }
    }
}

fn open(insn: &Instruction, undefined: u64) -> Option<Uncompared> {
    use Mnemonic::*;
    let varies = matches!(
        insn.mnemonic(),
        Rdtsc | Rdtscp | Rdrand | Rdseed | Xsave | Xsave64 | Xsaveopt | Xsaveopt64
    );
    if varies {
        return Some(Uncompared::Varies);
    }
    (rflags(insn.rflags_read()) & undefined != 0).then_some(Uncompared::UndefinedFlag)
}

/// Executes the instruction at `rip` with all its repetitions.
fn complete(
    cpu: &mut Cpu<Scratch>,
    machine: &mut Scratch,
    rip: u64,
) -> Result<Option<Uncompared>, Fault> {
    for _ in 0..MAX_BURSTS {
        cpu.step(machine)?;
        if machine.has_left() {
            return Ok(Some(Uncompared::Left));
        }
        if cpu.vcpu.rip != rip {
            return Ok(None);
        }
    }
    Ok(Some(Uncompared::Repeats))
}

fn repeats(insn: &Instruction) -> bool {
    insn.is_string_instruction() && (insn.has_rep_prefix() || insn.has_repne_prefix())
}

/// Flags that are undefined behind an instruction.
fn undefined_after(insn: &Instruction, before: u64) -> u64 {
    use Mnemonic::*;
    let written = insn.rflags_written() | insn.rflags_cleared() | insn.rflags_set();
    // With a count of zero these write nothing.
    let perhaps = repeats(insn)
        || matches!(insn.mnemonic(), Shl | Sal | Shr | Sar | Rol | Ror | Rcl | Rcr | Shld | Shrd);
    let left = if perhaps { before } else { before & !rflags(written) };
    // The manuals leave AF open; every CPU clears it.
    let cleared = if matches!(insn.mnemonic(), And | Or | Xor | Test) { flags::AF } else { 0 };
    left | rflags(insn.rflags_undefined()) & !cleared
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(code: &[u8], before: u64) -> u64 {
        undefined_after(&Decoder::new(64, code, DecoderOptions::NONE).decode(), before)
    }

    #[test]
    fn undefined_flags_are_followed() {
        let open = after(&[0x48, 0x0f, 0xaf, 0xc3], 0); // imul rax, rbx
        assert_eq!(open, flags::SF | flags::ZF | flags::AF | flags::PF);
        assert_eq!(after(&[0x48, 0x01, 0xd8], open), 0); // add rax, rbx
        assert_eq!(after(&[0x48, 0x21, 0xd8], 0), 0); // and rax, rbx
        assert_eq!(after(&[0x48, 0xd3, 0xe0], open) & open, open); // shl rax, cl
        assert_eq!(after(&[0x90], open), open);
    }
}
