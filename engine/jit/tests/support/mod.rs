//! What several tests of the translator use.

use jit::{Layout, Level, stubs};

/// A kernel's code for one vCPU. The cache has less room than the blocks of the cache's model need, so that it is full
/// now and then.
pub const LAYOUT: Layout = Layout {
    level: Level::Kernel,
    several: false,
    bias: 0,
    regions: 0x10_0000_0000,
    copies: None,
    cache: 0x10_1000_0000,
    cache_len: stubs::LEN + 0x4000,
    vcpu_page: 0x10_2000_0000,
    table: 0x10_3000_0000,
    landings: Some(0x7ff0_0000),
    checks: false,
    lookups: None,
    verified: None,
    origins: None,
};
