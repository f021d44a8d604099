//! How a run ended, as an exit code, a sentence and JSON.

use serde::Serialize;
use vmm::{Ended, Statistics, Whose};

/// How a run ended.
#[derive(Debug)]
pub enum Outcome {
    /// The machine ended by itself.
    Machine(Ended),
    /// Ctrl-A X.
    Left,
    /// `--timeout`.
    TimedOut,
    /// A signal told us to end.
    Signal(i32),
    /// The guest's kernel said that it crashed.
    Panicked,
    /// A fault cut the power.
    PowerCut,
    /// A fault reset the machine.
    Reset,
}

impl Outcome {
    /// The process exit code; `docs/exit-codes.md` lists them.
    pub fn code(&self) -> u8 {
        match self {
            Self::Machine(Ended::PowerOff) | Self::Left => 0,
            Self::Machine(Ended::Reset) | Self::Reset => 4,
            Self::PowerCut => 5,
            Self::Panicked => 8,
            Self::Machine(Ended::TripleFault(_)) => 6,
            Self::Machine(Ended::DebugExit(value)) => value << 1 | 1,
            Self::Machine(Ended::Stopped | Ended::Failed(_)) => 1,
            Self::TimedOut => 124,
            Self::Signal(number) => 128 | (number & 0x7f) as u8,
        }
    }

    /// Whether the machine has ended by itself: nobody has ended it from outside.
    pub fn is_the_machines(&self) -> bool {
        !matches!(
            self,
            Self::Left | Self::TimedOut | Self::Signal(_) | Self::Machine(Ended::Stopped)
        )
    }

    /// A word for programs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Machine(Ended::PowerOff) => "power-off",
            Self::Machine(Ended::Reset) | Self::Reset => "reset",
            Self::PowerCut => "power-cut",
            Self::Panicked => "panic",
            Self::Machine(Ended::TripleFault(_)) => "triple-fault",
            Self::Machine(Ended::DebugExit(_)) => "debug-exit",
            Self::Machine(Ended::Stopped) => "stopped",
            Self::Machine(Ended::Failed(_)) => "failed",
            Self::Left => "left",
            Self::TimedOut => "timeout",
            Self::Signal(_) => "signal",
        }
    }

    /// Whose doing it is, where it is somebody's failure.
    pub fn whose(&self) -> Option<Whose> {
        match self {
            Self::Machine(Ended::Failed(failure)) => Some(failure.whose),
            Self::Machine(Ended::TripleFault(_)) | Self::Panicked => Some(Whose::Guest),
            _ => None,
        }
    }

    /// What to tell the user; nothing when the guest ended as it should.
    pub fn message(&self) -> Option<String> {
        match self {
            Self::Machine(Ended::PowerOff | Ended::DebugExit(_)) | Self::Left => None,
            Self::Panicked => Some("the guest's kernel crashed; its console says why".to_owned()),
            Self::PowerCut => Some("a fault cut the power".to_owned()),
            Self::Reset => Some("a fault reset the machine".to_owned()),
            Self::Machine(Ended::Reset) => Some("the guest asked for a reset".to_owned()),
            Self::Machine(Ended::TripleFault(report)) => {
                Some(format!("triple fault: the guest's kernel crashed\n{report}"))
            }
            Self::Machine(Ended::Failed(failure)) => Some(failure.to_string()),
            Self::Machine(Ended::Stopped) => Some("the machine was stopped".to_owned()),
            Self::TimedOut => Some("timeout: the guest was still running".to_owned()),
            Self::Signal(number) => Some(format!("ended by signal {number}")),
        }
    }
}

/// What `--json` prints.
#[derive(Serialize)]
pub struct Summary<'a> {
    /// [`Outcome::name`].
    pub outcome: &'static str,
    /// [`Outcome::code`].
    pub exit_code: u8,
    /// [`Outcome::whose`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whose: Option<&'static str>,
    /// Wall-clock seconds from the first guest instruction to the end.
    pub seconds: f64,
    /// Counters, absent if the vCPU could not be stopped.
    pub statistics: Option<&'a Statistics>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_as_documented() {
        let documented = include_str!("../../../docs/exit-codes.md");
        let cases = [
            Outcome::Machine(Ended::PowerOff),
            Outcome::Machine(Ended::Reset),
            Outcome::PowerCut,
            Outcome::Panicked,
            Outcome::TimedOut,
            Outcome::Signal(15),
        ];
        for outcome in cases {
            let row = format!("| {} | ", outcome.code());
            let line = documented.lines().find(|line| line.starts_with(&row));
            let line = line.unwrap_or_else(|| panic!("no row for {}", outcome.code()));
            assert!(line.contains(&format!("`{}`", outcome.name())), "{line}");
        }
    }

    #[test]
    fn whose_a_failure_is_is_told() {
        let failed = |whose| {
            let what = "a process is gone".to_owned();
            Outcome::Machine(Ended::Failed(vmm::Failure { whose, what }))
        };
        for (whose, name, words) in [
            (Whose::Guest, "guest", "the guest's doing"),
            (Whose::User, "user", "what was asked for"),
            (Whose::Host, "host", "the host's doing"),
            (Whose::Ours, "ring3", "a bug in ring3"),
        ] {
            let (outcome, documented) =
                (failed(whose), include_str!("../../../docs/exit-codes.md"));
            let message = outcome.message().expect("something to tell");
            assert!(message.starts_with("a process is gone (") && message.contains(words));
            assert_eq!(outcome.whose().map(Whose::name), Some(name));
            assert!(documented.contains(&format!("`{name}`")), "{name}");
        }
        assert_eq!(Outcome::Panicked.whose(), Some(Whose::Guest));
        assert_eq!(Outcome::Left.whose(), None);
    }

    #[test]
    fn debug_exit_is_never_zero() {
        let code = |value| Outcome::Machine(Ended::DebugExit(value)).code();
        assert_eq!((code(0), code(1), code(0x7f)), (1, 3, 0xff));
        assert_eq!(code(0x80), 1, "the top bit is lost, as in a process's exit code");
    }
}
