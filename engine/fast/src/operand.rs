//! Which guest address an instruction was accessing.
//!
//! Inside STAC..CLAC a host address can stand for a user's address or for a kernel's; only the
//! instruction and its registers tell.

use crate::code::physical;
use engine::Board;
use iced_x86::{Decoder, DecoderOptions, Instruction, OpKind, Register};
use x86::{Vcpu, paging::Roots, seg};
use x86_interp::{GuestRam, System};

/// Bytes of the largest operand.
const LARGEST: u64 = 64;

/// The guest address at which the instruction at `rip` accesses the host address `hva`, if `bias` is what
/// it adds to an address.
pub fn gva(
    board: &Board,
    vcpu: &Vcpu,
    rip: u64,
    gpr: &[u64; 16],
    hva: u64,
    bias: impl Fn(u64) -> u64,
) -> Option<u64> {
    let insn = instruction(board, vcpu, rip);
    addresses(&insn, vcpu, gpr).find_map(|start| {
        let into = hva.wrapping_sub(start.wrapping_add(bias(start)));
        (into < LARGEST).then(|| start.wrapping_add(into))
    })
}

/// The 64-bit instruction at a GVA.
pub fn instruction(board: &Board, vcpu: &Vcpu, rip: u64) -> Instruction {
    let bytes = fetch(board, vcpu, rip);
    Decoder::with_ip(64, &bytes, rip, DecoderOptions::NONE).decode()
}

fn fetch(board: &Board, vcpu: &Vcpu, rip: u64) -> [u8; 15] {
    let mut bytes = [0; 15];
    for (n, byte) in bytes.iter_mut().enumerate() {
        let at = rip.wrapping_add(n as u64);
        let Some(offset) = physical(board.ram(), Roots::from(vcpu), at) else { break };
        *byte = board.ram().load8(offset);
    }
    bytes
}

/// The addresses an instruction accesses, its stack included.
fn addresses<'a>(
    insn: &'a Instruction,
    vcpu: &'a Vcpu,
    gpr: &'a [u64; 16],
) -> impl Iterator<Item = u64> + 'a {
    let value = move |register: Register| match register {
        Register::FS => vcpu.seg[seg::FS].base,
        Register::GS => vcpu.seg[seg::GS].base,
        r if r.is_segment_register() => 0,
        r if r.is_gpr() => {
            let full = gpr[r.full_register().number() & 15];
            if r.size() == 4 { full & 0xffff_ffff } else { full }
        }
        _ => 0,
    };
    let operands = (0..insn.op_count())
        .filter(|i| !matches!(insn.op_kind(*i), OpKind::Register | OpKind::NearBranch64));
    let operands =
        operands.filter_map(move |i| insn.virtual_address(i, 0, |r, _, _| Some(value(r))));
    // A push writes below RSP, everything else that uses the stack reads at it.
    let rsp = gpr[x86::reg::RSP];
    operands.chain([rsp, rsp.wrapping_sub(8)])
}
