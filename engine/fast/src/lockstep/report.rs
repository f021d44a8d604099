//! A difference, in words.

use super::{
    trace::{End, Trace},
    verdict::StateField,
};
use iced_x86::{Decoder, DecoderOptions, Formatter, IntelFormatter};
use std::fmt::Write;

/// What a report is made of.
pub struct DifferenceReport<'a> {
    pub fields: &'a [StateField],
    pub trace: &'a Trace,
    /// Where translated code has come to.
    pub rip: u64,
    /// Guest code, by GVA.
    pub guest: (u64, &'a [u8]),
    /// Host code, by HVA.
    pub host: (u64, &'a [u8]),
    /// The last blocks compared, the oldest first.
    pub past: Vec<String>,
}

impl DifferenceReport<'_> {
    /// The text.
    pub fn text(&self) -> String {
        let (start, rip) = (self.guest.0, self.rip);
        let mut text =
            format!("lock-step: the block at {start:016x} differs where it has come to {rip:016x}");
        text.push_str(&match self.trace.end {
            End::Fault(fault) => format!("; interpreted, it ends in {fault:x?}\n"),
            _ if self.fields.is_empty() => "; interpreted, it does not come by there\n".to_owned(),
            _ => "\n".to_owned(),
        });
        self.state(&mut text);
        text.push_str("guest code:\n");
        text.push_str(&listing(self.guest.0, self.guest.1));
        text.push_str("host code:\n");
        text.push_str(&listing(self.host.0, self.host.1));
        text.push_str("blocks before, from the oldest on:\n");
        for line in &self.past {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {line}");
        }
        text
    }

    /// Registers at the start, and both sides at the end.
    fn state(&self, text: &mut String) {
        let Some(first) = self.trace.moments.first() else { return };
        let _ = writeln!(text, "  {:<14} {:<16} {:<16} interpreted", "", "before", "translated");
        for (index, field) in self.fields.iter().enumerate() {
            let before = first.vcpu.gpr.get(index).map(|value| format!("{value:016x}"));
            let (before, mark) =
                (before.unwrap_or_default(), if field.differs() { " *" } else { "" });
            let StateField { name, translated, interpreted } = field;
            let _ = writeln!(
                text,
                "  {name:<14} {before:<16} {translated:016x} {interpreted:016x}{mark}"
            );
        }
        let _ = writeln!(text, "  rflags before  {:x}", first.vcpu.rflags);
    }
}

/// Disassembled code.
fn listing(at: u64, code: &[u8]) -> String {
    let mut decoder = Decoder::with_ip(64, code, at, DecoderOptions::NONE);
    let mut formatter = IntelFormatter::new();
    let mut text = String::new();
    while decoder.can_decode() {
        let from = decoder.position();
        let insn = decoder.decode();
        let bytes = &code[from..decoder.position()];
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let _ = write!(text, "  {:016x} {hex:<30} ", insn.ip());
        formatter.format(&insn, &mut text);
        text.push('\n');
    }
    text
}
