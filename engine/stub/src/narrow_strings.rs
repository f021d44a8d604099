//! String instructions of 32-bit kernels in pages that they map for a moment: they go on in the wedge's view of guest RAM.
//!
//! Linux clears and copies whole pages so. A translated string instruction has its pointers moved by what two registers hold, and those are
//! taken off again behind the instruction (`jit/src/emit/narrow.rs`). So where an instruction has faulted, a pointer and the pointer's register
//! can be moved further together.

use crate::{
    Context, lookup,
    mmu::{self, Access, PAGE, Walk},
};
use wedge_abi::NARROW_STRING_BIASES;
use x86::{
    exception::pf,
    flags::DF,
    reg::{RCX, RDI, RSI},
};

/// Prefixes.
const REP: u8 = 0xf3;
const WORDS: u8 = 0x66;

/// A translated string instruction that writes.
struct StringCode {
    /// It reads, too.
    moves: bool,
    /// Bytes of an element.
    width: u64,
    repeats: bool,
}

/// MOVS or STOS at an HVA in the code cache, if it is one of them.
fn string_at(pc: u64) -> Option<StringCode> {
    // SAFETY: translated code has just been executed there, and more lies behind.
    let bytes: [u8; 4] = unsafe { core::ptr::read_unaligned(pc as *const [u8; 4]) };
    let prefixes = bytes.iter().take_while(|byte| matches!(**byte, REP | WORDS)).count().min(2);
    let has = |prefix: u8| bytes.iter().take(prefixes).any(|byte| *byte == prefix);
    let wide = if has(WORDS) { 2 } else { 4 };
    let (moves, width) = match bytes.get(prefixes)? {
        0xa4 => (true, 1),
        0xa5 => (true, wide),
        0xaa => (false, 1),
        0xab => (false, wide),
        _ => return None,
    };
    Some(StringCode { moves, width, repeats: has(REP) })
}

/// A string instruction of a 32-bit kernel's has faulted at a GVA. Has the instruction go on elsewhere, if all that it will still access by the
/// same pointer is in the same page; false if not.
pub fn redirect(cx: &mut Context<'_>, gva: u64) -> bool {
    let write = cx.vcpu.exit.error & u64::from(pf::WRITE) != 0;
    let Some(code) = string_at(cx.vcpu.exit.pc).filter(|code| write || code.moves) else {
        return false;
    };
    let [of_source, of_destination] = NARROW_STRING_BIASES;
    let (pointer, bias) = if write { (RDI, of_destination) } else { (RSI, of_source) };
    let count = if code.repeats { cx.vcpu.regs.gpr[RCX] } else { 1 };
    let at = cx.vcpu.regs.gpr[pointer];
    let is_here = (at ^ cx.vcpu.exit.address) & !(PAGE - 1) == 0;
    let fits = count <= PAGE && (at & (PAGE - 1)) + count * code.width <= PAGE;
    if !is_here || !fits || cx.vcpu.block.host_flags & DF != 0 {
        return false;
    }
    let access = Access { write, fetch: false, user: false };
    let Walk::Found(leaf) = mmu::walk(cx, gva, access) else { return false };
    let Some(page) = lookup::target(cx, leaf, access).filter(|_| leaf.is_of_every_space()) else {
        return false;
    };
    let by = page.wrapping_sub(at & !(PAGE - 1));
    for register in [pointer, usize::from(bias) & 15] {
        cx.vcpu.regs.gpr[register] = cx.vcpu.regs.gpr[register].wrapping_add(by);
    }
    true
}
