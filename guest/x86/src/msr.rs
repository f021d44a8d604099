//! Model-specific register numbers (SDM vol. 4).

/// IA32 MSR `TSC`.
pub const TSC: u32 = 0x10;
/// IA32 MSR `APIC_BASE`.
pub const APIC_BASE: u32 = 0x1b;
/// IA32 MSR `SPEC_CTRL`.
pub const SPEC_CTRL: u32 = 0x48;
/// IA32 MSR `PRED_CMD`.
pub const PRED_CMD: u32 = 0x49;
/// IA32 MSR `TSC_ADJUST`.
pub const TSC_ADJUST: u32 = 0x3b;
/// IA32 MSR `BIOS_SIGN_ID`.
pub const BIOS_SIGN_ID: u32 = 0x8b;
/// IA32 MSR `MTRR_CAP`.
pub const MTRR_CAP: u32 = 0xfe;
/// IA32 MSR `ARCH_CAPABILITIES`.
pub const ARCH_CAPABILITIES: u32 = 0x10a;
/// IA32 MSR `SYSENTER_CS`.
pub const SYSENTER_CS: u32 = 0x174;
/// IA32 MSR `SYSENTER_ESP`.
pub const SYSENTER_ESP: u32 = 0x175;
/// IA32 MSR `SYSENTER_EIP`.
pub const SYSENTER_EIP: u32 = 0x176;
/// IA32 MSR `MCG_CAP`.
pub const MCG_CAP: u32 = 0x179;
/// IA32 MSR `MCG_STATUS`.
pub const MCG_STATUS: u32 = 0x17a;
/// IA32 MSR `MCG_CTL`.
pub const MCG_CTL: u32 = 0x17b;
/// IA32 MSR `MC0_CTL2`, the first of the machine-check banks'.
pub const MC0_CTL2: u32 = 0x280;
/// IA32 MSR `MC0_CTL`, the first of four registers for each machine-check bank: CTL, STATUS, ADDR, MISC.
pub const MC0_CTL: u32 = 0x400;
/// IA32 MSR `MISC_ENABLE`.
pub const MISC_ENABLE: u32 = 0x1a0;
/// IA32 MSR `PAT`.
pub const PAT: u32 = 0x277;
/// IA32 MSR `MTRR_DEF_TYPE`.
pub const MTRR_DEF_TYPE: u32 = 0x2ff;
/// IA32 MSR `TSC_DEADLINE`.
pub const TSC_DEADLINE: u32 = 0x6e0;
/// First of the x2APIC register MSRs; the register at MMIO offset `o` is `X2APIC + o / 16`.
pub const X2APIC: u32 = 0x800;
/// The in-service bits of vectors 0x80 to 0x9f.
pub const X2APIC_IN_SERVICE_80: u32 = 0x814;
/// IA32 MSR `X2APIC_LAST`.
pub const X2APIC_LAST: u32 = 0x8ff;
/// IA32 MSR `EFER`.
pub const EFER: u32 = 0xc000_0080;
/// IA32 MSR `STAR`.
pub const STAR: u32 = 0xc000_0081;
/// IA32 MSR `LSTAR`.
pub const LSTAR: u32 = 0xc000_0082;
/// IA32 MSR `CSTAR`.
pub const CSTAR: u32 = 0xc000_0083;
/// IA32 MSR `SFMASK`.
pub const SFMASK: u32 = 0xc000_0084;
/// IA32 MSR `FS_BASE`.
pub const FS_BASE: u32 = 0xc000_0100;
/// IA32 MSR `GS_BASE`.
pub const GS_BASE: u32 = 0xc000_0101;
/// IA32 MSR `KERNEL_GS_BASE`.
pub const KERNEL_GS_BASE: u32 = 0xc000_0102;
/// IA32 MSR `TSC_AUX`.
pub const TSC_AUX: u32 = 0xc000_0103;
/// IA32 MSR `PLATFORM_ID`.
pub const PLATFORM_ID: u32 = 0x17;
/// IA32 MSR `FEATURE_CONTROL`.
pub const FEATURE_CONTROL: u32 = 0x3a;
/// IA32 MSR `DEBUGCTL`.
pub const DEBUGCTL: u32 = 0x1d9;
/// First of the variable-range MTRRs: base, mask, base, mask...
pub const MTRR_PHYSBASE0: u32 = 0x200;
/// The eleven fixed-range MTRRs, by rising address.
pub const MTRR_FIXED: [u32; 11] =
    [0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f];
