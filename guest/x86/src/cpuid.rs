//! The CPUID model: which CPU the guest believes it has (SDM vol. 2A, CPUID; tables 3-8 to 3-20).
//!
//! The model is one fixed Intel server part, so that a guest sees the same machine on every
//! host, minus the instructions the host lacks: whatever user code can execute must be something
//! the host executes too, because engines hand such instructions to it. Privileged features
//! (paging, local APIC, TSC deadline) are ours and do not depend on the host.
//!
//! A bit is set only if the reference CPU implements what it promises. Left out on purpose:
//! AVX-512, AMX, protection keys, CET, LA57, XSAVES, TSX, MONITOR, VMX, user interrupts, PMU.
//! [`ARCH_CAPABILITIES`] declares the guest not vulnerable to the speculation flaws whose software
//! mitigations cost most, and the enhanced IBRS that lets kernels do without retpolines.
//!
//! Bits that follow the CPU's own state (OSXSAVE, the XSAVE area size for the current XCR0) are
//! overlaid by the CPU.

use crate::kvm;

/// Value of the IA32_ARCH_CAPABILITIES MSR, read-only (SDM vol. 4, table 2-2): RDCL_NO, IBRS_ALL,
/// SKIP_L1DFL_VMENTRY, SSB_NO, MDS_NO, IF_PSCHANGE_MC_NO, TAA_NO, SBDR_SSDP_NO, FBSDP_NO,
/// PSDP_NO, BHI_NO, PBRSB_NO, GDS_NO, RFDS_NO, ITS_NO.
pub const ARCH_CAPABILITIES: u64 =
    bits(&[0, 1, 3, 4, 5, 6, 8, 13, 14, 15, 20, 24, 26, 27]) as u64 | 1 << 62;

/// Frequency of the core crystal clock leaf 0x15 reports, in hertz. Kernels take it to be
/// the frequency the local APIC timer counts at, before its divider.
pub const CRYSTAL_HZ: u32 = 25_000_000;

/// Physical address width, in bits.
pub const PHYSICAL_ADDRESS_BITS: u32 = 46;
/// Linear address width, in bits.
pub const LINEAR_ADDRESS_BITS: u32 = 48;

/// Highest basic leaf.
const MAX_BASIC: u32 = 0x16;
/// Highest extended leaf.
const MAX_EXTENDED: u32 = 0x8000_0008;
/// First and highest hypervisor leaf.
const HYPERVISOR: u32 = 0x4000_0000;
/// How many machines of ours the CPU is inside of, in EAX.
const DEPTH: u32 = 0x4000_0001;
/// Our name in the first.
const NAME: &[u8; 12] = b"ring3ring3vm";
const MAX_HYPERVISOR: u32 = 0x4000_0010;
/// The leaf of KVM's features.
const KVM_FEATURES: u32 = kvm::LEAF + 1;
/// Family 6, model 79, stepping 1 in the encoding of leaf 1 EAX: a Broadwell server. Programs choose code by the
/// model as well as by feature bits (GCC's `target_clones("arch=...")` does), so it is one that had
/// nothing that is left out here; a later one would have them execute AVX-512, whose state no guest keeps.
const SIGNATURE: u32 = 0x0004_06f1;
/// Bytes a CLFLUSH flushes, in units of 8.
const CLFLUSH_QWORDS: u32 = 8;

/// What the CPUID instruction leaves in the registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuidResult {
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
}

impl CpuidResult {
    const fn new(eax: u32, ebx: u32, ecx: u32, edx: u32) -> Self {
        Self { eax, ebx, ecx, edx }
    }
}

/// A word with the given bits set.
const fn bits(positions: &[u32]) -> u32 {
    let mut word = 0;
    let mut i = 0;
    while i < positions.len() {
        word |= 1 << positions[i];
        i += 1;
    }
    word
}

/// Leaf 1 ECX, instructions of the host: SSE3, PCLMULQDQ, SSSE3, FMA, CMPXCHG16B, SSE4.1, SSE4.2,
/// MOVBE, POPCNT, AES, AVX, F16C, RDRAND.
const LEAF1_ECX_HOST: u32 = bits(&[0, 1, 9, 12, 13, 19, 20, 22, 23, 25, 28, 29, 30]);
/// Leaf 1 ECX, ours: PCID, x2APIC, TSC-deadline, XSAVE, hypervisor present.
const LEAF1_ECX_OURS: u32 = bits(&[17, 21, 24, 26, 31]);
/// Leaf 1 EDX: FPU, DE, PSE, TSC, MSR, PAE, MCE, CX8, APIC, SEP, MTRR, PGE, MCA, CMOV, PAT,
/// CLFSH, MMX, FXSR, SSE, SSE2. Every 64-bit host has the instructions among them.
const LEAF1_EDX: u32 =
    bits(&[0, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 19, 23, 24, 25, 26]);
/// Leaf 1 EDX: more than one logical CPU in the package.
const LEAF1_EDX_HTT: u32 = 1 << 28;
/// Leaf 7 EBX, instructions of the host: FSGSBASE, BMI1, AVX2, BMI2, ERMS, RDSEED, ADX,
/// CLFLUSHOPT, CLWB, SHA.
const LEAF7_EBX_HOST: u32 = bits(&[0, 3, 5, 8, 9, 18, 19, 23, 24, 29]);
/// Leaf 7 EBX, ours: TSC_ADJUST, SMEP, INVPCID, SMAP, and bit 13: FPU CS and DS are deprecated.
const LEAF7_EBX_OURS: u32 = bits(&[1, 7, 10, 13, 20]);
/// Leaf 7 ECX, instructions of the host: RDPID.
const LEAF7_ECX_HOST: u32 = bits(&[22]);
/// Leaf 7 ECX, ours: UMIP.
const LEAF7_ECX_OURS: u32 = bits(&[2]);
/// Leaf 7 EDX, of the host: fast short REP MOVSB.
const LEAF7_EDX_HOST: u32 = bits(&[4]);
/// Leaf 7 EDX, ours: SPEC_CTRL and PRED_CMD, STIBP, ARCH_CAPABILITIES.
const LEAF7_EDX_OURS: u32 = bits(&[26, 27, 29]);
/// Highest subleaf of leaf 7.
const LEAF7_SUBLEAVES: u32 = 2;
/// Leaf 7 subleaf 1 EAX, ours: fast short REP STOSB. Kernels that have it clear memory by that instruction. Others
/// do so by loops of stores, which take several times as long here, as each store is translated by itself.
const LEAF7_1_EAX_OURS: u32 = bits(&[11]);
/// Leaf 7 subleaf 2 EDX, ours: SPEC_CTRL has BHI_DIS_S. Kernels that have it need not clear the
/// branch history by a loop of jumps at every entry, which a translator would pay for.
const LEAF7_2_EDX: u32 = bits(&[4]);
/// Leaf 0x8000_0001 ECX, instructions of the host: LAHF in 64-bit mode, LZCNT, PREFETCHW.
const EXT1_ECX_HOST: u32 = bits(&[0, 5, 8]);
/// Leaf 0x8000_0001 EDX: SYSCALL, NX, 1 GiB pages, RDTSCP, long mode.
const EXT1_EDX: u32 = bits(&[11, 20, 26, 27, 29]);
/// AVX in leaf 1 ECX: everything VEX-encoded on vectors needs it.
const AVX: u32 = 1 << 28;
/// Leaf 1 ECX bits without meaning where AVX is missing: FMA, F16C.
const NEEDS_AVX: u32 = bits(&[12, 29]);
/// Leaf 7 EBX bits without meaning where AVX is missing: AVX2.
const AVX2: u32 = 1 << 5;

/// What is asked of the model besides the host's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Frequency of the time-stamp counter the guest sees, in hertz.
    pub tsc_hz: u64,
    /// Number of logical CPUs, at least one: cores of one package, one thread each.
    pub cpus: u32,
    /// What of KVM's interface the machine has, see [`kvm::feature`] and [`crate::paravirt::feature`]: nothing, not even its name, if zero.
    pub kvm_features: u64,
}

/// The features of a guest CPU, made once per machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    settings: Settings,
    clock: ClockRatio,
    leaf1_ecx: u32,
    leaf7: CpuidResult,
    ext1_ecx: u32,
    depth: u32,
}

/// How many machines of ours a CPU with this CPUID is inside of, one in the other: zero for none.
pub fn depth(host: impl Fn(u32, u32) -> CpuidResult) -> u32 {
    const HYPERVISOR_PRESENT: u32 = 1 << 31;
    let present = host(1, 0).ecx & HYPERVISOR_PRESENT != 0;
    let named = |CpuidResult { ebx, ecx, edx, .. }| [ebx, ecx, edx] == words(NAME);
    if present && named(host(HYPERVISOR, 0)) { host(DEPTH, 0).eax } else { 0 }
}

impl Model {
    /// The model on a host whose CPUID is `host(leaf, subleaf)`.
    pub fn new(host: impl Fn(u32, u32) -> CpuidResult, settings: Settings) -> Self {
        let basic = host(1, 0);
        let max_leaf = host(0, 0).eax;
        let structured = if max_leaf >= 7 { host(7, 0) } else { CpuidResult::default() };
        let extended = host(0x8000_0001, 0);
        let mut leaf1_ecx = basic.ecx & LEAF1_ECX_HOST;
        let mut leaf7_ebx = structured.ebx & LEAF7_EBX_HOST;
        if leaf1_ecx & AVX == 0 {
            leaf1_ecx &= !NEEDS_AVX;
            leaf7_ebx &= !AVX2;
        }
        Self {
            settings,
            clock: ClockRatio::of(settings.tsc_hz),
            leaf1_ecx: leaf1_ecx | LEAF1_ECX_OURS,
            leaf7: CpuidResult {
                eax: LEAF7_SUBLEAVES,
                ebx: leaf7_ebx | LEAF7_EBX_OURS,
                ecx: structured.ecx & LEAF7_ECX_HOST | LEAF7_ECX_OURS,
                edx: structured.edx & LEAF7_EDX_HOST | LEAF7_EDX_OURS,
            },
            ext1_ecx: extended.ecx & EXT1_ECX_HOST,
            depth: depth(host).saturating_add(1),
        }
    }

    /// What CPUID gives for `leaf` (EAX) and `subleaf` (ECX) on the CPU with the given APIC
    /// identifier. A basic or extended leaf above the highest gives the highest basic leaf.
    pub fn query(&self, leaf: u32, subleaf: u32, apic_id: u32) -> CpuidResult {
        match leaf {
            0..=MAX_BASIC => self.basic(leaf, subleaf, apic_id),
            HYPERVISOR..=0x4fff_ffff => self.hypervisor(leaf),
            0x8000_0000..=MAX_EXTENDED => self.extended(leaf),
            _ => self.basic(MAX_BASIC, subleaf, apic_id),
        }
    }

    fn basic(&self, leaf: u32, subleaf: u32, apic_id: u32) -> CpuidResult {
        match leaf {
            0x0 => vendor(MAX_BASIC, b"GenuineIntel"),
            0x1 => self.signature_and_features(apic_id),
            // The same caches as leaf 4: 2 MiB L2 in 8 ways (0x7d), 32 KiB L1i (0x30) and L1d (0x2c) in 8, 24 MiB L3 in
            // 24 (0xec). For 0xff, "see leaf 4", glibc asks for all of that leaf each of the twelve times that
            // it asks for this one, in each program that starts, and CPUID traps.
            0x2 => CpuidResult::new(0x2c30_7d01, 0, 0, 0xec),
            0x4 => self.cache(subleaf),
            // The local APIC timer runs in every power state.
            0x6 => CpuidResult::new(1 << 2, 0, 0, 0),
            0x7 if subleaf == 0 => self.leaf7,
            0x7 if subleaf == 1 => CpuidResult::new(LEAF7_1_EAX_OURS, 0, 0, 0),
            0x7 if subleaf == 2 => CpuidResult::new(0, 0, 0, LEAF7_2_EDX),
            0xb => self.topology(subleaf, apic_id),
            0xd => xsave(subleaf, self.leaf1_ecx & AVX != 0),
            0x15 => CpuidResult::new(self.clock.denominator, self.clock.numerator, CRYSTAL_HZ, 0),
            0x16 => self.frequencies(),
            _ => CpuidResult::default(),
        }
    }

    fn signature_and_features(&self, apic_id: u32) -> CpuidResult {
        let cpus = self.settings.cpus;
        let ids = cpus.next_power_of_two().min(255);
        let ebx = (apic_id & 0xff) << 24 | ids << 16 | CLFLUSH_QWORDS << 8;
        let htt = if cpus > 1 { LEAF1_EDX_HTT } else { 0 };
        CpuidResult::new(SIGNATURE, ebx, self.leaf1_ecx, LEAF1_EDX | htt)
    }

    /// Leaf 4: 32 KiB L1d and 32 KiB L1i, 2 MiB L2, 24 MiB L3. Sizes and ways that leaf 2 has descriptors for. CPUs share no
    /// cache: if they did, a scheduler would wake a program on any CPU that is idle. To wake another vCPU takes some 50 us, and
    /// a program that moves there has its host mappings made anew.
    fn cache(&self, subleaf: u32) -> CpuidResult {
        let cores = self.settings.cpus.next_power_of_two() - 1;
        let eax = |kind: u32, level: u32| kind | level << 5 | 1 << 8 | (cores & 0x3f) << 26;
        let ways = |ways: u32| (ways - 1) << 22 | 63;
        match subleaf {
            0 => CpuidResult::new(eax(1, 1), ways(8), 63, 0),
            1 => CpuidResult::new(eax(2, 1), ways(8), 63, 0),
            2 => CpuidResult::new(eax(3, 2), ways(8), 4095, 0),
            3 => CpuidResult::new(eax(3, 3), ways(24), 16383, 0),
            _ => CpuidResult::default(),
        }
    }

    /// Leaf 0xB: threads (one per core), then cores.
    fn topology(&self, subleaf: u32, apic_id: u32) -> CpuidResult {
        let core_bits = self.settings.cpus.next_power_of_two().trailing_zeros();
        match subleaf {
            0 => CpuidResult::new(0, 1, 1 << 8, apic_id),
            1 => CpuidResult::new(core_bits, self.settings.cpus, 2 << 8 | 1, apic_id),
            _ => CpuidResult::new(0, 0, subleaf & 0xff, apic_id),
        }
    }

    /// Leaf 0x16, in MHz: base, maximum, bus.
    fn frequencies(&self) -> CpuidResult {
        let mhz = u32::try_from(self.settings.tsc_hz / 1_000_000).unwrap_or(0) & 0xffff;
        CpuidResult::new(mhz, mhz, 100, 0)
    }

    fn hypervisor(&self, leaf: u32) -> CpuidResult {
        match leaf {
            HYPERVISOR => {
                let [b, c, d] = words(NAME);
                CpuidResult::new(MAX_HYPERVISOR, b, c, d)
            }
            DEPTH => CpuidResult::new(self.depth, 0, 0, 0),
            // Time-stamp counter and local APIC timer, in kHz.
            MAX_HYPERVISOR => {
                let khz = u32::try_from(self.settings.tsc_hz / 1000).unwrap_or(0);
                CpuidResult::new(khz, CRYSTAL_HZ / 1000, 0, 0)
            }
            kvm::LEAF if self.settings.kvm_features != 0 => {
                let [b, c, d] = words(kvm::SIGNATURE);
                CpuidResult::new(kvm::LEAF + 1, b, c, d)
            }
            KVM_FEATURES => {
                let features = self.settings.kvm_features;
                CpuidResult::new(features as u32, 0, 0, (features >> 32) as u32)
            }
            _ => CpuidResult::default(),
        }
    }

    fn extended(&self, leaf: u32) -> CpuidResult {
        match leaf {
            0x8000_0000 => CpuidResult::new(MAX_EXTENDED, 0, 0, 0),
            0x8000_0001 => CpuidResult::new(0, 0, self.ext1_ecx, EXT1_EDX),
            0x8000_0002..=0x8000_0004 => brand(leaf - 0x8000_0002),
            // 2 MiB L2, 16-way, 64-byte lines.
            0x8000_0006 => CpuidResult::new(0, 0, 2048 << 16 | 8 << 12 | 64, 0),
            // Invariant TSC.
            0x8000_0007 => CpuidResult::new(0, 0, 0, 1 << 8),
            0x8000_0008 => {
                CpuidResult::new(LINEAR_ADDRESS_BITS << 8 | PHYSICAL_ADDRESS_BITS, 0, 0, 0)
            }
            _ => CpuidResult::default(),
        }
    }
}

/// Leaf 0xD: x87, SSE and AVX in the standard layout, with XSAVEOPT.
fn xsave(subleaf: u32, avx: bool) -> CpuidResult {
    let (components, size) = if avx { (7, 832) } else { (3, 576) };
    match subleaf {
        0 => CpuidResult::new(components, size, size, 0),
        1 => CpuidResult::new(1, 0, 0, 0),
        2 if avx => CpuidResult::new(256, 576, 0, 0),
        _ => CpuidResult::default(),
    }
}

/// EAX with a twelve-letter name in EBX, EDX, ECX.
fn vendor(eax: u32, name: &[u8; 12]) -> CpuidResult {
    let [b, d, c] = words(name);
    CpuidResult::new(eax, b, c, d)
}

fn words(text: &[u8; 12]) -> [u32; 3] {
    core::array::from_fn(|i| word(text, i))
}

fn word(text: &[u8], index: usize) -> u32 {
    let byte = |i| u32::from(text[4 * index + i]);
    byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24
}

fn brand(part: u32) -> CpuidResult {
    const NAME: &[u8; 48] =
        b"ring3 virtual CPU\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let at = |i| word(NAME, 4 * part as usize + i);
    CpuidResult::new(at(0), at(1), at(2), at(3))
}

/// TSC frequency over crystal frequency, as leaf 0x15 gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ClockRatio {
    numerator: u32,
    denominator: u32,
}

impl ClockRatio {
    /// The closest ratio a kernel can use: Linux multiplies the numerator by the crystal's kHz in
    /// 32 bits.
    fn of(tsc_hz: u64) -> Self {
        let crystal = u64::from(CRYSTAL_HZ);
        let largest = u64::from(u32::MAX) / (crystal / 1000);
        let mut best = Self { numerator: 1, denominator: 1 };
        let mut best_error = u64::MAX;
        for denominator in 1..=2000 {
            let numerator = (tsc_hz * denominator + crystal / 2) / crystal;
            if numerator > largest {
                break;
            }
            let error = (crystal * numerator / denominator).abs_diff(tsc_hz);
            if error < best_error {
                best_error = error;
                best = Self { numerator: numerator as u32, denominator: denominator as u32 };
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paravirt::feature;

    /// A host that has every bit set: what the guest then sees is what we advertise at most.
    fn everything(_: u32, _: u32) -> CpuidResult {
        CpuidResult::new(u32::MAX, u32::MAX, u32::MAX, u32::MAX)
    }
    /// A host with nothing beyond the x86-64 baseline.
    fn nothing(_: u32, _: u32) -> CpuidResult {
        CpuidResult::default()
    }
    const ONE: Settings = Settings { tsc_hz: 2_000_000_000, cpus: 1, kvm_features: 0 };

    #[test]
    fn hides_what_is_not_implemented() {
        let model = Model::new(everything, ONE);
        let leaf1 = model.query(1, 0, 0);
        for (name, bit) in [("MONITOR", 3), ("VMX", 5), ("OSXSAVE", 27), ("PDCM", 15)] {
            assert_eq!(leaf1.ecx >> bit & 1, 0, "{name}");
        }
        let leaf7 = model.query(7, 0, 0);
        for (name, bit) in [("HLE", 4), ("RTM", 11), ("AVX512F", 16), ("PT", 25)] {
            assert_eq!(leaf7.ebx >> bit & 1, 0, "{name}");
        }
        for (name, bit) in [("PKU", 3), ("WAITPKG", 5), ("CET_SS", 7), ("LA57", 16)] {
            assert_eq!(leaf7.ecx >> bit & 1, 0, "{name}");
        }
        for (name, bit) in [("UINTR", 5), ("IBT", 20), ("AMX_TILE", 24), ("SERIALIZE", 14)] {
            assert_eq!(leaf7.edx >> bit & 1, 0, "{name}");
        }
        assert_eq!(
            model.query(7, 1, 0),
            CpuidResult::new(1 << 11, 0, 0, 0),
            "no AVX-VNNI, FRED, LAM"
        );
        assert_eq!(model.query(7, 3, 0), CpuidResult::default());
        assert_eq!(model.query(0xa, 0, 0), CpuidResult::default(), "no PMU");
        let compaction_and_supervisor = model.query(0xd, 1, 0).eax & 0b1010;
        assert_eq!(compaction_and_supervisor, 0);
    }

    /// Compilers know CPUs by their models, and what each can execute.
    #[test]
    fn the_model_has_no_vectors_that_are_not_advertised() {
        const AVX512: [u32; 15] = [
            0x55, 0x57, 0x66, 0x6a, 0x6c, 0x7d, 0x7e, 0x85, 0x8c, 0x8d, 0x8f, 0xa7, 0xad, 0xae,
            0xcf,
        ];
        let signature = Model::new(everything, ONE).query(1, 0, 0).eax;
        let model = signature >> 4 & 0xf | signature >> 12 & 0xf0;
        assert!(signature >> 8 & 0xf == 6 && !AVX512.contains(&model), "model {model:#x}");
    }

    #[test]
    fn follows_the_host_in_what_user_code_can_execute() {
        let poor = Model::new(nothing, ONE);
        assert_eq!(poor.query(1, 0, 0).ecx, LEAF1_ECX_OURS);
        assert_eq!(poor.query(7, 0, 0).ebx, LEAF7_EBX_OURS);
        assert_eq!(poor.query(0xd, 0, 0).eax, 3, "no AVX state");
        assert_eq!(poor.query(0xd, 2, 0), CpuidResult::default());
        let rich = Model::new(everything, ONE);
        assert_ne!(rich.query(1, 0, 0).ecx & AVX, 0);
        assert_eq!(rich.query(0xd, 0, 0).eax, 7);
    }

    #[test]
    fn without_avx_nothing_that_needs_it() {
        let host = |leaf, _| match leaf {
            1 => CpuidResult { ecx: !AVX, ..CpuidResult::default() },
            _ => everything(leaf, 0),
        };
        let model = Model::new(host, ONE);
        assert_eq!(model.query(1, 0, 0).ecx & (AVX | NEEDS_AVX), 0);
        assert_eq!(model.query(7, 0, 0).ebx & AVX2, 0);
    }

    #[test]
    fn names_and_limits() {
        let model = Model::new(everything, ONE);
        let leaf0 = model.query(0, 0, 0);
        assert_eq!(leaf0, CpuidResult::new(0x16, 0x756e_6547, 0x6c65_746e, 0x4965_6e69));
        assert_eq!(model.query(0x4000_0000, 0, 0).ebx.to_le_bytes(), *b"ring");
        assert_eq!(model.query(0x8000_0002, 0, 0).eax.to_le_bytes(), *b"ring");
        assert_eq!(model.query(0x8000_0008, 0, 0).eax, 0x302e);
        assert_eq!(model.query(0x17, 0, 0), model.query(0x16, 0, 0), "above the highest leaf");
        assert_eq!(model.query(0x8000_0009, 0, 0), model.query(0x16, 0, 0));
    }

    #[test]
    fn machines_inside_of_each_other_are_counted() {
        assert_eq!(depth(|_, _| CpuidResult::default()), 0);
        let outer = Model::new(|_, _| CpuidResult::default(), ONE);
        let within = |model: &Model| depth(|leaf, subleaf| model.query(leaf, subleaf, 0));
        assert_eq!(within(&outer), 1);
        let inner = Model::new(|leaf, subleaf| outer.query(leaf, subleaf, 0), ONE);
        assert_eq!(within(&inner), 2);
    }

    #[test]
    fn kvm_is_named_only_where_it_is_offered() {
        let none = Model::new(everything, ONE);
        for leaf in [kvm::LEAF, kvm::LEAF + 1, kvm::LEAF + 2] {
            assert_eq!(none.query(leaf, 0, 0), CpuidResult::default());
        }
        let clock = Settings { kvm_features: kvm::CLOCK_FEATURES, ..ONE };
        let model = Model::new(everything, clock);
        let name = model.query(kvm::LEAF, 0, 0);
        assert_eq!(name.eax, kvm::LEAF + 1);
        assert_eq!(name.ebx.to_le_bytes(), *b"KVMK");
        assert_eq!((name.ecx.to_le_bytes(), name.edx), (*b"VMKV", u32::from(b'M')));
        // The clock, and nothing that its guests would have to be answered for.
        assert_eq!(
            model.query(kvm::LEAF + 1, 0, 0),
            CpuidResult::new(1 << 1 | 1 << 3 | 1 << 24, 0, 0, 0)
        );
        let dedicated = Settings { kvm_features: feature::EOI | feature::DEDICATED, ..ONE };
        let hinted = Model::new(everything, dedicated).query(kvm::LEAF + 1, 0, 0);
        assert_eq!(hinted, CpuidResult::new(1 << 6, 0, 0, 1));
        assert_eq!(
            model.query(0x4000_0000, 0, 0),
            none.query(0x4000_0000, 0, 0),
            "ours stays first"
        );
    }

    #[test]
    fn one_cpu_is_one_core() {
        let model = Model::new(everything, ONE);
        assert_eq!(model.query(1, 0, 0).edx & LEAF1_EDX_HTT, 0);
        assert_eq!(model.query(4, 0, 0).eax >> 14, 0, "one sharer, one core");
        assert_eq!(model.query(0xb, 1, 0), CpuidResult::new(0, 1, 0x201, 0));
        assert_eq!(model.query(0xb, 2, 0).ecx, 2, "an invalid level ends the list");
    }

    /// A scheduler wakes programs on CPUs that share a cache with their own, which costs more here than it gains.
    #[test]
    fn cpus_share_no_cache() {
        let model = Model::new(everything, Settings { cpus: 6, ..ONE });
        for subleaf in 0..4 {
            let cache = model.query(4, subleaf, 3);
            assert_eq!((cache.eax >> 14 & 0xfff, cache.eax >> 26), (0, 7), "subleaf {subleaf}");
        }
    }

    #[test]
    fn both_leaves_on_caches_say_the_same() {
        extern crate std;
        use std::vec::Vec;
        let model = Model::new(everything, ONE);
        let leaf2 = model.query(2, 0, 0);
        assert_eq!(leaf2.eax as u8, 1, "asked once, it has said all");
        let descriptors: Vec<u8> = [leaf2.eax & !0xff, leaf2.ebx, leaf2.ecx, leaf2.edx]
            .iter()
            .flat_map(|register| register.to_le_bytes())
            .filter(|descriptor| *descriptor != 0)
            .collect();
        // KiB, ways, level and kind (1 is data, 2 instructions, 3 both), by SDM 2A, CPUID, leaf 2.
        let known = |descriptor: &u8| match descriptor {
            0x2c => (32, 8, 1, 1),
            0x30 => (32, 8, 1, 2),
            0x7d => (2048, 8, 2, 3),
            0xec => (24576, 24, 3, 3),
            _ => panic!("descriptor {descriptor:#x}"),
        };
        let leaf4 = |subleaf| {
            let cache = model.query(4, subleaf, 0);
            let (ways, line) = ((cache.ebx >> 22) + 1, (cache.ebx & 0xfff) + 1);
            let size = ways * line * (cache.ecx + 1) / 1024;
            (line == 64).then_some((size, ways, cache.eax >> 5 & 7, cache.eax & 31))
        };
        let mut told: Vec<_> = descriptors.iter().map(known).collect();
        told.sort_unstable();
        let mut listed: Vec<_> = (0..4).filter_map(leaf4).collect();
        listed.sort_unstable();
        assert_eq!(told, listed);
    }

    #[test]
    fn four_cpus_are_four_cores() {
        let model = Model::new(everything, Settings { cpus: 4, ..ONE });
        assert_eq!(model.query(1, 0, 3).ebx >> 24, 3);
        assert_eq!(model.query(1, 0, 3).ebx >> 16 & 0xff, 4);
        assert_eq!(model.query(0xb, 1, 3), CpuidResult::new(2, 4, 0x201, 3));
    }

    #[test]
    fn tsc_frequency_as_linux_computes_it() {
        for hz in [999_999_999, 2_000_000_000, 2_394_444_123, 3_700_001_000, 5_100_000_000] {
            let clock = Model::new(everything, Settings { tsc_hz: hz, ..ONE }).query(0x15, 0, 0);
            let khz = (clock.ecx / 1000).checked_mul(clock.ebx).expect("fits 32 bits") / clock.eax;
            let error = (u64::from(khz) * 1000).abs_diff(hz);
            assert!(error * 1_000_000 / hz <= 2, "{hz} Hz is off by {error}");
        }
    }

    #[test]
    fn capabilities_promise_no_retpolines_needed() {
        assert_eq!(ARCH_CAPABILITIES & 0b11, 0b11, "RDCL_NO and IBRS_ALL");
        assert_eq!(ARCH_CAPABILITIES >> 62, 1, "ITS_NO");
        let model = Model::new(nothing, ONE);
        assert_ne!(model.query(7, 0, 0).edx & 1 << 29, 0, "the MSR is enumerated");
    }
}
