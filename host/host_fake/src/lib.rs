//! A deterministic in-memory host for tests.
