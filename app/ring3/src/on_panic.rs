//! `--on-panic`: what happens when the guest's kernel says that it has crashed.

use clap::{Args, ValueEnum};

/// What happens when the guest's kernel crashes, as an option.
#[derive(Clone, Copy, Debug, Args)]
pub struct PanicOptions {
    /// What happens when the guest's kernel says that it has crashed
    ///
    /// It says so by a pvpanic device (PCI 1b36:0011), for which it needs its driver: Linux's module pvpanic-pci.
    #[arg(long, value_enum, default_value_t = OnPanic::Ignore)]
    pub on_panic: OnPanic,
}

/// What happens when the guest's kernel crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnPanic {
    /// There is no such device; the kernel does what its own parameters say
    Ignore,
    /// The machine ends, with exit code 8
    Stop,
}
