//! Services that are ready to use, and examples of how to write one.

pub mod integrity;
pub mod policy;
