//! The table of forms for docs/: what is tested, how often it ran, what is left out and why.

use std::collections::BTreeMap;
use std::fmt::Write;

use iced_x86::Code;

use crate::campaign::{Plan, Summary};
use crate::forms::{self, Verdict};

/// The table as Markdown, after the campaign `plan`.
pub fn markdown(plan: &Plan, summary: &Summary) -> String {
    let mut text = String::from(HEAD);
    let judged = summary.cases - summary.open.values().sum::<u64>();
    let _ = writeln!(
        text,
        "{}-bit code, seed {}: {} cases, {judged} judged, {} differences.\n",
        plan.bits, plan.seed, summary.cases, summary.failed
    );
    for (reason, count) in &summary.open {
        let _ = writeln!(text, "- {count} cases not judged: {reason}");
    }
    tested(&mut text, plan.bits, summary);
    excluded(&mut text, plan.bits);
    not_offered(&mut text, plan.bits);
    text
}

const HEAD: &str = "# What the oracle tests\n
Made by `oracle --table`; do not edit. A form is an iced-x86 `Code`. \"Completed\" and \"faulted\" count
instructions in cases that were compared with the host CPU.\n\n";

fn tested(text: &mut String, bits: u32, summary: &Summary) {
    let forms = forms::tested(bits);
    let _ = writeln!(text, "\n## Tested: {} forms\n", forms.len());
    let _ = writeln!(text, "| form | instruction | completed | faulted |\n|---|---|---:|---:|");
    for code in forms {
        let runs = summary.runs.get(&code).copied().unwrap_or_default();
        let (form, syntax) = (format!("{code:?}"), code.op_code().instruction_string());
        let _ = writeln!(text, "| {form} | {syntax} | {} | {} |", runs.completed, runs.faulted);
    }
}

fn excluded(text: &mut String, bits: u32) {
    let mut by_reason: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for code in Code::values() {
        if let Verdict::Excluded(reason) = forms::verdict(code, bits) {
            by_reason.entry(reason).or_default().push(format!("{code:?}"));
        }
    }
    let _ = writeln!(text, "\n## Offered by the CPU model, not tested here\n");
    for (reason, forms) in by_reason {
        list(text, reason, &forms);
    }
}

/// An item of a list, in lines of fewer than 110 columns.
fn list(text: &mut String, name: &str, forms: &[String]) {
    let _ = write!(text, "- {name}:");
    let mut column = name.len() + 3;
    for (index, form) in forms.iter().enumerate() {
        let comma = if index + 1 < forms.len() { "," } else { "" };
        if column + form.len() + 2 > 108 {
            text.push_str("\n ");
            column = 1;
        }
        let _ = write!(text, " {form}{comma}");
        column += form.len() + 1 + comma.len();
    }
    text.push('\n');
}

/// By feature: the forms are many.
fn not_offered(text: &mut String, bits: u32) {
    let mut by_feature: BTreeMap<String, usize> = BTreeMap::new();
    for code in Code::values().filter(|&code| forms::verdict(code, bits) == Verdict::NotOffered) {
        let missing = code.cpuid_features().iter().filter(|f| !forms::OFFERED.contains(f));
        let names: Vec<String> = missing.map(|feature| format!("{feature:?}")).collect();
        let name =
            if names.is_empty() { format!("not in {bits}-bit code") } else { names.join(" + ") };
        *by_feature.entry(name).or_default() += 1;
    }
    let _ = writeln!(text, "\n## Not offered by the CPU model\n");
    for (feature, count) in by_feature {
        let _ = writeln!(text, "- {feature}: {count} forms");
    }
}
