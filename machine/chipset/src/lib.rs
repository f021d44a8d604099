//! The platform devices of the guest PC: interrupt controllers, timers, clock, serial port, power.
//!
//! Devices here know no process, no thread and no engine. Time comes from [`host::Clock`];
//! whoever keeps time asks to be called through [`bus::Timed`], and the machine's timer thread
//! does so by way of [`TimerWheel`]. CPUs meet their interrupts through [`CpuInterrupts`].
//!
//! Lock order, from first taken to last:
//!
//! ```text
//! device (its bus mutex)
//!   device shared behind it (PIT behind port 0x61, 8042 behind its ports)
//!     I/O APIC and 8259s (one mutex)
//!       a local APIC (one at a time)
//!         machine-check banks
//!         Kicker, Rearm (must take no lock of the machine)
//! ```
//!
//! Nothing calls back up: what a local APIC wants of the others it returns as an effect, which is
//! acted on after its lock is released. [`MachineEvents`] is called with a device locked.

mod alarm;
mod cpu;
mod events;
pub mod fw_cfg;
pub mod hpet;
pub mod i8042;
mod interrupts;
pub mod ioapic;
mod kvm_clock;
mod lapic;
mod machine_check;
pub mod pic;
pub mod pit;
mod platform;
pub mod power;
mod put_off_eoi;
pub mod rtc;
mod steal_time;
pub mod testdev;
mod time;
mod timers;
pub mod uart;

#[cfg(test)]
mod tests;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use contract::pending;
pub use cpu::CpuInterrupts;
pub use events::{MachineEvent, MachineEvents};
pub use interrupts::{InterruptController, NoSuchGsi, TIMER_GSI};
pub use kvm_clock::KvmClock;
pub use machine_check::{Logged, MachineError, Severity};
pub use platform::{Platform, PlatformError, Settings, Surroundings};
pub use power::PowerManagement;
pub use put_off_eoi::PutOffEoi;
pub use steal_time::StealTime;
pub use timers::TimerWheel;
pub use uart::{SerialOutput, Uart};

#[cfg(test)]
host::choose!(host_linux::Linux);

/// Locks. A poisoned lock means a device panicked, which is our bug: the panic has been reported,
/// and the state is still the best there is.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
