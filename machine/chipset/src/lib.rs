//! The platform devices of the guest PC.
