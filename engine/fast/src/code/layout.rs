//! Where translated code and what belongs to it lie.

use jit::{Layout, Level};
use wedge_abi::{
    Base, CACHE, COPIES, LANDINGS, LOOKUP_ENTRIES, LOOKUPS, ORIGINS, REGIONS, TABLES, USER_CACHE,
    USER_CACHE_LEN, USER_TABLES, VCPU_PAGE, VERIFIED,
};

/// How user code accesses its memory operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operands {
    /// Where the host has them mapped.
    Mapped,
    /// Most by look-ups.
    LookedUp,
    /// By look-ups, or checked first: protection keys shut memory to the program, and are open where translations run.
    Checked,
}

/// Whose code it is, and how it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeKind {
    pub level: Level,
    /// Several vCPUs execute it.
    pub several: bool,
    /// How memory operands are accessed, if it is user code.
    pub operands: Operands,
    /// Computed jumps of kernel code go by landings; otherwise they search.
    pub landings: bool,
    /// User code is for places, not for addresses.
    pub placed: bool,
}

impl CodeKind {
    /// The kernel's, of one vCPU or of several.
    pub const fn kernel(several: bool) -> Self {
        Self {
            level: Level::Kernel,
            several,
            operands: Operands::Mapped,
            landings: true,
            placed: false,
        }
    }

    /// A vCPU's user code.
    pub const fn user(operands: Operands, placed: bool) -> Self {
        Self { level: Level::User, several: false, operands, landings: false, placed }
    }
}

/// Where the code of a level lies: the kernel's and the user's share nothing, so that the user's can
/// be dropped whenever another address space comes.
pub fn layout(kind: CodeKind, base: Base) -> Layout {
    let CodeKind { level, several, operands, landings, placed } = kind;
    let here = |usual: usize| base.at(usual as u64);
    let kernel = Layout {
        level,
        several,
        bias: base.bias(),
        regions: here(REGIONS),
        copies: Some(here(COPIES)),
        cache: here(CACHE),
        cache_len: (USER_CACHE - CACHE) as u64,
        vcpu_page: here(VCPU_PAGE),
        table: here(TABLES),
        landings: landings.then(|| here(LANDINGS)),
        checks: false,
        lookups: Some(here(LOOKUPS + LOOKUP_ENTRIES)),
        verified: None,
        origins: None,
    };
    let checks = operands == Operands::Checked;
    let looks_up = operands != Operands::Mapped;
    match level {
        Level::Kernel => kernel,
        Level::User => Layout {
            bias: 0,
            copies: kernel.copies.filter(|_| checks),
            checks,
            cache: here(USER_CACHE),
            cache_len: USER_CACHE_LEN as u64,
            table: here(TABLES + USER_TABLES),
            lookups: kernel.lookups.filter(|_| looks_up),
            verified: Some(here(LOOKUPS + VERIFIED)),
            origins: placed.then(|| here(LOOKUPS + ORIGINS)),
            ..kernel
        },
    }
}
