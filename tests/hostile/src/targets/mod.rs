//! One module a boundary.

pub(crate) mod agent;
pub(crate) mod chipset;
pub(crate) mod debugger;
pub(crate) mod fuse;
pub(crate) mod interpreter;
pub(crate) mod keeper;
pub(crate) mod kernel;
pub(crate) mod linux;
pub(crate) mod monitor;
pub(crate) mod pci;
pub(crate) mod qcow2;
pub(crate) mod scenario;
pub(crate) mod server;
pub(crate) mod services;
pub(crate) mod sockets;
pub(crate) mod translator;
pub(crate) mod usernet;
pub(crate) mod virtio;
pub(crate) mod wedge;

use arbitrary::{Arbitrary, Unstructured};

/// Things in these bytes, as many as there are; what is left over is nothing.
fn all<'a, T: Arbitrary<'a>>(bytes: &'a [u8], most: usize) -> Vec<T> {
    let mut bytes = Unstructured::new(bytes);
    let mut things = Vec::new();
    while !bytes.is_empty() && things.len() < most {
        let Ok(thing) = T::arbitrary(&mut bytes) else { break };
        things.push(thing);
    }
    things
}

/// No sound inputs: what is made out of nothing is as good.
fn none() -> Vec<Vec<u8>> {
    (0..4).map(|seed| anything(seed, 1024)).collect()
}

fn anything(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| random.u8(..)).collect()
}
