//! Translated code against the interpreter's trace.

use super::{
    scratch::{Bytes, WALKED},
    trace::{End, Moment, Trace, Uncompared},
};
use ram::Ram;
use std::{borrow::Cow, collections::BTreeMap};
use x86::{Vcpu, flags, seg};
use x86_interp::GuestRam;

/// Flags that code can see.
const VISIBLE: u64 = flags::STATUS | flags::DF | flags::IF | flags::AC | flags::ID;
const NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];

/// Bytes of RAM by offset, and which bits of them are open.
type Written = BTreeMap<u64, (u8, u8)>;

/// A part of the state, as both sides have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateField {
    pub name: Cow<'static, str>,
    pub translated: u64,
    pub interpreted: u64,
}

impl StateField {
    fn new(name: impl Into<Cow<'static, str>>, translated: u64, interpreted: u64) -> Self {
        Self { name: name.into(), translated, interpreted }
    }

    pub fn differs(&self) -> bool {
        self.translated != self.interpreted
    }
}

/// What became of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// Nothing had run.
    Idle,
    /// The same, after so many instructions.
    Same(usize),
    NotCompared(Uncompared),
    /// What the interpreter says of the place where translated code stands; nothing if it never
    /// gets there.
    Different(Vec<StateField>),
}

impl Trace {
    /// Judges where translated code has come to. `targets` are where the block's jumps lead.
    pub fn judge(&self, vcpu: &Vcpu, ram: &Ram, targets: &[u64]) -> Comparison {
        let mut different = None;
        for (done, moment) in self.moments.iter().enumerate().rev() {
            if moment.vcpu.rip != vcpu.rip {
                continue;
            }
            let fields = self.fields(moment, vcpu, ram);
            if !fields.iter().any(StateField::differs) {
                return if done == 0 { Comparison::Idle } else { Comparison::Same(done) };
            }
            different = different.or(Some((moment, fields)));
        }
        if let End::Open(reason) = self.end
            && (different.is_none() || targets.contains(&vcpu.rip))
        {
            return Comparison::NotCompared(reason);
        }
        let excuse = match &different {
            Some((moment, _)) => self.excuse(moment, vcpu, ram),
            None => self.moments.last().and_then(|moment| self.excuse(moment, vcpu, ram)),
        };
        match excuse {
            Some(reason) => Comparison::NotCompared(reason),
            None => Comparison::Different(different.map(|(_, fields)| fields).unwrap_or_default()),
        }
    }

    /// Why a difference may be nobody's fault.
    fn excuse(&self, moment: &Moment, vcpu: &Vcpu, ram: &Ram) -> Option<Uncompared> {
        let ours = written(&self.accesses.writes[..moment.progress[1]]);
        let mut reads = self.accesses.reads[..moment.progress[0]].iter();
        if reads.any(|read| is_changed(read, ram, &ours)) {
            return Some(Uncompared::Changed);
        }
        self.is_amid_repetition(moment, vcpu).then_some(Uncompared::Repeats)
    }

    /// Whether somebody else can have had a part in what the block did without [`Uncompared::Changed`] showing it: memory that it read may have
    /// been something else for a moment, as a lock is, and what it wrote can be written again.
    pub fn meets_others(&self) -> bool {
        !self.accesses.reads.is_empty() || !self.accesses.writes.is_empty()
    }

    /// Translated code stands at a string instruction that has done some of its iterations.
    fn is_amid_repetition(&self, moment: &Moment, vcpu: &Vcpu) -> bool {
        let left = |v: &Vcpu| v.gpr[x86::reg::RCX];
        let repeats = self.moments.iter().any(|m| m.repeats && m.vcpu.rip == vcpu.rip);
        repeats && left(vcpu) < left(&moment.vcpu)
    }

    /// Both sides, where the interpreter is at `moment`.
    fn fields(&self, moment: &Moment, vcpu: &Vcpu, ram: &Ram) -> Vec<StateField> {
        let mut fields = registers(vcpu, &moment.vcpu, VISIBLE & !moment.undefined);
        fields.extend(vectors(vcpu, &moment.vcpu));
        for (offset, (value, open)) in written(&self.accesses.writes[..moment.progress[1]]) {
            let now = ram.load8(offset);
            if (now ^ value) & !open != 0 {
                fields.push(StateField::new(format!("ram {offset:#x}"), now.into(), value.into()));
            }
        }
        fields
    }
}

/// Somebody else has written what was read. It may be a page-table entry that was walked.
fn is_changed(read: &Bytes, ram: &Ram, ours: &Written) -> bool {
    let mut now = vec![0; read.data.len()];
    ram.read(read.offset, &mut now);
    let walked = if read.data.len() == 8 { WALKED } else { 0 };
    let open = std::iter::once(walked).chain(std::iter::repeat(0));
    let mut bytes = (read.offset..).zip(read.data.iter().zip(&now)).zip(open);
    bytes.any(|((at, (was, is)), open)| (was ^ is) & !open != 0 && !ours.contains_key(&at))
}

fn registers(a: &Vcpu, b: &Vcpu, flags: u64) -> Vec<StateField> {
    let mut fields: Vec<_> =
        (0..16).map(|n| StateField::new(NAMES[n], a.gpr[n], b.gpr[n])).collect();
    fields.extend([
        StateField::new("rip", a.rip, b.rip),
        StateField::new("rflags", a.rflags & flags, b.rflags & flags),
        StateField::new("fs base", a.seg[seg::FS].base, b.seg[seg::FS].base),
        StateField::new("gs base", a.seg[seg::GS].base, b.seg[seg::GS].base),
        StateField::new("other gs base", a.kernel_gs_base, b.kernel_gs_base),
        StateField::new("cr2", a.cr2, b.cr2),
        StateField::new("cr3", a.cr3, b.cr3),
    ]);
    for (name, n) in ["es", "cs", "ss", "ds", "fs", "gs"].into_iter().zip(0..) {
        fields.push(StateField::new(name, a.seg[n].selector.into(), b.seg[n].selector.into()));
    }
    fields
}

/// Vector registers that differ. The pointers to the last x87 instruction depend on the CPU's maker.
fn vectors(a: &Vcpu, b: &Vcpu) -> Vec<StateField> {
    let (a, b) = (&a.fpu, &b.fpu);
    let mut fields = vec![
        StateField::new("fcw", a.fcw.into(), b.fcw.into()),
        StateField::new("fsw", a.fsw.into(), b.fsw.into()),
        StateField::new("ftw", a.ftw.into(), b.ftw.into()),
        StateField::new("mxcsr", a.mxcsr.into(), b.mxcsr.into()),
    ];
    let mut each = |name: &str, a: &[[u8; 16]], b: &[[u8; 16]]| {
        for (n, (a, b)) in a.iter().zip(b).enumerate() {
            let halves = |x: &[u8; 16]| u128::from_le_bytes(*x);
            let (a, b) = (halves(a), halves(b));
            if a != b {
                let high = ((a >> 64) as u64, (b >> 64) as u64);
                fields.push(StateField::new(format!("{name}{n}"), a as u64, b as u64));
                fields.push(StateField::new(format!("{name}{n} high"), high.0, high.1));
            }
        }
    };
    each("st", &a.st, &b.st);
    each("xmm", &a.xmm, &b.xmm);
    each("ymm high ", &a.ymm_high, &b.ymm_high);
    fields.retain(StateField::differs);
    fields
}

/// The bytes written, the last ones where they were written twice, with the bits that are open.
fn written(writes: &[Bytes]) -> Written {
    let mut bytes = BTreeMap::new();
    for write in writes {
        let open = std::iter::once(write.open).chain(std::iter::repeat(0));
        bytes.extend((write.offset..).zip(write.data.iter().copied().zip(open)));
    }
    bytes
}
