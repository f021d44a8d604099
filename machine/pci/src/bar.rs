//! Base address registers: what a function decodes, as it declares it.

/// How many address bits a memory BAR has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarWidth {
    /// Below 4 GiB; one register.
    Bits32,
    /// Anywhere; two registers, the second holding address bits 63:32.
    Bits64,
}

/// A memory BAR (PCI 3.0 section 6.2.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Bytes: a power of two of at least 16.
    pub size: u64,
    /// Address bits.
    pub width: BarWidth,
    /// Whether reads have no side effects.
    pub prefetchable: bool,
}

impl Bar {
    /// A 64-bit memory BAR of `size` bytes that is not prefetchable.
    pub fn memory64(size: u64) -> Self {
        Self { size, width: BarWidth::Bits64, prefetchable: false }
    }

    /// A 32-bit memory BAR of `size` bytes that is not prefetchable.
    pub fn memory32(size: u64) -> Self {
        Self { size, width: BarWidth::Bits32, prefetchable: false }
    }

    /// Whether a register pair can express this BAR.
    pub(crate) fn is_valid(&self) -> bool {
        let fits = self.width == BarWidth::Bits64 || self.size <= 1 << 31;
        self.size.is_power_of_two() && self.size >= 16 && fits
    }

    /// Bits 3:0 of the register, which say what kind it is.
    pub(crate) fn kind_bits(&self) -> u32 {
        let width = match self.width {
            BarWidth::Bits32 => 0,
            BarWidth::Bits64 => 0b100,
        };
        width | u32::from(self.prefetchable) << 3
    }

    /// Registers it takes.
    pub(crate) fn registers(&self) -> usize {
        match self.width {
            BarWidth::Bits32 => 1,
            BarWidth::Bits64 => 2,
        }
    }
}
