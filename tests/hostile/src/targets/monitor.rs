//! What a vhost-user monitor says to a server of ours.

use super::none;
use fuzzer::Target;

#[path = "../../../../server/vhost_user/tests/monitor/mod.rs"]
mod hostile;

pub(crate) const TARGET: Target = Target { name: "monitor", seeds: none, run };

fn run(bytes: &[u8]) {
    let seed = bytes.iter().fold(7_u64, |sum, byte| sum.wrapping_mul(31) ^ u64::from(*byte));
    hostile::connection(seed, bytes);
}
