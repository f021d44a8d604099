//! Loads the kernels distributions ship. They are too large for the tree: set `RING3_KERNELS` to a
//! directory of them (`/boot` of unpacked packages linux-image-*, memtest86+, xen-hypervisor-*) and
//! run with `--ignored`.

use boot::{BootProtocol, BootRequest, Loaded, Module};
use ram::Ram;
use std::path::PathBuf;

host::choose!(host_linux::Linux);

const MIB: u64 = 1 << 20;

/// Files in the directory whose names start like this; at least one.
fn kernels(prefix: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = std::env::var("RING3_KERNELS").expect("RING3_KERNELS is the directory of kernels");
    let entries = std::fs::read_dir(dir).expect("the directory can be read");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let named = |p: &PathBuf| {
        let name = p.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        name.starts_with(prefix) && !name.ends_with(".efi") && !name.ends_with(".config")
    };
    let found: Vec<_> =
        paths.filter(named).map(|p| (p.clone(), std::fs::read(p).expect("a kernel"))).collect();
    assert!(!found.is_empty(), "no {prefix}* in the directory");
    found
}

fn load(kernel: &[u8], protocol: BootProtocol) -> (Ram, Loaded) {
    let ram = Ram::new(512 * MIB).expect("512 MiB of RAM");
    let initrd = vec![0x5a; 3_000_001];
    let modules = [Module { data: &initrd, cmdline: "initrd" }];
    let cmdline = "console=ttyS0";
    let request =
        BootRequest { kernel, unpacked: None, modules: &modules, cmdline, cpus: 2, protocol };
    let loaded = boot::load(&ram, &request).expect("the kernel loads");
    (ram, loaded)
}

#[test]
#[ignore = "run by `cargo xtask test`, which puts kernels into RING3_KERNELS"]
fn linux_is_unpacked_and_entered_in_64_bit_mode() {
    for (path, kernel) in kernels("vmlinuz") {
        let (ram, loaded) = load(&kernel, BootProtocol::Auto);
        println!("{}: {:#x?}", path.display(), loaded.placed);
        assert_eq!(loaded.protocol, BootProtocol::Linux);
        assert!((0x100_0000..0x101_0000).contains(&loaded.vcpu.rip), "startup_64 is at the start");
        assert_eq!(loaded.vcpu.code_bits(), 64);
        let mut code = [0; 16];
        ram.read_gpa(loaded.vcpu.rip, &mut code).expect("RAM at the entry");
        assert_ne!(code, [0; 16]);
    }
}

#[test]
#[ignore = "run by `cargo xtask test`, which puts kernels into RING3_KERNELS"]
fn linux_has_a_pvh_entry_and_a_bzimage_entry() {
    for (_, kernel) in kernels("vmlinuz") {
        let (_, pvh) = load(&kernel, BootProtocol::Pvh);
        assert_eq!((pvh.protocol, pvh.vcpu.code_bits()), (BootProtocol::Pvh, 32));
        let (_, whole) = load(&kernel, BootProtocol::BzImage);
        assert_eq!(whole.vcpu.rip, 0x100_0200);
    }
}

#[test]
#[ignore = "run by `cargo xtask test`, which puts kernels into RING3_KERNELS"]
fn a_damaged_linux_is_refused() {
    for (_, kernel) in kernels("vmlinuz") {
        let refused = |kernel: &[u8]| {
            let (modules, cmdline, cpus, protocol) = (&[][..], "", 1, BootProtocol::Auto);
            let request = BootRequest { kernel, unpacked: None, modules, cmdline, cpus, protocol };
            boot::load(&Ram::new(512 * MIB).expect("RAM"), &request).is_err()
        };
        for part in 0..8 {
            assert!(refused(&kernel[..kernel.len() * part / 8]), "{part}/8 of the file");
        }
        let mut damaged = kernel.clone();
        damaged[kernel.len() / 2..][..64].fill(0);
        assert!(refused(&damaged), "64 bytes in the middle are gone");
    }
}

#[test]
#[ignore = "run by `cargo xtask test`, which puts kernels into RING3_KERNELS"]
fn memtest_is_entered_as_it_is() {
    for (path, kernel) in kernels("memtest86+") {
        let (_, loaded) = load(&kernel, BootProtocol::Auto);
        let is_64bit = path.to_string_lossy().contains("x64");
        let expected = if is_64bit { (0x10_0200, 64) } else { (0x10_0000, 32) };
        assert_eq!(loaded.protocol, BootProtocol::BzImage);
        assert_eq!((loaded.vcpu.rip, loaded.vcpu.code_bits()), expected);
    }
}

#[test]
#[ignore = "run by `cargo xtask test`, which puts kernels into RING3_KERNELS"]
fn xen_is_unpacked_and_entered_by_multiboot() {
    for (_, kernel) in kernels("xen-") {
        let (_, loaded) = load(&kernel, BootProtocol::Auto);
        assert_eq!(loaded.protocol, BootProtocol::Multiboot);
        assert_eq!(loaded.vcpu.gpr[x86::reg::RAX], 0x2bad_b002);
        assert_eq!(loaded.vcpu.code_bits(), 32);
    }
}
