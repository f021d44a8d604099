//! Interrupt messages, as they travel between I/O APIC, devices and local APICs (SDM 10.6, 10.11).

/// Every local APIC.
pub(crate) const BROADCAST: u32 = u32::MAX;

/// Which local APICs a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// The one with this APIC ID, or [`BROADCAST`].
    Physical(u32),
    /// Those whose logical destination register matches, or [`BROADCAST`].
    Logical(u32),
}

impl Destination {
    /// From the eight bits of xAPIC, I/O APIC and MSI.
    pub(crate) fn from_8_bits(id: u8, logical: bool) -> Self {
        let id = if id == 0xff { BROADCAST } else { u32::from(id) };
        Self::new(id, logical)
    }

    pub(crate) fn new(id: u32, logical: bool) -> Self {
        if logical { Self::Logical(id) } else { Self::Physical(id) }
    }
}

/// What a message does at its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// Interrupts every destination with the vector.
    Fixed,
    /// Interrupts the destination at the lowest priority.
    Lowest,
    /// System management interrupt: there is no SMM, it is ignored.
    Smi,
    /// Reserved encodings: ignored.
    Reserved,
    /// Non-maskable interrupt.
    Nmi,
    /// Resets the CPU's state and waits for start-up.
    Init,
    /// Start-up at page `vector`.
    StartUp,
    /// The 8259's vector.
    ExtInt,
}

impl Delivery {
    /// From the three-bit field.
    pub(crate) fn from_bits(bits: u64) -> Self {
        match bits & 7 {
            0 => Self::Fixed,
            1 => Self::Lowest,
            2 => Self::Smi,
            4 => Self::Nmi,
            5 => Self::Init,
            6 => Self::StartUp,
            7 => Self::ExtInt,
            _ => Self::Reserved,
        }
    }
}

/// What became of an interrupt. The more of it there is, the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Taken {
    /// Nothing takes it: it is lost.
    No,
    /// One like it waits already, and they are one.
    Merged,
    /// It waits, or has acted.
    Yes,
}

/// An interrupt message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) destination: Destination,
    pub(crate) delivery: Delivery,
    pub(crate) vector: u8,
    /// Level-triggered: its end is broadcast to the I/O APIC.
    pub(crate) level: bool,
}

impl Message {
    /// An MSI: `data` written at `address` (SDM 10.11).
    pub(crate) fn from_msi(address: u64, data: u32) -> Self {
        let logical = address & 1 << 2 != 0;
        Self {
            destination: Destination::from_8_bits((address >> 12) as u8, logical),
            delivery: Delivery::from_bits(u64::from(data) >> 8),
            vector: data as u8,
            level: data & 1 << 15 != 0,
        }
    }
}
