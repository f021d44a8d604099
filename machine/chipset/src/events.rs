//! What the guest asks of the machine as a whole.

/// A request of the guest that no device can fulfil itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineEvent {
    /// ACPI S5: switch off.
    PowerOff,
    /// Start over from the reset vector (or boot again).
    Reset,
    /// The test exit port was written: leave the monitor with this status.
    DebugExit(u8),
}

/// Acts on [`MachineEvent`]s. Called with the device locked, on the vCPU's thread: it should note
/// the event, stop the vCPUs soon, and return.
pub trait MachineEvents: Send + Sync {
    /// The guest asks for `event`.
    fn raise(&self, event: MachineEvent);
}
