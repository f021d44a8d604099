//! Tests of whole loads live in `tests/`; here are those of the parts.
