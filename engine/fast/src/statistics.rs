//! What the engine has done.

use frame::ExitKind;
use iced_x86::Code;
use std::collections::HashMap;

/// Reasons for call-outs that are shown.
const SHOWN: usize = 12;

/// Counters since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Times a wedge got its turn.
    pub entries: u64,
    /// Exits by kind, see [`ExitKind`].
    pub exits: [u64; 15],
    /// Page faults answered with a mapping.
    pub mapped: u64,
    /// Instructions interpreted one by one.
    pub interpreted: u64,
    /// Host instructions stepped through to reach a boundary of the guest's.
    pub stepped: u64,
    /// Flushes the guest asked for.
    pub flushes: u64,
    /// System calls that came to the monitor.
    pub system_calls: u64,
    /// Call-outs by instruction code, as far as it is one: guest code can make the wedge say anything.
    reasons: HashMap<Option<Code>, u64>,
}

impl Statistics {
    /// Name and count of each.
    pub fn rows(&self) -> [(&'static str, u64); 15] {
        let exit = |kind: ExitKind| self.exits[kind as usize];
        [
            ("wedge turns", self.entries),
            ("call-outs", exit(ExitKind::CallOut)),
            ("misses", exit(ExitKind::Miss)),
            ("interrupt windows", exit(ExitKind::InterruptWindow)),
            ("sysret exits", exit(ExitKind::Sysret)),
            ("iret exits", exit(ExitKind::Iret)),
            ("kernel signals", exit(ExitKind::KernelSignal)),
            ("user signals", exit(ExitKind::UserSignal)),
            ("kicked exits", exit(ExitKind::Kicked)),
            ("pages mapped", self.mapped),
            ("interpreted singly", self.interpreted),
            ("host steps", self.stepped),
            ("slow look-ups", exit(ExitKind::Lookup)),
            ("flushes", self.flushes),
            ("slow system calls", self.system_calls),
        ]
    }

    /// Counts a call-out for an instruction with this code.
    pub fn call_out(&mut self, code: u64) {
        *self.reasons.entry(Code::try_from(code as usize).ok()).or_default() += 1;
    }

    /// The most frequent reasons for call-outs.
    pub fn call_outs(&self) -> Vec<(String, u64)> {
        let name = |code: Option<Code>| match code {
            Some(code) => format!("call-outs, {code:?}"),
            None => "call-outs, unknown".to_owned(),
        };
        let mut all: Vec<_> = self.reasons.iter().map(|(code, n)| (name(*code), *n)).collect();
        all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        all.truncate(SHOWN);
        all
    }

    /// Counts an exit the wedge has told.
    pub fn exit(&mut self, kind: u64) -> ExitKind {
        let kind = match kind {
            1 => ExitKind::CallOut,
            2 => ExitKind::Miss,
            3 => ExitKind::InterruptWindow,
            4 => ExitKind::Sysret,
            5 => ExitKind::Iret,
            6 => ExitKind::KernelSignal,
            7 => ExitKind::UserSignal,
            8 => ExitKind::Kicked,
            9 => ExitKind::LoadVectors,
            10 => ExitKind::InvalidatePage,
            11 => ExitKind::HotSite,
            12 => ExitKind::LoadSpace,
            13 => ExitKind::Lookup,
            14 => ExitKind::SystemCall,
            _ => ExitKind::None,
        };
        self.exits[kind as usize] += 1;
        kind
    }
}
