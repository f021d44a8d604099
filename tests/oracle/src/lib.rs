//! Differential tests: the interpreter against the host CPU.
