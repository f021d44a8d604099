//! Faults of a vCPU and of memory that somebody has looked up: registers, results of instructions, symbols, processes.

use std::collections::BTreeSet;

use contract::{Engine, GuestRam};
use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
use ram::{PAGE, Ram};
use vmm::Inspector;
use x86::{
    paging::{ADDRESS, P, PS, Roots, US},
    reg::RSP,
};

use crate::{linux::LinuxKernel, memory};

/// Instructions that a vCPU executes one by one in search of the one that is to have a wrong result, at the most.
const MOST_STEPS: u32 = 200_000;
/// Bytes of an instruction at the most.
const INSTRUCTION: usize = 15;
/// Entries of a page table.
const ENTRIES: u64 = 512;

/// A register that was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Struck {
    /// Its number.
    pub register: usize,
    /// Where the vCPU was (GVA).
    pub rip: u64,
    /// The instruction whose result it was, if it was one.
    pub instruction: Option<String>,
    /// Its value.
    pub before: u64,
    /// Its value now.
    pub after: u64,
}

/// Flips a bit of a general register; `None` if the vCPU has ended.
pub fn register(inspector: &Inspector, vcpu: usize, register: usize, bit: u8) -> Option<Struck> {
    inspector.run_on_vcpu(vcpu, move |access| {
        let rip = access.engine.vcpu().rip;
        flip(access.engine, register, bit, (rip, None))
    })?
}

fn flip(
    engine: &mut dyn Engine,
    register: usize,
    bit: u8,
    (rip, instruction): (u64, Option<String>),
) -> Option<Struck> {
    let mut state = engine.vcpu().clone();
    let value = state.gpr.get_mut(register)?;
    let before = *value;
    *value ^= 1 << (bit & 63);
    let after = *value;
    engine.set_vcpu(state);
    Some(Struck { register, rip, instruction, before, after })
}

/// Has the next instruction of this name end with a wrong result in its general register: a bit of it is flipped. `None` if there
/// is none in the next instructions.
pub fn wrong_result(inspector: &Inspector, vcpu: usize, name: &str, bit: u8) -> Option<Struck> {
    let (ram, name) = (inspector.ram().clone(), name.to_ascii_lowercase());
    inspector.run_on_vcpu(vcpu, move |access| {
        let engine = &mut *access.engine;
        for _ in 0..MOST_STEPS {
            let (rip, insn) = (engine.vcpu().rip, next(engine, &ram));
            let result = insn.as_ref().and_then(|insn| result_of(insn, &name));
            // What a probe is at is executed all the same.
            let _ = engine.step();
            if let (Some((register, bits)), Some(insn)) = (result, insn)
                && engine.vcpu().rip == insn.next_ip()
            {
                return flip(engine, register, bit % bits, (rip, Some(insn.to_string())));
            }
        }
        None
    })?
}

/// There are instructions of this name.
pub fn is_instruction(name: &str) -> bool {
    Mnemonic::values().any(|known| format!("{known:?}").eq_ignore_ascii_case(name))
}

fn next(engine: &dyn Engine, ram: &Ram) -> Option<Instruction> {
    let state = engine.vcpu();
    let mut bytes = [0; INSTRUCTION];
    let count = memory::read(ram, Roots::from(state), state.rip, &mut bytes);
    let mut decoder = Decoder::with_ip(64, &bytes[..count], state.rip, DecoderOptions::NONE);
    let insn = decoder.decode();
    (!insn.is_invalid()).then_some(insn)
}

/// The general register that has the result of an instruction of this name, and its bits. The stack pointer is none: whatever came of
/// that would come of any instruction.
fn result_of(insn: &Instruction, name: &str) -> Option<(usize, u8)> {
    let named = format!("{:?}", insn.mnemonic()).eq_ignore_ascii_case(name);
    let register = insn.op0_register();
    let is_register = insn.op_count() > 0 && insn.op0_kind() == OpKind::Register;
    let fits = named && is_register && register.is_gpr() && !is_high(register);
    let number = register.full_register().number();
    (fits && number != RSP).then(|| (number, (register.size() * 8) as u8))
}

fn is_high(register: Register) -> bool {
    matches!(register, Register::AH | Register::BH | Register::CH | Register::DH)
}

/// Where a symbol of the guest's kernel is (GPA).
pub fn symbol(kernel: &LinuxKernel, ram: &Ram, name: &str) -> Option<u64> {
    memory::translate(ram, kernel.roots(), kernel.symbols.find(name)?)
}

/// The pages (GPA) of the first process of this name that its programs can reach.
pub fn pages_of(kernel: &LinuxKernel, ram: &Ram, name: &str) -> Vec<u64> {
    let task = kernel.processes(ram).into_iter().find(|task| task.comm == name);
    let root = task.and_then(|task| kernel.tables_of(ram, &task));
    let mut pages = BTreeSet::new();
    if let Some(root) = root {
        // Programs have the lower half.
        collect(ram, root, 39, ENTRIES / 2, &mut pages);
    }
    pages.into_iter().collect()
}

fn collect(ram: &Ram, table: u64, shift: u32, entries: u64, pages: &mut BTreeSet<u64>) {
    let mut bytes = [0; PAGE as usize];
    if ram.read_gpa(table, &mut bytes).is_err() {
        return;
    }
    for entry in bytes.as_chunks::<8>().0.iter().take(entries as usize) {
        let entry = u64::from_le_bytes(*entry);
        let is_page = shift == 12 || entry & PS != 0;
        match entry & (P | US) == P | US {
            true if is_page => {
                let first = entry & ADDRESS & !((1 << shift) - 1);
                let all = (first..first + (1 << shift)).step_by(PAGE as usize);
                pages.extend(all.filter(|gpa| ram.page(*gpa).is_some()));
            }
            true => collect(ram, entry & ADDRESS, shift - 9, ENTRIES, pages),
            false => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(bytes: &[u8], name: &str) -> Option<(usize, u8)> {
        let insn = Decoder::with_ip(64, bytes, 0x1000, DecoderOptions::NONE).decode();
        result_of(&insn, name)
    }

    #[test]
    fn results_are_in_general_registers() {
        assert_eq!(result(b"\x48\x01\xd8", "ADD"), Some((0, 64)), "add rax, rbx");
        assert_eq!(result(b"\x41\x0f\xaf\xc1", "imul"), Some((0, 32)), "imul eax, r9d");
        assert_eq!(result(b"\x01\x18", "add"), None, "to memory");
        assert_eq!(result(b"\x48\x83\xc4\x08", "add"), None, "add rsp, 8");
        assert_eq!(result(b"\x48\x01\xd8", "sub"), None);
        assert!(is_instruction("add") && is_instruction("IMUL") && !is_instruction("ad"));
    }

    #[test]
    fn programs_have_the_pages_that_their_tables_say() {
        let ram = Ram::new(1 << 20).expect("memory");
        let put = |gpa: u64, entry: u64| ram.write_gpa(gpa, &entry.to_le_bytes()).expect("inside");
        put(0x1000, 0x2000 | P | US);
        put(0x2000, 0x3000 | P | US);
        put(0x3000, 0x4000 | P | US);
        put(0x4000, 0x8000 | P | US);
        put(0x4008, 0x9000 | P);
        put(0x4010, 0xffff_f000 | P | US);
        put(0x1000 + 8 * 256, 0x2000 | P | US);
        let mut pages = BTreeSet::new();
        collect(&ram, 0x1000, 39, ENTRIES / 2, &mut pages);
        assert_eq!(pages, BTreeSet::from([0x8000]));
    }
}
