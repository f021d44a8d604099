//! What the engine has done.

use iced_x86::Code;
use std::collections::HashMap;
use wedge_abi::{BlockExit, WedgeExit};

/// Reasons for call-outs that are shown.
const SHOWN: usize = 12;

/// What wedges have done by themselves.
pub fn of_wedges(counters: &wedge_abi::Counters) -> [(&'static str, u64); 15] {
    [
        ("user entries", counters.user_entries),
        ("fast system calls", counters.system_calls),
        ("fast user returns", counters.returns),
        ("fast kernel returns", counters.kernel_returns),
        ("patched system calls", counters.patched_system_calls),
        ("fast CPUIDs", counters.cpuids),
        ("fast address spaces", counters.hand_overs),
        ("fast mappings", counters.mapped),
        ("fast protections", counters.shown),
        ("fast page faults", counters.faults),
        ("fast segment loads", counters.segments),
        ("fast look-ups", counters.lookups),
        ("fast invalidations", counters.invalidations),
        ("fast doorbells", counters.rung),
        ("fast interrupts", counters.interrupts),
    ]
}

/// Counters since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FastStatistics {
    /// Times a wedge got its turn.
    pub entries: u64,
    /// Exits by [`WedgeExit::number`].
    pub exits: [u64; WedgeExit::COUNT],
    /// Page faults answered with a mapping.
    pub mapped: u64,
    /// Instructions interpreted one by one.
    pub interpreted: u64,
    /// Host instructions stepped through to reach a boundary of the guest's.
    pub stepped: u64,
    /// Flushes the guest asked for.
    pub flushes: u64,
    /// Times it has gone on with translations of its own, because of other vCPUs' page tables.
    pub parted: u64,
    /// System calls that came to the monitor.
    pub system_calls: u64,
    /// Call-outs by instruction code, as far as it is one: guest code can make the wedge say anything.
    reasons: HashMap<Option<Code>, u64>,
}

impl FastStatistics {
    /// Name and count of each.
    pub fn rows(&self) -> [(&'static str, u64); 16] {
        let exit = |exit: WedgeExit| self.exits[exit.number()];
        let block = |kind| exit(WedgeExit::Block(kind));
        [
            ("wedge turns", self.entries),
            ("call-outs", block(BlockExit::CallOut)),
            ("misses", block(BlockExit::Miss)),
            ("interrupt windows", block(BlockExit::InterruptWindow)),
            ("sysret exits", block(BlockExit::Sysret) + block(BlockExit::SysretNarrow)),
            ("iret exits", block(BlockExit::Iret) + block(BlockExit::IretNarrow)),
            ("kernel signals", exit(WedgeExit::KernelSignal)),
            ("user signals", exit(WedgeExit::UserSignal)),
            ("kicked exits", exit(WedgeExit::Kicked)),
            ("pages mapped", self.mapped),
            ("interpreted singly", self.interpreted),
            ("host steps", self.stepped),
            ("slow look-ups", block(BlockExit::Lookup)),
            ("flushes", self.flushes),
            ("slow system calls", self.system_calls),
            ("translations of its own", self.parted),
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

    /// Counts an exit.
    pub fn exit(&mut self, exit: WedgeExit) {
        self.exits[exit.number()] += 1;
    }
}
