//! The differences between two outcomes, as far as they mean something.

use std::fmt::Write;

use x86::{Fault, exception::pf, flags, vector};

use crate::field::Field;
use crate::state::{Outcome, Patch, State, Stop};
use crate::undefined::{FaultDetail, Ignored};

/// First address Linux reports user faults at as protection violations, whatever the kernel has
/// mapped there (`sanitize_error_code`, arch/x86/mm/fault.c).
const TASK_SIZE_MAX: u64 = 0x7fff_ffff_f000;

/// One line for each thing that differs; empty if nothing does.
pub fn differences(native: &Outcome, other: &Outcome, ignored: &Ignored) -> Vec<String> {
    if ignored.all.is_some() {
        return Vec::new();
    }
    let mut lines = Vec::new();
    let mut add = |what: &str, native: String, other: String| {
        lines.push(format!("{what}: native {native}, interpreter {other}"));
    };
    let stop = visible(native.stop, ignored.fault);
    let other_stop = visible(other.stop, ignored.fault);
    if stop != other_stop {
        add("stop", stop.to_string(), other_stop.to_string());
    }
    for field in Field::all() {
        let significant = significant(field, ignored);
        let (a, b) = (visible_value(field, &native.state), visible_value(field, &other.state));
        if a & significant != b & significant {
            add(&field.to_string(), format!("{a:#x}"), format!("{b:#x}"));
        }
    }
    let (a, b) = (memory(&native.changes, ignored), memory(&other.changes, ignored));
    if a != b {
        add("memory", list(&a, &b), list(&b, &a));
    }
    lines
}

fn is_of_memory(number: u8) -> bool {
    matches!(number, vector::PF | vector::GP | vector::SS | vector::AC)
}

/// A register as the native side can know it: the kernel's IRET turns null selectors with an RPL
/// into zero.
fn visible_value(field: Field, state: &State) -> u128 {
    match (field, field.get(state)) {
        (Field::Selector(_), 1..=3) => 0,
        (_, value) => value,
    }
}

/// The bits of a register that are to be compared.
fn significant(field: Field, ignored: &Ignored) -> u128 {
    match field {
        Field::Rflags => (flags::ALL & !ignored.flags).into(),
        Field::Gpr(i) if ignored.upper_halves >> i & 1 != 0 => 0xffff_ffff,
        Field::Fop | Field::Fip | Field::Fdp if ignored.x87_pointers => 0,
        // How many address bits the host CPU has.
        Field::Fip | Field::Fdp => 0xffff_ffff_ffff,
        Field::Mxcsr => (!ignored.mxcsr).into(),
        Field::Fsw if ignored.x87_stack => !(7 << 11),
        Field::Ftw | Field::St(_) if ignored.x87_stack => 0,
        _ => u128::MAX,
    }
}

/// A fault as far as a Linux program can know it and the architecture defines it.
fn visible(stop: Stop, detail: FaultDetail) -> Stop {
    let Stop::Fault(mut fault) = stop else { return stop };
    if fault.vector == vector::PF && fault.address >= TASK_SIZE_MAX {
        fault.code = fault.code.map(|code| code | pf::PRESENT);
    }
    match detail {
        FaultDetail::Page if fault.vector == vector::PF => fault.address &= !0xfff,
        FaultDetail::Vector if is_of_memory(fault.vector) => {
            fault = Fault::new(vector::PF);
        }
        _ => {}
    }
    if fault.vector == vector::DB {
        fault.address = 0;
    }
    Stop::Fault(fault)
}

/// Changed bytes with their addresses, less those left open.
fn memory(changes: &[Patch], ignored: &Ignored) -> Vec<(u64, u8)> {
    let open = |address| ignored.memory.iter().any(|range| range.contains(&address));
    let bytes = |run: &Patch| {
        let start = run.address;
        run.bytes.clone().into_iter().enumerate().map(move |(i, byte)| (start + i as u64, byte))
    };
    changes.iter().flat_map(bytes).filter(|&(address, _)| !open(address)).collect()
}

/// The bytes of `these` that are not in `those`.
fn list(these: &[(u64, u8)], those: &[(u64, u8)]) -> String {
    const MOST: usize = 48;
    let own: Vec<_> = these.iter().filter(|byte| !those.contains(byte)).collect();
    let mut text = String::new();
    let mut next = None;
    for (address, byte) in own.iter().take(MOST) {
        if next != Some(*address) {
            let _ = write!(text, " [{address:#x}]");
        }
        let _ = write!(text, " {byte:02x}");
        next = Some(address + 1);
    }
    if own.len() > MOST {
        let _ = write!(text, " and {} bytes more", own.len() - MOST);
    }
    if text.is_empty() { "as before".into() } else { text.trim_start().into() }
}
