//! What the guest asks of the machine as a whole.

/// A request of the guest that no device can fulfil itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineEvent {
    /// ACPI S5: switch off.
    PowerOff,
    /// Start over from the reset vector (or boot again).
    Reset,
    /// This value (its low byte) was written to the debug exit port: leave the monitor. The custom
    /// is an exit status of value * 2 + 1, so that a test's zero is not success of the monitor.
    DebugExit(u8),
}

/// Acts on [`MachineEvent`]s. Called with the device locked, on the vCPU's thread: it should note
/// the event, stop the vCPUs soon, and return.
pub trait MachineEvents: Send + Sync {
    /// The guest asks for `event`.
    fn raise(&self, event: MachineEvent);
}
