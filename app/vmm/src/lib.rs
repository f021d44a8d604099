//! From a description to running parts.
