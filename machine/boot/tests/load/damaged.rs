//! Damaged and truncated kernels by the thousand: loading them ends, in a loaded machine or an error,
//! and writes only where it says it does.

use crate::images;
use crate::memory::{LoadedMachine, RAM};
use boot::{BootProtocol, BootRequest, Module};
use proptest::prelude::*;
use ram::Ram;
use std::sync::LazyLock;

/// One valid kernel of each kind.
static KERNELS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let packed = images::FORMATS.map(|(_, pack)| images::bzimage(&pack(&images::elf64())));
    let mut kernels = vec![
        images::elf64(),
        images::elf32(),
        images::multiboot_elf(),
        images::multiboot_flat(),
        images::bzimage_without_payload(true),
        images::bzimage_without_payload(false),
        images::gzip(&images::multiboot_elf()),
    ];
    kernels.extend(packed);
    kernels
});

const PROTOCOLS: [BootProtocol; 5] = [
    BootProtocol::Auto,
    BootProtocol::Linux,
    BootProtocol::BzImage,
    BootProtocol::Pvh,
    BootProtocol::Multiboot,
];

/// RAM of this thread: allocating it anew for each case would be most of the time.
fn load(kernel: &[u8], protocol: BootProtocol) {
    thread_local!(static MEMORY: Ram = Ram::new(RAM).expect("RAM"));
    let modules = [Module { data: &[1; 5000], cmdline: "module" }];
    let request =
        BootRequest { kernel, unpacked: None, modules: &modules, cmdline: "x", cpus: 2, protocol };
    MEMORY.with(|ram| {
        if let Ok(loaded) = boot::load(ram, &request) {
            LoadedMachine { ram: ram.clone(), loaded }.assert_disjoint();
        }
    });
}

/// Bytes that tend to matter in a length or an address.
fn interesting() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        Just(0_u64),
        Just(u64::MAX),
        Just(u64::MAX - 0xfff),
        Just(1 << 32),
        Just(0x7fff_ffff),
        Just(0x10_0000),
        any::<u64>(),
        0_u64..0x400,
    ];
    (word, prop::sample::select(vec![1_usize, 2, 4, 8]))
        .prop_map(|(word, len)| word.to_le_bytes()[..len].to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn changed_fields(
        kernel in prop::sample::select(KERNELS.clone()),
        changes in prop::collection::vec((any::<prop::sample::Index>(), interesting()), 1..4),
        protocol in prop::sample::select(PROTOCOLS.to_vec()),
    ) {
        let mut kernel = kernel;
        for (at, field) in changes {
            let start = at.index(kernel.len());
            let end = (start + field.len()).min(kernel.len());
            kernel[start..end].copy_from_slice(&field[..end - start]);
        }
        load(&kernel, protocol);
    }

    #[test]
    fn changed_headers(
        kernel in prop::sample::select(KERNELS.clone()),
        at in prop_oneof![0_usize..0xa0, 0x1f0_usize..0x270],
        field in interesting(),
    ) {
        let mut kernel = kernel;
        if let Some(place) = kernel.get_mut(at..at + field.len()) {
            place.copy_from_slice(&field);
        }
        load(&kernel, BootProtocol::Auto);
    }

    #[test]
    fn truncated(
        kernel in prop::sample::select(KERNELS.clone()),
        at in any::<prop::sample::Index>(),
    ) {
        load(&kernel[..at.index(kernel.len())], BootProtocol::Auto);
    }

    #[test]
    fn random_payloads(
        (_, pack) in prop::sample::select(images::FORMATS.to_vec()),
        noise in prop::collection::vec(any::<u8>(), 0..2000),
    ) {
        let magic = pack(&images::CODE)[..8].to_vec();
        load(&images::bzimage(&[magic, noise].concat()), BootProtocol::Auto);
    }
}
