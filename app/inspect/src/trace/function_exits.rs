//! Where a function of the kernel ends.
//!
//! A function's instructions are gone through from its symbol to the next one. It ends at RET, or where it jumps to a return thunk.
//! Where it jumps out of itself otherwise it goes on in another function, or in the part of it that the compiler took for cold; both
//! end where this one does. The target of a jump through a register is not known; a function with one has no known ends.

use std::collections::BTreeSet;

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, OpKind};
use ram::Ram;

use crate::linux::LinuxKernel;

/// Functions that lead to each other, ends, and bytes of a function, at the most.
const MOST_FUNCTIONS: usize = 24;
const MOST_EXITS: usize = 96;
const MOST_BYTES: u64 = 32 << 10;

/// The kernel's code and symbols.
trait KernelCode {
    /// The function around an address: its first byte (GVA), and its code.
    fn function(&self, address: u64) -> Option<(u64, Vec<u8>)>;
    /// The address is a return thunk: a jump there returns.
    fn is_thunk(&self, address: u64) -> bool;
}

impl KernelCode for (&LinuxKernel, &Ram) {
    fn function(&self, address: u64) -> Option<(u64, Vec<u8>)> {
        let (kernel, ram) = self;
        let range = kernel.symbols.around(address)?;
        let len = range.end - range.start;
        let mut code = vec![0; (len <= MOST_BYTES).then_some(len)? as usize];
        kernel.read(ram, range.start, &mut code).then_some((range.start, code))
    }

    fn is_thunk(&self, address: u64) -> bool {
        let name = self.0.symbols.before(address);
        name.is_some_and(|(name, offset)| offset == 0 && name.ends_with("return_thunk"))
    }
}

/// The addresses of the instructions with which a function returns, that of its tail calls included; `None` if not all are known.
pub fn of(kernel: &LinuxKernel, ram: &Ram, entry: u64) -> Option<BTreeSet<u64>> {
    found(&(kernel, ram), entry)
}

fn found(text: &impl KernelCode, entry: u64) -> Option<BTreeSet<u64>> {
    let (mut exits, mut seen, mut rest) = (BTreeSet::new(), BTreeSet::new(), vec![entry]);
    while let Some(address) = rest.pop() {
        let (start, code) = text.function(address)?;
        if !seen.insert(start) {
            continue;
        }
        let end = start + code.len() as u64;
        for instruction in Decoder::with_ip(64, &code, start, DecoderOptions::NONE) {
            match flow(&instruction) {
                Flow::On => {}
                Flow::Returns => drop(exits.insert(instruction.ip())),
                Flow::Unknown => return None,
                Flow::To(target) if text.is_thunk(target) => drop(exits.insert(instruction.ip())),
                Flow::To(target) if (start..end).contains(&target) => {}
                Flow::To(target) => rest.push(target),
            }
        }
        if seen.len() > MOST_FUNCTIONS || exits.len() > MOST_EXITS {
            return None;
        }
    }
    (!exits.is_empty()).then_some(exits)
}

/// Where execution goes after an instruction.
enum Flow {
    On,
    Returns,
    To(u64),
    Unknown,
}

fn flow(instruction: &Instruction) -> Flow {
    match instruction.flow_control() {
        FlowControl::Return => match instruction.code() {
            Code::Retnq | Code::Retnq_imm16 => Flow::Returns,
            _ => Flow::Unknown,
        },
        FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
            match instruction.op0_kind() {
                OpKind::NearBranch64 => Flow::To(instruction.near_branch_target()),
                _ => Flow::Unknown,
            }
        }
        FlowControl::IndirectBranch => Flow::Unknown,
        _ => Flow::On,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Functions of 16 bytes each, from 0x1000 on; the last is the thunk.
    struct Sample(Vec<[u8; 16]>);

    impl KernelCode for Sample {
        fn function(&self, address: u64) -> Option<(u64, Vec<u8>)> {
            let n = address.checked_sub(0x1000)? / 16;
            Some((0x1000 + n * 16, self.0.get(n as usize)?.to_vec()))
        }
        fn is_thunk(&self, address: u64) -> bool {
            address == 0x1000 + (self.0.len() as u64 - 1) * 16
        }
    }

    fn function(code: &[u8]) -> [u8; 16] {
        let mut all = [0xcc; 16];
        all[..code.len()].copy_from_slice(code);
        all
    }

    #[test]
    fn functions_end_where_they_or_what_they_jump_to_return() {
        let sample = Sample(vec![
            // je +1; ret; jmp to 0x1010
            function(b"\x74\x01\xc3\xe9\x08\0\0\0"),
            // nop; jmp to the thunk at 0x1030
            function(b"\x90\xe9\x1a\0\0\0"),
            function(b"\xff\xe0"),
            function(b"\xc3"),
        ]);
        assert_eq!(found(&sample, 0x1000), Some([0x1002, 0x1011].into()));
        assert_eq!(found(&sample, 0x1010), Some([0x1011].into()));
        assert_eq!(found(&sample, 0x1020), None, "through a register");
        assert_eq!(found(&sample, 0x2000), None, "no function");
        let endless = Sample(vec![function(b"\xeb\xfe"), function(b"\xc3")]);
        assert_eq!(found(&endless, 0x1000), None, "it never ends");
    }
}
