//! Runs single vector instructions on the host CPU.
