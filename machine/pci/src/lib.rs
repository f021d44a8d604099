//! PCI.
