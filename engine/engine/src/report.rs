//! What a vCPU did, and what it looked like at the end.

use std::fmt;

use contract::GuestRam;
use iced_x86::{Decoder, DecoderOptions, Formatter, IntelFormatter};
use serde::Serialize;
use x86::{
    Vcpu,
    paging::{self, Access, Roots, WalkMemory},
    seg,
};

use crate::{Counters, Engine, EventLog};

/// Bytes of code shown at RIP.
const CODE_BYTES: u64 = 48;
/// Bytes of a page.
const PAGE: u64 = 4096;
/// Instructions shown at RIP.
const CODE_LINES: usize = 8;

/// What a vCPU did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Statistics {
    /// Instructions completed.
    pub instructions: u64,
    /// Blocks entered.
    pub blocks: u64,
    /// Blocks decoded.
    pub blocks_decoded: u64,
    /// Code pages whose blocks were dropped because the page was written.
    pub code_pages_dropped: u64,
    /// Page walks.
    pub tlb_misses: u64,
    /// Whole TLB flushes.
    pub tlb_flushes: u64,
    /// Exceptions delivered: vector and count, those that occurred.
    pub exceptions: Vec<(u8, u64)>,
    /// Maskable interrupts delivered.
    pub interrupts: u64,
    /// NMIs delivered.
    pub nmis: u64,
    /// Times the CPU halted.
    pub halts: u64,
    /// Times the engine was left because of a kick.
    pub kicks: u64,
    /// Accesses to device memory.
    pub mmio_accesses: u64,
    /// Port accesses.
    pub port_accesses: u64,
    /// What the engine counts besides: name and count.
    pub engine: Vec<(String, u64)>,
    /// Nanoseconds halted.
    pub halted_ns: u64,
    /// Nanoseconds executing.
    pub running_ns: u64,
}

impl Statistics {
    /// What the loop and its engine have counted.
    pub(crate) fn of(counted: &Self, engine: &mut dyn Engine) -> Self {
        let mut all = counted.clone().with(&engine.counters(), engine.traffic());
        all.engine = engine.details();
        all
    }

    /// Adds what the engine counted.
    pub(crate) fn with(mut self, counters: &Counters, (mmio, port): (u64, u64)) -> Self {
        self.instructions = counters.instructions;
        self.blocks = counters.blocks;
        self.blocks_decoded = counters.blocks_decoded;
        self.code_pages_dropped = counters.code_pages_dropped;
        self.tlb_misses = counters.tlb_misses;
        self.tlb_flushes = counters.tlb_flushes;
        let vectors = (0..).zip(counters.exceptions);
        self.exceptions = vectors.filter(|&(_, count)| count != 0).collect();
        (self.mmio_accesses, self.port_accesses) = (mmio, port);
        self
    }

    /// Adds what another vCPU did.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        macro_rules! add {
            ($($field:ident),*) => { $(self.$field += other.$field;)* };
        }
        add!(
            instructions,
            blocks,
            blocks_decoded,
            code_pages_dropped,
            tlb_misses,
            tlb_flushes,
            interrupts
        );
        add!(nmis, halts, kicks, mmio_accesses, port_accesses, halted_ns, running_ns);
        add_by_name(&mut self.exceptions, &other.exceptions);
        self.exceptions.sort_unstable();
        add_by_name(&mut self.engine, &other.engine);
        self
    }

    /// Millions of instructions per second of executing.
    pub fn mips(&self) -> f64 {
        self.instructions as f64 * 1000.0 / self.running_ns.max(1) as f64
    }

    /// Everything counted, by name.
    pub fn counts(&self) -> impl Iterator<Item = (String, u64)> {
        let own = [
            ("instructions", self.instructions),
            ("blocks entered", self.blocks),
            ("blocks decoded", self.blocks_decoded),
            ("code pages dropped", self.code_pages_dropped),
            ("TLB misses", self.tlb_misses),
            ("TLB flushes", self.tlb_flushes),
            ("interrupts", self.interrupts),
            ("NMIs", self.nmis),
            ("halts", self.halts),
            ("kicks", self.kicks),
            ("MMIO accesses", self.mmio_accesses),
            ("port accesses", self.port_accesses),
        ];
        let named = own.into_iter().map(|(name, count)| (name.to_owned(), count));
        let exceptions = self.exceptions.iter();
        let exceptions = exceptions.map(|(vector, count)| (format!("exception {vector}"), *count));
        named.chain(exceptions).chain(self.engine.iter().cloned())
    }
}

fn add_by_name<N: PartialEq + Clone>(to: &mut Vec<(N, u64)>, from: &[(N, u64)]) {
    for (name, count) in from {
        match to.iter_mut().find(|(known, _)| known == name) {
            Some((_, sum)) => *sum += count,
            None => to.push((name.clone(), *count)),
        }
    }
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let lived = seconds(self.running_ns + self.halted_ns).max(1e-9);
        for (name, count) in self.counts() {
            let rate = count as f64 / lived;
            writeln!(f, "{name:>28} {count:>16} {rate:>16.1}/s")?;
        }
        writeln!(f, "{:>28} {:>16.3} s", "executing", seconds(self.running_ns))?;
        writeln!(f, "{:>28} {:>16.3} s", "halted", seconds(self.halted_ns))?;
        write!(f, "{:>28} {:>16.1} million/s of executing", "interpreted", self.mips())
    }
}

/// A vCPU at the moment it could not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report(String);

impl Report {
    pub(crate) fn new(vcpu: &Vcpu, ram: &dyn GuestRam, log: &EventLog) -> Self {
        let mut text = registers(vcpu);
        text.push_str("code at RIP:\n");
        for line in code(vcpu, ram) {
            text.push_str(&format!("  {line}\n"));
        }
        text.push_str("last events (after how many instructions, RIP, what):\n");
        for line in log.lines() {
            text.push_str(&format!("  {line}\n"));
        }
        Self(text)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.trim_end())
    }
}

fn registers(v: &Vcpu) -> String {
    const GPR: [&str; 16] = [
        "RAX", "RCX", "RDX", "RBX", "RSP", "RBP", "RSI", "RDI", "R8 ", "R9 ", "R10", "R11", "R12",
        "R13", "R14", "R15",
    ];
    const SEGMENTS: [&str; 6] = ["ES", "CS", "SS", "DS", "FS", "GS"];
    let mut text = format!("RIP {:016x}  RFLAGS {:08x}  CPL {}\n", v.rip, v.rflags, v.cpl());
    for (row, values) in v.gpr.chunks(4).enumerate() {
        let names = &GPR[4 * row..];
        let cells: Vec<_> =
            names.iter().zip(values).map(|(n, v)| format!("{n} {v:016x}")).collect();
        text.push_str(&cells.join("  "));
        text.push('\n');
    }
    for (name, s) in SEGMENTS.iter().zip(&v.seg) {
        text.push_str(&format!(
            "{name} {:04x} base {:016x} limit {:08x} attr {:04x}\n",
            s.selector, s.base, s.limit, s.attr
        ));
    }
    text.push_str(&format!(
        "CR0 {:08x}  CR2 {:016x}  CR3 {:016x}  CR4 {:08x}",
        v.cr0, v.cr2, v.cr3, v.cr4
    ));
    text.push_str(&format!("  EFER {:04x}\n", v.efer));
    text.push_str(&format!("GDT {:016x}+{:04x}  ", v.gdtr.base, v.gdtr.limit));
    text.push_str(&format!("IDT {:016x}+{:04x}  ", v.idtr.base, v.idtr.limit));
    text.push_str(&format!("TR {:04x} base {:016x}\n", v.tr.selector, v.tr.base));
    text
}

/// The instructions at RIP, as far as they can be read.
fn code(v: &Vcpu, ram: &dyn GuestRam) -> Vec<String> {
    let start = if v.is_64bit() { v.rip } else { v.rip.wrapping_add(v.seg[seg::CS].base) };
    let bytes: Vec<u8> =
        (0..CODE_BYTES).map_while(|i| peek(v, ram, start.wrapping_add(i))).collect();
    if bytes.is_empty() {
        return vec![format!("{start:016x} is not mapped to RAM")];
    }
    let mut decoder = Decoder::with_ip(v.code_bits(), &bytes, v.rip, DecoderOptions::NONE);
    let mut formatter = IntelFormatter::new();
    let mut lines = Vec::new();
    while decoder.can_decode() && lines.len() < CODE_LINES {
        let at = decoder.position();
        let instruction = decoder.decode();
        let mut assembly = String::new();
        formatter.format(&instruction, &mut assembly);
        let hex: String =
            bytes[at..at + instruction.len()].iter().map(|b| format!("{b:02x}")).collect();
        lines.push(format!("{:016x} {hex:<24} {assembly}", instruction.ip()));
    }
    lines
}

/// The byte at a linear address, read without any effect on the guest.
fn peek(v: &Vcpu, ram: &dyn GuestRam, linear: u64) -> Option<u8> {
    let access = Access { fetch: true, user: v.cpl() == 3, ..Access::default() };
    let page = paging::walk(&mut Frozen(ram), Roots::from(v), linear, access).ok()?;
    offset(ram, page.gpa).map(|offset| ram.load8(offset))
}

/// The offset in guest RAM of a GPA.
fn offset(ram: &dyn GuestRam, gpa: u64) -> Option<u64> {
    let page = ram.page(gpa)?;
    Some(page.offset + gpa % PAGE)
}

/// RAM whose page tables a walk does not change.
struct Frozen<'a>(&'a dyn GuestRam);

impl WalkMemory for Frozen<'_> {
    // Where there is no RAM the bus floats: all ones. An entry never crosses a page.
    fn read_u64(&mut self, gpa: u64) -> u64 {
        offset(self.0, gpa).map_or(u64::MAX, |offset| self.0.load64(offset))
    }
    fn read_u32(&mut self, gpa: u64) -> u32 {
        offset(self.0, gpa).map_or(u32::MAX, |offset| self.0.load32(offset))
    }
    fn cas_u64(&mut self, _: u64, _: u64, _: u64) -> bool {
        true
    }
    fn cas_u32(&mut self, _: u64, _: u32, _: u32) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Event;
    use ram::Ram;

    #[test]
    fn a_report_shows_registers_code_and_events() {
        let ram = Ram::new(1 << 20).expect("memory");
        ram.write_gpa(0x1000, &[0x90, 0x0f, 0x0b]).expect("in RAM");
        let mut vcpu = Vcpu { rip: 0x1000, ..Vcpu::default() };
        vcpu.gpr[0] = 0x1234_5678;
        let mut log = EventLog::new(4);
        log.push(77, 0x0fff, Event::Nmi);
        let text = Report::new(&vcpu, &ram, &log).to_string();
        for part in ["RAX 0000000012345678", "nop", "ud2", "77", "NMI"] {
            assert!(text.contains(part), "no {part} in\n{text}");
        }
    }

    #[test]
    fn what_two_vcpus_did_is_added_up() {
        let one = |halts, engine: &[(&str, u64)]| Statistics {
            halts,
            exceptions: vec![(14, halts)],
            engine: engine.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect(),
            ..Statistics::default()
        };
        let both = one(3, &[("a", 1)]).and(&one(4, &[("b", 2), ("a", 5)]));
        assert_eq!(both, one(7, &[("a", 6), ("b", 2)]));
    }

    #[test]
    fn code_outside_ram_is_said_to_be() {
        let ram = Ram::new(1 << 20).expect("memory");
        let vcpu = Vcpu { rip: 0xfff0_0000, ..Vcpu::default() };
        let text = Report::new(&vcpu, &ram, &EventLog::new(1)).to_string();
        assert!(text.contains("not mapped to RAM"), "{text}");
    }
}
