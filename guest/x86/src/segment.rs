//! Segment registers with their hidden part, and descriptors (SDM 3.4, 3.5).

/// A segment register: the visible selector and the hidden descriptor cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Selector: index, table indicator, RPL.
    pub selector: u16,
    /// Bits 8..16 of the descriptor's second word in 0..8 (type, S, DPL, P) and its bits 20..24 in
    /// 12..16 (AVL, L, D/B, G): the layout VMX calls access rights. See the constants below.
    pub attr: u16,
    /// Limit in bytes, granularity already applied, inclusive.
    pub limit: u32,
    /// Base address (GVA).
    pub base: u64,
}

/// `Segment::attr` bits.
pub mod attr {
    /// The four type bits.
    pub const TYPE: u16 = 0xf;
    /// Accessed (code and data).
    pub const ACCESSED: u16 = 1 << 0;
    /// Data: writable. Code: readable.
    pub const RW: u16 = 1 << 1;
    /// Data: expand-down. Code: conforming.
    pub const DC: u16 = 1 << 2;
    /// Code rather than data.
    pub const CODE: u16 = 1 << 3;
    /// Code or data rather than system.
    pub const S: u16 = 1 << 4;
    /// Shift of the two DPL bits.
    pub const DPL_SHIFT: u16 = 5;
    /// Present.
    pub const P: u16 = 1 << 7;
    /// 64-bit code.
    pub const L: u16 = 1 << 13;
    /// Default size 32 bits / big stack.
    pub const DB: u16 = 1 << 14;
    /// Granularity of the limit: 4 KB.
    pub const G: u16 = 1 << 15;
}

impl Segment {
    /// Descriptor privilege level.
    pub const fn dpl(&self) -> u8 {
        ((self.attr >> attr::DPL_SHIFT) & 3) as u8
    }
    /// Present bit; an unusable segment (null selector loaded) is not present.
    pub const fn present(&self) -> bool {
        self.attr & attr::P != 0
    }
    /// The four-bit type.
    pub const fn kind(&self) -> u8 {
        (self.attr & attr::TYPE) as u8
    }
    /// Requested privilege level of the selector.
    pub const fn rpl(&self) -> u8 {
        (self.selector & 3) as u8
    }
    /// Decodes an 8-byte descriptor; `base` gets 32 bits only (system descriptors of long mode add
    /// their upper half themselves).
    pub const fn from_descriptor(selector: u16, raw: u64) -> Self {
        let attr = ((raw >> 40) & 0xff | (raw >> 40) & 0xf000) as u16;
        let raw_limit = ((raw & 0xffff) | ((raw >> 32) & 0xf_0000)) as u32;
        let limit = if attr & attr::G != 0 { raw_limit << 12 | 0xfff } else { raw_limit };
        let base = ((raw >> 16) & 0xff_ffff) | ((raw >> 32) & 0xff00_0000);
        Self { selector, attr, limit, base }
    }
}

/// GDTR or IDTR.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRegister {
    /// Base address (GVA).
    pub base: u64,
    /// Limit in bytes, inclusive.
    pub limit: u16,
    #[doc(hidden)]
    pub pad: [u16; 3],
}
