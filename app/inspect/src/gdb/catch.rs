//! What GDB cannot ask for by itself: exceptions and oopses that stop the machine, and breakpoints in user code of one process.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use ram::Ram;
use x86::{Vcpu, paging::ADDRESS, paging::Roots};

use crate::{linux::LinuxKernel, memory};

/// Functions in which a Linux kernel begins to report an oops or a panic; no kernel has all of them.
const OOPS: [&str; 3] = ["oops_begin", "panic", "vpanic"];
/// Exceptions by the names of the processor's manual.
const EXCEPTIONS: [(&str, u8); 12] = [
    ("de", 0),
    ("db", 1),
    ("nmi", 2),
    ("bp", 3),
    ("of", 4),
    ("br", 5),
    ("ud", 6),
    ("nm", 7),
    ("df", 8),
    ("gp", 13),
    ("pf", 14),
    ("mf", 16),
];
/// Bytes of a gate of the IDT.
const GATE: u64 = 16;
/// Linux's page tables of a program, where they are not the kernel's, have this bit in CR3, and are the next page.
const APART: u64 = 1 << 11;
const NEXT_PAGE: u64 = 1 << 12;

/// Catchpoints: code (GVA) that stops the machine, and why.
#[derive(Default)]
pub struct Catchpoints(BTreeMap<u64, String>);

impl Catchpoints {
    /// All catchpoints (GVA).
    pub fn addresses(&self) -> impl Iterator<Item = u64> {
        self.0.keys().copied()
    }

    /// There is a catchpoint at `gva`.
    pub fn has(&self, gva: u64) -> bool {
        self.0.contains_key(&gva)
    }

    /// Carries a command out; returns what it prints.
    pub fn run_command(&mut self, ram: &Ram, state: &Vcpu, words: &[&str]) -> String {
        match words {
            [] => {}
            ["none"] => self.0.clear(),
            ["oops"] => match oops(ram) {
                Ok(found) => self.0.extend(found),
                Err(problem) => return problem,
            },
            ["exception", which] => match exception(ram, state, which) {
                Some(found) => self.0.extend([found]),
                None => return format!("`{which}` is no exception that has a handler now\n"),
            },
            _ => return "catch [oops | exception N | exception NAME | none]\n".to_owned(),
        }
        self.0.iter().map(|(gva, what)| format!("{gva:#x}  {what}\n")).collect()
    }
}

fn oops(ram: &Ram) -> Result<Vec<(u64, String)>, String> {
    let kernel = LinuxKernel::find(ram).map_err(|unknown| format!("{unknown}\n"))?;
    let place = |name: &&str| Some((kernel.symbols.find(name)?, format!("oops ({name})")));
    Ok(OOPS.iter().filter_map(place).collect())
}

/// The handler of an exception, as the vCPU has it now.
fn exception(ram: &Ram, state: &Vcpu, which: &str) -> Option<(u64, String)> {
    let named = EXCEPTIONS.iter().find(|(name, _)| *name == which).map(|(_, number)| *number);
    let number = named.or_else(|| which.parse().ok()).filter(|number| *number < 32)?;
    let gate = state.idtr.base.wrapping_add(u64::from(number) * GATE);
    let [low, high] = [0, 8].map(|more| memory::word(ram, Roots::from(state), gate + more));
    let (low, high) = (low?, high?);
    const PRESENT: u64 = 1 << 47;
    let gva = (low & 0xffff) | (low >> 32 & 0xffff_0000) | high << 32;
    (low & PRESENT != 0).then(|| (gva, format!("exception {number}")))
}

/// The process whose breakpoints in user code count, by the root of its page tables (GPA); zero for all processes.
#[derive(Clone, Default)]
pub struct ProcessFilter(Arc<AtomicU64>);

impl ProcessFilter {
    /// The vCPU is in user code of another process.
    pub fn excludes(&self, state: &Vcpu) -> bool {
        let only = self.0.load(Ordering::SeqCst);
        only != 0 && state.cpl() == 3 && root(state.cr3) != only
    }

    /// Carries a command out; returns what it prints.
    pub fn run_command(&self, ram: &Ram, word: Option<&str>) -> String {
        let root = match word {
            Some("all") => Ok(0),
            Some(pid) => pid.parse().map_err(|_| "only PID, or only all".to_owned()),
            None => Err("only PID, or only all".to_owned()),
        };
        let root = match root {
            Ok(0) => Ok(0),
            Ok(pid) => root_of(ram, pid),
            Err(problem) => Err(problem),
        };
        match root {
            Ok(root) => self.0.store(root, Ordering::SeqCst),
            Err(problem) => return problem + "\n",
        }
        String::new()
    }
}

fn root(cr3: u64) -> u64 {
    let table = cr3 & ADDRESS;
    if cr3 & APART == 0 { table } else { table & !NEXT_PAGE }
}

/// The root of a process's page tables.
fn root_of(ram: &Ram, pid: u32) -> Result<u64, String> {
    let kernel = LinuxKernel::find(ram).map_err(|unknown| unknown.to_string())?;
    let task = kernel.processes(ram).into_iter().find(|task| task.pid == pid);
    let task = task.ok_or_else(|| format!("there is no process {pid}"))?;
    let root = kernel.tables_of(ram, &task);
    root.ok_or_else(|| format!("process {pid} has no page tables of its own"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::control::{cr0, cr4, efer};

    #[test]
    fn an_exceptions_handler_is_in_its_gate() {
        let ram = Ram::new(1 << 20).expect("memory");
        // Without paging an address is a place in memory.
        let mut state = Vcpu { cr0: cr0::PE, cr4: cr4::PAE, efer: efer::LMA, ..Vcpu::default() };
        state.idtr.base = 0x1000;
        let gate = [0x8234_8e00_0010_5678u64, 0xffff_ffff].map(u64::to_le_bytes).concat();
        ram.write_gpa(0x1000 + 14 * GATE, &gate).expect("inside");
        let mut catchpoints = Catchpoints::default();
        let said = catchpoints.run_command(&ram, &state, &["exception", "pf"]);
        assert_eq!(said, "0xffffffff82345678  exception 14\n");
        assert!(catchpoints.has(0xffff_ffff_8234_5678));
        assert!(
            catchpoints.run_command(&ram, &state, &["exception", "13"]).contains("no exception")
        );
        assert_eq!(catchpoints.run_command(&ram, &state, &["none"]), "");
    }

    #[test]
    fn only_user_code_of_other_processes_is_spared() {
        let only = ProcessFilter::default();
        let mut state = Vcpu { cr3: 0x5000 | APART, ..Vcpu::default() };
        state.seg[x86::seg::CS].selector = 0x33;
        state.seg[x86::seg::SS].selector = 0x2b;
        state.seg[x86::seg::SS].attr |= 3 << 5;
        assert!(!only.excludes(&state));
        only.0.store(0x4000, Ordering::SeqCst);
        assert_eq!((state.cpl(), only.excludes(&state)), (3, false), "tables of its own");
        state.cr3 = 0x5000;
        assert!(only.excludes(&state));
    }
}
