//! A case on both sides.

use crate::compare::differences;
use crate::interp::{InterpError, Interpreted, Interpreter};
use crate::runner::{NativeRunner, RunnerError};
use crate::state::{Case, Outcome};
use crate::vendor::Vendor;

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
            && let Some(reason) = self.vendor.is_stricter(case, &native, &interpreted.outcome)
        {
            interpreted.ignored.all = Some(reason);
            differences.clear();
        }
        Ok(Report { native, interpreted, differences })
    }
}
