//! What users are told of the border between a guest's kernel and its programs (docs/isolation.md).
//!
//! Where the host has protection keys there is nothing to choose, and nothing is said. Elsewhere a machine's programs are closed off
//! for a price, or not; machines that people put others' programs into are, a command of one user is not.

use host_linux::probe;
use vmm::{EngineKind, EngineOptions, RunningMachine};

use crate::output;

/// What the programs of a machine are kept from their kernel by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Border {
    /// Keys, or an interpreter: at no price.
    Anyway,
    /// Processes of their own.
    Processes,
    /// The host's processes, but not from one who writes for ring3.
    Stray,
    /// Nothing.
    Open,
}

impl Border {
    fn of(options: &EngineOptions, keys: bool) -> Self {
        match options.kind {
            EngineKind::Interpreter | EngineKind::Jit => Self::Anyway,
            _ if keys => Self::Anyway,
            EngineKind::Auto | EngineKind::Fast if options.fast.strict => Self::Processes,
            EngineKind::Direct if !options.translate_user => Self::Stray,
            _ => Self::Open,
        }
    }

    fn line(self, can: bool) -> Option<&'static str> {
        match self {
            Self::Anyway => None,
            Self::Processes => Some(
                "programs are closed off from the guest's kernel by processes of their own, as this host has no \
                 protection keys; --guest-isolation fast is faster",
            ),
            Self::Stray => Some(
                "a program that is written for it reaches the guest's kernel, as this host has no protection keys",
            ),
            Self::Open if can => Some(
                "programs of this guest can reach its kernel's memory, as this host has no protection keys; \
                 --guest-isolation strict closes it",
            ),
            Self::Open => Some(
                "programs of this guest can reach its kernel's memory, as this host has neither protection keys nor \
                 seccomp's notifications (Linux 5.19); --engine jit and interp close it",
            ),
        }
    }
}

/// How programs are kept from their kernel, if that is worth a line. Tries what the host has, which a sandbox would refuse.
pub fn line(options: &EngineOptions) -> Option<&'static str> {
    Border::of(options, probe::protection_keys() && !options.fast.without_keys)
        .line(probe::can_isolate())
}

/// Prints the line. It is about the fast engine, so nothing is printed where the host could not run that engine.
pub fn tell(line: Option<&str>, running: &RunningMachine) {
    if let Some(line) = line.filter(|_| running.fallback().is_none()) {
        output::say(&format!("ring3: {line}\n"));
    }
}

/// For the survey of this host: what it is if nothing is chosen.
pub fn usual() -> &'static str {
    match (probe::protection_keys(), probe::can_isolate()) {
        (true, _) => "protection keys",
        (false, true) => "run: strict; exec and shell: fast",
        (false, false) => "none",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm::FastOptions;

    fn border(kind: EngineKind, strict: bool, keys: bool) -> Border {
        let fast = FastOptions { strict, ..FastOptions::default() };
        Border::of(&EngineOptions { kind, fast, ..EngineOptions::default() }, keys)
    }

    #[test]
    fn a_line_is_said_where_there_was_a_choice() {
        for kind in [EngineKind::Auto, EngineKind::Fast] {
            assert_eq!(border(kind, true, false), Border::Processes);
            assert_eq!(border(kind, false, false), Border::Open);
            assert_eq!(border(kind, false, true), Border::Anyway);
        }
        assert_eq!(border(EngineKind::Jit, false, false), Border::Anyway);
        assert_eq!(border(EngineKind::Direct, false, false), Border::Stray);
        let told = |border: Border, can| border.line(can).unwrap_or_default();
        assert!(told(Border::Anyway, true).is_empty());
        assert!(told(Border::Processes, true).contains("--guest-isolation fast"));
        assert!(told(Border::Open, true).contains("--guest-isolation strict"));
        assert!(told(Border::Open, false).contains("--engine jit"));
    }
}
