//! Guest bytes to a block.

use crate::{
    Layout,
    block::{Block, Version},
    emit::Emitter,
    rules::{Rule, narrow, rule},
};
use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction, Mnemonic};

/// Guest instructions in a block at the most.
const MAX_INSTRUCTIONS: usize = 64;

/// What to translate.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// GVA of the first instruction.
    pub guest: u64,
    /// The bytes there, as far as they may be used.
    pub bytes: &'a [u8],
    /// Instructions start in so many of them: to the end of the page, say.
    pub here: usize,
    /// The virtual RFLAGS.AC: user memory may be accessed.
    pub ac: bool,
    /// The first instruction has a tap.
    pub tap: bool,
    /// Computed jumps are likely to lead here: the block begins with a landing.
    pub landing: bool,
    /// It is 32-bit code, whose addresses are below 4 GiB.
    pub narrow: bool,
    /// The block is to run alone first: its jumps can be pointed elsewhere.
    pub on_trial: bool,
    /// Bit `n`: what 32-bit kernel code accesses by instructions whose offset in the block, modulo 64, is `n`, is looked up.
    pub sought: u64,
    /// The pages of the block, if it is to have a gate.
    pub version: Option<Version>,
    /// HVA the code will lie at.
    pub host: u64,
    /// HVA behind the stub of the first link.
    pub stubs: u64,
    /// Offset of `host` in the code cache.
    pub cache_offset: u32,
}

/// Not even the first instruction lies wholly in the given bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Untranslatable;

/// How a block goes on after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// With the next instruction.
    On,
    /// Not at all: the emitted code leaves it.
    Ends,
}

/// Translates a block.
///
/// # Errors
/// If the first instruction does not lie wholly in the bytes.
pub fn translate(layout: &Layout, request: &Request<'_>) -> Result<Block, Untranslatable> {
    let bits = if request.narrow { 32 } else { 64 };
    let mut decoder = Decoder::with_ip(bits, request.bytes, request.guest, DecoderOptions::NONE);
    let mut emitter = Emitter::new(layout, request);
    let mut end = request.guest;
    if request.landing {
        emitter.landing();
    }
    if request.tap {
        emitter.tap();
    }
    if let Some(version) = request.version {
        emitter.gate(version);
    }
    let mut read = 0;
    for left in (0..MAX_INSTRUCTIONS).rev() {
        if decoder.position() >= request.here {
            break;
        }
        let Some(insn) = next(&mut decoder) else { break };
        end = insn.next_ip();
        // The last bytes of the address space have the first behind them.
        let offset = insn.ip().wrapping_sub(request.guest) as usize;
        let after = offset + insn.len();
        let bytes = &request.bytes[offset..after];
        let follower = match insn.mnemonic() {
            Mnemonic::Sti if left != 0 && after < request.here => {
                at(layout, request.bytes, after, bits)
            }
            Mnemonic::Swapgs => follower_of_swapgs(layout, request.bytes, after),
            _ => None,
        };
        read = read.max(follower.as_ref().map_or(after, |follower| follower.end));
        if emitter.instruction(&insn, bytes, follower.map(|follower| follower.rule)) == Flow::Ends {
            return Ok(emitter.finish(end, read));
        }
    }
    if end == request.guest {
        return Err(Untranslatable);
    }
    emitter.go_on(end);
    Ok(emitter.finish(end, read))
}

/// An instruction behind the one that is translated.
struct Follower {
    /// The instruction, decoded as if it lay at GVA zero.
    insn: Instruction,
    rule: Rule,
    /// Offset in the bytes at which the instruction ends.
    end: usize,
}

/// The decoder's next instruction, if it lies wholly in the bytes.
fn next(decoder: &mut Decoder<'_>) -> Option<Instruction> {
    if !decoder.can_decode() {
        return None;
    }
    let insn = decoder.decode();
    (decoder.last_error() != DecoderError::NoMoreBytes).then_some(insn)
}

/// The instruction at `offset` in the bytes.
fn at(layout: &Layout, bytes: &[u8], offset: usize, bits: u32) -> Option<Follower> {
    let insn = next(&mut Decoder::new(bits, bytes.get(offset..)?, DecoderOptions::NONE))?;
    let rule = if bits == 32 { narrow(&insn, layout.level) } else { rule(&insn, layout.level) };
    Some(Follower { insn, rule, end: offset + insn.len() })
}

/// The first instruction at or behind `offset` that is neither a NOP nor a jump forward. Between SWAPGS and
/// the return to user code Linux has an instruction that clears CPU buffers, and on CPUs that need none a NOP or a jump
/// over it.
fn follower_of_swapgs(layout: &Layout, bytes: &[u8], mut offset: usize) -> Option<Follower> {
    loop {
        let follower = at(layout, bytes, offset, 64)?;
        if follower.rule == Rule::Jump {
            let target = follower.insn.near_branch_target();
            let forward = usize::try_from(target).ok().filter(|by| *by > 0);
            offset = offset.checked_add(forward?)?;
        } else if follower.insn.mnemonic() == Mnemonic::Nop {
            offset = follower.end;
        } else {
            return Some(follower);
        }
    }
}
