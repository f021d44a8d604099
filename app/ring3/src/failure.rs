//! Why ring3 itself ends without a guest having ended: one line, and an exit code.

use std::fmt;

use vmm::Whose;

/// An error on its way to the user.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// Process exit code.
    pub code: u8,
    message: String,
}

impl Failure {
    /// The command line is wrong: exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { code: 2, message: message.into() }
    }
    /// The same with another exit code.
    pub fn with_code(self, code: u8) -> Self {
        Self { code, ..self }
    }
    /// The host failed: exit code 1.
    pub fn host(message: impl Into<String>) -> Self {
        Self { code: 1, message: message.into() }
    }
    /// ring3 failed: exit code 1, and the message says so.
    pub fn bug(message: impl fmt::Display) -> Self {
        Self::host(format!("{message} ({})", Whose::Ours))
    }
}

impl From<vmm::Error> for Failure {
    fn from(error: vmm::Error) -> Self {
        match error.whose() {
            Whose::User => Self::usage(error.to_string()),
            Whose::Host | Whose::Guest => Self::host(error.to_string()),
            Whose::Ours => Self::bug(error.to_string()),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
