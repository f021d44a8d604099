//! Errors that hardware finds and tells of: machine checks, and memory that ECC has found wrong.

use chipset::{MachineError, Severity};
use serde::{Deserialize, Deserializer, de};

/// An error that the CPU tells of.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineCheck {
    /// How bad it is.
    #[serde(deserialize_with = "severity")]
    pub severity: Severity,
    /// The bank that notes it.
    pub bank: Option<usize>,
    /// The architecture's error code.
    pub code: Option<u16>,
    /// Guest-physical address of what it was with, if that is known.
    pub address: Option<u64>,
}

/// Memory that ECC has found wrong.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryError {
    /// How bad it is.
    #[serde(deserialize_with = "severity")]
    pub severity: Severity,
    /// Its guest-physical address.
    pub address: Option<u64>,
    /// Or the symbol of the guest's kernel that is there.
    pub symbol: Option<String>,
    /// Or the process in the guest that has a page there.
    pub process: Option<String>,
}

impl MachineCheck {
    /// A bank that is nobody's in particular.
    const BANK: usize = 3;
    /// Internal parity error (SDM table 15-9).
    const CODE: u16 = 0x0005;

    /// The error as the CPU meets it.
    pub fn error(&self) -> MachineError {
        let Self { severity, address, .. } = *self;
        let (bank, code) = (self.bank.unwrap_or(Self::BANK), self.code.unwrap_or(Self::CODE));
        MachineError { severity, bank, code, address }
    }

    pub(crate) fn problem(&self) -> Option<&'static str> {
        let there = self.bank.is_none_or(|bank| bank < MachineError::BANKS);
        (!there).then_some("bank: a CPU has the banks 0 to 9")
    }
}

impl MemoryError {
    /// The bank that a memory controller's errors are in.
    const BANK: usize = 7;

    /// The error as the CPU meets it, at this guest-physical address.
    pub fn error(&self, address: u64) -> MachineError {
        let code = match self.severity {
            // By the scrubber, on any channel; by a load of data; by a read, on any channel.
            Severity::Optional => 0x00cf,
            Severity::Required => 0x0134,
            Severity::Corrected | Severity::NoAction | Severity::Fatal => 0x009f,
        };
        MachineError { severity: self.severity, bank: Self::BANK, code, address: Some(address) }
    }

    pub(crate) fn problem(&self) -> Option<&'static str> {
        let given = [self.address.is_some(), self.symbol.is_some(), self.process.is_some()];
        match given.into_iter().filter(|given| *given).count() {
            1 => None,
            _ => Some("say address = 0x..., symbol = \"...\" or process = \"...\", one of them"),
        }
    }
}

fn severity<'de, D: Deserializer<'de>>(from: D) -> Result<Severity, D::Error> {
    Ok(match &*String::deserialize(from)? {
        "corrected" => Severity::Corrected,
        "no-action" => Severity::NoAction,
        "action-optional" => Severity::Optional,
        "action-required" => Severity::Required,
        "fatal" => Severity::Fatal,
        other => {
            return Err(de::Error::custom(format!(
                "severity `{other}`: write corrected, no-action, action-optional, action-required or fatal"
            )));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MachineAction, Scenario};

    fn action(on: &str, what: &str) -> Result<MachineAction, String> {
        let scenario = Scenario::parse(&format!("[[fault]]\non = '{on}'\ndo = {{ {what} }}"));
        Ok(scenario.map_err(|error| error.to_string())?.timed()[0].action.clone())
    }

    #[test]
    fn errors_are_understood() {
        let check = action("machine", "machine-check = { severity = 'fatal', bank = 9 }");
        let Ok(MachineAction::MachineCheck(check)) = check else { panic!("{check:?}") };
        let expected =
            MachineError { severity: Severity::Fatal, bank: 9, code: 0x0005, address: None };
        assert_eq!(check.error(), expected);
        let text = "memory-error = { severity = 'action-optional', symbol = 'jiffies' }";
        let Ok(MachineAction::MemoryError(memory)) = action("ram", text) else { panic!("{text}") };
        assert_eq!(memory.error(0x1040).address, Some(0x1040));
        assert_eq!((memory.error(0).bank, memory.error(0).code), (7, 0x00cf));
    }

    #[test]
    fn mistakes_are_named() {
        for (on, what, part) in [
            ("machine", "machine-check = { severity = 'bad' }", "action-required or fatal"),
            ("machine", "machine-check = { severity = 'fatal', bank = 10 }", "banks 0 to 9"),
            ("ram", "machine-check = { severity = 'fatal' }", "machine-check"),
            ("machine", "memory-error = { severity = 'fatal', address = 1 }", "memory-error"),
            ("ram", "memory-error = { severity = 'corrected' }", "one of them"),
            (
                "ram",
                "memory-error = { severity = 'fatal', address = 1, symbol = 'x' }",
                "one of them",
            ),
        ] {
            let error = action(on, what).expect_err(what);
            assert!(error.contains(part), "{what}: {error}");
        }
    }
}
