//! A case on both sides.

use crate::compare::differences;
use crate::interp::{InterpError, Interpreted, Interpreter};
use crate::runner::{NativeRunner, RunnerError};
use crate::state::{Case, Outcome, Stop};
use crate::vendor::Vendor;
use x86::{Fault, vector};

/// Why cases cannot be checked.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The native side.
    #[error(transparent)]
    Native(#[from] RunnerError),
    /// The interpreter's side.
    #[error(transparent)]
    Interpreter(#[from] InterpError),
}

/// What both sides made of a case.
#[derive(Clone, Debug)]
pub struct Report {
    /// The host CPU.
    pub native: Outcome,
    /// The interpreter.
    pub interpreted: Interpreted,
    /// What differs, a line each.
    pub differences: Vec<String>,
}

/// Both sides.
pub struct Checker {
    native: NativeRunner,
    interpreter: Interpreter,
    vendor: Vendor,
}

impl Checker {
    /// Sets both sides up.
    ///
    /// # Errors
    /// The host lacks something.
    pub fn new() -> Result<Self, CheckError> {
        let (native, interpreter) = (NativeRunner::new()?, Interpreter::new()?);
        Ok(Self { native, interpreter, vendor: Vendor::of_host() })
    }

    /// Runs `case` on both sides.
    ///
    /// # Errors
    /// The native side failed.
    pub fn check(&mut self, case: &Case) -> Result<Report, CheckError> {
        let image = case.image();
        let native = self.native.run_on(case, &image)?;
        let mut interpreted = self.interpreter.run_on(case, &image);
        let mut differences = differences(&native, &interpreted.outcome, &interpreted.ignored);
        if !differences.is_empty()
            && let Some(reason) = self.excuse(case, &native, &interpreted.outcome)
        {
            interpreted.ignored.all = Some(reason);
            differences.clear();
        }
        Ok(Report { native, interpreted, differences })
    }

    /// Why two outcomes differ, if that says nothing about the interpreter.
    fn excuse(&self, case: &Case, native: &Outcome, other: &Outcome) -> Option<&'static str> {
        match other.stop {
            Stop::Fault(Fault { vector: vector::PF, address, .. })
                if self.native.has_of_its_own(address) =>
            {
                Some("comes upon the native process's own memory")
            }
            _ => self.vendor.is_stricter(case, native, other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::State;
    use x86::reg;

    #[test]
    fn the_native_process_s_own_memory_is_no_difference() {
        let mut checker = Checker::new().expect("the host has what it takes");
        let ours = 7_u64;
        let mut state = State::default();
        state.gpr[reg::RCX] = std::ptr::from_ref(&ours).addr() as u64;
        // mov rax, [rcx]
        let case = Case { state, code: vec![0x48, 0x8b, 0x01], background: 0, patches: vec![] };
        let report = checker.check(&case).expect("checked");
        assert_ne!(report.native.stop, report.interpreted.outcome.stop);
        assert!(report.differences.is_empty(), "{:#?}", report.differences);
        assert!(report.interpreted.ignored.all.is_some());
    }
}
