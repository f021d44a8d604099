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

/// Types of system descriptors (SDM table 3-2).
pub mod kind {
    /// Available 16-bit TSS.
    pub const TSS16: u8 = 1;
    /// LDT.
    pub const LDT: u8 = 2;
    /// Busy 16-bit TSS.
    pub const TSS16_BUSY: u8 = 3;
    /// 16-bit call gate.
    pub const CALL16: u8 = 4;
    /// Task gate.
    pub const TASK: u8 = 5;
    /// 16-bit interrupt gate.
    pub const INTERRUPT16: u8 = 6;
    /// 16-bit trap gate.
    pub const TRAP16: u8 = 7;
    /// Available 32-bit or 64-bit TSS.
    pub const TSS: u8 = 9;
    /// Busy 32-bit or 64-bit TSS.
    pub const TSS_BUSY: u8 = 11;
    /// 32-bit or 64-bit call gate.
    pub const CALL: u8 = 12;
    /// 32-bit or 64-bit interrupt gate.
    pub const INTERRUPT: u8 = 14;
    /// 32-bit or 64-bit trap gate.
    pub const TRAP: u8 = 15;
}

/// A gate of the IDT, GDT or LDT (SDM 5.8.3, 6.11, 6.14.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate {
    /// Selector of the target code segment or TSS.
    pub selector: u16,
    /// Target offset in the code segment.
    pub offset: u64,
    /// Type, see [`kind`]; [`Gate::NOT_SYSTEM`] for a descriptor that is no gate at all.
    pub kind: u8,
    /// Privilege level a caller needs.
    pub dpl: u8,
    /// Present bit.
    pub present: bool,
    /// Interrupt stack table index, zero for none (long mode).
    pub ist: u8,
    /// Stack words a call gate copies (legacy modes).
    pub parameters: u8,
}

impl Gate {
    /// [`Gate::kind`] of a code or data descriptor: matches no type.
    pub const NOT_SYSTEM: u8 = 0x10;

    /// Decodes the low 8 bytes; a 16-bit gate has a 16-bit offset.
    pub const fn from_descriptor(raw: u64) -> Self {
        let kind = if raw >> 44 & 1 == 0 { (raw >> 40 & 0xf) as u8 } else { Self::NOT_SYSTEM };
        let wide = kind & 8 != 0;
        Self {
            selector: (raw >> 16) as u16,
            offset: (raw & 0xffff) | if wide { raw >> 32 & 0xffff_0000 } else { 0 },
            kind,
            dpl: (raw >> 45 & 3) as u8,
            present: raw >> 47 & 1 != 0,
            ist: (raw >> 32 & 7) as u8,
            parameters: (raw >> 32 & 0x1f) as u8,
        }
    }
    /// Adds the upper half of a long-mode gate's offset.
    pub const fn with_high(mut self, high: u64) -> Self {
        self.offset = self.offset & 0xffff_ffff | high << 32;
        self
    }
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
    /// A system descriptor (LDT, TSS, gate) rather than code or data.
    pub const fn is_system(&self) -> bool {
        self.attr & attr::S == 0
    }
    /// A code segment.
    pub const fn is_code(&self) -> bool {
        self.attr & (attr::S | attr::CODE) == attr::S | attr::CODE
    }
    /// A conforming code segment: callable from outer levels, runs at the caller's level.
    pub const fn is_conforming(&self) -> bool {
        self.is_code() && self.attr & attr::DC != 0
    }
    /// Data, or code that may be read.
    pub const fn is_readable(&self) -> bool {
        !self.is_system() && self.attr & (attr::CODE | attr::RW) != attr::CODE
    }
    /// Data that may be written.
    pub const fn is_writable(&self) -> bool {
        self.attr & (attr::S | attr::CODE | attr::RW) == attr::S | attr::RW
    }
    /// What a null selector leaves in the register: unusable, but the DPL remembers the level,
    /// because the DPL of SS is the current privilege level.
    pub const fn null(selector: u16, dpl: u8) -> Self {
        Self { selector, attr: (dpl as u16 & 3) << attr::DPL_SHIFT, limit: 0, base: 0 }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_code_and_data() {
        let code = Segment::from_descriptor(0x2b, 0x00af_fb00_0000_ffff);
        assert_eq!((code.base, code.limit, code.dpl(), code.rpl()), (0, u32::MAX, 3, 3));
        assert!(code.is_code() && code.is_readable() && code.present());
        assert!(!code.is_writable() && !code.is_conforming() && !code.is_system());
        assert_eq!(code.attr & (attr::L | attr::DB), attr::L);
        let data = Segment::from_descriptor(0x10, 0x1240_9334_5678_0fff);
        assert_eq!((data.base, data.limit), (0x1234_5678, 0xfff));
        assert!(data.is_writable() && !data.is_code());
    }

    #[test]
    fn a_null_selector_remembers_only_the_level() {
        let null = Segment::null(2, 2);
        assert_eq!((null.dpl(), null.rpl(), null.present(), null.base), (2, 2, false, 0));
        assert!(!null.is_readable() && !null.is_writable());
    }

    #[test]
    fn gates() {
        let wide = Gate::from_descriptor(0x8765_ee03_0008_4321).with_high(0xffff_ffff);
        let expected = Gate {
            selector: 8,
            offset: 0xffff_ffff_8765_4321,
            kind: kind::INTERRUPT,
            dpl: 3,
            present: true,
            ist: 3,
            parameters: 3,
        };
        assert_eq!(wide, expected);
        let narrow = Gate::from_descriptor(0x8765_0600_0008_4321);
        assert_eq!((narrow.offset, narrow.kind), (0x4321, kind::INTERRUPT16));
        assert!(!narrow.present);
        assert_eq!(Gate::from_descriptor(0x00af_9b00_0000_ffff).kind, Gate::NOT_SYSTEM);
    }
}
