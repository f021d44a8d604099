//! A vCPU's registers as GDB has them: a table in the order of the target description, which is made from it.

use gdbstub::arch::{Arch, RegId, Registers};
use std::{fmt::Write, num::NonZeroUsize, sync::OnceLock};
use x86::{Vcpu, reg, seg};

/// A register's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    General(usize),
    Rip,
    Flags,
    Selector(usize),
    X87(usize),
    X87Control(usize),
    Xmm(usize),
    Mxcsr,
    Base(usize),
    YmmHigh(usize),
    KernelGsBase,
    Control(usize),
    Efer,
    Xcr0,
    System(usize),
    Debug(usize),
}

/// A register.
#[derive(Clone, Debug)]
struct RegisterInfo {
    name: String,
    kind: Kind,
    bits: usize,
    gdb_type: &'static str,
    feature: &'static str,
}

const CORE: &str = "org.gnu.gdb.i386.core";
const SSE: &str = "org.gnu.gdb.i386.sse";
const SEGMENTS: &str = "org.gnu.gdb.i386.segments";
const AVX: &str = "org.gnu.gdb.i386.avx";
const OWN: &str = "org.ring3.control";

const EFLAGS: &str = r#"<flags id="i386_eflags" size="4"><field name="" start="22" end="31"/>
<field name="CF" start="0" end="0"/><field name="PF" start="2" end="2"/><field name="AF" start="4" end="4"/>
<field name="ZF" start="6" end="6"/><field name="SF" start="7" end="7"/><field name="TF" start="8" end="8"/>
<field name="IF" start="9" end="9"/><field name="DF" start="10" end="10"/><field name="OF" start="11" end="11"/>
<field name="NT" start="14" end="14"/><field name="RF" start="16" end="16"/><field name="VM" start="17" end="17"/>
<field name="AC" start="18" end="18"/><field name="VIF" start="19" end="19"/><field name="VIP" start="20" end="20"/>
<field name="ID" start="21" end="21"/></flags>"#;
const VECTORS: &str = r#"<vector id="v4f" type="ieee_single" count="4"/><vector id="v2d" type="ieee_double" count="2"/>
<vector id="v16i8" type="int8" count="16"/><vector id="v8i16" type="int16" count="8"/>
<vector id="v4i32" type="int32" count="4"/><vector id="v2i64" type="int64" count="2"/>
<union id="vec128"><field name="v4_float" type="v4f"/><field name="v2_double" type="v2d"/>
<field name="v16_int8" type="v16i8"/><field name="v8_int16" type="v8i16"/><field name="v4_int32" type="v4i32"/>
<field name="v2_int64" type="v2i64"/><field name="uint128" type="uint128"/></union>"#;

/// All registers, in order.
fn rows() -> &'static [RegisterInfo] {
    static ROWS: OnceLock<Vec<RegisterInfo>> = OnceLock::new();
    ROWS.get_or_init(|| {
        let mut rows = core();
        let mut add = |feature, kind, name: String, bits, gdb_type| {
            rows.push(RegisterInfo { name, kind, bits, gdb_type, feature });
        };
        (0..16).for_each(|n| add(SSE, Kind::Xmm(n), format!("xmm{n}"), 128, "vec128"));
        add(SSE, Kind::Mxcsr, "mxcsr".to_owned(), 32, "int");
        for (name, segment) in [("fs_base", seg::FS), ("gs_base", seg::GS)] {
            add(SEGMENTS, Kind::Base(segment), name.to_owned(), 64, "int");
        }
        (0..16).for_each(|n| add(AVX, Kind::YmmHigh(n), format!("ymm{n}h"), 128, "uint128"));
        add(OWN, Kind::KernelGsBase, "k_gs_base".to_owned(), 64, "int");
        for n in [0, 2, 3, 4] {
            add(OWN, Kind::Control(n), format!("cr{n}"), 64, "int");
        }
        add(OWN, Kind::Efer, "efer".to_owned(), 64, "int");
        add(OWN, Kind::Xcr0, "xcr0".to_owned(), 64, "int");
        for (n, name) in ["lstar", "star", "sfmask", "gdtr", "idtr", "tr"].iter().enumerate() {
            add(OWN, Kind::System(n), (*name).to_owned(), 64, "int");
        }
        for n in [0, 1, 2, 3, 6, 7] {
            add(OWN, Kind::Debug(n), format!("dr{n}"), 64, "int");
        }
        rows
    })
}

/// GDB's core registers of x86-64.
fn core() -> Vec<RegisterInfo> {
    const GENERAL: [(&str, usize); 8] = [
        ("rax", reg::RAX),
        ("rbx", reg::RBX),
        ("rcx", reg::RCX),
        ("rdx", reg::RDX),
        ("rsi", reg::RSI),
        ("rdi", reg::RDI),
        ("rbp", reg::RBP),
        ("rsp", reg::RSP),
    ];
    const SELECTORS: [(&str, usize); 6] = [
        ("cs", seg::CS),
        ("ss", seg::SS),
        ("ds", seg::DS),
        ("es", seg::ES),
        ("fs", seg::FS),
        ("gs", seg::GS),
    ];
    const X87: [&str; 8] = ["fctrl", "fstat", "ftag", "fiseg", "fioff", "foseg", "fooff", "fop"];
    let mut rows = Vec::new();
    let mut add = |kind, name: String, bits, gdb_type| {
        rows.push(RegisterInfo { name, kind, bits, gdb_type, feature: CORE });
    };
    for (name, n) in GENERAL {
        let pointer = n == reg::RBP || n == reg::RSP;
        add(Kind::General(n), name.to_owned(), 64, if pointer { "data_ptr" } else { "int64" });
    }
    (8..16).for_each(|n| add(Kind::General(n), format!("r{n}"), 64, "int64"));
    add(Kind::Rip, "rip".to_owned(), 64, "code_ptr");
    add(Kind::Flags, "eflags".to_owned(), 32, "i386_eflags");
    for (name, segment) in SELECTORS {
        add(Kind::Selector(segment), name.to_owned(), 32, "int32");
    }
    (0..8).for_each(|n| add(Kind::X87(n), format!("st{n}"), 80, "i387_ext"));
    for (n, name) in X87.iter().enumerate() {
        add(Kind::X87Control(n), (*name).to_owned(), 32, "int");
    }
    rows
}

/// The target description.
fn description() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let mut text =
            String::from("<?xml version=\"1.0\"?><!DOCTYPE target SYSTEM \"gdb-target.dtd\">\n");
        text.push_str("<target version=\"1.0\"><architecture>i386:x86-64</architecture>\n");
        for feature in [CORE, SSE, SEGMENTS, AVX, OWN] {
            let types = if feature == CORE {
                EFLAGS
            } else if feature == SSE {
                VECTORS
            } else {
                ""
            };
            let _ = writeln!(text, "<feature name=\"{feature}\">{types}"); // a String takes all
            for row in rows().iter().filter(|row| row.feature == feature) {
                let RegisterInfo { name, bits, gdb_type, .. } = row;
                let _ =
                    writeln!(text, "<reg name=\"{name}\" bitsize=\"{bits}\" type=\"{gdb_type}\"/>");
            }
            text.push_str("</feature>\n");
        }
        text + "</target>"
    })
}

/// The bytes of a register.
fn get(v: &Vcpu, kind: Kind) -> Vec<u8> {
    match kind {
        Kind::X87(n) => v.fpu.st[n][..10].to_vec(),
        Kind::Xmm(n) => v.fpu.xmm[n].to_vec(),
        Kind::YmmHigh(n) => v.fpu.ymm_high[n].to_vec(),
        Kind::Flags => (v.rflags as u32).to_le_bytes().to_vec(),
        Kind::Selector(n) => u32::from(v.seg[n].selector).to_le_bytes().to_vec(),
        Kind::Mxcsr => v.fpu.mxcsr.to_le_bytes().to_vec(),
        Kind::X87Control(n) => x87_control(v)[n].to_le_bytes().to_vec(),
        _ => wide(v, kind).to_le_bytes().to_vec(),
    }
}

fn x87_control(v: &Vcpu) -> [u32; 8] {
    let f = &v.fpu;
    let tags = (0..8).map(|n| if f.ftw >> n & 1 == 0 { 3 << (2 * n) } else { 0 }).sum();
    [
        f.fcw.into(),
        f.fsw.into(),
        tags,
        (f.fip >> 32) as u32,
        f.fip as u32,
        (f.fdp >> 32) as u32,
        f.fdp as u32,
        f.fop.into(),
    ]
}

fn wide(v: &Vcpu, kind: Kind) -> u64 {
    match kind {
        Kind::General(n) => v.gpr[n],
        Kind::Rip => v.rip,
        Kind::Base(n) => v.seg[n].base,
        Kind::KernelGsBase => v.kernel_gs_base,
        Kind::Control(n) => [v.cr0, 0, v.cr2, v.cr3, v.cr4][n],
        Kind::Efer => v.efer,
        Kind::Xcr0 => v.xcr0,
        Kind::System(n) => [v.lstar, v.star, v.sfmask, v.gdtr.base, v.idtr.base, v.tr.base][n],
        Kind::Debug(n) => v.dr[n],
        _ => 0,
    }
}

/// Sets a register; false if it cannot be set: what the CPU keeps consistent with something else. Selectors are not loaded
/// from memory: writing what is there already is no error.
fn set(v: &mut Vcpu, kind: Kind, bytes: &[u8]) -> bool {
    let word = bytes.iter().take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    match kind {
        Kind::General(n) => v.gpr[n] = word,
        Kind::Rip => v.rip = word,
        Kind::Flags => v.rflags = word & 0x3f_7fd5 | x86::flags::FIXED,
        Kind::Base(n) => v.seg[n].base = word,
        Kind::KernelGsBase => v.kernel_gs_base = word,
        Kind::Control(2) => v.cr2 = word,
        Kind::X87(n) => v.fpu.st[n][..10].copy_from_slice(&bytes[..10]),
        Kind::Xmm(n) => v.fpu.xmm[n].copy_from_slice(&bytes[..16]),
        Kind::YmmHigh(n) => v.fpu.ymm_high[n].copy_from_slice(&bytes[..16]),
        Kind::X87Control(0) => v.fpu.fcw = word as u16,
        Kind::X87Control(1) => v.fpu.fsw = word as u16,
        Kind::Mxcsr => v.fpu.mxcsr = word as u32 & v.fpu.mxcsr_mask,
        _ => return get(v, kind) == bytes,
    }
    true
}

/// A register by its number in the target description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisterId(usize);

impl RegisterId {
    /// Its bytes.
    pub fn get(self, vcpu: &Vcpu) -> Vec<u8> {
        get(vcpu, rows()[self.0].kind)
    }

    /// Sets it; false if that is not possible.
    pub fn set(self, vcpu: &mut Vcpu, bytes: &[u8]) -> bool {
        let row = &rows()[self.0];
        bytes.len() == row.bits / 8 && set(vcpu, row.kind, bytes)
    }
}

impl RegId for RegisterId {
    fn from_raw_id(id: usize) -> Option<(Self, Option<NonZeroUsize>)> {
        let row = rows().get(id)?;
        Some((Self(id), NonZeroUsize::new(row.bits / 8)))
    }
    fn to_raw_id(&self) -> Option<usize> {
        Some(self.0)
    }
}

/// The values of all registers of a vCPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RegisterFile {
    rip: u64,
    bytes: Vec<u8>,
}

impl RegisterFile {
    /// Of this vCPU.
    pub fn of(vcpu: &Vcpu) -> Self {
        let bytes = rows().iter().flat_map(|row| get(vcpu, row.kind)).collect();
        Self { rip: vcpu.rip, bytes }
    }

    /// Puts them into a vCPU, as far as they can be set.
    pub fn put(&self, vcpu: &mut Vcpu) {
        let mut rest = &self.bytes[..];
        for row in rows() {
            let Some((bytes, behind)) = rest.split_at_checked(row.bits / 8) else { return };
            set(vcpu, row.kind, bytes);
            rest = behind;
        }
    }
}

impl Registers for RegisterFile {
    type ProgramCounter = u64;

    fn pc(&self) -> u64 {
        self.rip
    }
    fn gdb_serialize(&self, mut write_byte: impl FnMut(Option<u8>)) {
        self.bytes.iter().for_each(|byte| write_byte(Some(*byte)));
    }
    fn gdb_deserialize(&mut self, bytes: &[u8]) -> Result<(), ()> {
        self.bytes = bytes.to_vec();
        Ok(())
    }
}

/// x86-64 with the registers that a kernel's debugger needs.
#[derive(Debug)]
pub enum DebugArch {}

impl Arch for DebugArch {
    type Usize = u64;
    type Registers = RegisterFile;
    type BreakpointKind = usize;
    type RegId = RegisterId;

    fn target_description_xml() -> Option<&'static str> {
        Some(description())
    }
}

/// All registers in words, a line each, but those of vectors.
pub fn listing(vcpu: &Vcpu) -> String {
    let shown = rows().iter().filter(|row| row.bits <= 64);
    shown.fold(String::new(), |text, row| {
        let bytes = get(vcpu, row.kind);
        let digits: String = bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect();
        format!("{text}{:<10} {digits}\n", row.name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_survive_the_way_to_gdb_and_back() {
        let mut vcpu = Vcpu { rip: 0xffff_ffff_8100_0000, kernel_gs_base: 7, ..Vcpu::default() };
        vcpu.gpr.iter_mut().zip(1..).for_each(|(gpr, n)| *gpr = n);
        vcpu.fpu.xmm[3] = [9; 16];
        vcpu.fpu.mxcsr_mask = 0xffff;
        let image = RegisterFile::of(&vcpu);
        let mut bytes = Vec::new();
        image.gdb_serialize(|byte| bytes.extend(byte));
        assert_eq!(bytes.len(), rows().iter().map(|row| row.bits / 8).sum::<usize>());
        let mut back = RegisterFile::default();
        back.gdb_deserialize(&bytes).expect("taken");
        let mut other = Vcpu::default();
        other.fpu.mxcsr_mask = 0xffff;
        back.put(&mut other);
        assert_eq!((other.gpr, other.rip, other.fpu.xmm[3]), (vcpu.gpr, vcpu.rip, [9; 16]));
        assert_eq!(other.kernel_gs_base, 7);
    }

    #[test]
    fn what_the_cpu_keeps_consistent_cannot_be_set() {
        let mut vcpu = Vcpu::default();
        let number =
            |name: &str| RegisterId(rows().iter().position(|row| row.name == name).expect("known"));
        assert!(!number("cr3").set(&mut vcpu, &[1, 0, 0, 0, 0, 0, 0, 0]));
        assert!(number("cr3").set(&mut vcpu, &[0; 8]), "it is so");
        assert!(!number("rax").set(&mut vcpu, &[0; 4]), "not all of it");
    }
}
